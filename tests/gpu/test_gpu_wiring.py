"""From knobs to an engine: what needs no GPU to be tried."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from pipeline_helpers import tiny_model

from minibatch import builder
from minibatch.config import EngineConfig
from minibatch.errors import ConfigError, DeviceMemoryError
from minibatch.executor import memory
from minibatch.executor.memory import GIB, GRAPH_BYTES, explained_oom, profiled_budget
from minibatch.executor.release import empty_storages, tensors_of
from minibatch.model.fp8_kv_cache import Fp8KVCache, fp8_format
from minibatch.sampling_params import SamplingParams

ROOT = Path(__file__).resolve().parent.parent.parent


def generate(**knobs: Any) -> tuple[list[int], Any]:
    settings = {"model": "tiny", "load_format": "dummy", "device": "cpu", "num_gpu_blocks": 64}
    engine = builder.build_engine(EngineConfig(**(settings | knobs)))
    engine.add_request("A", [5, 6, 7], SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))
    list(engine.run())
    return engine.output("A").outputs[0].token_ids, engine


def test_fp8_kv_cache_on_a_cpu() -> None:
    tokens, engine = generate(kv_cache_dtype="fp8")
    assert len(tokens) == 8
    assert isinstance(engine.executor.kv_cache, Fp8KVCache)


def test_fp8_kv_cache_holds_more_blocks_in_the_same_bytes() -> None:
    blocks = []
    for kv_cache_dtype in ("auto", "fp8"):
        _, engine = generate(
            kv_cache_dtype=kv_cache_dtype, num_gpu_blocks=None, kv_cache_memory_bytes=2**20
        )
        blocks.append(engine.config.num_gpu_blocks)
    assert blocks[1] == 4 * blocks[0]  # of float32


@pytest.mark.parametrize("quantization", ["fp8", "int8"])
def test_quantized_weights_on_a_cpu(quantization: str) -> None:
    tokens, _ = generate(quantization=quantization)
    assert len(tokens) == 8


def test_unknown_formats_are_refused() -> None:
    with pytest.raises(ConfigError, match="quantization='int3': expected one of int8, fp8"):
        EngineConfig(model="tiny", quantization="int3")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="kv_cache_dtype='fp4': expected one of auto, fp8"):
        EngineConfig(model="tiny", kv_cache_dtype="fp4")  # type: ignore[arg-type]


def test_the_8_bit_format_follows_the_chip() -> None:
    device = torch.device("cuda")
    for capability, expected in (((8, 0), "e5m2"), ((8, 9), "e4m3fn"), ((9, 0), "e4m3fn")):
        with mock.patch("torch.cuda.get_device_capability", return_value=capability):
            assert fp8_format(device) == getattr(torch, f"float8_{expected}")
    assert fp8_format(torch.device("cpu")) == torch.float8_e4m3fn


def test_a_gpu_engine_imports_without_triton() -> None:
    """Only a GPU needs it, and only when it is used."""
    code = (
        "import sys; sys.modules['triton'] = None; import minibatch.builder, minibatch.pipelined; "
        "from minibatch.llm import LLM; llm = LLM('tiny', load_format='dummy', device='cpu', "
        "num_gpu_blocks=8); print(len(llm.generate([[1, 2]], use_tqdm=False)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120
    )
    assert done.stdout.strip() == "1", done.stderr


# -- memory -------------------------------------------------------------------------------------


def fake_cuda(total: int, free: int, reserved: int, peak: int) -> Any:
    names = {
        "synchronize": lambda device: None,
        "mem_get_info": lambda device: (free, total),
        "memory_reserved": lambda device: reserved,
        "reset_peak_memory_stats": lambda device: None,
        "max_memory_allocated": lambda device: peak,
        "empty_cache": lambda: None,
        "is_available": lambda: True,
        "OutOfMemoryError": torch.OutOfMemoryError,
    }
    return SimpleNamespace(**names)


@pytest.mark.parametrize("enforce_eager", [True, False])
def test_profiled_budget(enforce_eager: bool) -> None:
    """Of 80 GiB 90 % are ours, less 4 that another process holds, less the peak of 20."""
    model = tiny_model()
    config = EngineConfig(
        model="tiny", gpu_memory_utilization=0.9, max_num_batched_tokens=64, max_num_seqs=4,
        enforce_eager=enforce_eager,
    )  # fmt: skip
    cuda = fake_cuda(total=80 * GIB, free=60 * GIB, reserved=16 * GIB, peak=20 * GIB)
    with mock.patch.object(torch, "cuda", cuda):
        budget = profiled_budget(config, model)
    graphs = 0 if enforce_eager else GRAPH_BYTES
    assert budget == 72 * GIB - 4 * GIB - 20 * GIB - graphs


def test_the_largest_step_samples_for_all_rows() -> None:
    model = tiny_model()
    with mock.patch.object(memory, "sample") as sample:
        memory.run_largest_step(model, 64, 9, 16)
    assert sample.call_args.args[0].shape == (9, model.config.vocab_size)
    memory.run_largest_step(model, 5, 9, 16)  # fewer tokens than rows


def test_out_of_memory_names_the_knob() -> None:
    with (
        pytest.raises(DeviceMemoryError, match=r"for the weights: use a smaller model\. \(CUDA"),
        explained_oom("the weights", "use a smaller model"),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB.")


def test_an_engine_that_cannot_be_built_leaves_no_weights_behind() -> None:
    """The traceback of a failed notebook cell holds the model; its memory is free all the same."""
    made: list[Any] = []
    random_model = builder.random_model

    def watched(*args: Any, **kwargs: Any) -> Any:
        made.append(random_model(*args, **kwargs))
        return made[-1]

    with mock.patch.object(builder, "random_model", watched), pytest.raises(ConfigError):
        generate(num_gpu_blocks=None, kv_cache_memory_bytes=1)
    assert all(weight.untyped_storage().nbytes() == 0 for weight in made[0].parameters())


def test_storages_are_emptied_whoever_holds_a_view() -> None:
    whole = torch.zeros(100)
    holder = SimpleNamespace(pool=whole, views=[whole[:10], whole[10:]], name="cache")
    assert len(list(tensors_of(holder))) == 3
    view = whole[3:]
    empty_storages(tensors_of(holder))
    assert view.untyped_storage().nbytes() == 0
