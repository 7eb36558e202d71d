"""``view(trace, t)``: what is counted from it must be what the record says."""

from __future__ import annotations

import sys

import demo_traces
import pytest

from minibatch.config import SchedulerConfig
from minibatch.simulation import simulate
from minibatch.trace import Trace
from minibatch.workload import RequestSpec
from widgets.view import view

ALL = list(demo_traces.DEMOS)


@pytest.mark.parametrize("name", ALL)
def test_views_agree_with_their_records(name: str, demos: dict[str, Trace]) -> None:
    trace = demos[name]
    size = trace.meta.knobs["block_size"]
    for t, record in enumerate(trace):
        shown = view(trace, t)
        assert shown.free_blocks == record.free_blocks
        assert len(shown.cached) == record.cached_blocks
        cpu = sum(len(table) for table in shown.cpu_tables.values())
        assert trace.meta.knobs["num_cpu_blocks"] - cpu == record.free_cpu_blocks
        assert {lane.request_id for lane in shown.lanes} >= set(record.running)
        slots = [lane.slot for lane in shown.lanes]
        assert len(set(slots)) == len(slots)
        for row in record.scheduled:  # its blocks hold its KV
            assert len(shown.tables[row.request_id]) * size >= row.context_len
        states = [block.state for block in shown.blocks()]
        assert states.count("free") + states.count("cached") == record.free_blocks


@pytest.mark.parametrize("name", ALL)
def test_every_request_is_in_one_place_and_has_a_reason(name: str, demos: dict[str, Trace]) -> None:
    trace = demos[name]
    for t, record in enumerate(trace):
        shown = view(trace, t)
        for queue in ("waiting", "swapped"):
            for request in getattr(record, queue):
                assert shown.place(request) == queue
        for request in trace.requests:
            assert shown.why(request).endswith(".")
            assert "{" not in shown.why(request)


@pytest.mark.parametrize("name", ALL)
def test_steps_may_be_asked_for_in_any_order(name: str) -> None:
    forward, backward = demo_traces.load(name), demo_traces.load(name)
    steps = range(len(forward))
    told = [view(forward, t).sentence for t in steps]
    assert [view(backward, t).sentence for t in reversed(steps)] == told[::-1]
    assert view(forward, -1).sentence == told[-1]
    with pytest.raises(IndexError):
        view(forward, len(forward))


@pytest.mark.parametrize("name", ALL)
def test_totals_of_the_last_step_are_those_of_the_run(name: str, demos: dict[str, Trace]) -> None:
    trace = demos[name]
    totals, summary = view(trace, -1).totals, trace.summary
    assert totals.generated_tokens == summary["num_generated_tokens"]
    assert totals.padding_tokens == summary["num_padding_tokens"]
    assert totals.preemptions == summary["num_preemptions"]
    assert totals.finished == summary["num_finished"]
    assert totals.end_s == pytest.approx(summary["end_s"])


def test_an_eviction_is_told_with_who_needed_what_and_why_this_one() -> None:
    trace = demo_traces.load("continuous")
    told = view(trace, 4)
    assert told.sentence.startswith(
        "Step 4: request D is evicted (recompute): C needs 1 block, 0 free; D is the newest; "
        "D gives 3 blocks back, waits first in line, and will compute its 11 tokens again"
    )
    assert told.place("D") == "waiting"
    assert told.why("D").startswith("D was evicted in this step; it waits first in line")
    lost = [number for number, block in enumerate(told.blocks()) if block.lost_by == "D"]
    assert len(lost) == 3
    assert "needs 2 blocks, 1 free" in told.why("E")


def test_a_swapped_request_keeps_its_kv_in_the_cpu_pool() -> None:
    trace = demo_traces.load("swap")
    out = next(t for t, step in enumerate(trace) if step.swapped_out)
    told = view(trace, out)
    assert "is evicted (swap)" in told.sentence and "nothing is lost" in told.sentence
    assert told.place("D") == "swapped"
    assert len(told.cpu_tables["D"]) == 3
    assert told.requests["D"].context_len > 0


