"""Traces: what is written is what is read, however the file ends."""

from __future__ import annotations

import gzip
import json
import zlib
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
from engine_helpers import greedy, make_engine, run, table
from hypothesis import given
from hypothesis import strategies as st

from minibatch.engine import Engine
from minibatch.errors import RequestTooLargeError, TraceFormatError
from minibatch.record import (
    Admission,
    Arrival,
    Finish,
    HeldBack,
    Preemption,
    Refusal,
    Scheduled,
    StepRecord,
    one_line,
)
from minibatch.trace import Trace, TraceMeta, TraceWriter

SUFFIXES = [".jsonl", ".jsonl.gz"]


def eventful(**more: Any) -> Engine:
    """A run in which every field of the record is used; it has been run."""
    engine = make_engine(
        policy="continuous",
        preemption_mode="swap",
        num_gpu_blocks=8,
        num_cpu_blocks=3,
        enable_prefix_caching=True,
        **more,
    )
    engine.predict = lambda output: 0.5
    engine.add_request("请求", [1, 2, 3, 4, 5, 8], greedy(9, n=2))
    engine.add_request("B", [1, 2, 3, 4, 6, 7], greedy(9))
    with pytest.raises(RequestTooLargeError):
        engine.add_request("huge", [1] * 60, greedy(3))
    return engine


def read(path: Path) -> str:
    data = path.read_bytes()
    return (gzip.decompress(data) if path.suffix == ".gz" else data).decode()


def write(path: Path, text: str) -> Path:
    data = text.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


# -- records ------------------------------------------------------------------------------------

FULL = StepRecord(
    step=17,
    start_s=1.25,
    duration_s=0.5,
    schedule_s=0.001,
    predicted_s=0.4,
    arrived=(Arrival("A", 0.5, 3, 9),),
    admitted=(Admission("A", "new", 2),),
    held_back=HeldBack("H", "no_blocks", 3, 1),
    scheduled=(Scheduled("A", 0, "prefill", 3, 3, 2), Scheduled("B", 1, "padding", 0, 7, 1)),
    preempted=(Preemption("C", "swap", "A", 1, 0),),
    swapped_in={"D": 2},
    swapped_out={"C": 1},
    finished=(Finish("B", "stop"),),
    refused=(Refusal("Z", "too large", 9, 4, "num_gpu_blocks"),),
    waiting=("H", "I"),
    running=("A", "B"),
    swapped=("C",),
    num_batched_tokens=3,
    num_padding_tokens=3,
    blocks_allocated={"A": [1, 2]},
    blocks_freed={"B": [3]},
    blocks_copied=((4, 5),),
    blocks_cached=(6,),
    cpu_blocks_allocated={"C": [0]},
    cpu_blocks_freed={"D": [1, 2]},
    free_blocks=3,
    free_cpu_blocks=1,
    cached_blocks=2,
    sampled={"A": [7]},
)


def test_the_full_record_uses_every_field() -> None:
    empty = StepRecord(step=0)
    for field in fields(StepRecord):
        assert getattr(FULL, field.name) != getattr(empty, field.name), field.name


@pytest.mark.parametrize("record", [FULL, StepRecord(step=0)], ids=["full", "empty"])
def test_a_record_survives_json(record: StepRecord) -> None:
    again = StepRecord.from_dict(json.loads(json.dumps(record.to_dict())))
    assert again == record
    for field in fields(StepRecord):  # also the types: tuples of named rows, not lists
        assert type(getattr(again, field.name)) is type(getattr(record, field.name))
    assert isinstance(again.held_back, HeldBack | None)
    assert all(isinstance(row, Scheduled) for row in again.scheduled)


def test_empty_fields_are_left_out() -> None:
    assert set(StepRecord(step=3).to_dict()) == {
        "step", "start_s", "duration_s", "schedule_s", "num_batched_tokens",
        "num_padding_tokens", "free_blocks", "free_cpu_blocks", "cached_blocks",
    }  # fmt: skip


