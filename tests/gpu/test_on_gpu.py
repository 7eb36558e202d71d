"""What only a GPU can show. Skipped elsewhere; ``benchmarks/gpu.py`` measures, this only checks."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from pipeline_helpers import answers, drive, plain_engine, random_arrivals, small_config, tiny_model

pytest.importorskip("triton")

from minibatch.builder import engine_for
from minibatch.config import EngineConfig
from minibatch.executor.cuda_model_runner import CudaModelRunner
from minibatch.executor.gpu import quantize
from minibatch.llm import LLM
from minibatch.model.hub import WHEEL_GGUF, cache_dir
from minibatch.model.llama import LlamaForCausalLM
from minibatch.model.loader import random_model
from minibatch.model.presets import PRESETS
from minibatch.model.triton_attention import TritonFp8KVCache, TritonKVCache
from minibatch.pipelined import PipelinedEngine
from minibatch.sampling_params import SamplingParams

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def on_gpu() -> LlamaForCausalLM:
    return tiny_model("cuda")


@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize(
    "knobs",
    [
        {"policy": "static"},
        {"policy": "continuous", "num_gpu_blocks": 13, "preemption_mode": "swap"},
        {"policy": "unified", "num_gpu_blocks": 13, "max_num_batched_tokens": 9},
        {"policy": "unified", "enable_prefix_caching": True},
    ],
    ids=["static", "swap", "unified", "prefix cache"],
)
def test_tokens_are_those_of_the_cpu(
    on_gpu: LlamaForCausalLM, knobs: dict[str, Any], enforce_eager: bool
) -> None:
    """Float32 on both sides; kernels, graphs, streams and all."""
    config = small_config(**knobs)
    arrivals = random_arrivals(0, count=9, stop_token_ids=list(range(40, 60)))
    plain = plain_engine(tiny_model(), config)
    drive(plain, arrivals)
    names = EngineConfig.__dataclass_fields__
    settings = {name: value for name, value in vars(config).items() if name in names}
    engine = engine_for(on_gpu, EngineConfig(model="tiny", enforce_eager=enforce_eager, **settings))
    assert isinstance(engine, PipelinedEngine)
    assert isinstance(engine.executor, CudaModelRunner)
    drive(engine, arrivals)
    assert answers(engine, arrivals) == answers(plain, arrivals)
    engine.close()


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("quantization", [None, "int8", "fp8"])
def test_every_number_format_runs(kv_cache_dtype: Any, quantization: Any) -> None:
    if quantization == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no 8-bit floats")
    with LLM(
        "tiny", load_format="dummy", device="cuda", dtype="bfloat16", num_gpu_blocks=64,
        kv_cache_dtype=kv_cache_dtype, quantization=quantization,
    ) as llm:  # fmt: skip
        params = SamplingParams(max_tokens=20, temperature=0.8, top_p=0.9, ignore_eos=True)
        outputs = llm.generate([[1, 2, 3]] * 5, params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [20] * 5


def test_memory_comes_back_even_if_a_traceback_holds_the_model() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    llm = LLM("smollm2-135m", load_format="dummy", device="cuda", gpu_memory_utilization=0.3)
    held = llm.engine.executor.model  # as a frame of a traceback would
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=5), use_tqdm=False)
    llm.close()
    assert held is not None
    assert torch.cuda.memory_allocated() - before < 64 * 2**20


def test_two_engines_and_the_first_one_is_closed(on_gpu: LlamaForCausalLM) -> None:
    """The second one's graphs go on with memory of their own."""
    config = EngineConfig(model="tiny", num_gpu_blocks=64, max_num_seqs=4)
    params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    first, second = engine_for(tiny_model("cuda"), config), engine_for(on_gpu, config)
    for engine in (first, second):
        engine.add_request("A", [5, 6, 7], params)
    list(first.run())
    second.step()
    first.close()
    filler = [torch.full((2**20,), float("nan"), device="cuda") for _ in range(64)]
    list(second.run())
    said = [engine.output("A").outputs[0].token_ids for engine in (first, second)]
    assert said[0] == said[1] and len(filler) == 64
    second.close()


