"""Attention that others wrote, over the same cases: the reference by hand is ours as well.

torch's run anywhere; its packed-prompt kernel and xformers' paged one need a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from paged_case import BLOCK_SIZE, Case, attend, make_case
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

pytest.importorskip("triton")

from minibatch.model.triton_attention import TritonAttention
from minibatch.model.triton_kernels import Tiling

LENGTHS, QUERY_LENS = [33, 20, 60], [1, 5, 60]  # a decode, a chunk behind context, a prompt


def gathered(case: Case, row: int) -> tuple[Tensor, Tensor, Tensor]:
    """One sequence without pages: ``q [n, Hq, D]``, ``k`` and ``v [length, Hkv, D]``."""
    start, end = case.meta.query_start[row : row + 2].tolist()
    length = case.meta.seq_lens_host[row]
    table = case.meta.block_tables[row, : -(-length // BLOCK_SIZE)].long()
    k, v = (pool[0][table].flatten(0, 1)[:length] for pool in (case.cache.keys, case.cache.values))
    return case.q[start:end], k, v


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # [1, heads, tokens, D]
    mask = causal_lower_right(q.shape[2], k.shape[2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)[0].transpose(0, 1)


def flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    behind = len(k) - len(q)
    mask = create_block_mask(
        lambda b, h, query, key: key <= query + behind, None, None, len(q), len(k), str(q.device)
    )
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return flex_attention(q, k, v, block_mask=mask)[0].transpose(0, 1)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("oracle", [sdpa, flex], ids=["SDPA", "FlexAttention"])
def test_torchs_attention_agrees(
    oracle: Callable[[Tensor, Tensor, Tensor], Tensor], device: torch.device
) -> None:
    case = make_case((2, 2), LENGTHS, QUERY_LENS, device=device)
    tiling = Tiling(rows=32, keys=32)
    found = attend(TritonAttention(1, decode=Tiling(16, 32, splits=2), chunk=tiling), case)
    expected = torch.cat([oracle(*gathered(case, row)) for row in range(3)]).cpu()
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(expected, case.expected, atol=1e-4, rtol=1e-3)


@pytest.mark.gpu
def test_varlen_attn_is_causal_from_the_bottom_right() -> None:
    """Where a chunk attends to more keys than it has queries: what ``benchmarks/gpu.py`` compares
    our kernel with is the same function. (SDPA's ``is_causal`` is aligned top left.)
    """
    varlen = pytest.importorskip("torch.nn.attention.varlen", reason="torch before 2.10")
    case = make_case((2, 2), LENGTHS, QUERY_LENS, head_dim=64, dtype=torch.bfloat16, device="cuda")
    parts = [gathered(case, row) for row in range(3)]
    q, k, v = (torch.cat(group) for group in zip(*parts, strict=True))
    starts = torch.tensor([0, *LENGTHS], device="cuda").cumsum(0).int()
    out = varlen.varlen_attn(
        q, k, v, case.meta.query_start, starts, max(QUERY_LENS), max(LENGTHS), window_size=(-1, 0)
    )
    torch.testing.assert_close(out.float().cpu(), case.expected, atol=2e-2, rtol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [1, 4])
def test_xformers_reads_the_same_pages(splits: int) -> None:
    """Its split-KV kernel for decodes over pages, which nobody here wrote."""
    fmha: Any = pytest.importorskip(
        "xformers.ops.fmha", reason="xformers is not installed, or not for this torch",
        exc_type=ImportError,
    )  # fmt: skip
    if not fmha.triton_splitk.FwOp.is_available():
        pytest.skip("xformers does not support this version of Triton")
    lengths = [1, 16, 17, 130]
    case = make_case((4, 4), lengths, [1] * 4, head_dim=64, dtype=torch.bfloat16, device="cuda")
    # It also loads what lies behind a sequence's end, so no NaN and no garbage there.
    k, v = (pool[0].nan_to_num().flatten(0, 1)[None] for pool in
            (case.cache.keys, case.cache.values))  # fmt: skip
    tables = case.meta.block_tables.where(case.meta.block_tables < case.cache.num_blocks, 0)
    bias = fmha.attn_bias.PagedBlockDiagonalPaddedKeysMask.from_seqlens(
        [1] * 4, lengths, tables, BLOCK_SIZE, device=torch.device("cuda")
    )
    operator = fmha.triton_splitk.FwOp.get_operator(splits, block_n=BLOCK_SIZE)
    try:
        theirs = fmha.memory_efficient_attention_forward(
            case.q.contiguous()[None], k, v, attn_bias=bias, op=operator
        )[0]
    except Exception as error:
        if "lock pointers" not in str(error):
            raise
        pytest.skip("xformers' kernel needs block pointers, which this Triton has no more")
    ours = attend(TritonAttention(1, decode=Tiling(16, splits=splits)), case)
    torch.testing.assert_close(theirs.float().cpu(), case.expected, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(ours, theirs.float().cpu(), atol=2e-2, rtol=2e-2)


def test_cases_differ_where_the_alignment_matters() -> None:
    """The cases above would tell one alignment from the other."""
    case = make_case((2, 2), LENGTHS, QUERY_LENS)
    q, k, v = gathered(case, 1)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    top_left = F.scaled_dot_product_attention(q, k, v, is_causal=True)[0].transpose(0, 1)
    bounds = list(pairwise(case.meta.query_start.tolist()))
    assert not torch.allclose(top_left, case.expected[slice(*bounds[1])], atol=1e-2)
