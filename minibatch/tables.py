"""Figures as text: plain columns, Markdown or CSV."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from minibatch.metrics import RunMetrics


def table(header: Sequence[str], rows: Iterable[Sequence[object]], style: str = "plain") -> str:
    """Rows as text.

    Args:
        style: ``plain`` (aligned columns), ``markdown`` or ``csv``.

    Raises:
        ValueError: another style.
    """
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    if style == "csv":
        return "\n".join(",".join(map(_csv_cell, row)) for row in cells)
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    padded = [
        [
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in cells
    ]
    if style == "plain":
        return "\n".join("  ".join(row).rstrip() for row in padded)
    if style != "markdown":
        raise ValueError(f"style={style!r}: expected 'plain', 'markdown' or 'csv'.")
    rule = [
        "-" * width if column == 0 else "-" * max(width - 1, 1) + ":"
        for column, width in enumerate(widths)
    ]
    lines = [padded[0], rule, *padded[1:]]
    return "\n".join("| " + " | ".join(row) + " |" for row in lines)


COMPARISON_HEADER = (
    "run",
    "finished",
    "steps",
    "time s",
    "in tok/s",
    "out tok/s",
    "total tok/s",
    "TTFT p50 s",
    "queue p50 s",
    "TPOT p50 ms",
    "ITL p99 ms",
    "E2E p99 s",
    "preempted",
    "slots %",
    "KV %",
)


def comparison(runs: dict[str, RunMetrics], style: str = "plain") -> str:
    """A line a run; tokens/s apart for input, output and both."""
    rows = [
        (
            name,
            f"{run.num_finished}/{len(run.requests)}",
            run.num_steps,
            f"{run.duration_s:.2f}",
            f"{run.input_tokens_per_s:.0f}",
            f"{run.output_tokens_per_s:.0f}",
            f"{run.total_tokens_per_s:.0f}",
            f"{run.percentile('ttft_s', 50):.3f}",
            f"{run.percentile('queue_s', 50):.3f}",
            f"{1e3 * run.percentile('tpot_s', 50):.2f}",
            f"{1e3 * run.percentile('itl_s', 99):.2f}",
            f"{run.percentile('e2e_s', 99):.3f}",
            run.num_preemptions,
            f"{100 * run.slot_utilization:.1f}",
            f"{100 * run.kv_utilization:.1f}",
        )
        for name, run in runs.items()
    ]
    return table(COMPARISON_HEADER, rows, style)


def request_rows(run: RunMetrics, style: str = "csv") -> str:
    """A line a request, seconds; empty where a request did not get that far."""
    header = (
        "request_id",
        "arrival_s",
        "prompt_tokens",
        "output_tokens",
        "queue_s",
        "prefill_s",
        "ttft_s",
        "tpot_s",
        "e2e_s",
        "finish_reason",
        "preemptions",
    )
    rows = [
        (
            r.request_id,
            f"{r.arrival_s:.6f}",
            r.num_prompt_tokens,
            r.num_output_tokens,
            *("" if v is None else f"{v:.6f}" for v in (r.queue_s, r.prefill_s, r.ttft_s)),
            *("" if v is None else f"{v:.6f}" for v in (r.tpot_s, r.e2e_s)),
            r.finish_reason or "",
            r.num_preemptions,
        )
        for r in run.requests
    ]
    return table(header, rows, style)


def _csv_cell(cell: str) -> str:
    return '"' + cell.replace('"', '""') + '"' if set(cell) & set(',"\n') else cell