@pytest.mark.parametrize("name", [field.name for field in fields(StepRecord)])
def test_each_field_survives_alone(name: str) -> None:
    record = replace(StepRecord(step=0), **{name: getattr(FULL, name)})
    assert StepRecord.from_dict(json.loads(json.dumps(record.to_dict()))) == record


def test_fields_of_later_versions_are_passed_over() -> None:
    data = FULL.to_dict() | {"mood": "good", "weather": {"rain": 1}}
    data["scheduled"] = [row | {"colour": "red"} for row in data["scheduled"]]
    data["held_back"] = data["held_back"] | {"since": 3}
    assert StepRecord.from_dict(data) == FULL


@given(st.floats(allow_nan=False, allow_infinity=False), st.floats(0, 1e9))
def test_times_survive_exactly(start: float, duration: float) -> None:
    record = StepRecord(step=0, start_s=start, duration_s=duration)
    assert StepRecord.from_dict(json.loads(json.dumps(record.to_dict()))) == record


def test_derived_numbers() -> None:
    assert FULL.end_s == 1.75
    assert FULL.num_generated_tokens == 1
    assert [row.request_id for row in FULL.rows("padding")] == ["B"]
    assert str(FULL) == one_line(FULL)


# -- files --------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_saved_trace_is_the_same_record_by_record(suffix: str, tmp_path: Path) -> None:
    engine = eventful()
    run(engine)
    trace = engine.trace
    assert any(record.swapped_in for record in trace)
    assert any(record.blocks_copied for record in trace)
    path = trace.save(tmp_path / f"run{suffix}")
    again = Trace.load(path)
    assert again.steps == trace.steps and again.meta == trace.meta
    assert again.summary == trace.summary and list(again.lines()) == list(trace.lines())
    assert again.requests == trace.requests and repr(again) == repr(trace)
    assert len(again) == len(trace) and again[-1] == trace[-1]
    assert again.save(tmp_path / f"again{suffix}").exists()
    assert read(tmp_path / f"again{suffix}") == read(path)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_trace_is_readable_after_every_step(suffix: str, tmp_path: Path) -> None:
    engine = eventful()
    path = tmp_path / f"run{suffix}"
    engine.record_to(path)
    assert Trace.load(path).steps == []
    while engine.has_unfinished:
        engine.step()
        assert Trace.load(path).steps == engine.trace.steps
    whole = Trace.load(path)
    assert whole.summary == engine.trace.summary  # computed: there is no summary line yet
    engine.close()
    assert json.loads(read(path).splitlines()[-1])["kind"] == "summary"
    assert Trace.load(path).summary == whole.summary


def test_the_lines_of_a_file(tmp_path: Path) -> None:
    engine = eventful()
    with engine.record_to(tmp_path / "run.jsonl"):
        run(engine)
    lines = [json.loads(line) for line in read(tmp_path / "run.jsonl").splitlines()]
    assert [line["kind"] for line in lines] == ["meta", *["step"] * len(engine.trace), "summary"]
    meta = lines[0]
    assert (meta["format"], meta["version"], meta["source"]) == ("minibatch-trace", 1, "measured")
    assert meta["policy"] == "continuous"
    assert meta["knobs"] == asdict(engine.config) | {"preemption_mode": "swap"}
    summary = lines[-1]
    assert summary["num_steps"] == len(engine.trace) and summary["num_requests"] == 3
    assert summary["num_finished"] == 3 and summary["num_refused"] == 1
    assert summary["num_generated_tokens"] == 27
    assert summary["num_preemptions"] == sum(len(r.preempted) for r in engine.trace)
    assert summary["busy_s"] == len(engine.trace) and summary["end_s"] == engine.trace[-1].end_s
    assert "请求" in read(tmp_path / "run.jsonl")  # readable, not escaped


