"""The audit's verdicts, cell by cell, and the reasons that it gives for them."""

from __future__ import annotations

import json
import re
from collections import Counter

import pytest

from minibatch.audit import Audit, Finding, Verdict, load_claims
from minibatch.commands.audit import as_text
from minibatch.reservation import reservation


@pytest.fixture(scope="module")
def audit() -> Audit:
    return Audit()


@pytest.fixture(scope="module")
def findings(audit: Audit) -> dict[tuple[str, str], Finding]:
    found = audit.run()
    table = {(finding.claim, finding.cell): finding for finding in found}
    assert len(table) == len(found)
    return table


@pytest.mark.parametrize("concurrency", [1, 8, 16, 32, 64, 128])
@pytest.mark.parametrize(
    ("policy", "scheme", "reserved", "fits"),
    [("static", "max", 4096, (28, 29)), ("dynamic", "pow2", 1024, (114, 118)),
     ("continuous", "paged", 640, (183, 190))],
)  # fmt: skip
def test_every_oom_cell_of_t2_and_why(
    audit: Audit,
    findings: dict[tuple[str, str], Finding],
    concurrency: int,
    policy: str,
    scheme: str,
    reserved: int,
    fits: tuple[int, int],
) -> None:
    """80 GiB x 0.90 - 12.55 GiB of weights (- 2 GiB), 512 KiB a token, so many tokens each."""
    for reserve_gib, expected in zip((2, 0), fits, strict=True):
        kv_bytes = int(0.90 * 80 * 2**30) - 2 * 6_738_415_616 - reserve_gib * 2**30
        assert kv_bytes // (512 * 1024) // reserved == expected
    row = next(r for r in audit.claims["T2"]["rows"] if r["concurrency"] == concurrency)
    assert (row[policy] == "OOM") == (concurrency > fits[1])
    finding = findings["T2", f"{policy} @{concurrency}"]
    if row[policy] == "OOM":
        assert finding.verdict is Verdict.REPRODUCED
        assert finding.bound == f"{fits[0]}-{fits[1]} sequences fit"
        assert finding.arithmetic.startswith(f"{scheme}: {reserved} tokens each of 117654-121750")
    else:
        assert finding.verdict in (
            Verdict.POSSIBLE,
            Verdict.NEEDS_OVERLAP,
            Verdict.IMPOSSIBLE,
        )
        assert f"{fits[0]}-{fits[1]} sequences fit" in finding.arithmetic


def test_reserving_2048_would_not_reproduce_t2(audit: Audit) -> None:
    blocks = audit.memory().num_blocks
    shorter = reservation("static", blocks, 512, 128, max_model_len=2048)
    assert shorter.num_sequences == 59 and shorter.fits(32)  # but the article has OOM at 32


@pytest.mark.parametrize(
    ("cell", "verdict"),
    [
        ("static @1", Verdict.POSSIBLE),
        ("static @8", Verdict.POSSIBLE),
        ("static @16", Verdict.POSSIBLE),
        ("continuous @1", Verdict.POSSIBLE),
        ("continuous @8", Verdict.POSSIBLE),
        ("continuous @16", Verdict.POSSIBLE),
        ("dynamic @32", Verdict.NEEDS_OVERLAP),
        ("continuous @32", Verdict.NEEDS_OVERLAP),
        ("dynamic @64", Verdict.NEEDS_OVERLAP),
        ("continuous @64", Verdict.NEEDS_OVERLAP),
        ("continuous @128", Verdict.IMPOSSIBLE),
        ("gain @1", Verdict.REPRODUCED),
        ("gain @8", Verdict.REPRODUCED),
        ("gain @16", Verdict.REPRODUCED),
        ("continuous, 8 to 32", Verdict.CONTRADICTS),
    ],
)
def test_throughputs_of_t2(
    findings: dict[tuple[str, str], Finding], cell: str, verdict: Verdict
) -> None:
    assert findings["T2", cell].verdict is verdict


def test_the_numbers_that_verdicts_stand_on(findings: dict[tuple[str, str], Finding]) -> None:
    assert "94% of overlapped" in findings["T2", "continuous @64"].arithmetic
    impossible = findings["T2", "continuous @128"]
    assert impossible.bound == "decode only 5032, serial 2740, overlapped 4745 tok/s"
    assert impossible.arithmetic.startswith("1.15 times the highest bound")
    assert findings["T2", "continuous, 8 to 32"].claimed == "15.2-15.4 ms a step"


