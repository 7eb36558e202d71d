"""The website: lessons, API reference and README, without a kernel and without a network."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from lessons.build import FOLDER, ROOT

SOURCES = ROOT / "docs" / "site"


def gather(target: Path) -> None:
    """Sources, notebooks and README side by side, as Sphinx wants them."""
    if target.exists():
        shutil.rmtree(target)
    shutil.copytree(SOURCES, target)
    skipped = shutil.ignore_patterns(".ipynb_checkpoints", "*.cfg", "*.md", "*.py", "index.ipynb")
    shutil.copytree(FOLDER, target / "notebooks", ignore=skipped)
    for name in ("README.md", "CHANGELOG.md"):
        shutil.copy(ROOT / name, target / name.lower())
    pictures = list((ROOT / "docs").glob("*.svg"))
    (target / "docs").mkdir(exist_ok=True)
    for picture in pictures:
        shutil.copy(picture, target / "docs")


def build_site(out: Path) -> int:
    """Build into ``out``; returns Sphinx's exit status. Warnings are errors."""
    source = out.parent / f"{out.name}-source"
    gather(source)
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html"]
    command += ["-d", str(source / ".doctrees")]
    status = subprocess.run([*command, str(source), str(out)], check=False).returncode
    print(f"{out}/index.html" if status == 0 else f"sphinx ended with {status}")
    return status
