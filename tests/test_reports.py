"""Public fault reports of engines like this one, each with its small input: none of them here.

Real KV is computed where the fault was in KV: by a tiny random Llama in float32. What concerns
loading, sampling and text alone has its full test elsewhere; the table says where, and the last
test here sees to it that these exist.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers import (
    Alphabet,
    Auditor,
    assert_all_free,
    foretell,
    greedy,
    make_engine,
    paper,
    run,
    tokens_of,
)
from torch import Tensor

from minibatch.builder import engine_for
from minibatch.config import EngineConfig
from minibatch.engine import Engine
from minibatch.errors import DuplicateRequestError, InvalidRequestError, RequestTooLargeError
from minibatch.executor.model_runner import ModelRunner
from minibatch.llm import LLM
from minibatch.model.llama import LlamaForCausalLM
from minibatch.model.loader import random_model
from minibatch.model.presets import preset
from minibatch.sampling_params import SamplingParams
from minibatch.scheduler import ScheduledRequest, SchedulerOutput
from tests.toy_tokenizers import llama_style

TESTED_IN_FULL_ELSEWHERE = {
    "A9": "test_sampler.py::test_n_samples_are_independent_draws",
    "A12": "test_detokenizer.py::test_stop_strings_by_definition",
    "A13": "test_detokenizer.py::test_deltas_joined_are_the_decoded_text",
    "A14": "model/test_model_config.py::test_end_tokens_are_an_int_or_a_list",
    "A15": "test_sampler.py::test_tiny_temperatures",
    "A16": "test_sampler.py::test_top_k_of_any_size",
    "A17": "test_tokens.py::test_every_shape_under_every_policy",
    "A18": "model/test_llama.py::test_prompts_of_unequal_length_equal_single_runs",
    "A19": "test_tokenizer.py::test_a_chat_has_one_bos_and_generate_after_render_too",
    "A20 present": "model/test_loader.py::test_tied_and_head_present_must_be_equal",
    "A20 absent": "model/test_loader.py::test_tied_and_head_absent_is_shared",
    "A20 untied": "model/test_loader.py::test_untied_and_head_absent_is_an_error",
    "A21": "model/test_rotary.py::test_old_and_new_config_give_equal_logits",
    "A22": "model/test_gguf.py::test_a_gguf_is_the_model_it_was_written_from",
    "A23": "model/test_kv_cache.py::test_slot_minus_one_writes_nowhere",
    "A25": "model/test_rotary.py::test_dynamic_rope_is_unscaled_up_to_the_original_length",
    "A27": "test_llm.py::test_two_calls_give_the_same_and_leave_the_caller_s_objects_alone",
    "A28": "model/test_llama.py::test_heads_that_do_not_divide_the_hidden_size",
}

PAGED = ["continuous", "unified"]
POLICIES = ["static", "dynamic", *PAGED]


# -- a real model -------------------------------------------------------------------------------


@functools.cache
def tiny_llama() -> LlamaForCausalLM:
    """Random weights, scaled up until its greedy tokens vary."""
    model = random_model(preset("tiny"), seed=3, max_model_len=64)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.mul_(4)
    return model


def llama_engine(**knobs: Any) -> Engine:
    """The real executor; KV that nobody has written is NaN."""
    settings: dict[str, Any] = {
        "model": "tiny",
        "block_size": 4,
        "num_gpu_blocks": 64,
        "num_cpu_blocks": 64,
        "max_model_len": 64,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 256,
        "check_invariants": True,
    }
    engine = engine_for(tiny_llama(), EngineConfig(**(settings | knobs)))
    assert isinstance(engine.executor, ModelRunner) and engine.executor.kv_cache is not None
    cache = engine.executor.kv_cache
    for pool in (*cache.keys, *cache.values):
        pool.fill_(math.nan)
    return engine


def real(max_tokens: int, **more: Any) -> SamplingParams:
    return greedy(max_tokens, ignore_eos=True, **more)


def generate(engine: Engine, prompts: Sequence[list[int]], max_tokens: int) -> list[list[int]]:
    """One after the other into the queue, all at once through the engine."""
    names = [f"{len(engine.trace)}.{index}" for index in range(len(prompts))]
    for name, prompt in zip(names, prompts, strict=True):
        engine.add_request(name, prompt, real(max_tokens))
    run(engine)
    assert_all_free(engine)
    return [tokens_of(engine, name) for name in names]


@functools.cache
def alone(prompt: tuple[int, ...], max_tokens: int) -> list[int]:
    """What the tiny Llama says to one prompt with nothing else about, computed without a cache:
    each token by a prefill of all before it.
    """
    tokens = list(prompt)
    for _ in range(max_tokens):
        engine = llama_engine(policy="continuous")
        tokens += generate(engine, [tokens], 1)[0]
    return tokens[len(prompt) :]


def numbers(start: int, count: int) -> list[int]:
    return [(17 * (start + index) + 5) % 256 for index in range(count)]


# -- A1 to A8: KV blocks ------------------------------------------------------------------------


@pytest.mark.parametrize("policy", PAGED)
@pytest.mark.parametrize("pool", [4, 5, 6, 100])
def test_a01_a_preempted_request_finds_its_own_blocks_again(policy: str, pool: int) -> None:
    extra = 1 if policy == "unified" else 0  # the null block
    engine = llama_engine(
        policy=policy, num_gpu_blocks=pool + extra, enable_prefix_caching=True, max_model_len=16
    )
    prompts = [numbers(0, 5), numbers(9, 5)]
    assert generate(engine, prompts, 7) == [alone(tuple(prompt), 7) for prompt in prompts]
    evictions = [p for record in engine.trace for p in record.preempted]
    again = [a for r in engine.trace for a in r.admitted if a.how == "recomputed"]
    if pool <= 5:
        assert evictions and len(again) == len(evictions)
        assert any(a.prefix_hit_tokens for a in again)  # the case that the report is about
        for record in engine.trace:  # cached and new tokens are decided once, and add up
            rows = {row.request_id: row for row in record.scheduled}
            for admission in record.admitted:
                row = rows[admission.request_id]
                assert row.context_len == admission.prefix_hit_tokens + row.num_tokens
    if pool == 100:
        assert not evictions


@pytest.mark.parametrize(
    ("policy", "prompt", "output"),
    [
        *[(policy, 9, 1) for policy in POLICIES],
        *[(policy, 6, 8) for policy in POLICIES if policy != "static"],  # outgrows the pool alone
    ],
)
def test_a02_what_can_never_fit_is_refused_and_the_queue_goes_on(
    policy: str, prompt: int, output: int
) -> None:
    blocks = 3 if policy == "unified" else 2  # with the null block
    longest = 8 if policy == "static" else 32  # a static row reserves that much
    engine = make_engine(policy=policy, num_gpu_blocks=blocks, max_model_len=longest)
    engine.add_request("first", [1], greedy(2))
    with pytest.raises(RequestTooLargeError) as caught:
        engine.add_request("huge", [1] * prompt, greedy(output))
    engine.add_request("second", [1, 2], greedy(2))
    records = run(engine)
    assert [r.request_id for record in records for r in record.refused] == ["huge"]
    assert records[0].refused[0].needed == caught.value.needed > caught.value.available
    assert tokens_of(engine, "first") == foretell([1], 2)
    assert tokens_of(engine, "second") == foretell([1, 2], 2)


@pytest.mark.parametrize(
    "knobs",
    [
        {"policy": "unified", "num_gpu_blocks": 9},
        {"policy": "continuous", "enable_chunked_prefill": True, "num_gpu_blocks": 9},
        {"policy": "continuous", "enable_chunked_prefill": True, "num_gpu_blocks": 9,
         "preemption_mode": "swap"},
    ],
    ids=["unified", "chunked recompute", "chunked swap"],
)  # fmt: skip
def test_a03_preemptions_are_bounded(knobs: dict[str, Any]) -> None:
    engine = make_engine(max_num_batched_tokens=4, max_num_seqs=4, max_model_len=32, **knobs)
    auditor = Auditor(engine)
    prompts = {"long": list(range(20)), "s1": [21] * 4, "s2": [22] * 4, "s3": [23] * 4}
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, greedy(12))
    while engine.has_unfinished:
        auditor.step()
    for name, prompt in prompts.items():
        assert tokens_of(engine, name) == foretell(prompt, 12)
        metrics = engine.output(name).metrics
        assert metrics is not None
        told = sum(p.request_id == name for r in auditor.records for p in r.preempted)
        assert metrics.num_preemptions == told <= 12  # at most once a token
    assert len(auditor.records) < 150
    # Nobody comes back for a piece only: there must be blocks for all its tokens.
    known = {name: len(prompt) for name, prompt in prompts.items()}
    for record in auditor.records:
        for admission in record.admitted:
            if admission.how == "recomputed":
                taken = len(record.blocks_allocated[admission.request_id])
                assert record.free_blocks + taken >= -(-known[admission.request_id] // 4)
        for name, tokens in record.sampled.items():
            known[name] += len(tokens)


def test_a03_its_own_pool_of_six_blocks_refuses_it() -> None:
    """20 + 12 tokens never fit 6 blocks of 4: the report's engine thrashed for ever on that."""
    engine = make_engine(policy="unified", num_gpu_blocks=7, max_num_batched_tokens=4)
    with pytest.raises(RequestTooLargeError, match="need 8 KV blocks of 4, and at most 6"):
        engine.add_request("long", [1] * 20, greedy(12))


