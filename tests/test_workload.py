"""Workloads: drawn, read from public formats, scaled; bad files say where and why."""

from __future__ import annotations

import gzip
import json
import random
import statistics
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minibatch.errors import ConfigError, MinibatchError
from minibatch.metrics import MetricsCollector, measure
from minibatch.simulation import simulate
from minibatch.workload import (
    RequestSpec,
    Segment,
    Workload,
    all_at_once,
    as_workload,
    fixed,
    gamma,
    generate,
    listed,
    lognormal,
    poisson,
    uniform,
)
from minibatch.workload_files import (
    WorkloadFormatError,
    load_workload,
    read_azure,
    read_burstgpt,
    read_mooncake,
    read_sharegpt,
    read_workload,
    save_workload,
)

ROOT = Path(__file__).resolve().parent.parent
PUBLIC = ROOT.parent / "shared" / "data"
needs_public_data = pytest.mark.skipif(not PUBLIC.is_dir(), reason=f"no public traces at {PUBLIC}")


# -- drawing --------------------------------------------------------------------------------------


def draw(lengths: Any, count: int = 2000) -> list[int]:
    rng = random.Random(1)
    return [lengths(rng, index) for index in range(count)]


def test_lengths_have_the_shape_that_they_are_named_for() -> None:
    assert set(draw(fixed(7))) == {7}
    assert set(draw(uniform(3, 5))) == {3, 4, 5}
    assert draw(listed([10, 500]), 5) == [10, 500, 10, 500, 10]
    values = draw(lognormal(200, 1.0))
    assert statistics.median(values) == pytest.approx(200, rel=0.1)
    above = sum(value > 200 * 2.718 for value in values) / len(values)
    assert above == pytest.approx(0.16, abs=0.03)  # one standard deviation of the logarithm
    cut = draw(lognormal(200, 1.0, low=50, high=300))
    assert (min(cut), max(cut)) == (50, 300)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_rate_and_the_variation_asked_for(burstiness: float) -> None:
    times = gamma(5.0, burstiness)(random.Random(3), 20_000)
    gaps = [later - earlier for earlier, later in zip([0.0, *times], times, strict=False)]
    assert times == sorted(times)
    assert statistics.mean(gaps) == pytest.approx(1 / 5.0, rel=0.05)
    variation = statistics.stdev(gaps) / statistics.mean(gaps)
    assert variation == pytest.approx(burstiness**-0.5, rel=0.05)


def test_rescaled_arrivals_end_at_count_over_rate() -> None:
    free = poisson(2.0)(random.Random(4), 50)
    rescaled = poisson(2.0, rescale=True)(random.Random(4), 50)
    assert rescaled[-1] == pytest.approx(50 / 2.0)
    assert free[-1] != pytest.approx(25.0)
    stretch = rescaled[-1] / free[-1]
    assert rescaled == pytest.approx([time * stretch for time in free])
    assert all_at_once()(random.Random(4), 3) == [0.0, 0.0, 0.0]


def test_a_seed_draws_the_same_again_and_each_part_on_its_own() -> None:
    base = generate(20, uniform(1, 99), uniform(1, 99), poisson(3.0), seed=7)
    assert generate(20, uniform(1, 99), uniform(1, 99), poisson(3.0), seed=7) == base
    assert generate(20, uniform(1, 99), uniform(1, 99), poisson(3.0), seed=8) != base
    other = generate(20, uniform(1, 99), 5, seed=7)
    assert [r.prompt_len for r in other] == [r.prompt_len for r in base]


def test_shared_prefixes_are_shared_and_nothing_else_is() -> None:
    workload = generate(12, 6, 1, shared_prefix_len=10, num_prefixes=2, seed=1)
    prompts = [request.prompt_token_ids(1000) for request in workload]
    assert all(len(prompt) == 16 for prompt in prompts)
    assert len({tuple(prompt[:10]) for prompt in prompts}) == 2
    assert len({tuple(prompt[10:]) for prompt in prompts}) == 12
    assert all(3 <= token < 1000 for prompt in prompts for token in prompt)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RequestSpec("r", 0.0, 0, 1), "prompt_len=0"),
        (lambda: RequestSpec("r", 0.0, 1, 0), "output_len=0"),
        (lambda: RequestSpec("r", -1.0, 1, 1), "arrival_s=-1.0"),
        (lambda: RequestSpec("r", float("nan"), 1, 1), "arrival_s=nan"),
        (lambda: RequestSpec("r", 0.0, 4, 1, (Segment(0, 5),)), "5 tokens.*prompt_len=4"),
        (lambda: generate(0, 1, 1), "num_requests=0"),
        (lambda: poisson(0.0), "above 0"),
        (lambda: uniform(5, 4), "high=4"),
        (lambda: listed([]), "empty"),
        (lambda: as_workload([RequestSpec("r", 0.0, 1, 1)] * 2), "1 request ids are used twice"),
    ],
)
def test_impossible_workloads_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_a_workload_is_put_in_order_of_arrival() -> None:
    late, soon = RequestSpec("late", 2.0, 1, 1), RequestSpec("soon", 1.0, 1, 1)
    assert [r.request_id for r in as_workload([late, soon])] == ["soon", "late"]


