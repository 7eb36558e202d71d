"""``python -m lessons build | check | text | read | site``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import nbformat

from lessons import build, check, site, text
from lessons.cards import FOLDER


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m lessons", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, told in (
        ("build", "execute notebooks and write them back as they are committed"),
        ("check", "skeleton, budgets, numbers, cleanliness"),
    ):
        command = commands.add_parser(name, help=told)
        command.add_argument("notebooks", nargs="*", type=Path, help="default: all")
    command = commands.add_parser("text", help="print a notebook's cells as plain text")
    command.add_argument("notebook", type=Path)
    command = commands.add_parser("read", help="make a notebook from such a text")
    command.add_argument("text", type=Path)
    command.add_argument("notebook", type=Path)
    command = commands.add_parser("site", help="build the website")
    command.add_argument("--out", type=Path, default=Path("build/site"))
    given = parser.parse_args(arguments)
    if given.command == "text":
        print(text.to_text(nbformat.read(given.notebook, as_version=4)))
        return 0
    if given.command == "read":
        build.write(text.from_text(given.text.read_text(encoding="utf-8")), given.notebook)
        return 0
    if given.command == "site":
        return site.build_site(given.out)
    paths = given.notebooks or build.lesson_paths()
    if given.command == "build":
        for path in paths:
            print(f"{path} ...", flush=True)
            build.build(path)
    found = [problem for path in paths for problem in check.problems(path)]
    if not given.notebooks:
        for path in sorted(FOLDER.glob("*.json")):
            found += check.interview_problems(path)
    for problem in found:
        print(problem, file=sys.stderr)
    print(f"{len(paths)} notebooks, {len(found)} problems")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