def test_static_padding_rows_keep_their_memory() -> None:
    trace = demo_traces.load("static")
    told = view(trace, 6)
    lane = told.lane_of("B")
    assert lane is not None and lane.phase == "padding"
    assert "computed for nobody" in told.why("B")
    assert len(told.tables["B"]) == 8


def test_shared_and_cached_blocks_are_told_apart() -> None:
    trace = demo_traces.load("prefix")
    states = [{block.state for block in view(trace, t).blocks()} for t in range(len(trace))]
    assert any("shared" in seen for seen in states)
    assert any("cached" in seen for seen in states)
    assert all("null" in seen for seen in states)


def test_a_request_that_can_never_run_is_drawn_as_refused() -> None:
    specs = [RequestSpec("big", 0.0, 40, 4), RequestSpec("ok", 0.0, 4, 2)]
    trace = simulate(
        specs,
        "a100-80gb",
        "llama-2-7b",
        "continuous",
        {
            **demo_traces.SMALL,
            "num_gpu_blocks": 4,
            "max_model_len": 64,
            "max_num_batched_tokens": 64,
        },
    )
    told = view(trace, 0)
    assert told.refused == ("big",)
    assert "big is refused" in told.sentence or "#1 is refused" in told.sentence
    assert told.place("big") == "refused"


def test_chinese_sentences_come_from_the_same_facts() -> None:
    trace = demo_traces.load("continuous")
    told = view(trace, 4, lang="zh")
    assert told.sentence.startswith("第 4 步：请求 D 被抢占（重算）：C 需要 1 个块，空闲 0 个")
    with pytest.raises(ValueError, match="lang"):
        view(trace, 0, lang="xx")


def test_both_languages_have_every_text() -> None:
    from widgets.words import WORDS

    assert WORDS["en"].keys() == WORDS["zh"].keys()
    for key, text in WORDS["en"].items():
        names = {part.split("}")[0] for part in text.split("{")[1:]}
        other = {part.split("}")[0] for part in WORDS["zh"][key].split("{")[1:]}
        assert other <= names, key


def test_a_trace_without_knobs_can_be_shown() -> None:
    trace = demo_traces.load("continuous")
    trace.meta.knobs = {}
    assert view(trace, 5).blocks()


def test_views_need_no_torch_and_no_jupyter() -> None:
    import subprocess

    code = (
        "import sys; from widgets.view import view; from widgets.static import timeline_svg; "
        "import widgets; "
        "bad = {'torch', 'ipywidgets', 'anywidget', 'IPython', 'plotly'} & set(sys.modules); "
        "sys.exit(str(bad) if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_shuffled_knobs_of_every_policy_stay_consistent() -> None:
    """A wider net than the hand-made runs: forks, chunks, caches, small pools."""
    specs = [
        RequestSpec(f"r{i}", 0.004 * (i % 5), 3 + (7 * i) % 17, 2 + (5 * i) % 13) for i in range(24)
    ]
    for policy in ("static", "dynamic", "continuous", "unified"):
        for extra in (
            {},
            {"preemption_mode": "swap", "num_cpu_blocks": 9},
            {"enable_prefix_caching": True, "enable_chunked_prefill": True},
        ):
            knobs = {**demo_traces.SMALL, "num_gpu_blocks": 14, "max_num_seqs": 5, **extra}
            knobs["max_num_batched_tokens"] = 160 if policy in ("static", "dynamic") else 32
            assert SchedulerConfig(policy=policy, **knobs)
            trace = simulate(specs, "a100-80gb", "llama-2-7b", policy, knobs)
            for t, record in enumerate(trace):
                shown = view(trace, t)
                assert shown.free_blocks == record.free_blocks, (policy, extra, t)
                assert len(shown.cached) == record.cached_blocks, (policy, extra, t)