def test_the_requests_of_a_saved_trace(tmp_path: Path) -> None:
    engine = eventful()
    run(engine)
    meta = Trace.load(engine.trace.save(tmp_path / "run.jsonl")).meta
    assert [(r["request_id"], r["num_prompt_tokens"], r["num_output_tokens"], r["finish_reason"])
            for r in meta.requests] == [
        ("请求#0", 6, 9, "length"), ("请求#1", 6, 9, "length"), ("B", 6, 9, "length"),
    ]  # fmt: skip


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("cut", [1, 2, 5, 40, 150, 155, 160])
def test_a_file_cut_short_has_all_whole_lines(suffix: str, cut: int, tmp_path: Path) -> None:
    engine = eventful()
    with TraceWriter(tmp_path / "whole.jsonl", TraceMeta()) as writer:
        for record in run(engine):
            writer.write(record)
    text = (tmp_path / "whole.jsonl").read_bytes()[:-cut]
    path = tmp_path / f"cut{suffix}"
    if suffix == ".jsonl":
        path.write_bytes(text)
    else:  # as a killed process leaves it: flushed, but without the end of a gzip file
        packer = zlib.compressobj(wbits=31)
        path.write_bytes(packer.compress(text) + packer.flush(zlib.Z_SYNC_FLUSH))
    whole_lines = text.count(b"\n") - 1
    steps = min(whole_lines, len(engine.trace))
    assert Trace.load(path).steps == engine.trace.steps[:steps]


def test_a_cut_inside_a_character_loses_no_line_before_it(tmp_path: Path) -> None:
    lines = [json.dumps({"kind": "meta", **asdict(TraceMeta())})]
    lines += [json.dumps({"kind": "step", **StepRecord(step=i).to_dict()}) for i in range(3)]
    path = tmp_path / "run.jsonl"
    path.write_bytes("\n".join(lines).encode() + b'\n{"kind":"step","waiting":["' + b"\xe8\xaf")
    assert [record.step for record in Trace.load(path)] == [0, 1, 2]


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_gz_file_cut_at_any_byte(cut: int, tmp_path: Path) -> None:
    engine = eventful()
    with TraceWriter(tmp_path / "run.jsonl.gz", TraceMeta()) as writer:
        for record in run(engine):
            writer.write(record)
    path = tmp_path / "cut.jsonl.gz"
    path.write_bytes((tmp_path / "run.jsonl.gz").read_bytes()[:-cut])
    steps = Trace.load(path).steps
    assert steps == engine.trace.steps[: len(steps)]
    assert len(steps) >= len(engine.trace) - 2


def test_a_damaged_gz_file_is_an_error_of_ours(tmp_path: Path) -> None:
    engine = eventful()
    with TraceWriter(tmp_path / "run.jsonl.gz", TraceMeta()) as writer:
        for record in run(engine):
            writer.write(record)
    data = bytearray((tmp_path / "run.jsonl.gz").read_bytes())
    data[200:300] = bytes(100)
    (tmp_path / "bad.jsonl.gz").write_bytes(data)
    with pytest.raises(TraceFormatError, match="not a trace file"):
        Trace.load(tmp_path / "bad.jsonl.gz")


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_unknown_lines_and_fields_are_passed_over(suffix: str, tmp_path: Path) -> None:
    engine = eventful()
    run(engine)
    lines = read(engine.trace.save(tmp_path / "run.jsonl")).splitlines()
    lines[0] = json.dumps(json.loads(lines[0]) | {"weather": "fine", "minor": 7})
    lines[2] = json.dumps(json.loads(lines[2]) | {"moon": {"phase": 0.5}})
    lines.insert(2, json.dumps({"kind": "remark", "text": "hello"}))
    again = Trace.load(write(tmp_path / f"later{suffix}", "\n".join(lines) + "\n"))
    assert again.steps == engine.trace.steps and again.meta == engine.trace.meta


