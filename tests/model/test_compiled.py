"""The C sources against plain arithmetic, and what happens where they cannot be compiled."""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from model_helpers import assert_close, hf_config, hf_logits, hf_model, random_tokens, save
from torch import Tensor, nn

from minibatch.builder import engine_for, pack_for_cpu
from minibatch.config import EngineConfig
from minibatch.engine import Engine
from minibatch.errors import ConfigError
from minibatch.model.attention import AttentionMetadata
from minibatch.model.config import ModelConfig
from minibatch.model.cpu import compiler
from minibatch.model.cpu.kernels import CpuKernels
from minibatch.model.cpu.linear import CompiledLinear, pack
from minibatch.model.cpu.ops import CompiledAttention
from minibatch.model.kv_cache import KVCache
from minibatch.model.linear import PackedLinear
from minibatch.model.llama import MLP_ROWS
from minibatch.model.loader import load_model
from minibatch.sampling_params import SamplingParams

X86 = platform.machine().lower() in ("x86_64", "amd64")
# What -march=native hides: the same sources on processors with narrower registers.
PROCESSORS = {"native": (), "AVX2": ("-mno-avx512f",), "SSE": ("-march=x86-64",)}
DTYPES = [torch.float32, torch.bfloat16]
needs_compiler = pytest.mark.skipif(not shutil.which("cc"), reason="there is no C compiler here")
pytestmark = needs_compiler


