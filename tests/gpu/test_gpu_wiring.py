"""From knobs to an engine: what needs no GPU to be tried."""

from __future__ import annotations

import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from pipeline_helpers import tiny_model

from minibatch import builder
from minibatch.config import EngineConfig, SchedulerConfig
from minibatch.errors import ConfigError, DeviceMemoryError, HostMemoryError
from minibatch.executor import gpu, memory
from minibatch.executor.cuda_graphs import cuda_graph_maker
from minibatch.executor.memory import GIB, GRAPH_BYTES, explained_oom, profiled_budget
from minibatch.executor.release import empty_storages, release_device_caches, tensors_of
from minibatch.model.fp8_kv_cache import Fp8KVCache, fp8_format
from minibatch.model.kv_cache import KVCache
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


def test_another_gpu_than_the_current_one_is_refused() -> None:
    with mock.patch("torch.cuda.current_device", return_value=0):
        for name in ("cuda", "cuda:0"):
            gpu.check_current(torch.device(name))
        with pytest.raises(ConfigError, match=r"device='cuda:1'.*set_device\(1\) first"):
            gpu.check_current(torch.device("cuda:1"))


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
    for tokens in (64, 5):  # also if there are fewer tokens than rows
        with mock.patch.object(memory, "sample") as sample:
            memory.run_largest_step(model, tokens, 9, 16)
        assert sample.call_args.args[0].shape == (9, model.config.vocab_size)
        assert sample.call_args.args[2].nucleus_size == model.config.vocab_size


def test_the_largest_step_has_as_many_prompts_as_it_takes() -> None:
    """A budget of more tokens than one sequence may have is several sequences."""
    model = tiny_model()
    model.max_model_len = 20
    seen: list[Any] = []
    forward = type(model).forward
    with mock.patch.object(
        type(model), "forward", lambda self, *args: (seen.append(args), forward(self, *args))[1]
    ):
        memory.run_largest_step(model, 50, 4, 16)
        memory.run_largest_step(model, 500, 4, 16)
    (ids, positions, _, meta), (more_ids, *_) = seen
    assert len(ids) == 50 and meta.query_lens == [20, 20, 10]
    assert meta.query_start.tolist() == [0, 20, 40, 50]
    assert int(positions.max()) == 19
    assert len(more_ids) == 4 * 20  # no step is larger than max_num_seqs whole sequences


def test_profiling_runs_the_budget_that_the_scheduler_will_have() -> None:
    """Not stated, it follows from policy and length; a step of two prompts is larger than one."""
    model = tiny_model()
    cuda = fake_cuda(total=80 * GIB, free=80 * GIB, reserved=0, peak=0)
    for knobs, tokens in (
        ({"max_num_batched_tokens": 4096}, 4096),
        ({"max_model_len": 3000}, 3000),
        ({"max_model_len": 3000, "policy": "unified"}, 2048),
    ):
        config = EngineConfig(model="tiny", **knobs)  # type: ignore[arg-type]
        with (
            mock.patch.object(torch, "cuda", cuda),
            mock.patch.object(memory, "run_largest_step") as step,
        ):
            profiled_budget(config, model)
        assert step.call_args.args[1] == tokens


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


def test_graphs_take_a_workspace_of_their_own() -> None:
    """Not one from the pool of an earlier engine, which may be closed before this one."""
    order: list[str] = []
    cuda = SimpleNamespace(graph_pool_handle=lambda: order.append("pool"))
    keepers = SimpleNamespace(_cuda_clearCublasWorkspaces=lambda: order.append("cleared"))
    with mock.patch.object(torch, "cuda", cuda), mock.patch.object(torch, "_C", keepers):
        cuda_graph_maker()
    assert "cleared" in order


def test_memory_that_cannot_be_freed_in_place_is_let_go() -> None:
    """numpy's, or what ``pin_memory()`` returns: whoever holds the tensor holds nothing."""
    array = np.zeros(100, dtype=np.uint8)
    gone = weakref.ref(array)
    held = torch.from_numpy(array)
    del array
    assert not held.untyped_storage().resizable() and gone() is not None
    empty_storages([held])
    assert held.numel() == 0 and gone() is None