META = json.dumps({"kind": "meta", **asdict(TraceMeta())}) + "\n"
STEP = json.dumps({"kind": "step", **StepRecord(step=0).to_dict()}) + "\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty, expected a minibatch-trace meta line"),
        ("hello\n", "line 1: "),
        ('{"kind": "meta"', "line 1: "),  # cut inside the first line: no trace at all
        ("[1, 2]\n", "line 1: expected an object"),
        ('{"traceEvents": []}\n', "line 1: expected a minibatch-trace meta line"),
        (STEP + META, "line 1: expected a minibatch-trace meta line"),
        (META.replace('"version": 1', '"version": 2'), "version 2; .* reads up to 1. Upgrade"),
        (META.replace('"version": 1', '"version": "1.5"'), "line 1: version '1.5'"),
        (META.replace('"version": 1', '"version": null'), "line 1: version None"),
        (META + "hello\n" + STEP, "line 2: "),
        (META + STEP + "[]\n", "line 3: expected an object"),
        (META + '{"kind": "step"}\n', "line 2: no step"),
        (META + '{"kind": "step", "step": 1, "scheduled": [{"slot": 1}]}\n', "line 2: no step"),
        (META + '{"kind": "step", "step": 1, "scheduled": 7}\n', "line 2: no step"),
    ],
)
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_what_is_no_trace_says_where(suffix: str, text: str, message: str, tmp_path: Path) -> None:
    path = write(tmp_path / f"bad{suffix}", text)
    with pytest.raises(TraceFormatError, match=message) as caught:
        Trace.load(path)
    assert str(path) in str(caught.value)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("name", ["run.jsonl", "run.jsonl.gz"])