def test_a04_an_empty_prompt_harms_nobody(tiny_chat_model: Path) -> None:
    with LLM(str(tiny_chat_model), max_model_len=64, num_gpu_blocks=64) as llm:
        params = SamplingParams(temperature=0, max_tokens=3)
        before = llm.generate(["a"], params, use_tqdm=False)
        for prompts in (["", "a"], [[]]):
            with pytest.raises(InvalidRequestError, match=f"prompt 0 of {len(prompts)}"):
                llm.generate(prompts, params, use_tqdm=False)
        after = llm.generate(["a"], params, use_tqdm=False)
        assert [o.outputs[0].token_ids for o in after] == [o.outputs[0].token_ids for o in before]


@pytest.mark.parametrize("policy", PAGED)
@pytest.mark.parametrize("prompt", [3, 4, 5, 7, 8, 9])
def test_a05_blocks_held_are_those_of_the_tokens_with_kv(policy: str, prompt: int) -> None:
    engine = make_engine(policy=policy)
    engine.add_request("A", [1] * prompt, greedy(6))
    request = engine.scheduler.requests["A"]
    held: list[int] = []

    def watch(output: SchedulerOutput) -> None:  # decided, about to be computed
        held.append(len(request.block_table))

    paper(engine).watch = watch
    for number, record in enumerate(engine.run()):
        with_kv = prompt + number
        assert record.scheduled[0].context_len == with_kv
        assert held[-1] == -(-with_kv // 4)
    # Known are one more than have KV; a block is added when the token past the boundary is fed.
    assert request.num_tokens == request.num_computed_tokens + 1


@pytest.mark.parametrize("policy", PAGED)
def test_a06_a_whole_prompt_is_never_a_hit(policy: str) -> None:
    engine = llama_engine(policy=policy, enable_prefix_caching=True)
    prompt = numbers(0, 8)
    first = generate(engine, [prompt], 3)
    second = generate(engine, [prompt], 3)
    third = generate(engine, [[*prompt, 7]], 3)
    hits = [a.prefix_hit_tokens for record in engine.trace for a in record.admitted]
    assert hits == [0, 4, 8]
    assert first == second == [alone(tuple(prompt), 3)]
    assert third == [alone((*prompt, 7), 3)]


@pytest.mark.parametrize("policy", PAGED)
def test_a07_a_block_that_was_reused_is_found_no_more(policy: str) -> None:
    blocks = 4 if policy == "unified" else 3
    engine = llama_engine(policy=policy, num_gpu_blocks=blocks, enable_prefix_caching=True)
    a, b = numbers(0, 8), numbers(50, 12)
    first = generate(engine, [a], 1)
    assert generate(engine, [b], 1) == [alone(tuple(b), 1)]
    assert generate(engine, [a], 1) == first == [alone(tuple(a), 1)]
    hits = [a.prefix_hit_tokens for record in engine.trace for a in record.admitted]
    assert hits == [0, 0, 0]


def test_a07_equal_hashes_are_not_equal_blocks() -> None:
    """Python hashes an integer by its remainder by 2**61 - 1."""
    twin = [2**61 - 1 + 1, 2, 3, 4, 5]
    assert hash(tuple(twin)) == hash((1, 2, 3, 4, 5))
    engine = make_engine(policy="unified", enable_prefix_caching=True)
    engine.vocab_size = None
    auditor = Auditor(engine)
    for name, prompt in (("A", [1, 2, 3, 4, 5]), ("B", twin), ("C", [1, 2, 3, 4, 5])):
        engine.add_request(name, prompt, greedy(3))
        while engine.has_unfinished:
            auditor.step()  # whose paper KV would tell a wrong block
        assert tokens_of(engine, name) == foretell(prompt, 3)
    hits = [a.prefix_hit_tokens for record in engine.trace for a in record.admitted]
    assert hits == [0, 0, 4]


@pytest.mark.parametrize("policy", PAGED)
@pytest.mark.parametrize("caching", [False, True])
def test_a08_one_count_for_each_table_entry(policy: str, caching: bool) -> None:
    engine = llama_engine(policy=policy, enable_prefix_caching=caching)
    prompt = numbers(0, 6)
    engine.add_request("A", prompt, real(6, n=3))
    blocks = engine.scheduler.block_manager
    shared = 0
    while engine.has_unfinished:
        engine.step()
        entries = Counter(b for r in engine.scheduler.requests.values() for b in r.block_table)
        assert dict(entries) == {b: n for b, n in enumerate(blocks.ref_counts) if n}
        shared = max(shared, *entries.values(), 0)
    assert shared == 3  # the first block of the prompt had three owners
    assert len([c for record in engine.trace for c in record.blocks_copied]) == 2
    assert_all_free(engine)
    assert [part.token_ids for part in engine.output("A").outputs] == [alone(tuple(prompt), 6)] * 3


# -- A9 to A16: requests, text, sampling --------------------------------------------------------


def runner_with_logits(logits: Tensor) -> tuple[ModelRunner, Engine]:
    """The real executor, but whatever is computed, these are the logits of every row."""
    engine = llama_engine()
    runner = engine.executor
    assert isinstance(runner, ModelRunner) and runner.model is not None

    class Fixed:
        config, device, dtype = runner.model.config, runner.model.device, logits.dtype

        def __call__(self, input_ids: Tensor, *rest: Any) -> Tensor:
            return torch.zeros(len(input_ids), 1)

        def compute_logits(self, hidden: Tensor) -> Tensor:
            return logits.expand(len(hidden), -1)

    runner.model = Fixed()  # type: ignore[assignment]
    return runner, engine


def one_token(logits: Tensor, params: SamplingParams) -> list[int]:
    """What is said first, by each of the ``n`` samples."""
    _, engine = runner_with_logits(logits)
    engine.add_request("A", [1, 2, 3], params)
    run(engine)
    return [part.token_ids[0] for part in engine.output("A").outputs]


def test_a09_n_samples_are_independent_draws() -> None:
    logits = torch.log(torch.tensor([0.02, 0.9, 0.03, 0.05]))
    first = [
        token
        for seed in range(200)
        for token in one_token(logits, SamplingParams(n=8, max_tokens=1, seed=seed))
    ]
    likely = first.count(1) / len(first)
    assert abs(likely - 0.9) < 4 * math.sqrt(0.9 * 0.1 / 1600)


def test_a10_a_second_request_of_a_live_name_is_refused() -> None:
    engine = make_engine()
    engine.add_request("x", [1, 2, 3], greedy(5))
    engine.step()
    with pytest.raises(DuplicateRequestError, match="'x'"):
        engine.add_request("x", [4], greedy(5))
    run(engine)
    assert tokens_of(engine, "x") == foretell([1, 2, 3], 5)
    assert_all_free(engine)


@pytest.mark.parametrize(
    ("state", "knobs"),
    [
        ("waiting", {"policy": "unified", "max_num_seqs": 1}),
        ("prefilling", {"policy": "unified", "max_num_batched_tokens": 5}),
        ("running", {"policy": "unified"}),
        ("swapped", {"policy": "continuous", "preemption_mode": "swap"}),
    ],
)
def test_a11_abort_works_in_every_state(state: str, knobs: dict[str, Any]) -> None:
    engine = make_engine(**knobs)
    engine.add_request("A", [1, 2], greedy(6))
    engine.add_request("B", [3] * 9, greedy(6))
    engine.step()
    if state == "swapped":
        engine.preempt("B")
    engine.step()
    request = engine.scheduler.requests["B"]
    where = "prefilling" if request.is_prefill and request.block_table else request.status.value
    assert where == state
    assert engine.abort("B")
    run(engine)
    assert engine.output("B").outputs[0].finish_reason == "abort"
    assert tokens_of(engine, "A") == foretell([1, 2], 6)
    assert_all_free(engine)


def streamed(
    tokens: Sequence[str], max_tokens: int, **more: Any
) -> tuple[list[str], str, str | None, str | int | None]:
    """(deltas step by step, whole text, finish reason, stop reason) of a scripted output."""
    engine = make_engine(tokenizer=Alphabet(tokens))
    paper(engine).scripts["A"] = list(range(len(tokens)))
    engine.add_request("A", [0], greedy(max_tokens, **more))
    deltas = []
    for _ in engine.run():
        deltas.append(engine.outputs.output("A", delta=True).outputs[0].text)
    (part,) = engine.output("A").outputs
    assert "".join(deltas) == part.text
    return deltas, part.text, part.finish_reason, part.stop_reason


@pytest.mark.parametrize(
    ("tokens", "stop", "deltas", "reason"),
    [
        (["ABC", "DEF", "G"], "DE", ["ABC", ""], "stop"),
        (["a", "b", "c", "d"], "bc", ["a", "", ""], "stop"),
        (["b", "x"], "bc", ["", "bx"], "length"),
        (["a", "b"], "bc", ["a", "b"], "length"),  # held text is let go at the end
    ],
)
def test_a12_stop_strings(tokens: list[str], stop: str, deltas: list[str], reason: str) -> None:
    found, text, finish_reason, stop_reason = streamed(tokens, len(tokens), stop=stop)
    assert (found, text, finish_reason) == (deltas, "".join(deltas), reason)
    assert stop_reason == (stop if reason == "stop" else None)


def test_a12_the_stop_string_may_be_kept() -> None:
    _, text, _, _ = streamed(["ABC", "DEF", "G"], 3, stop="DE", include_stop_str_in_output=True)
    assert text == "ABCDE"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("cut", [9, 5])
def test_a13_streamed_text_is_the_decoded_text(policy: str, cut: int) -> None:
    """``cut`` 5: max_tokens ends it after byte 3 of 6."""
    tokenizer = llama_style()
    ids = {tokenizer.id_to_token(token_id): token_id for token_id in range(tokenizer.vocab_size)}
    said = [ids["▁Hi"], ids["▁there"]]
    said += [ids[f"<0x{byte:02X}>"] for byte in "é😀".encode()]
    engine = make_engine(policy=policy, tokenizer=tokenizer)
    engine.vocab_size = None
    said = said[:cut]
    paper(engine).scripts["A"] = said
    engine.add_request("A", [ids["▁I"]], greedy(len(said)))
    deltas = []
    for _ in engine.run():
        deltas.append(engine.outputs.output("A", delta=True).outputs[0].text)
    prompt = [ids["▁I"]]
    whole = tokenizer.decode(prompt + said).removeprefix(tokenizer.decode(prompt))
    assert "".join(deltas) == engine.output("A").outputs[0].text == whole
    assert whole == (" Hi thereé😀" if cut == 9 else whole)
    assert "�" not in "".join(deltas[:-1])  # only the very end may be broken


@pytest.mark.parametrize(("ignore", "said"), [(False, 2), (True, 6)])
def test_a14_every_end_token_of_a_list_ends_it(ignore: bool, said: int) -> None:
    engine = make_engine(eos_token_ids=[2, 5])
    paper(engine).scripts["A"] = [9, 5, 9, 2, 9, 9]
    engine.add_request("A", [1], greedy(6, ignore_eos=ignore))
    run(engine)
    (part,) = engine.output("A").outputs
    assert len(part.token_ids) == said
    assert part.finish_reason == ("length" if ignore else "stop")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1e-5, 1e-4, 1e-2, 0.0])
