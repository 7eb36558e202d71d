"""The executor that runs a real model: a step's rows become one packed forward pass.

Tokens of all rows lie one behind the other, without padding between them. One-token rows come
first (decodes), then pieces of prompts, then, for static batching only, padding that belongs to
nobody.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from minibatch.executor.base import SampledToken
from minibatch.model.attention import AttentionMetadata
from minibatch.model.kv_cache import KVCache
from minibatch.model.llama import LlamaForCausalLM
from minibatch.sampler import InvalidLogitsError, Sampler, SamplingRow
from minibatch.scheduler.output import ScheduledRequest, SchedulerOutput


@dataclass
class Batch:
    """A step in tensors. T packed tokens of S rows."""

    rows: list[ScheduledRequest]  # in packed order
    input_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    meta: AttentionMetadata


class ModelRunner:
    """Runs a model over a paged KV cache.

    Args:
        model: weights and forward pass.
        kv_cache: the pools that the block manager's numbers point into.
        max_model_len: longest sequence, in tokens.
        forward: another way to compute ``model.forward``.
    """

    def __init__(
        self,
        model: LlamaForCausalLM,
        kv_cache: KVCache,
        max_model_len: int,
        forward: Callable[..., Tensor] | None = None,
    ) -> None:
        self.model: LlamaForCausalLM | None = model
        self._forward_pass: Callable[..., Tensor] | None = forward or model
        self.kv_cache: KVCache | None = kv_cache
        self.sampler = Sampler()
        self.block_size = kv_cache.block_size
        self.max_blocks = -(-max_model_len // kv_cache.block_size)
        # One row of block ids a lane, kept from step to step: a decode adds an entry now and then.
        self._tables = np.zeros((0, self.max_blocks), dtype=np.int32)
        self._written: dict[int, tuple[list[int], int]] = {}  # lane -> (block table, entries)

    @torch.inference_mode()
    def execute(self, output: SchedulerOutput) -> dict[str, SampledToken]:
        """See ``Executor``. One forward pass for all rows, logits only where a token is due."""
        assert self.model is not None and self.kv_cache is not None, "closed"
        self._move_blocks(output)
        if not output.scheduled:
            return {}
        batch = self._pack(output)
        return self._sample(self._forward(batch), batch)

    def close(self) -> None:
        """Drop weights and pools, whoever still holds this object."""
        self.model = self.kv_cache = self._forward_pass = None
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _forward(self, batch: Batch) -> Tensor:
        """Final hidden states of the packed tokens, ``[T, H]``."""
        assert self._forward_pass is not None
        return self._forward_pass(batch.input_ids, batch.positions, self.kv_cache, batch.meta)

    # -- before the forward pass --------------------------------------------------------------

    def _move_blocks(self, output: SchedulerOutput) -> None:
        """Each kind of move once, even if the step is executed again."""
        assert self.kv_cache is not None
        moves = {
            "swap_out": self.kv_cache.swap_out,
            "swap_in": self.kv_cache.swap_in,
            "copies": self.kv_cache.copy_blocks,
        }
        for name in output.MOVES[output.moves_made :]:
            moves[name](getattr(output, name))
            output.moves_made += 1
        if output.copies:
            self._written.clear()  # copy-on-write changes entries in the middle of a table

    def _pack(self, output: SchedulerOutput) -> Batch:
        assert self.model is not None
        decodes = [row for row in output.scheduled if row.num_tokens <= 1]  # padding rows too
        chunks = [row for row in output.scheduled if row.num_tokens > 1]
        rows = decodes + chunks
        lanes = self._update_tables(rows)
        input_ids = [row.request.token_ids[row.start] for row in decodes]
        positions = [row.start for row in decodes]
        lengths = [1] * len(decodes) + [row.num_tokens for row in chunks]
        for row in chunks:
            input_ids += row.request.token_ids[row.start : row.end]
            positions += range(row.start, row.end)
        position_array = np.array(positions, dtype=np.int64)
        lane_of_token = np.repeat(lanes, lengths)
        blocks = self._tables[lane_of_token, position_array // self.block_size]
        slots = blocks.astype(np.int64) * self.block_size + position_array % self.block_size
        # Static batching computes the padding of its rectangle, and writes it nowhere.
        padding = sum(row.num_padding_tokens for row in rows if row.phase != "padding")
        if padding:
            input_ids += [0] * padding
            position_array = np.pad(position_array, (0, padding))
            slots = np.pad(slots, (0, padding), constant_values=-1)
        seq_lens = [row.start + max(row.num_tokens, 1) for row in rows]
        widest = -(-max(seq_lens) // self.block_size)
        query_start = np.zeros(len(rows) + 1, dtype=np.int32)
        np.cumsum(lengths, out=query_start[1:])
        meta = AttentionMetadata(
            slot_mapping=self._to_device(slots),
            block_tables=self._to_device(self._tables[lanes, :widest]),
            query_start=self._to_device(query_start),
            seq_lens=self._to_device(np.array(seq_lens, dtype=np.int32)),
            query_lens=lengths,
            seq_lens_host=seq_lens,
            num_decodes=len(decodes),
        )
        if self.model.config.rope.depends_on_prompt_length:
            prompts = np.array([row.request.num_prompt_tokens for row in rows], dtype=np.int32)
            meta.prompt_lens = self._to_device(prompts)
        ids = self._to_device(np.array(input_ids, dtype=np.int64))
        return Batch(rows, ids, self._to_device(position_array), meta)

    def _update_tables(self, rows: list[ScheduledRequest]) -> np.ndarray:
        """Bring the rows' block tables up to date; returns their lanes, ``[S]``."""
        lanes = [row.slot for row in rows]
        most = max(lanes) + 1
        if most > len(self._tables):
            grown = np.zeros((2 * most, self.max_blocks), dtype=np.int32)
            grown[: len(self._tables)] = self._tables
            self._tables = grown
        for row in rows:
            table = row.request.block_table
            known, entries = self._written.get(row.slot, (None, 0))
            if known is not table:  # somebody else's lane, or its blocks were taken and given anew
                entries = 0
            if entries < len(table):
                self._tables[row.slot, entries : len(table)] = table[entries:]
                self._written[row.slot] = (table, len(table))
        return np.array(lanes)

    def _to_device(self, array: np.ndarray) -> Tensor:
        assert self.model is not None
        return torch.from_numpy(array).to(self.model.device, non_blocking=True)

    # -- behind it ----------------------------------------------------------------------------

    def _sample(self, hidden: Tensor, batch: Batch) -> dict[str, SampledToken]:
        assert self.model is not None
        due = [index for index, row in enumerate(batch.rows) if row.samples]
        if not due:
            return {}
        last = batch.meta.query_start[1:] - 1  # [S]: each row's last token
        if len(due) < len(batch.rows):
            last = last[torch.tensor(due, device=last.device)]
        if len(last) < len(hidden):
            hidden = hidden[last]  # [R, H]
        logits = self.model.compute_logits(hidden)  # [R, V]
        rows = [batch.rows[index] for index in due]
        return self._draw(logits, rows)

    def _draw(self, logits: Tensor, rows: list[ScheduledRequest]) -> dict[str, SampledToken]:
        try:
            sampled = self.sampler(logits, [sampling_row(row) for row in rows])
        except InvalidLogitsError as error:  # those end; their batch mates go on
            bad = set(error.rows)
            results = {rows[i].request.request_id: SampledToken(None) for i in bad}
            good = [i for i in range(len(rows)) if i not in bad]
            if good:
                results |= self._draw(logits[good], [rows[i] for i in good])
            return results
        return {
            row.request.request_id: SampledToken(token_id, logprobs)
            for row, token_id, logprobs in zip(
                rows, sampled.token_ids, sampled.logprobs, strict=True
            )
        }


def sampling_row(row: ScheduledRequest) -> SamplingRow:
    """What the sampler must know of a request; token lists are copied only if somebody looks."""
    request = row.request
    params = request.sampling_params
    prompt: list[int] = []
    generated: list[int] = []
    stops: tuple[int, ...] = ()
    if params.has_penalties:
        prompt, generated = request.prompt_token_ids, request.output_token_ids
    if request.num_output_tokens < params.min_tokens:
        stops = (*request.eos_token_ids, *params.stop_token_ids)
    return SamplingRow(
        params,
        (request.seed, request.sample_index),
        request.num_output_tokens,
        prompt,
        generated,
        stops,
    )