# -- scaling --------------------------------------------------------------------------------------


def test_scaling_divides_lengths_and_says_so() -> None:
    workload = Workload((RequestSpec("a", 8.0, 1600, 3), RequestSpec("b", 16.0, 31, 640)), "w")
    scaled = workload.scaled(tokens=1 / 16, time=0.5)
    assert [(r.arrival_s, r.prompt_len, r.output_len) for r in scaled] == [
        (4.0, 100, 1),
        (8.0, 2, 40),
    ]
    assert "tokens x 0.0625" in scaled.describe() and "times x 0.5" in scaled.describe()


@given(
    blocks=st.lists(st.integers(0, 3), min_size=1, max_size=6),
    other=st.lists(st.integers(0, 3), min_size=1, max_size=6),
    tails=st.tuples(st.integers(1, 64), st.integers(1, 64)),
    factor=st.sampled_from([1.0, 0.5, 0.3, 1 / 16, 0.77]),
)
@settings(max_examples=150, deadline=None)
def test_what_began_alike_still_does_when_scaled(
    blocks: list[int], other: list[int], tails: tuple[int, int], factor: float
) -> None:
    """Prompts of 64-token segments agree, scaled, at least as far as the scaled common part."""

    def spec(name: str, keys: list[int], tail: int) -> RequestSpec:
        lengths = [64] * (len(keys) - 1) + [tail]
        segments = tuple(map(Segment, keys, lengths))
        return RequestSpec(name, 0.0, sum(lengths), 1, segments)

    pair = Workload((spec("a", blocks, tails[0]), spec("b", other, tails[1])))
    common = 0
    for mine, theirs in zip(blocks[:-1], other[:-1], strict=False):
        if mine != theirs:
            break
        common += 64
    first, second = (r.prompt_token_ids(50_000) for r in pair.scaled(tokens=factor))
    kept = min(round(common * factor), len(first), len(second))
    assert first[:kept] == second[:kept]
    assert len(first) == max(1, round(pair.requests[0].prompt_len * factor))


def test_only_what_fits_is_kept() -> None:
    workload = Workload((RequestSpec("a", 0.0, 10, 6), RequestSpec("b", 0.0, 11, 6)))
    assert [r.request_id for r in workload.fitting(16)] == ["a"]
    assert "1 of more than 16 tokens left out" in workload.fitting(16).note


# -- our own format -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["w.jsonl", "w.jsonl.gz"])
def test_our_own_format_keeps_everything(tmp_path: Path, name: str) -> None:
    drawn = generate(9, uniform(5, 50), lognormal(20, 1), poisson(2), shared_prefix_len=8, seed=2)
    spoken = RequestSpec("t", 0.5, 4, 2, (Segment(5, 3, (7, 8, 9)),))
    workload = as_workload(Workload((*drawn, spoken), "mine", "seed 2"))
    path = save_workload(workload, tmp_path / name)
    assert load_workload(path) == workload
    assert read_workload(path) == workload
    assert spoken.prompt_token_ids(100)[:3] == [7, 8, 9]


def test_the_sample_workloads_can_be_read() -> None:
    paths = sorted((ROOT / "data" / "workloads").glob("*.jsonl"))
    assert len(paths) >= 3
    for path in paths:
        workload = read_workload(path)
        assert len(workload) > 0 and workload.note


# -- public formats -------------------------------------------------------------------------------

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def write(tmp_path: Path, name: str, text: str) -> Path:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def test_azure_times_keep_their_seven_digits(tmp_path: Path) -> None:
    """Cut to two digits, these two would come together."""
    path = write(
        tmp_path,
        "azure.csv",
        AZURE
        + "2023-11-16 18:15:46.6805900,374,44\r\n"
        + "2023-11-16 18:15:46.6895901,396,109\r\n"
        + "2023-11-17 00:00:00,5,6\r\n",
    )
    times = [request.arrival_s for request in read_azure(path)]
    assert times[:2] == [0.0, pytest.approx(0.0090001, abs=1e-12)]
    assert times[2] == pytest.approx(5 * 3600 + 44 * 60 + 13.31941, abs=1e-9)
    assert [(r.prompt_len, r.output_len) for r in read_workload(path)][:2] == [
        (374, 44),
        (396, 109),
    ]


