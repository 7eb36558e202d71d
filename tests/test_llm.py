"""The offline interface: code written for vLLM runs here, streams included."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest

from minibatch import LLM, SamplingParams
from minibatch.errors import ConfigError, EngineClosedError, InvalidRequestError
from minibatch.trace import Trace

T = TypeVar("T")

CHINESE = [
    "解释一下什么是分页注意力。",
    "写一首关于秋天的短诗。",
    "为什么天空是蓝色的？",
    "请推荐三本历史书。",
    "用一句话介绍杭州。",
]
ENGLISH = [
    "What is continuous batching?",
    "Hi",
    "Tell me a long story about a lighthouse keeper who has never once seen the sea by day.",
    "List the prime numbers below thirty.",
    "Why?",
]


def in_a_loop(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run it in an event loop of its own, whatever runs in this thread (a browser test may)."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, coroutine).result()


@pytest.fixture(scope="module")
def llm(tiny_chat_model: Path) -> Iterator[LLM]:
    with LLM(str(tiny_chat_model), swap_space=0.01, check_invariants=True) as llm:
        yield llm


def test_the_article_s_batch_snippet(tiny_chat_model: Path) -> None:
    """Only the import and the model differ from what is written for vLLM 0.6.0."""
    llm = LLM(
        model=str(tiny_chat_model),
        tensor_parallel_size=1,
        gpu_memory_utilization=0.90,
        max_model_len=4096,
        block_size=16,
        enable_prefix_caching=True,
        swap_space=4,
    )
    prompts = (CHINESE + ENGLISH) * 25
    sampling_params = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=12)
    outputs = llm.generate(prompts, sampling_params)
    assert len(outputs) == 250
    total_tokens = sum(len(o.outputs[0].token_ids) for o in outputs)
    assert total_tokens == sum(len(r.sampled) for r in llm.trace)
    assert 250 <= total_tokens <= 250 * 12
    assert [o.prompt for o in outputs] == prompts
    assert all(o.finished and o.outputs[0].finish_reason in ("stop", "length") for o in outputs)
    assert max(len(record.running) for record in llm.trace) == 128  # max_num_seqs
    llm.close()


def test_the_article_s_streaming_snippet(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = CHINESE
    sampling_params = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=16, stream=True)
    first = len(llm.trace)
    for output in llm.generate(prompts, sampling_params, use_tqdm=False):
        for chunk in output:
            print(chunk.outputs[0].text, end="")
    assert capsys.readouterr().out
    steps = llm.trace.steps[first:]
    # All five ran side by side, though they were read one after the other.
    assert len(steps) <= 1 + 16
    assert max(len(record.scheduled) for record in steps) == 5


def test_streams_add_up_to_the_whole(llm: LLM) -> None:
    params = {"temperature": 0.8, "seed": 5, "max_tokens": 20}
    whole = llm.generate(CHINESE + ENGLISH, SamplingParams(**params), use_tqdm=False)
    streams = llm.generate(CHINESE + ENGLISH, SamplingParams(**params, stream=True), use_tqdm=False)
    for expected, stream in zip(whole, streams, strict=True):
        chunks = list(stream)
        assert "".join(chunk.outputs[0].text for chunk in chunks) == expected.outputs[0].text
        tokens = sum((chunk.outputs[0].token_ids for chunk in chunks), [])
        assert tokens == expected.outputs[0].token_ids
        assert [chunk.finished for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


def test_streams_may_be_read_in_any_order(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, stream=True, ignore_eos=True)
    streams = list(llm.generate(ENGLISH, params))
    texts = ["".join(chunk.outputs[0].text for chunk in stream) for stream in reversed(streams)]
    whole = llm.generate(ENGLISH, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    assert texts[::-1] == [output.outputs[0].text for output in whole]


def test_a_stream_left_early_frees_its_requests(llm: LLM) -> None:
    params = SamplingParams(max_tokens=50, stream=True, ignore_eos=True)
    streams = llm.generate(ENGLISH, params)
    next(next(streams))
    assert llm.engine.has_unfinished
    streams.close()
    assert not llm.engine.has_unfinished
    blocks = llm.engine.scheduler.block_manager
    assert blocks.num_free_blocks == blocks.num_usable_blocks


def test_inside_a_running_event_loop(llm: LLM) -> None:
    """A notebook cell runs inside a loop, where ``asyncio.run`` is forbidden."""
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)

    async def cell() -> tuple[list[list[int]], dict[str, list[int]]]:
        sync = [o.outputs[0].token_ids for o in llm.generate(ENGLISH, params, use_tqdm=False)]
        streamed: dict[str, list[int]] = {}
        ticks = 0

        async def ticker() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0)

        background = asyncio.create_task(ticker())
        async for output in llm.stream_async(ENGLISH, params):
            streamed.setdefault(output.request_id, []).extend(output.outputs[0].token_ids)
        background.cancel()
        assert ticks > 5  # the loop was never blocked for a whole run
        return sync, streamed

    sync, streamed = in_a_loop(cell())
    assert list(streamed.values()) == sync


def test_several_async_streams_share_batches(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    alone = llm.generate(ENGLISH, params, use_tqdm=False)

    async def read(prompt: str) -> list[int]:
        tokens: list[int] = []
        async for output in llm.stream_async(prompt, params):
            tokens += output.outputs[0].token_ids
        return tokens

    async def all_at_once() -> list[list[int]]:
        return await asyncio.gather(*map(read, ENGLISH))

    first = len(llm.trace)
    assert in_a_loop(all_at_once()) == [output.outputs[0].token_ids for output in alone]
    assert max(len(record.scheduled) for record in llm.trace.steps[first:]) > 1


def test_chat_ends_at_the_turn_s_end_and_has_one_bos(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    tokenizer = llm.engine.tokenizer
    assert tokenizer is not None
    (output,) = llm.chat(messages, SamplingParams(max_tokens=3), use_tqdm=False)
    assert output.prompt_token_ids == tokenizer.apply_chat_template(messages)
    assert Counter(output.prompt_token_ids)[tokenizer.bos_token_id] >= 1
    both = llm.chat([messages, messages], SamplingParams(max_tokens=3), use_tqdm=False)
    assert len(both) == 2


def test_two_calls_give_the_same_and_leave_the_caller_s_objects_alone(llm: LLM) -> None:
    prompts, params = list(ENGLISH[:3]), SamplingParams(temperature=0, max_tokens=6)
    first = llm.generate(prompts, params, use_tqdm=False)
    second = llm.generate(prompts[::-1], params, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in second[::-1]] == [o.outputs[0].token_ids for o in first]
    assert prompts == ENGLISH[:3] and params == SamplingParams(temperature=0, max_tokens=6)
    assert not llm.engine.outputs.groups  # nothing is kept for nobody


def test_one_bad_prompt_names_itself_and_nothing_of_its_call_runs(llm: LLM) -> None:
    steps = len(llm.trace)
    for bad in (["a", "", "b"], [[1, 2], []], ["a", [10**9]]):
        with pytest.raises(InvalidRequestError, match=r"prompt \d of \d"):
            llm.generate(bad, SamplingParams(), use_tqdm=False)
    assert not llm.engine.has_unfinished
    assert len(llm.trace) == steps
    assert llm.generate(["a"], SamplingParams(max_tokens=2), use_tqdm=False)[0].finished


def test_params_one_for_all_or_one_each(llm: LLM) -> None:
    each = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (1, 2, 3)]
    outputs = llm.generate(ENGLISH[:3], each, use_tqdm=False)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [1, 2, 3]
    with pytest.raises(InvalidRequestError, match="2 sampling_params for 3 prompts"):
        llm.generate(ENGLISH[:3], each[:2])


def test_metrics_of_a_request(llm: LLM) -> None:
    (output,) = llm.generate("Hi", SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
    metrics = output.metrics
    assert metrics is not None and metrics.num_generated_tokens == 4
    assert metrics.ttft == pytest.approx(metrics.time_in_queue + metrics.prefill_time)
    assert metrics.e2e == pytest.approx(metrics.ttft + 3 * metrics.tpot)


def test_unknown_knob_names_the_known_ones(tiny_chat_model: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown knob max_seqs.*max_num_seqs"):
        LLM(str(tiny_chat_model), max_seqs=4)


def test_close_gives_the_memory_back_though_the_object_lives(tiny_chat_model: Path) -> None:
    import gc
    import weakref

    llm = LLM(str(tiny_chat_model), swap_space=0, num_gpu_blocks=64)
    runner = llm.engine.executor
    weights = weakref.ref(runner.model.embed_tokens.weight)
    pool = weakref.ref(runner.kv_cache.keys[0])
    llm.close()
    llm.close()
    gc.collect()
    assert weights() is None and pool() is None
    with pytest.raises(EngineClosedError):
        llm.generate("Hi")


@pytest.mark.smollm2
def test_smollm2_answers_a_mixed_batch(smollm2: Path) -> None:
    """The main job: real questions, real answers, fewer slots than questions."""
    with LLM(str(smollm2), max_num_seqs=3, swap_space=0.1, max_model_len=512) as llm:
        questions = ["What is the capital of France?", "What is 2+2?", *CHINESE[:2]]
        chats = [[{"role": "user", "content": question}] for question in questions]
        outputs = llm.chat(chats, SamplingParams(temperature=0, max_tokens=24), use_tqdm=False)
        assert "Paris" in outputs[0].outputs[0].text
        assert "4" in outputs[1].outputs[0].text
        assert all(output.outputs[0].text for output in outputs)
        assert max(len(record.running) for record in llm.trace) == 3


def test_waiting_for_a_batch_sleeps(tiny_chat_model: Path) -> None:
    """``max_wait``: one idle record says what is waited for, then nothing until it is time."""
    knobs = {"policy": "static", "max_wait": 0.3, "max_model_len": 64, "num_gpu_blocks": 32}
    with LLM(str(tiny_chat_model), **knobs) as llm:
        (output,) = llm.generate("Hi", SamplingParams(max_tokens=3), use_tqdm=False)
        assert output.metrics.time_in_queue >= 0.3
        assert len(llm.trace) <= 2 + len(output.outputs[0].token_ids)


def test_the_last_words_reach_the_trace(tiny_chat_model: Path, tmp_path: Path) -> None:
    llm = LLM(str(tiny_chat_model), num_gpu_blocks=8, swap_space=0)
    llm.engine.record_to(tmp_path / "run.jsonl")
    llm.submit(["Hi"], [SamplingParams()])
    llm.engine.abort("A")
    with pytest.raises(InvalidRequestError):
        llm.generate([[5] * 500])
    llm.close()
    (record,) = Trace.load(tmp_path / "run.jsonl")
    assert [finish.request_id for finish in record.finished] == ["A"]
    assert [refusal.request_id for refusal in record.refused] == ["B"]
