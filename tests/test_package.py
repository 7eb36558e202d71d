"""The package as such: what it imports, and that its papers agree with it."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import minibatch

ROOT = Path(__file__).resolve().parent.parent

TORCH_FREE = [
    "minibatch",
    "minibatch.llm",
    "minibatch.engine",
    "minibatch.scheduler",
    "minibatch.block_manager",
    "minibatch.trace",
    "minibatch.metrics",
    "minibatch.cost_model",
    "minibatch.simulation",
    "minibatch.cli",
    "widgets",
]


@pytest.mark.parametrize("name", TORCH_FREE)
def test_imports_without_torch_or_transformers(name: str) -> None:
    code = f"import sys, {name}; sys.exit(bool({{'torch', 'transformers'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT)
    assert done.returncode == 0


def test_public_names() -> None:
    for name in minibatch.__all__:
        assert getattr(minibatch, name) is not None
    assert set(minibatch.__all__) <= set(dir(minibatch))
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = minibatch.no_such_name


def test_every_dependency_is_pinned() -> None:
    """``constraints.txt`` pins what ``pyproject.toml`` asks for, within its range."""
    pins = dict(
        re.match(r"([\w.-]+)==([^;\s]+)", line.lower()).groups()
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    )
    asked = re.findall(r'^ +"([\w-]+)>=([\d.]+)",', (ROOT / "pyproject.toml").read_text(), re.M)
    assert len(asked) > 8
    for name, least in asked:
        pinned = pins[name]
        numbers = [tuple(map(int, re.findall(r"\d+", version)[:3])) for version in (pinned, least)]
        assert numbers[0] >= numbers[1], name


def test_files_that_the_readme_names_exist() -> None:
    text = (ROOT / "README.md").read_text()
    named = set(re.findall(r"`((?:minibatch|tests|data|benchmarks|docs)/[\w./]+)`", text))
    named |= set(re.findall(r"\]\((\w[\w./]+)\)", text))
    assert len(named) > 10
    for name in named:
        assert (ROOT / name).exists(), name


def test_every_module_says_what_it_is() -> None:
    for path in sorted((ROOT / "minibatch").rglob("*.py")):
        if path.name == "__main__.py":
            continue
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        if "triton" in name:
            continue  # needs triton, which is an extra
        assert import_module(name).__doc__, name


def test_every_file_that_the_code_reads_is_packaged() -> None:
    """C sources, scripts, styles, data: whatever lies in a package and is no Python."""
    tomllib = pytest.importorskip("tomllib")
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    globs = settings["package-data"]
    missing = []
    for package in ("minibatch", "widgets", "lessons"):
        folder = ROOT / package
        packaged = {path for glob in globs.get(package, []) for path in folder.glob(glob)}
        for path in folder.rglob("*"):
            generated = "__pycache__" in path.parts or path.suffix in (".py", ".typed")
            if path.is_file() and not generated and path not in packaged:
                missing.append(path.relative_to(ROOT))
    assert not missing