def test_azure_2024_times_with_a_zone_are_read_too(tmp_path: Path) -> None:
    rows = "2024-05-10 00:00:00.009930+00:00,10,2\n2024-05-10 00:00:01.109930+00:00,10,2\n"
    assert [r.arrival_s for r in read_azure(write(tmp_path, "a.csv", AZURE + rows))] == [0.0, 1.1]


@needs_public_data
@pytest.mark.parametrize(
    ("name", "rows", "span", "input_mean", "output_mean", "fit_4096", "distinct"),
    [
        ("conv", 19_366, 3501.7, 1154.7, 211.1, 17_754, None),
        ("code", 8_819, 3435.9, 2047.8, 27.9, 7_562, 8_819),
    ],
)
def test_the_azure_files_as_published(
    name: str,
    rows: int,
    span: float,
    input_mean: float,
    output_mean: float,
    fit_4096: int,
    distinct: int | None,
) -> None:
    workload = read_workload(PUBLIC / f"AzureLLMInferenceTrace_{name}.csv")
    assert len(workload) == rows
    assert workload.requests[-1].arrival_s == pytest.approx(span, abs=0.06)
    assert statistics.mean(r.prompt_len for r in workload) == pytest.approx(input_mean, abs=0.05)
    assert statistics.mean(r.output_len for r in workload) == pytest.approx(output_mean, abs=0.05)
    assert len(workload.fitting(4096)) == fit_4096
    times = {request.arrival_s for request in workload}
    if distinct is not None:  # with two digits, 6,129 would be left
        assert len(times) == distinct
        assert len({round(time, 2) for time in times}) < 6_500


@needs_public_data
@pytest.mark.parametrize(("name", "policy"), [("conv", "continuous"), ("code", "unified")])
def test_the_azure_files_replay_in_full(name: str, policy: str) -> None:
    """Every row is served, at the time it came, by a model on a chip; lengths are those of the
    file, or a 16th of them.
    """
    workload = read_workload(PUBLIC / f"AzureLLMInferenceTrace_{name}.csv")
    if name == "conv":
        workload = workload.scaled(tokens=1 / 16)
    knobs = {"max_model_len": 16_384, "num_gpu_blocks": 20_000, "max_num_batched_tokens": 16_384}
    collector = MetricsCollector(128, 20_000, 16)
    simulate(workload, "h100", "llama-3-8b", policy, knobs, on_step=collector.add, keep_records=1)
    run = collector.result()
    assert run.num_finished == len(workload)
    assert run.num_input_tokens == sum(r.prompt_len for r in workload)
    assert run.num_output_tokens == sum(r.output_len for r in workload)
    assert run.open_loop
    last = workload.requests[-1].arrival_s
    assert last < run.duration_s < last + 60
    arrivals = {request.request_id: request.arrival_s for request in run.requests}
    assert arrivals == {r.request_id: r.arrival_s for r in workload}
    assert min(run.values("queue_s")) >= 0.0


def test_mooncake_blocks_become_shared_prompts(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [1, 2, 3]},
        {"timestamp": 3000, "input_length": 1024, "output_length": 7, "hash_ids": [1, 2]},
        {"timestamp": 3000, "input_length": 600, "output_length": 1, "hash_ids": [1, 9]},
    ]
    path = write(tmp_path, "m.jsonl", "\n".join(map(json.dumps, rows)) + "\n")
    zipped = tmp_path / "m.jsonl.gz"
    zipped.write_bytes(gzip.compress(path.read_bytes()))
    for file in (path, zipped):
        workload = read_workload(file)
        assert [request.arrival_s for request in workload] == [0.0, 3.0, 3.0]
        a, b, c = (request.prompt_token_ids(32_000) for request in workload)
        assert [len(a), len(b), len(c)] == [1100, 1024, 600]
        assert a[:1024] == b and c[:512] == a[:512] and c[512:600] != a[512:600]


@needs_public_data
@pytest.mark.parametrize(
    ("name", "rows", "hits"), [("conversation", 12_031, 0.366), ("synthetic", 3_993, 0.640)]
)
def test_the_mooncake_files_as_published(name: str, rows: int, hits: float) -> None:
    """With an endless cache this share of the blocks was seen before."""
    workload = read_mooncake(PUBLIC / f"mooncake_{name}_trace.jsonl.gz")
    assert len(workload) == rows
    seen: set[int] = set()
    found = total = 0
    for request in workload:
        keys = [segment.key for segment in request.segments]
        total += len(keys)
        found += sum(key in seen for key in keys)
        seen.update(keys)
    assert found / total == pytest.approx(hits, abs=0.001)


