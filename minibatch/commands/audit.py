"""``minibatch audit``: published figures, claim by claim, against the arithmetic."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections import Counter
from dataclasses import asdict
from typing import Any

from minibatch.audit import Finding, audit, load_claims
from minibatch.tables import table

EXAMPLES = """\
examples:
  minibatch audit                    every claim, with bound and arithmetic
  minibatch audit --claim T2 T7      only these
  minibatch audit --style markdown   a table to paste
  minibatch audit --json             an object a finding
"""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "audit",
        help="check published throughput claims against bounds",
        description="Check the figures of an article on continuous batching, claim by claim: "
        "reproduced, possible, only with overlap, impossible, or in contradiction.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--claim", nargs="+", default=(), metavar="T", help="T1 ... T8, or 'Text 2'"
    )
    parser.add_argument("--style", choices=("text", "markdown", "csv"), default="text")
    parser.add_argument("--json", action="store_true", help="print an object a finding")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    findings = audit(args.claim)
    if args.json:
        for finding in findings:
            print(json.dumps({**asdict(finding), "verdict": finding.verdict.value}))
    elif args.style == "text":
        print(as_text(findings))
    else:
        header = ("claim", "cell", "claimed", "verdict", "bound", "arithmetic")
        rows = [
            (f.claim, f.cell, f.claimed, f.verdict.value, f.bound, f.arithmetic) for f in findings
        ]
        print(table(header, rows, args.style))
    return 0


def as_text(findings: list[Finding]) -> str:
    """A block a claim, two lines a finding, and how often each verdict fell."""
    claims = load_claims()
    lines = [textwrap.fill(f"Source: {claims['source']}.", 100)]
    setup = claims["setup"]
    lines.append(
        f"Setup: {setup['model']} in {setup['dtype']} on {setup['hardware']}, "
        f"{setup['prompt_len']} tokens in, {setup['output_len']} out."
    )
    shown = ""
    for finding in findings:
        if finding.claim != shown:
            shown = finding.claim
            title = claims.get(shown, {}).get("title", "An interview page on the same subject")
            lines.append(f"\n{shown}  {title}")
        lines.append(f"  {finding.cell:34} {finding.claimed:>26}   {finding.verdict.value.upper()}")
        because = finding.arithmetic
        if finding.bound != "none":
            because = f"{finding.bound}; {because}"
        lines.append(textwrap.fill(because, 96, initial_indent=" " * 6, subsequent_indent=" " * 6))
    counts = Counter(finding.verdict.value for finding in findings)
    lines.append("\n" + ", ".join(f"{count} {name}" for name, count in counts.most_common()))
    return "\n".join(lines)
