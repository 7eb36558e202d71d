"""``minibatch models``: what ``--model`` may be called."""

from __future__ import annotations

import argparse
from typing import Any

from minibatch.model.hub import SHORT_NAMES
from minibatch.model.presets import PRESETS


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("models", help="list the short names of models")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    width = max(map(len, [*SHORT_NAMES, *PRESETS]))
    print("Checkpoints (--model NAME; a folder, a .gguf file or a hub id works too):")
    for name, entry in SHORT_NAMES.items():
        print(f"  {name:{width}}  {entry.description}")
    print("\nShapes for random weights (--load-format dummy --model NAME):")
    for name, shape in PRESETS.items():
        kib = shape.kv_bytes_per_token() / 1024
        parameters = f"{shape.num_parameters / 1e6:,.0f} M parameters"
        print(f"  {name:{width}}  {parameters}, {kib:g} KiB of 16-bit KV a token")
    return 0