@needs_public_data
def test_mooncake_hits_the_prefix_cache_when_replayed() -> None:
    """With room for everything, whole blocks of 16 that any earlier prompt began with are found."""
    workload = read_mooncake(PUBLIC / "mooncake_conversation_trace.jsonl.gz").first(300)
    small = workload.scaled(tokens=1 / 16)  # a hash id stands for two blocks now
    knobs = {"enable_prefix_caching": True, "max_model_len": 8192, "num_gpu_blocks": 60_000}
    trace = simulate(small, "h100", "llama-3-8b", "unified", knobs)
    seen: set[tuple[int, ...]] = set()
    expected: dict[str, int] = {}
    for request in small:
        keys = tuple(segment.key for segment in request.segments)
        ends = range(16, request.prompt_len + 1, 16)
        prefixes = [(*keys[: -(-end // 32)], end) for end in ends]
        reusable = [p for p in prefixes if p[-1] < request.prompt_len]  # never the whole prompt
        hits = next((i for i, p in enumerate(reusable) if p not in seen), len(reusable))
        expected[request.request_id] = 16 * hits
        seen.update(prefixes)
    assert sum(expected.values()) > 20_000
    found = {r.request_id: r.prefix_hit_tokens for r in measure(trace).requests}
    assert found == expected


BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"


def test_burstgpt_leaves_out_failures_and_other_models(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "burst.csv",
        BURST
        + "5,ChatGPT,472,18,490,Conversation log\n"
        + "45,ChatGPT,1087,0,1087,Conversation log\n"
        + "118.5,GPT-4,417,276,693,API log\n",
    )
    workload = read_workload(path)
    assert [(r.arrival_s, r.prompt_len, r.output_len) for r in workload] == [
        (0.0, 472, 18),
        (113.5, 417, 276),
    ]
    assert "1 failed requests left out" in workload.note
    assert [(r.arrival_s, r.prompt_len) for r in read_burstgpt(path, model="GPT-4")] == [(0.0, 417)]


# -- ShareGPT -------------------------------------------------------------------------------------


def words(text: str) -> list[int]:
    """A tokenizer that a test can follow: one id a word."""
    return [int(word) for word in text.split()]


def conversation(*turns: list[int]) -> dict[str, Any]:
    return {
        "id": "x",
        "conversations": [{"from": "?", "value": " ".join(map(str, t))} for t in turns],
    }


def sharegpt(tmp_path: Path, *conversations: dict[str, Any]) -> Path:
    return write(tmp_path, "sharegpt.json", json.dumps(conversations))


def test_the_sharegpt_filter_is_vllms(tmp_path: Path) -> None:
    ten = list(range(10, 20))
    path = sharegpt(
        tmp_path,
        conversation(ten),  # one turn
        conversation([1] * 3, ten),  # prompt under 4
        conversation(ten, [1] * 3),  # answer under 4
        conversation([1] * 1025, ten),  # prompt over 1024
        conversation([1] * 1024, [2] * 1025),  # sum over 2048
        conversation([1] * 1024, [2] * 1024),
        conversation([1] * 4, [2] * 4),
    )
    kept = {(r.prompt_len, r.output_len) for r in read_sharegpt(path, words)}
    assert kept == {(1024, 1024), (4, 4)}
    with_length = {(r.prompt_len, r.output_len) for r in read_sharegpt(path, words, output_len=7)}
    assert with_length == {(1024, 7), (4, 7), (10, 7)}  # short answers do not matter then
    assert read_workload(path, encode=words).requests == read_sharegpt(path, words).requests


def test_sharegpt_prompts_are_the_texts_and_order_depends_on_the_seed(tmp_path: Path) -> None:
    path = sharegpt(tmp_path, *(conversation([i] * 4, [i] * (4 + i)) for i in range(10, 30)))
    first = read_sharegpt(path, words, seed=0)
    assert read_sharegpt(path, words, seed=0) == first
    assert read_sharegpt(path, words, seed=1) != first
    for request in first:
        prompt = request.prompt_token_ids(50_000)
        assert prompt == [prompt[0]] * 4 and request.output_len == 4 + prompt[0]
    # vLLM: random.seed(0); random.shuffle(conversations)
    order = list(range(10, 30))
    random.Random(0).shuffle(order)
    assert [request.prompt_token_ids(100)[0] for request in first] == order


def test_sharegpt_repeats_a_short_file(tmp_path: Path) -> None:
    path = sharegpt(tmp_path, *(conversation([i] * 4, [i] * 9) for i in (5, 6)))
    workload = read_sharegpt(path, words, num_requests=5)
    first_ids = [request.prompt_token_ids(100)[0] for request in workload]
    assert first_ids[2:] == (first_ids * 2)[:3] and set(first_ids) == {5, 6}
    assert len({request.request_id for request in workload}) == 5


def test_four_turns_are_two_requests_and_the_second_begins_with_the_first(tmp_path: Path) -> None:
    turns = [[1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11], [12, 13, 14, 15]]
    path = sharegpt(tmp_path, conversation(*turns))
    only_first = read_sharegpt(path, words)
    assert len(only_first) == 1 and "turns 0 and 1 only" in only_first.note
    first, second = read_sharegpt(path, words, multi_turn=True)
    assert first.prompt_token_ids(100) == turns[0]
    assert second.prompt_token_ids(100) == turns[0] + turns[1] + turns[2]
    assert (first.output_len, second.output_len) == (5, 4)


# -- bad files ------------------------------------------------------------------------------------

MOON = '{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [0, 1]}\n'
OURS = '{"format": "minibatch-workload", "name": "w"}\n'


@pytest.mark.parametrize(
    ("name", "text", "line", "reason"),
    [
        ("a.csv", AZURE + "2023-11-16 18:15:46.68,374,44\n2023-11-16 18:15,1,2\n", 3, "not a time"),
        ("a.csv", AZURE + "2023-11-16 18:15:46.68,0,44\n", 2, "ContextTokens=0"),
        ("a.csv", AZURE + "2023-11-16 18:15:46.68,3.5,44\n", 2, "ContextTokens='3.5'"),
        ("a.csv", AZURE + "2023-11-16 18:15:46.68,3\n", 2, "too few fields"),
        (
            "a.csv",
            AZURE + "2023-11-16 18:15:46,3,4\n2023-11-16 18:15:45,3,4\n",
            3,
            "arrival_s=-1.0",
        ),
        ("a.csv", "TIMESTAMP,ContextTokens\n", 1, "no GeneratedTokens"),
        ("b.csv", BURST + "5,ChatGPT,x,18,490,log\n", 2, "Request tokens='x'"),
        ("b.csv", BURST + "soon,ChatGPT,4,18,490,log\n", 2, "soon"),
        ("m.jsonl", MOON + MOON.replace("600", "1600"), 2, "2 hash_ids for input_length=1600"),
        ("m.jsonl", MOON + MOON.replace("600", "true"), 2, "input_length=True"),
        ("m.jsonl", MOON + "{oops\n", 2, "not JSON"),
        ("m.jsonl", MOON + "[]\n", 2, "expected an object"),
        ("m.jsonl", MOON.replace("[0, 1]", '"hash_ids"'), 1, "expected a list"),
        ("w.jsonl", OURS + '{"request_id": "a", "arrival_s": 0}\n', 2, "'prompt_len' is missing"),
        (
            "w.jsonl",
            OURS + '{"request_id": "a", "arrival_s": 0, "prompt_len": 0, "output_len": 1}\n',
            2,
            "prompt_len=0",
        ),
        ("s.json", '[{"conversations": [{"from": "human"}]}]', 1, "turn without 'value'"),
        ("s.json", '[{"conversations": [],\n oops}]', 2, "Expecting property name"),
        ("s.json", '[{"conversations": []}]', 1, "no conversation passes"),
        ("x.txt", "hello\n", 1, "'hello' begins none of the formats"),
        ("x.txt", "", 1, "begins none of the formats"),
    ],
)
def test_bad_files_name_line_and_reason(
    tmp_path: Path, name: str, text: str, line: int, reason: str
) -> None:
    path = write(tmp_path, name, text)
    options = {"encode": words} if name == "s.json" else {}
    with pytest.raises(WorkloadFormatError) as raised:
        read_workload(path, **options)
    assert raised.value.line == line
    assert reason in str(raised.value)
    assert str(raised.value).startswith(f"{path}, line {line}: ")
    assert isinstance(raised.value, ValueError) and isinstance(raised.value, MinibatchError)


def test_a_missing_file_is_the_same_kind_of_error(tmp_path: Path) -> None:
    with pytest.raises(WorkloadFormatError, match="cannot be read"):
        read_workload(tmp_path / "none.csv")
