"""What only a GPU can show. Skipped elsewhere; ``benchmarks/gpu.py`` measures, this only checks."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from pipeline_helpers import answers, drive, plain_engine, random_arrivals, small_config, tiny_model

from minibatch.builder import engine_for
from minibatch.config import EngineConfig
from minibatch.executor.cuda_model_runner import CudaModelRunner
from minibatch.llm import LLM
from minibatch.model.llama import LlamaForCausalLM
from minibatch.pipelined import PipelinedEngine
from minibatch.sampling_params import SamplingParams

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def on_gpu() -> LlamaForCausalLM:
    return tiny_model().to("cuda")


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


def test_half_precision_text_is_close_to_float32() -> None:
    """SmolLM2's shape in bfloat16: most greedy tokens agree with float32's."""
    texts = []
    for dtype in ("float32", "bfloat16"):
        with LLM(
            "smollm2-135m", load_format="dummy", device="cuda", dtype=dtype, num_gpu_blocks=256
        ) as llm:
            params = SamplingParams(max_tokens=1, temperature=0.0)
            prompts = [list(range(10 * i, 10 * i + 40)) for i in range(20)]
            outputs = llm.generate(prompts, params, use_tqdm=False)
            texts.append([output.outputs[0].token_ids for output in outputs])
    agree = sum(a == b for a, b in zip(*texts, strict=True))
    assert agree >= 15