def test_half_precision_tokens_are_close_to_float32() -> None:
    """SmolLM2's shape, the same weights in both: most greedy tokens agree."""
    shape = PRESETS["smollm2-135m"]
    exact = random_model(shape, device="cuda", max_model_len=512)
    rounded = random_model(shape, device="cuda", dtype=torch.bfloat16, max_model_len=512)
    for view, source in zip(
        rounded.checkpoint_views().values(), exact.checkpoint_views().values(), strict=True
    ):
        view.copy_(source)
    tokens = []
    for model in (exact, rounded):
        engine = engine_for(model, EngineConfig(model="smollm2-135m", num_gpu_blocks=256))
        params = SamplingParams(max_tokens=1, temperature=0.0)
        for i in range(20):
            engine.add_request(str(i), list(range(10 * i, 10 * i + 40)), params)
        list(engine.run())
        tokens.append([engine.output(str(i)).outputs[0].token_ids for i in range(20)])
        engine.close()
    agree = sum(a == b for a, b in zip(*tokens, strict=True))
    assert agree >= 15


@torch.inference_mode()
@pytest.mark.parametrize("format_", ["fp8", "int8"])
def test_eight_bit_matrices_on_the_device(format_: str) -> None:
    """Of Llama-2-7B's sizes, at one row, a batch and a prompt: no further off than 8 bits are."""
    if format_ == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no 8-bit floats")
    shape = replace(PRESETS["llama-2-7b"], num_layers=1)
    model = random_model(shape, device="cuda", dtype=torch.bfloat16, max_model_len=64)
    plain = {"qkv": model.layers[0].attention.qkv_proj, "down": model.layers[0].mlp.down_proj}
    quantize(model, format_)
    packed = {"qkv": model.layers[0].attention.qkv_proj, "down": model.layers[0].mlp.down_proj}
    for name, linear in plain.items():
        for rows in (1, 17, 128, 700):
            x = torch.randn(rows, linear.in_features, device="cuda", dtype=torch.bfloat16)
            expected, found = linear(x).float(), packed[name](x).float()
            error = float((found - expected).norm() / expected.norm())
            assert error < (0.06 if format_ == "fp8" else 0.02), (name, rows)


@pytest.mark.parametrize("format_", ["auto", "fp8"])  # bytes are moved: any GPU can
def test_swapped_blocks_come_back_as_they_left(format_: Any) -> None:
    """Through pinned memory, on a stream of its own, while the model's stream goes on writing."""
    shape = PRESETS["tiny"]
    kinds: dict[str, Any] = {"auto": TritonKVCache, "fp8": TritonFp8KVCache}
    settings: dict[str, Any] = {"device": "cuda", "num_cpu_blocks": 40}
    if format_ == "fp8":
        settings["scales"] = torch.ones(shape.num_layers, 2, shape.num_kv_heads)
    cache = kinds[format_](shape, 40, 16, **settings)
    assert cache._cpu_pool.is_pinned()
    pool = cache._device_pool.view(torch.uint8)
    pool.copy_(torch.randint(256, pool.shape, device="cuda", dtype=torch.uint8))
    before = pool.clone()
    cache.swap_out([(block, 39 - block) for block in range(30)])
    pool[:, :, :30].zero_()  # whoever takes the blocks next need not wait
    cache.swap_in([(39 - block, block) for block in range(30)])
    assert torch.equal(pool[:, :, :40], before[:, :, :40])


CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


def real_texts(device: str, dtype: Any, **knobs: Any) -> list[str]:
    """Greedy answers of SmolLM2-135M-Instruct. Never downloaded here: a GPU may have no network."""
    path = cache_dir() / WHEEL_GGUF
    if not path.is_file():
        pytest.skip(f"no {WHEEL_GGUF} in {cache_dir()}")
    prompts = ["The capital of France is Paris. The capital of Italy is",
               CHAT.format("What is the capital of France?"), CHAT.format("What is 2+2?"),
               "Once upon a time, in a village by the sea, there lived"]  # fmt: skip
    with LLM(
        str(path), device=device, dtype=dtype, max_model_len=256, num_gpu_blocks=64, **knobs
    ) as llm:
        params = SamplingParams(max_tokens=24, temperature=0.0)
        outputs = llm.generate(prompts, params, use_tqdm=False)
    return [output.outputs[0].text for output in outputs]


@pytest.mark.smollm2
def test_a_real_model_says_what_it_says_on_a_cpu() -> None:
    """In float32 word for word; rounded it may choose other words, but still knows the answer."""
    expected = real_texts("cpu", "float32")
    assert real_texts("cuda", "float32") == expected
    formats: list[dict[str, Any]] = [{}, {"kv_cache_dtype": "fp8"}, {"quantization": "int8"}]
    if torch.cuda.get_device_capability() >= (8, 9):
        formats.append({"quantization": "fp8"})
    for knobs in formats:
        italy, france, *_ = real_texts("cuda", "bfloat16", **knobs)
        assert "Rome" in italy and "Paris" in france, knobs