def test_a15_tiny_temperatures(dtype: torch.dtype, temperature: float) -> None:
    logits = torch.tensor([-30.0, 12.0, 30.0, 29.0, -math.inf], dtype=dtype)
    assert one_token(logits, SamplingParams(temperature=temperature, max_tokens=1)) == [2]


@pytest.mark.parametrize("top_k", [0, -1, 1, 10, 11, 12, 10**9])
def test_a16_top_k_of_any_size(top_k: int) -> None:
    logits = torch.arange(11.0)
    tokens = {
        one_token(logits, SamplingParams(top_k=top_k, max_tokens=1, seed=seed))[0]
        for seed in range(30)
    }
    assert tokens <= set(range(11)) and (top_k != 1 or tokens == {10})
    assert top_k == 1 or len(tokens) > 1


# -- A17 to A28: batches, models, calls ---------------------------------------------------------


def first_logits(policy: str, prompts: Sequence[list[int]]) -> list[Tensor]:
    """The logits behind each prompt's first token, all in one batch."""
    engine = llama_engine(policy=policy, num_gpu_blocks=16 * len(prompts) + 1)
    runner = engine.executor
    assert isinstance(runner, ModelRunner)
    seen: dict[str, Tensor] = {}
    draw = runner._draw

    def listen(logits: Tensor, rows: list[ScheduledRequest]) -> Any:
        for row, of_row in zip(rows, logits, strict=True):
            seen[row.request.request_id] = of_row.clone()
        return draw(logits, rows)

    runner._draw = listen  # type: ignore[method-assign]
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, real(1))
    assert len(run(engine)) == 1
    return [seen[str(index)] for index in range(len(prompts))]