@pytest.fixture(params=PROCESSORS)
def processor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if request.param != "native" and not X86:
        pytest.skip("these are flags for x86")
    monkeypatch.setattr(compiler, "FLAGS", (*compiler.FLAGS, *PROCESSORS[request.param]))
    compiler.library.cache_clear()
    yield
    compiler.library.cache_clear()


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def close(found: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    """Within rounding of ``exact``, which is in float64."""
    assert found.dtype is dtype
    relative = 2e-6 if dtype is torch.float32 else 2**-8
    torch.testing.assert_close(found.double(), exact, rtol=relative, atol=relative)


# -- between the matrices -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 8), (3, 576), (7, 33), (80, 576)])
def test_add_norm(processor: None, dtype: torch.dtype, rows: int, size: int) -> None:
    """80 x 576 numbers are worth sharing among threads, the others not."""
    torch.manual_seed(0)
    kernels = CpuKernels(dtype, 8, 1)
    stream, added = (torch.randn(rows, size).to(dtype) for _ in range(2))
    weight = torch.rand(size).to(dtype)
    total = (stream + added).double()  # rounded once, as it is stored
    normed = kernels.add_norm(stream, added, weight, 0.1)
    assert torch.equal(stream.double(), total)
    close(normed, F.rms_norm(total, (size,), weight.double(), 0.1), dtype)
    before = stream.clone()
    assert torch.equal(kernels.add_norm(stream, None, weight, 0.1), normed)
    assert torch.equal(stream, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_silu_mul(processor: None, dtype: torch.dtype, rows: int) -> None:
    kernels = CpuKernels(dtype, 8, 1)
    gate_up = (torch.randn(rows, 2 * 1000) * 10).to(dtype)
    gate_up[0, :4] = torch.tensor([-1e4, 1e4, 0.0, -88.0])
    gate, up = gate_up.double().chunk(2, dim=1)
    close(kernels.silu_mul(gate_up), F.silu(gate) * up, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_nan_is_nobody_elses(dtype: torch.dtype) -> None:
    """It is neither lost in a rounding nor seen by another row."""
    kernels = CpuKernels(dtype, 8, 2)
    x = torch.randn(3, 48).to(dtype)
    x[1, 5] = torch.nan
    matrix = nn.Linear(48, 40, bias=False, dtype=dtype).requires_grad_(False)
    weight = torch.ones(48, dtype=dtype)
    results = {
        "norm": kernels.add_norm(x.clone(), None, weight, 1e-5),
        "silu": kernels.silu_mul(x),
        "matmul": CompiledLinear(matrix)(x),
        "int8": CompiledLinear(matrix, int8=True)(x),
    }
    for name, result in results.items():
        bad = result.isnan().any(dim=1)
        assert bad.tolist() == [False, True, False], name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "heads", "kv_heads"), [(8, 4, 4), (24, 6, 2), (64, 9, 3)])
def test_turn_and_store(
    processor: None, dtype: torch.dtype, head_dim: int, heads: int, kv_heads: int
) -> None:
    tokens, half = 20, head_dim // 2
    kernels = CpuKernels(dtype, head_dim, heads // kv_heads)
    qkv = torch.randn(tokens, heads + 2 * kv_heads, head_dim).to(dtype)
    angles = torch.randn(tokens, 1, half).double()
    cos = torch.cat((angles.cos(), angles.cos()), dim=-1).to(dtype)
    sin = torch.cat((-angles.sin(), angles.sin()), dim=-1).to(dtype)
    keys, values = torch.zeros(2, 5, 8, kv_heads, head_dim, dtype=dtype)
    slots = torch.randperm(40)[:tokens]
    slots[3] = slots[17] = -1  # nowhere
    given = qkv.double()
    turned = given * cos.double() + torch.cat(
        (
            given[..., half:] * sin[..., :half].double(),
            given[..., :half] * sin[..., half:].double(),
        ),
        dim=-1,
    )
    kernels.turn_and_store(qkv, cos, sin, keys, values, slots)
    close(qkv[:, : heads + kv_heads], turned[:, : heads + kv_heads], dtype)
    assert torch.equal(qkv[:, -kv_heads:].double(), given[:, -kv_heads:])
    written = slots >= 0
    places = slots[written]
    assert torch.equal(keys.view(40, kv_heads, -1)[places], qkv[written, heads:-kv_heads])
    assert torch.equal(values.view(40, kv_heads, -1)[places], qkv[written, -kv_heads:])
    others = torch.ones(40, dtype=torch.bool)
    others[places] = False
    assert not keys.view(40, -1)[others].any() and not values.view(40, -1)[others].any()


# -- attention ----------------------------------------------------------------------------------


def write_sequence(
    keys: Tensor, values: Tensor, table: Tensor, deck: list[int], length: int
) -> tuple[Tensor, Tensor]:
    """Put ``length`` random tokens into blocks from ``deck``, and these into ``table``.

    Returns:
        K and V, ``[length, kv_heads, head_dim]``.
    """
    _, block_size, *head_shape = keys.shape
    blocks = [deck.pop() for _ in range(-(-length // block_size))]
    table[: len(blocks)] = torch.tensor(blocks)
    k, v = torch.randn(2, length, *head_shape).to(keys.dtype)
    slots = [blocks[t // block_size] * block_size + t % block_size for t in range(length)]
    keys.view(-1, *head_shape)[slots] = k
    values.view(-1, *head_shape)[slots] = v
    return k, v


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [1, 4, 16, 64])
@pytest.mark.parametrize(("head_dim", "heads", "kv_heads"), [(8, 4, 4), (24, 6, 2), (64, 9, 3)])
def test_decodes_read_pages(
    processor: None,
    threads: Callable[[int], None],
    dtype: torch.dtype,
    block_size: int,
    head_dim: int,
    heads: int,
    kv_heads: int,
) -> None:
    """Every length around a tile's and a block's edge; unwritten slots hold NaN."""
    torch.manual_seed(0)
    kernels = CpuKernels(dtype, head_dim, heads // kv_heads)
    lengths = [1, 2, 15, 16, 17, 0, 63, 64, 65, 200]
    pool = torch.full((2, 320, block_size, kv_heads, head_dim), torch.nan, dtype=dtype)
    if block_size == 1:
        pool = pool.new_full((2, 500, 1, kv_heads, head_dim), torch.nan)
    deck = torch.randperm(pool.shape[1]).tolist()
    tables = torch.full((len(lengths), 200 // block_size + 1), -1, dtype=torch.int32)
    exact = torch.zeros(len(lengths), heads, head_dim, dtype=torch.float64)
    # Queries lie in a longer row, as the fused projection leaves them.
    q = torch.randn(len(lengths), heads + 2 * kv_heads, head_dim).to(dtype)[:, :heads]
    for row, length in enumerate(lengths):
        k, v = write_sequence(pool[0], pool[1], tables[row], deck, length)
        for head in range(heads * (length > 0)):
            kv_head = head * kv_heads // heads
            scores = k[:, kv_head].double() @ q[row, head].double() / head_dim**0.5
            exact[row, head] = scores.softmax(0) @ v[:, kv_head].double()
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    for number in (1, 3):
        threads(number)
        out = torch.full(q.shape, 7.0, dtype=dtype)
        kernels.attend_decodes(out, q, *pool, tables, seq_lens, len(lengths))
        close(out, exact, dtype)
        alone = torch.full(q.shape, 7.0, dtype=dtype)  # fewer sequences than threads
        kernels.attend_decodes(alone, q[9:], *pool, tables[9:], seq_lens[9:], 1)
        assert torch.equal(alone[0], out[9]) and bool((alone[1:] == 7).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [1, 16, 40])
@pytest.mark.parametrize(("head_dim", "heads", "kv_heads"), [(8, 5, 5), (24, 6, 2), (64, 9, 3)])
def test_chunks_see_what_came_before_them(
    processor: None,
    threads: Callable[[int], None],
    dtype: torch.dtype,
    block_size: int,
    head_dim: int,
    heads: int,
    kv_heads: int,
) -> None:
    """Whole prompts and later pieces, over the edges of tiles; unwritten slots hold NaN."""
    torch.manual_seed(0)
    kernels = CpuKernels(dtype, head_dim, heads // kv_heads)
    attention = CompiledAttention(kernels)
    pieces = [(2, 2), (70, 70), (65, 33), (100, 3), (33, 32)]  # tokens in all, queries
    config = shape_of(heads, kv_heads, head_dim)
    needed = [-(-length // block_size) for length, _ in pieces]
    cache = KVCache(config, sum(needed) + 3, block_size, dtype=dtype)
    cache.keys[0].fill_(torch.nan)
    cache.values[0].fill_(torch.nan)
    deck = torch.randperm(sum(needed) + 3).tolist()
    tables = torch.full((len(pieces), max(needed) + 1), -1, dtype=torch.int32)
    tokens = sum(queries for _, queries in pieces)
    q = torch.randn(tokens, heads + 2 * kv_heads, head_dim).to(dtype)[:, :heads]
    exact, token = torch.empty(tokens, heads, head_dim, dtype=torch.float64), 0
    for row, (length, queries) in enumerate(pieces):
        k, v = write_sequence(cache.keys[0], cache.values[0], tables[row], deck, length)
        for i in range(queries):
            seen = length - queries + i + 1
            for head in range(heads):
                keys, values = (x[:seen, head * kv_heads // heads].double() for x in (k, v))
                scores = keys @ q[token, head].double() / head_dim**0.5
                exact[token, head] = scores.softmax(0) @ values
            token += 1
    meta = AttentionMetadata(
        slot_mapping=torch.zeros(tokens + 2, dtype=torch.int64),  # two tokens of padding
        block_tables=tables,
        query_start=torch.tensor([0, *(n for _, n in pieces)]).cumsum(0).int(),
        seq_lens=torch.tensor([length for length, _ in pieces]).int(),
        query_lens=[queries for _, queries in pieces],
        seq_lens_host=[length for length, _ in pieces],
        num_decodes=0,
    )
    padded = torch.cat((q, q[:2]))
    for number in (1, 3):
        threads(number)
        attention.prepare(meta, cache, dtype)
        out = attention.forward(padded, cache, 0, meta)
        close(out[:tokens], exact, dtype)
        assert not out[tokens:].any()


def shape_of(heads: int, kv_heads: int, head_dim: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_layers=1, num_heads=heads,
        num_kv_heads=kv_heads, head_dim=head_dim, max_position_embeddings=128,
    )  # fmt: skip


def test_scores_far_apart_and_far_from_zero() -> None:
    """exp(score) itself would be infinite, or 0 for all."""
    kernels = CpuKernels(torch.float32, 8, 1)
    for offset in (-900.0, 900.0):
        pool = torch.zeros(2, 3, 16, 1, 8)
        pool[0, ..., 0] = offset
        pool[0, 1, 3, 0, 0] += 30.0  # one key stands out, and its value is 1
        pool[1, 1, 3] = 1.0
        q = torch.full((1, 1, 8), 8**0.5)
        out = torch.empty_like(q)
        tables, seq_lens = torch.arange(3).int()[None], torch.tensor([48]).int()
        kernels.attend_decodes(out, q, *pool, tables, seq_lens, 1)
        torch.testing.assert_close(out, torch.ones(1, 1, 8))


# -- matrices -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), [(576, 96), (10, 7), (62, 33)])
def test_matmul(processor: None, dtype: torch.dtype, int8: bool, inputs: int, outputs: int) -> None:
    """Every number of rows that a tile can have, whole panels and cut ones, with a bias."""
    torch.manual_seed(0)
    inputs -= inputs % 4 if int8 else 0
    plain = nn.Linear(inputs, outputs, dtype=dtype).requires_grad_(False)
    compiled = CompiledLinear(plain, int8)
    weight = plain.weight.double()
    if int8:
        scale = weight.abs().amax(dim=1, keepdim=True) / 127
        weight = (weight / scale).round() * scale
    for rows in [*range(1, 26), 130]:
        x = torch.randn(rows, inputs).to(dtype)
        found, exact = compiled(x), x.double() @ weight.T + plain.bias.double()
        assert found.shape == exact.shape
        relative = 1e-5 if dtype is torch.float32 else 2**-6  # the bias is added to a rounded sum
        torch.testing.assert_close(found.double(), exact, rtol=relative, atol=relative)


def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    """Bit for bit: a token's answer is the same in every batch."""
    for dtype, int8 in ((torch.float32, False), (torch.bfloat16, False), (torch.float32, True)):
        linear = nn.Linear(96, 64, bias=False, dtype=dtype).requires_grad_(False)
        compiled, x = CompiledLinear(linear, int8), torch.randn(40, 96).to(dtype)
        together = compiled(x)
        for rows in (1, 5, 12, 13):
            assert torch.equal(compiled(x[:rows]), together[:rows])


def test_rows_that_do_not_lie_side_by_side() -> None:
    linear = nn.Linear(24, 16, dtype=torch.float32).requires_grad_(False)
    compiled, x = CompiledLinear(linear), torch.randn(6, 48)
    torch.testing.assert_close(compiled(x[:, 24:]), linear(x[:, 24:]))


def test_a_packed_matrix_is_no_larger_than_the_plain_one() -> None:
    weight = torch.randn(64, 10)
    assert pack(weight, 32, 2).shape == (2, 5, 32, 2)
    assert pack(weight, 32, 2)[1, 3, 4].tolist() == weight[36, 6:8].tolist()
    linear = nn.Linear(576, 960, bias=False).requires_grad_(False)
    assert CompiledLinear(linear).packed.nbytes == linear.weight.nbytes
    assert CompiledLinear(linear, int8=True).packed.nbytes == linear.weight.nbytes // 4


# -- the whole model ----------------------------------------------------------------------------


def tiny(tmp_path: Path, **overrides: Any) -> Path:
    # More rows than the MLP takes at once, in one step.
    return save(hf_model(hf_config(max_position_embeddings=2 * MLP_ROWS, **overrides)), tmp_path)


def engine_of(path: Path, **knobs: Any) -> Engine:
    """What ``build_engine`` does, for a checkpoint without a tokenizer."""
    knobs = {"num_gpu_blocks": 100, "max_model_len": 1300, "dtype": "float32"} | knobs
    config = EngineConfig(str(path), **knobs)
    model = load_model(path, dtype=getattr(torch, config.dtype), max_model_len=1300)
    pack_for_cpu(model, config)
    return engine_for(model, config)


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"num_attention_heads": 8, "num_key_value_heads": 2},
        {"attention_bias": True, "mlp_bias": True},
        {"tie_word_embeddings": True, "head_dim": 24},
    ],
)
def test_an_engine_gives_transformers_logits(shape: dict[str, Any], tmp_path: Path) -> None:
    theirs = hf_model(hf_config(max_position_embeddings=2 * MLP_ROWS, **shape))
    path = save(theirs, tmp_path)
    prompt = random_tokens(1100)
    assert len(prompt) > MLP_ROWS
    engine = engine_of(path, cpu_kernels="compiled")
    runner: Any = engine.executor
    forward, seen = runner._forward_pass, []

    def watch(*args: Any) -> Tensor:
        seen.append(forward(*args))
        return seen[-1]

    runner._forward_pass = watch
    engine.add_request("a", prompt, SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))
    while engine.has_unfinished:
        engine.step()
    tokens = prompt + engine.output("a").outputs[0].token_ids
    found = runner.model.compute_logits(torch.cat(seen))
    assert len(seen) == 4 and engine.trace.meta.software["cpu_kernels"] == "compiled"
    assert_close(found, hf_logits(theirs, tokens)[: len(found)])


def test_int8_is_near(tmp_path: Path) -> None:
    path = tiny(tmp_path)
    outputs = {}
    for quantization in (None, "int8"):
        engine = engine_of(path, quantization=quantization)
        kinds = {type(m) for m in engine.executor.model.modules()}  # type: ignore[attr-defined]
        assert CompiledLinear in kinds
        outputs[quantization] = engine.executor.model  # type: ignore[attr-defined]
    ours = outputs["int8"].layers[0].attention.qkv_proj
    x = torch.randn(9, ours.in_features)
    exact, found = outputs[None].layers[0].attention.qkv_proj(x), ours(x)
    error = (found - exact).norm() / exact.norm()
    assert 0 < error < 0.01


# -- where it cannot be compiled ----------------------------------------------------------------


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("MINIBATCH_CACHE", str(tmp_path / "cache"))
    compiler.library.cache_clear()
    yield tmp_path / "cache"
    compiler.library.cache_clear()


def broken_compiler(folder: Path) -> str:
    path = folder / "broken-cc"
    path.write_text("#!/bin/sh\necho 'cannot see -fopenmp' >&2\nexit 1\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize("trouble", ["no compiler", "it fails", "it makes nonsense"])
def test_torch_does_it_instead(
    trouble: str, empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny(tmp_path / "model")
    expected = {
        "no compiler": "need a C compiler",
        "it fails": "cannot see -fopenmp",
        "it makes nonsense": "cannot be loaded",
    }[trouble]
    if trouble == "no compiler":
        monkeypatch.setenv("CC", str(tmp_path / "none"))
    elif trouble == "it fails":
        monkeypatch.setenv("CC", broken_compiler(tmp_path))
    else:
        monkeypatch.setattr(compiler, "_compile", lambda command, file: nonsense(file))
    engine = engine_of(path)
    assert engine.trace.meta.software["cpu_kernels"] == "torch"
    assert not isinstance(engine.executor.model.backend, CompiledAttention)  # type: ignore[attr-defined]
    by_torch = generate(path)
    with pytest.raises(ConfigError, match=expected) as caught:
        engine_of(path, cpu_kernels="compiled")
    assert "Use 'auto' or 'torch'" in str(caught.value)
    monkeypatch.undo()
    compiler.library.cache_clear()
    assert engine_of(path).trace.meta.software["cpu_kernels"] == "compiled"
    assert generate(path) == by_torch


def nonsense(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("not a library")


def generate(path: Path) -> list[int]:
    engine = engine_of(path)
    engine.add_request("a", random_tokens(9), SamplingParams(max_tokens=6, temperature=0.0))
    while engine.has_unfinished:
        engine.step()
    return engine.output("a").outputs[0].token_ids


@pytest.mark.parametrize(
    ("knobs", "shape", "reason"),
    [
        ({"dtype": "float16"}, {}, "float32 and bfloat16, not torch.float16"),
        ({"kv_cache_dtype": "fp8"}, {}, "KV cache of 8 bits"),
        ({}, {"head_dim": 12}, "multiple of 8, not 12"),
        ({"quantization": "int8"}, {"intermediate_size": 62}, "4 inputs at once"),
        (
            {"quantization": "int8"},
            {
                "head_dim": 6,
                "num_attention_heads": 3,
                "num_key_value_heads": 3,
                "hidden_size": 60,
            },
            "4 inputs at once, and not all of .*18",
        ),
        ({}, {"intermediate_size": 63}, "2 inputs at once, and not all of .*63"),
    ],
)
def test_what_the_kernels_are_not_made_for(
    knobs: dict[str, Any], shape: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    path = tiny(tmp_path, **shape)
    with pytest.raises(ConfigError, match=reason):
        engine_of(path, cpu_kernels="compiled", **knobs)
    engine = engine_of(path, **knobs)
    engine.add_request("a", random_tokens(9), SamplingParams(max_tokens=4, ignore_eos=True))
    while engine.has_unfinished:
        engine.step()
    assert len(engine.output("a").outputs[0].token_ids) == 4


def test_torch_on_request(tmp_path: Path) -> None:
    model = load_model(tiny(tmp_path))
    pack_for_cpu(model, EngineConfig("x", cpu_kernels="torch"))
    kinds = {type(module) for module in model.modules()}
    assert CompiledLinear not in kinds and (PackedLinear in kinds or nn.Linear in kinds)
    with pytest.raises(ConfigError, match="cpu_kernels='gcc'"):
        EngineConfig("x", cpu_kernels="gcc")  # type: ignore[arg-type]


def test_it_is_compiled_once(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    CpuKernels(torch.float32, 8, 1)
    files = list(empty_cache.rglob("*.so"))
    assert len(files) == 2 and not list(empty_cache.rglob("tmp*"))
    compiler.library.cache_clear()
    monkeypatch.setattr(compiler, "_compile", partial(pytest.fail, "compiled again"))
    CpuKernels(torch.float32, 8, 1)


def test_another_processor_compiles_anew(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache may lie in a home folder that machines share."""
    CpuKernels(torch.float32, 8, 1)
    compiler.library.cache_clear()
    monkeypatch.setattr(compiler.platform, "processor", lambda: "another")
    CpuKernels(torch.float32, 8, 1)
    assert len(list(empty_cache.rglob("*.so"))) == 4


@pytest.mark.parametrize("defines", ["-DX", "-DBF16", "-DINT8", "-DINT8 -DBF16"])
def test_the_sources_compile_without_a_warning(defines: str, tmp_path: Path) -> None:
    for source in ("layer.c", "attention.c", "matmul.c"):
        command = [
            *("cc", "-O2", "-march=native", "-fopenmp", "-Wall", "-Wextra", "-Werror", "-shared"),
            *("-fPIC", "-DHEAD_DIM=64", "-DGROUP=3", *defines.split()),
            *(str(compiler.FOLDER / source), "-o", str(tmp_path / "out.so")),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
