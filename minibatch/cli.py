"""``python -m minibatch``: run prompts, look at traces, list models."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from minibatch import __version__
from minibatch.errors import MinibatchError

COMMANDS = ("run", "simulate", "audit", "trace", "models")
INTERRUPTED = 130  # the shell's code for Ctrl-C


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 1 for an error of ours (told in one line), 130 for Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="minibatch",
        description="A continuous-batching LLM engine to read, run and watch.",
        epilog="Each command has its own --help, with examples.",
    )
    parser.add_argument("--version", action="version", version=f"minibatch-lab {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMANDS:
        importlib.import_module(f"minibatch.commands.{name}").add_parser(subparsers)
    args = parser.parse_args(argv)
    try:
        return args.run(args)
    except MinibatchError as error:
        print(f"minibatch: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("minibatch: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # `minibatch trace show FILE | head`
        sys.stderr.close()
        return 0