def test_binary_rubbish_is_no_trace(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(bytes(range(256)) * 20)
    with pytest.raises(TraceFormatError):
        Trace.load(tmp_path / name)


def test_a_missing_file_is_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Trace.load(tmp_path / "nowhere.jsonl")


def test_recording_to_another_file_closes_the_first(tmp_path: Path) -> None:
    engine = eventful()
    engine.record_to(tmp_path / "one.jsonl")
    engine.step()
    engine.record_to(tmp_path / "two.jsonl")
    run(engine)
    engine.close()
    assert Trace.load(tmp_path / "one.jsonl").steps == engine.trace.steps[:1]
    assert Trace.load(tmp_path / "two.jsonl").steps == engine.trace.steps[1:]
    assert Trace.load(tmp_path / "one.jsonl").summary["num_steps"] == 1


def test_a_file_that_cannot_be_opened_leaves_the_engine_alone(tmp_path: Path) -> None:
    engine = eventful()
    engine.record_to(tmp_path / "one.jsonl")
    with pytest.raises(OSError):
        engine.record_to(tmp_path / "no such folder" / "two.jsonl")
    assert run(engine)


def test_memory_is_bounded_while_a_file_gets_everything(tmp_path: Path) -> None:
    engine = make_engine(keep_records=5, max_model_len=2000, num_gpu_blocks=600,
                         max_num_batched_tokens=2000)  # fmt: skip
    engine.record_to(tmp_path / "run.jsonl")
    engine.add_request("A", [1], greedy(300))
    most = 0
    for _ in engine.run():
        most = max(most, len(engine.trace))
    engine.close()
    assert most < 10
    whole = Trace.load(tmp_path / "run.jsonl")
    assert [record.step for record in whole] == list(range(300))
    assert whole.steps[-len(engine.trace) :] == engine.trace.steps


# -- Perfetto -----------------------------------------------------------------------------------


def test_perfetto(tmp_path: Path) -> None:
    engine = eventful()
    run(engine)
    trace = engine.trace
    timeline = trace.to_perfetto(tmp_path / "run.json")
    assert json.loads((tmp_path / "run.json").read_text()) == timeline
    events = timeline["traceEvents"]
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        by_kind.setdefault(event["ph"], []).append(event)
    slices = by_kind["X"]
    assert len(slices) == sum(len(record.scheduled) for record in trace)
    lanes = {row.slot for record in trace for row in record.scheduled}
    names = {e["tid"]: e["args"]["name"] for e in by_kind["M"] if e["name"] == "thread_name"}
    assert names == {lane + 1: f"slot {lane}" for lane in lanes}
    assert {e["tid"] for e in slices} == set(names)
    assert len(by_kind["C"]) == 3 * len(trace)
    assert len(by_kind["i"]) == sum(len(record.preempted) for record in trace) > 0
    assert by_kind.keys() == {"M", "X", "C", "i"}
    for event in (*slices, *by_kind["C"], *by_kind["i"]):
        assert event["ts"] >= 0 and event["pid"] == 1
    last: dict[int, float] = {}
    for event in slices:  # no two slices of a lane overlap
        assert event["ts"] >= last.get(event["tid"], 0.0)
        last[event["tid"]] = event["ts"] + event["dur"]
    first = slices[0]
    assert (first["name"], first["cat"], first["ts"], first["dur"]) == ("请求#0", "prefill", 0, 1e6)
    assert first["args"]["num_tokens"] == 6 and first["args"]["step"] == 0


def test_perfetto_of_an_empty_trace() -> None:
    assert [event["name"] for event in Trace().to_perfetto()["traceEvents"]] == ["process_name"]


# -- a line a step ------------------------------------------------------------------------------


def rows(*names: str, phase: str = "decode", tokens: int = 1) -> tuple[Scheduled, ...]:
    return tuple(Scheduled(name, i, phase, tokens, 9) for i, name in enumerate(names))


@pytest.mark.parametrize(
    ("record", "total", "line"),
    [
        (
            StepRecord(
                step=17,
                duration_s=0.0145631,
                scheduled=rows(*"ABDEFG"),
                waiting=tuple("HIJK"),
                swapped=("C",),
                free_blocks=3,
                sampled={name: [1] for name in "ABDEFG"},
            ),
            64,
            "it  17 | decode 6 tok | run A B D E F G | wait H(+3) | swap C | free 3/64 | 412 tok/s",
        ),
        (
            StepRecord(step=0, scheduled=rows("A", "B", phase="prefill", tokens=5), free_blocks=9),
            None,
            "it   0 | prefill 10 tok | run A B | free 9",
        ),
        (
            StepRecord(
                step=3,
                scheduled=(Scheduled("A", 0, "prefill", 4, 4), Scheduled("B", 1, "decode", 1, 9)),
                waiting=("C",),
                free_blocks=1,
            ),
            8,
            "it   3 | prefill 4 tok + decode 1 tok | run A B | wait C | free 1/8",
        ),
        (
            StepRecord(
                step=1234,
                scheduled=(
                    Scheduled("A", 0, "decode", 1, 9),
                    Scheduled("B", 1, "padding", 0, 4, 1),
                ),
                num_padding_tokens=1,
                finished=(Finish("A", "stop"),),
            ),
            8,
            "it 1234 | decode 1 tok + padding 1 tok | run A B | done A | free 0/8",
        ),
        (
            StepRecord(
                step=5,
                preempted=(
                    Preemption("C", "swap", "A", 1, 0),
                    Preemption("D", "recompute", None, 0, 3),
                ),
            ),
            None,
            "it   5 | idle | run - | evict C (swap, for A) | evict D (recompute, by hand) | free 0",
        ),
        (
            StepRecord(
                step=6,
                scheduled=rows(*"ABCDEFGHIJ"),
                refused=(Refusal("Z", "too long", 9, 4, "x"),),
            ),
            None,
            "it   6 | decode 10 tok | run A B C D E F G H(+2) | refused Z: too long | free 0",
        ),
    ],
)
def test_one_line(record: StepRecord, total: int | None, line: str) -> None:
    assert one_line(record, total) == line


def test_the_lines_of_a_trace_know_the_pool() -> None:
    engine = make_engine(num_gpu_blocks=16, max_model_len=16)
    engine.add_request("A", [1, 2, 3], greedy(2))
    run(engine)
    assert list(engine.trace.lines()) == [
        "it   0 | prefill 3 tok | run A | free 15/16 | 1 tok/s",
        "it   1 | decode 1 tok | run A | done A | free 15/16 | 1 tok/s",
    ]
    assert table(engine.trace) == ["A:p3", "A:d1"]