@pytest.mark.parametrize("policy", POLICIES)
def test_a17_company_changes_nothing_in_float32(policy: str) -> None:
    prompts = [numbers(3 * index, 1 + index % 7) for index in range(16)]
    together = first_logits(policy, prompts)
    for prompt, logits in zip(prompts, together, strict=True):
        (single,) = first_logits(policy, [prompt])
        torch.testing.assert_close(logits, single, atol=1e-4, rtol=0)
        assert logits.argmax() == single.argmax()


def test_a18_static_batching_computes_its_padding_and_is_not_moved_by_it() -> None:
    prompts = [numbers(0, 1), numbers(10, 4), numbers(20, 7)]
    engine = llama_engine(policy="static", num_gpu_blocks=64)
    assert generate(engine, prompts, 6) == [alone(tuple(prompt), 6) for prompt in prompts]
    assert engine.trace[0].num_padding_tokens == 6 + 3
    together = first_logits("static", prompts)
    for prompt, logits in zip(prompts, together, strict=True):
        (single,) = first_logits("static", [prompt])
        torch.testing.assert_close(logits, single, atol=1e-5, rtol=0)


def test_a19_one_bos() -> None:
    tokenizer = llama_style()
    chat = [{"role": "user", "content": "Hi"}]
    engine = make_engine(tokenizer=tokenizer, num_gpu_blocks=64)
    engine.vocab_size = None
    engine.add_request("chat", tokenizer.apply_chat_template(chat), greedy(1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine.add_request("rendered", tokenizer.render_chat_template(chat), greedy(1))
    engine.add_request("plain", "Hi", greedy(1))
    for name in ("chat", "rendered", "plain"):
        ids = engine.output(name).prompt_token_ids
        assert ids.count(1) == 1 and ids[0] == 1, name


def test_a23_padding_writes_into_nobody_s_block() -> None:
    """The static batch's padding, with the pool full: slot -1 would be the last block's end."""
    engine = llama_engine(policy="static", num_gpu_blocks=8, max_model_len=16, max_num_seqs=2)
    prompts = [numbers(0, 1), numbers(10, 9)]
    assert generate(engine, prompts, 7) == [alone(tuple(prompt), 7) for prompt in prompts]
    assert engine.trace[0].free_blocks == 0 and engine.trace[0].num_padding_tokens == 8
    assert engine.trace[0].blocks_allocated["0.1"][-1] == 7  # the last block


@pytest.mark.parametrize("cpu_blocks", [0, 1])
@pytest.mark.parametrize("chunked", [False, True])
def test_a24_a_full_cpu_pool_means_recompute(cpu_blocks: int, chunked: bool) -> None:
    engine = llama_engine(
        policy="continuous",
        preemption_mode="swap",
        num_gpu_blocks=6,
        num_cpu_blocks=cpu_blocks,
        max_model_len=16,
        enable_chunked_prefill=chunked,
    )
    prompts = [numbers(10 * index, 4) for index in range(3)]  # each grows to 3 blocks
    assert generate(engine, prompts, 7) == [alone(tuple(prompt), 7) for prompt in prompts]
    modes = Counter(p.mode for record in engine.trace for p in record.preempted)
    assert modes["recompute"] > 0
    assert modes["swap"] == 0 or cpu_blocks == 1


@pytest.mark.parametrize("policy", POLICIES)
def test_a26_without_an_end_token_it_ends_where_the_model_does(policy: str) -> None:
    engine = llama_engine(policy=policy, max_model_len=16)
    for name, length in (("A", 5), ("B", 15)):
        engine.add_request(name, numbers(0, length), SamplingParams(
            temperature=0, max_tokens=None, ignore_eos=True))  # fmt: skip
    run(engine)
    for name, length in (("A", 5), ("B", 15)):
        (part,) = engine.output(name).outputs
        assert part.finish_reason == "length"
        assert part.token_ids == alone(tuple(numbers(0, length)), 16 - length)
        positions = [
            r.context_len for s in engine.trace for r in s.scheduled if r.request_id == name
        ]
        assert max(positions) == 15  # the last token is said, not fed


def test_a27_calls_in_a_row(tiny_chat_model: Path) -> None:
    prompts = ["one", "two and", "three"]
    params = SamplingParams(temperature=0, max_tokens=4)
    before = (list(prompts), SamplingParams(temperature=0, max_tokens=4))
    with LLM(str(tiny_chat_model), max_model_len=64, num_gpu_blocks=64) as llm:

        def call(order: Sequence[int]) -> dict[str, list[int]]:
            outputs = llm.generate([prompts[i] for i in order], params, use_tqdm=False)
            assert [o.prompt for o in outputs] == [prompts[i] for i in order]
            return {prompts[i]: o.outputs[0].token_ids for i, o in zip(order, outputs, strict=True)}

        first = call([0, 1, 2])
        assert call([2, 0, 1]) == first
        for at in (0, 2):  # in the prefill, and in a decode
            break_in_step(llm.engine, at)
            with pytest.raises(RuntimeError, match="on purpose"):
                call([0, 1, 2])
            assert not llm.engine.has_unfinished
            assert call([1, 2, 0]) == first
        assert_all_free(llm.engine)
    assert (prompts, params) == before


def break_in_step(engine: Engine, number: int) -> None:
    """Let the executor fail once, ``number`` steps from now."""
    execute = engine.executor.execute
    left = number

    def fail(output: SchedulerOutput) -> Any:
        nonlocal left
        left -= 1
        if left == -1:
            engine.executor.execute = execute  # type: ignore[method-assign]
            raise RuntimeError("on purpose")
        return execute(output)

    engine.executor.execute = fail  # type: ignore[method-assign]


# -- the table at the top -----------------------------------------------------------------------


@pytest.mark.parametrize("report", TESTED_IN_FULL_ELSEWHERE)
def test_it_is_really_tested_elsewhere(report: str) -> None:
    file, name = TESTED_IN_FULL_ELSEWHERE[report].split("::")
    text = (Path(__file__).parent / file).read_text(encoding="utf-8")
    assert f"\ndef {name}(" in text


def test_every_report_has_a_test() -> None:
    here = {name[5:8] for name in globals() if name.startswith("test_a")}
    elsewhere = {f"a{int(key[1:].split()[0]):02d}" for key in TESTED_IN_FULL_ELSEWHERE}
    assert here | elsewhere == {f"a{number:02d}" for number in range(1, 29)}
