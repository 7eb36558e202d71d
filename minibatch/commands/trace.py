"""``minibatch trace``: look at a recorded run."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from minibatch.errors import TraceFormatError
from minibatch.trace import Trace

EXAMPLES = """\
examples:
  minibatch trace show run.jsonl.gz
  minibatch trace show run.jsonl.gz --steps 10 20
  minibatch trace perfetto run.jsonl.gz timeline.json     (open at ui.perfetto.dev)
"""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "trace",
        help="look at a recorded run",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    show = actions.add_parser("show", help="a line an iteration, and the totals")
    show.add_argument("file", type=Path)
    show.add_argument("--steps", type=int, nargs=2, metavar=("FIRST", "LAST"))
    show.set_defaults(run=run_show)
    perfetto = actions.add_parser("perfetto", help="convert to a timeline for Perfetto")
    perfetto.add_argument("file", type=Path)
    perfetto.add_argument("output", type=Path)
    perfetto.set_defaults(run=run_perfetto)


def run_show(args: argparse.Namespace) -> int:
    trace = load(args.file)
    meta = trace.meta
    print(f"{meta.policy} on {meta.hardware or 'unknown hardware'}, {meta.model} ({meta.source})")
    first, last = args.steps or (0, float("inf"))
    for step, line in zip(trace, trace.lines(), strict=True):
        if first <= step.step <= last:
            print(line)
    print(json.dumps(trace.summary))
    return 0


def run_perfetto(args: argparse.Namespace) -> int:
    timeline = load(args.file).to_perfetto(args.output)
    print(f"{args.output}: {len(timeline['traceEvents'])} events")
    return 0


def load(path: Path) -> Trace:
    try:
        return Trace.load(path)
    except OSError as error:
        raise TraceFormatError(f"{path}: {error.strerror or error}.") from error