@pytest.mark.parametrize(
    ("claim", "cell", "verdict", "number"),
    [
        ("T1", "static @128", Verdict.CONTRADICTS, "29 sequences"),
        ("T1", "dynamic @128", Verdict.CONTRADICTS, "118 sequences"),
        ("T1", "continuous @128", Verdict.IMPOSSIBLE, "4745"),
        ("T1", "GPU utilisation", Verdict.NO_MEASURE, "NVML"),
        ("T3", "static batch 32", Verdict.CONTRADICTS, "28-29"),
        ("T3", "gain grows with spread", Verdict.REPRODUCED, "ours"),
        ("T4", "static: 18 rows / 15 ms", Verdict.REPRODUCED, "= 1200"),
        ("T4", "continuous: 87 rows / 15 ms", Verdict.REPRODUCED, "= 5800"),
        ("T4", "87 rows in 15 ms", Verdict.IMPOSSIBLE, "19.4 ms"),
        ("T4", "87 rows in 15 ms", Verdict.IMPOSSIBLE, "23.8 sequences"),
        ("T4", "static, 32 slots", Verdict.CONTRADICTS, "280 tok/s"),
        ("T5", "4 + 10 + 1 ms", Verdict.REPRODUCED, "26.7 %, 66.7 %, 6.7 %"),
        ("T5", "kernels and reads of one batch", Verdict.CONTRADICTS, "23.8 rows"),
        ("T5", "SM utilisation, large batch", Verdict.IMPOSSIBLE, "24% of peak"),
        ("T6", "prefill is compute-bound", Verdict.REPRODUCED, "6.70 TFLOP"),
        ("T6", "prefill is compute-bound", Verdict.REPRODUCED, "ridge 153"),
        ("T6", "prefill time", Verdict.POSSIBLE, "21.5 ms"),
        ("T6", "decode is memory-bound", Verdict.REPRODUCED, "1 to 190"),
        ("T6", "decode time, least", Verdict.IMPOSSIBLE, "6.48 ms"),
        ("T6", "decode time, most", Verdict.POSSIBLE, "91 rows"),
        ("T6", "utilisation of prefill and decode", Verdict.NO_MEASURE, "95"),
        ("T7", "swap in 512 tokens", Verdict.IMPOSSIBLE, "256 MiB at 25 GB/s: 10.7 ms"),
        ("T7", "swap in 512 tokens", Verdict.IMPOSSIBLE, "PCIe 5 5.3 ms"),
        ("T7", "recompute 512 tokens", Verdict.POSSIBLE, "43 ms at half of peak"),
        ("T7", "recompute / swap", Verdict.CONTRADICTS, "2.0x at peak, 4.0x"),
        ("T8", "continuous batching", Verdict.POSSIBLE, "ours"),
        ("T8", "separating prefill and decode", Verdict.CONTRADICTS, "1.73x"),
        ("Text 2", "static wastes slots", Verdict.REPRODUCED, "570 useful of 4000"),
        ("Text 2", "one more sequence is almost free", Verdict.REPRODUCED, "2.2%"),
        ("Text 2", "defaults are caps", Verdict.REPRODUCED, "128"),
    ],
)
def test_the_other_claims(
    findings: dict[tuple[str, str], Finding], claim: str, cell: str, verdict: Verdict, number: str
) -> None:
    finding = findings[claim, cell]
    assert finding.verdict is verdict
    assert number in f"{finding.claimed} {finding.bound} {finding.arithmetic}"


def test_our_gains_of_t3_grow_and_are_called_ours(
    audit: Audit, findings: dict[tuple[str, str], Finding]
) -> None:
    text = findings["T3", "gain grows with spread"].arithmetic
    slots, paged = ([float(x) for x in re.findall(r"([\d.]+)x", p)] for p in text.split(";"))
    assert text.startswith("ours at 32 slots each")
    assert slots == sorted(slots) and paged == sorted(paged)
    assert slots[0] == pytest.approx(1.0, abs=0.05)
    assert slots[2] > 1.3
    assert all(more > less for more, less in zip(paged, slots, strict=True))
    claimed = [row["gain"] for row in audit.claims["T3"]["rows"]]
    assert all(gain < claim for gain, claim in zip(slots[1:], claimed[1:], strict=True))


def test_every_claim_of_the_article_is_judged(
    audit: Audit, findings: dict[tuple[str, str], Finding]
) -> None:
    judged = {claim for claim, _ in findings}
    assert judged == {f"T{number}" for number in range(1, 9)} | {"Text 2"}
    t2 = {cell for claim, cell in findings if claim == "T2"}
    for row in audit.claims["T2"]["rows"]:
        for policy in ("static", "dynamic", "continuous"):
            assert f"{policy} @{row['concurrency']}" in t2


def test_the_claims_are_data_with_a_source() -> None:
    for name in ("throughput_article", "interview_page"):
        assert len(load_claims(name)["source"]) > 30
    rows = load_claims()["T2"]["rows"]
    assert [row["continuous"] for row in rows] == [48, 520, 1050, 2100, 3800, 5800]
    assert [row["dynamic"] for row in rows] == [48, 520, 1050, 2100, 3500, "OOM"]
    assert [row["static"] for row in rows] == [42, 180, 280, "OOM", "OOM", "OOM"]


def test_a_claim_that_is_changed_gets_another_verdict() -> None:
    """The verdicts come from the numbers."""
    changed = Audit()
    rows = {row["concurrency"]: row for row in changed.claims["T2"]["rows"]}
    rows[128]["continuous"] = 2500
    rows[16]["static"] = "OOM"
    rows[8]["gain"] = 3.5
    found = {finding.cell: finding for finding in changed.t2()}
    assert found["continuous @128"].verdict is Verdict.POSSIBLE
    assert found["static @16"].verdict is Verdict.CONTRADICTS
    assert found["gain @8"].verdict is Verdict.CONTRADICTS


def test_the_report_shows_every_finding(findings: dict[tuple[str, str], Finding]) -> None:
    text = as_text(list(findings.values()))
    flat = re.sub(r"\s+", " ", text)
    for finding in findings.values():
        assert finding.cell in flat and finding.arithmetic in flat
    counts = Counter(finding.verdict.value for finding in findings.values())
    for name, count in counts.items():
        assert f"{count} {name}" in text.splitlines()[-1]
    assert "Source: An article" in text
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize("options", [["--json"], ["--style", "markdown"], ["--style", "csv"]])
def test_the_command_prints_what_was_asked_for(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    import argparse

    from minibatch.commands import audit as command

    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    args = parser.parse_args(["audit", "--claim", "T4", "T7", *options])
    assert args.run(args) == 0
    lines = capsys.readouterr().out.strip().splitlines()
    if options == ["--json"]:
        rows = [json.loads(line) for line in lines]
        assert {row["claim"] for row in rows} == {"T4", "T7"}
        assert {row["verdict"] for row in rows} <= {verdict.value for verdict in Verdict}
    else:
        assert sum("T4" in line or "T7" in line for line in lines) == 7