def test_closing_hands_back_what_torch_keeps_for_later() -> None:
    called: list[str] = []
    keepers = SimpleNamespace(
        _cuda_clearCublasWorkspaces=lambda: called.append("workspaces"),
        _host_emptyCache=lambda: called.append("pinned"),
    )
    cuda = SimpleNamespace(is_available=lambda: True, empty_cache=lambda: called.append("gpu"))
    with mock.patch.object(torch, "cuda", cuda), mock.patch.object(torch, "_C", keepers):
        release_device_caches()
    # The GPU's last: the workspaces came from it.
    assert called == ["workspaces", "pinned", "gpu"]
    with mock.patch.object(torch, "cuda", cuda), mock.patch.object(torch, "_C", SimpleNamespace()):
        release_device_caches()  # a torch that has no such names


# -- the pool in host memory --------------------------------------------------------------------


class FakePinning(KVCache):
    """Fails as CUDA does when the host has no more memory to pin."""

    def __init__(self, *args: Any, num_cpu_blocks: int = 0, **kwargs: Any) -> None:
        if num_cpu_blocks:
            raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported...")
        super().__init__(*args, **kwargs)


def swapping_config(num_cpu_blocks: int) -> SchedulerConfig:
    return SchedulerConfig(
        policy="continuous", num_gpu_blocks=4, num_cpu_blocks=num_cpu_blocks, block_size=16,
        max_model_len=32, max_num_batched_tokens=64, max_num_seqs=2,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["KVCache", "Fp8KVCache"])
def test_host_memory_that_cannot_be_pinned_names_swap_space(kind: str) -> None:
    make = {"KVCache": gpu.make_kv_cache, "Fp8KVCache": gpu.make_fp8_kv_cache}[kind]
    model = tiny_model()
    with (
        mock.patch.object(gpu, kind, FakePinning),
        mock.patch.object(memory, "physical_memory", lambda: 64 * GIB),
        pytest.raises(HostMemoryError) as caught,
    ):
        make(model, swapping_config(2**17))
    gib = 1.0 if kind == "KVCache" else 0.25  # 8 KiB a block in float32
    assert str(caught.value) == (
        f"no {gib:.2f} GiB of host memory for 131072 swapped KV blocks (this machine has 64 GiB in "
        "all): lower swap_space (in GiB) or num_cpu_blocks; with 0 a preempted request is "
        "recomputed. (CUDA error: out of memory.)"
    )


def test_a_pool_that_this_machine_cannot_hold_is_not_even_tried() -> None:
    with (
        mock.patch.object(memory, "physical_memory", lambda: 64 * GIB),
        pytest.raises(HostMemoryError, match=r"no 65\.00 GiB .* has 64 GiB .* \(more than there"),
    ):
        memory.check_swap_space(65, GIB)
    with mock.patch.object(memory, "physical_memory", lambda: 0):  # not known
        memory.check_swap_space(65, GIB)


def test_other_errors_are_not_blamed_on_swap_space() -> None:
    model = tiny_model()
    with (
        pytest.raises(DeviceMemoryError, match="lower gpu_memory_utilization"),  # the device's
        gpu._explained(model, swapping_config(4), torch.float32),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
    with (
        pytest.raises(RuntimeError, match="no kernel image"),  # nothing was to be pinned
        gpu._explained(model, swapping_config(0), torch.float32),
    ):
        raise RuntimeError("no kernel image")


def test_too_large_a_pool_on_a_cpu() -> None:
    """numpy's own error has no knob in it."""
    with pytest.raises(HostMemoryError, match="lower swap_space"):
        gpu.make_kv_cache(tiny_model(), swapping_config(2**45))
    with pytest.raises(MemoryError):  # the other pool, which swap_space says nothing about
        gpu.make_kv_cache(tiny_model(), replace(swapping_config(4), num_gpu_blocks=2**45))
