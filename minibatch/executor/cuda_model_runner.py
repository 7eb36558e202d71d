"""The runner of GPUs: a step is launched, not awaited.

    pack -> one copy in -> [graph: embed ... norm] -> logits -> sample -> one copy out

Everything between the two copies happens on the device, in order, on one stream. The sampled ids
stay there too: the next step may be launched before the host has seen them (``pipelined``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from minibatch.executor.base import SampledToken
from minibatch.executor.cuda_graphs import DecodeGraphs, Graph, batch_sizes
from minibatch.executor.device_sampler import INVALID, Needs, sample, write_knobs
from minibatch.executor.launch import PENDING, Launched, waits_for_tokens
from minibatch.executor.memory import explained_oom
from minibatch.executor.model_runner import ModelRunner, sampling_row
from minibatch.executor.release import empty_storages, release_device_caches, tensors_of
from minibatch.executor.step_inputs import TURNS, CopyIn, StepInputs
from minibatch.model.attention import AttentionMetadata
from minibatch.model.kv_cache import KVCache
from minibatch.model.llama import LlamaForCausalLM
from minibatch.scheduler.output import ScheduledRequest, SchedulerOutput


@dataclass(frozen=True)
class Done:
    """A step whose tokens the host has seen."""

    tokens: dict[str, SampledToken]

    def wait(self) -> dict[str, SampledToken]:
        return self.tokens


@dataclass
class OnDevice:
    """A step whose tokens are still to come."""

    places: dict[str, int]  # request id -> its place among the sampled ids
    host_ids: Tensor  # pinned; the ids are on their way to it
    arrived: torch.cuda.Event
    tokens: dict[str, SampledToken] | None = None

    def wait(self) -> dict[str, SampledToken]:
        if self.tokens is None:
            self.arrived.synchronize()
            ids = self.host_ids.tolist()
            self.tokens = {
                request_id: SampledToken(None if ids[place] == INVALID else ids[place])
                for request_id, place in self.places.items()
            }
        return self.tokens


@dataclass
class _Packed:
    """What the host knows of a step once it is written down."""

    rows: list[ScheduledRequest]  # in packed order
    due: list[int]  # indices of those that sample
    needs: Needs | None  # None: somebody waits for these tokens
    query_lens: list[int]
    num_tokens: int  # static batching's padding included
    graph_size: int | None  # rows after padding, if a graph will run


class BlockTables:
    """One row of block ids a lane, on the device from start to end; only changes are sent."""

    def __init__(self, num_lanes: int, width: int, device: torch.device) -> None:
        self.width = width
        self.tensor = torch.zeros(num_lanes, width, dtype=torch.int32, device=device)
        self._written: dict[int, tuple[list[int], int]] = {}  # lane -> (block table, entries)

    def changes(self, rows: Iterable[ScheduledRequest]) -> tuple[list[int], list[int]]:
        """Entries that these rows need and the device lacks: (places, block ids)."""
        where: list[int] = []
        blocks: list[int] = []
        for row in rows:
            table, lane = row.request.block_table, row.slot
            known, entries = self._written.get(lane, (None, 0))
            if known is not table:  # somebody else's lane, or its blocks were taken and given anew
                entries = 0
            if entries < len(table):
                start = lane * self.width
                where.extend(range(start + entries, start + len(table)))
                blocks.extend(table[entries:])
                self._written[lane] = (table, len(table))
        return where, blocks

    def forget(self) -> None:
        """The device may lack some of what was noted: send all of it again."""
        self._written.clear()


class CudaModelRunner(ModelRunner):
    """Runs a model on a GPU (or, for tests, the same code on a CPU).

    Args:
        model, kv_cache, max_model_len: as for ``ModelRunner``.
        max_num_seqs: rows of the largest step.
        max_num_tokens: tokens of the largest step.
        make_graph: how decode steps are captured; None runs them kernel by kernel.
        forward: another way to compute ``model.forward``.
        owns_model: ``close()`` gives the weights back as well.
    """

    def __init__(
        self,
        model: LlamaForCausalLM,
        kv_cache: KVCache,
        max_model_len: int,
        *,
        max_num_seqs: int,
        max_num_tokens: int,
        make_graph: Callable[[], Graph] | None = None,
        forward: Callable[..., Tensor] | None = None,
        owns_model: bool = False,
    ) -> None:
        super().__init__(model, kv_cache, max_model_len)
        device = model.device
        self._module = torch.get_device_module(device)
        self._forward_pass = forward or model
        self._owns_model = owns_model
        self._block_tables = BlockTables(max_num_seqs, self.max_blocks, device)
        most_updates = max_num_seqs * self.max_blocks
        capacity = StepInputs.size(max_num_tokens, max_num_seqs, most_updates)
        self._copy_in = CopyIn(capacity, device)
        self._sampled = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)
        # Where every graph leaves its result, so that they need not keep one each.
        self._decoded = torch.zeros(
            max_num_seqs, model.config.hidden_size, dtype=model.dtype, device=device
        )
        pinned = device.type == "cuda"
        self._host_ids = [
            torch.zeros(max_num_seqs, dtype=torch.int32, pin_memory=pinned) for _ in range(TURNS)
        ]
        self._turn = 0
        self._graphs: DecodeGraphs | None = None
        if make_graph is not None:
            sizes = batch_sizes(max_num_seqs)
            with torch.inference_mode():
                self._graphs = DecodeGraphs(
                    self._padded_decode, sizes, make_graph, self._clear_inputs
                )

    def execute(self, output: SchedulerOutput) -> dict[str, SampledToken]:
        """See ``Executor``: a launch that is waited for."""
        return self.launch(output).wait()

    @torch.inference_mode()
    def launch(self, output: SchedulerOutput, before: Launched | None = None) -> Launched:
        """See ``Launcher``."""
        assert self.model is not None and self.kv_cache is not None, "closed"
        self._move_blocks(output)
        if not output.scheduled:
            return Done({})
        with explained_oom(
            f"a step of {output.num_batched_tokens} tokens",
            "lower gpu_memory_utilization, max_num_batched_tokens or max_num_seqs",
        ):
            return self._launch(output, before)

    def close(self) -> None:
        """Give all memory back, even what somebody still holds (a traceback, say)."""
        if self.kv_cache is None:
            return
        self._module.synchronize()
        if self._graphs is not None:
            self._graphs.close()
        held = [*tensors_of(self), *self._copy_in.tensors(), self._block_tables.tensor]
        held += tensors_of(self.kv_cache)
        if self._owns_model and self.model is not None:
            held += [*self.model.parameters(), *self.model.buffers()]
        empty_storages(held)
        del held, self._forward_pass
        super().close()
        release_device_caches()

    def _launch(self, output: SchedulerOutput, before: Launched | None) -> Launched:
        try:
            packed = self._pack_in(output, before)
            logits = self._logits(packed)  # [R, V]
        except BaseException:
            self._block_tables.forget()
            raise
        if not packed.due:
            return Done({})
        rows = [packed.rows[index] for index in packed.due]
        if packed.needs is None:
            return Done(self._draw(logits, rows))
        knobs = self._inputs(packed).knobs[: len(rows)]
        return self._send_back(sample(logits, knobs, packed.needs), rows)

    # -- the host's part ----------------------------------------------------------------------

    def _move_blocks(self, output: SchedulerOutput) -> None:
        if output.copies and output.moves_made < len(output.MOVES):
            self._block_tables.forget()  # copy-on-write changes entries in the middle of a table
        super()._move_blocks(output)

    def _pack_in(self, output: SchedulerOutput, before: Launched | None) -> _Packed:
        """Write the step down, and send it."""
        decodes = [row for row in output.scheduled if row.num_tokens <= 1]  # padding rows too
        chunks = [row for row in output.scheduled if row.num_tokens > 1]
        rows = decodes + chunks
        query_lens = [1] * len(decodes) + [row.num_tokens for row in chunks]
        padding = sum(row.num_padding_tokens for row in rows if row.phase != "padding")
        used = sum(query_lens)
        graph_size = None
        if self._graphs is not None and not chunks and not padding:
            graph_size = self._graphs.padded_size(len(rows))
        num_tokens, num_rows = graph_size or used + padding, graph_size or len(rows)

        where, blocks = self._block_tables.changes(rows)
        buffer = self._copy_in.begin()
        inputs = StepInputs.over(buffer, num_tokens, num_rows, len(where))
        self._write_tokens(inputs, decodes, chunks)
        inputs.query_start[0] = 0
        inputs.query_start[1 : len(rows) + 1] = np.cumsum(query_lens)
        count = len(rows)
        inputs.seq_lens[:count] = [row.start + max(row.num_tokens, 1) for row in rows]
        inputs.lanes[:count] = [row.slot for row in rows]
        inputs.prompt_lens[:count] = [row.request.num_prompt_tokens for row in rows]
        inputs.source[:count] = self._sources(rows, before)
        inputs.where[:], inputs.blocks[:] = where, blocks
        due = [index for index, row in enumerate(rows) if row.samples]
        ends = inputs.query_start[1:]
        inputs.due[: len(due)] = [ends[index] - 1 for index in due]
        inputs.pad(used, count)
        needs = None
        if not any(waits_for_tokens(row) for row in rows):
            knobs = inputs.knobs[: len(due)]
            vocab_size = self.model.config.vocab_size  # type: ignore[union-attr]
            needs = write_knobs([sampling_row(rows[index]) for index in due], vocab_size, knobs)
        self._copy_in.send(StepInputs.size(num_tokens, num_rows, len(where)))
        if where:
            sent = StepInputs.over(self._copy_in.device_buffer, num_tokens, num_rows, len(where))
            self._block_tables.tensor.view(-1).index_copy_(0, sent.where.long(), sent.blocks)
        return _Packed(rows, due, needs, query_lens, num_tokens, graph_size)

    def _write_tokens(
        self,
        inputs: StepInputs[np.ndarray],
        decodes: list[ScheduledRequest],
        chunks: list[ScheduledRequest],
    ) -> None:
        """Ids, positions and slots."""
        size, count = self.block_size, len(decodes)
        starts = [row.start for row in decodes]
        inputs.ids[:count] = [row.request.token_ids[row.start] for row in decodes]
        inputs.positions[:count] = starts
        blocks = [row.request.block_table[row.start // size] for row in decodes]
        offsets = np.array(starts, dtype=np.int64) % size
        inputs.slots[:count] = np.array(blocks, dtype=np.int64) * size + offsets
        at = count
        for row in chunks:
            here = slice(at, at + row.num_tokens)
            positions = np.arange(row.start, row.end)
            inputs.ids[here] = row.request.token_ids[row.start : row.end]
            inputs.positions[here] = positions
            table = np.array(row.request.block_table)
            inputs.slots[here] = table[positions // size] * size + positions % size
            at += row.num_tokens

    @staticmethod
    def _sources(rows: list[ScheduledRequest], before: Launched | None) -> list[int]:
        """Where on the device the rows' last tokens are, of those that the host does not know."""
        if not isinstance(before, OnDevice):
            return [-1] * len(rows)
        sources = []
        for row in rows:
            last = row.start + max(row.num_tokens, 1) - 1
            unknown = row.request.token_ids[last] == PENDING
            sources.append(before.places[row.request.request_id] if unknown else -1)
        return sources

    # -- the device's part --------------------------------------------------------------------

    def _inputs(self, packed: _Packed) -> StepInputs[Tensor]:
        """The step's numbers where the device finds them."""
        rows = packed.graph_size or len(packed.rows)
        return StepInputs.over(self._copy_in.device_buffer, packed.num_tokens, rows)

    def _logits(self, packed: _Packed) -> Tensor:
        """Logits of the rows that sample, ``[R, V]``."""
        assert self.model is not None
        count = len(packed.due)
        inputs = self._inputs(packed)
        if packed.graph_size is not None:
            assert self._graphs is not None
            hidden = self._graphs.replay(packed.graph_size)  # [padded rows, H]
        else:
            seq_lens = [row.start + max(row.num_tokens, 1) for row in packed.rows]
            hidden = self._hidden(inputs, packed.query_lens, seq_lens)  # [T, H]
        return self.model.compute_logits(hidden.index_select(0, inputs.due[:count]))

    def _padded_decode(self, size: int) -> Tensor:
        """What a graph of ``size`` rows captures: token ids to hidden states, ``[size, H]``."""
        inputs = StepInputs.over(self._copy_in.device_buffer, size, size)
        # The host's copy of the lengths is frozen into the graph, so it says what is possible.
        longest = [self.max_blocks * self.block_size] * size
        return self._decoded[:size].copy_(self._hidden(inputs, [1] * size, longest))

    def _clear_inputs(self, size: int) -> None:
        """A step of ``size`` rows that are all padding, for the run before the capture."""
        inputs = StepInputs.over(self._copy_in.begin(), size, size)
        inputs.query_start[0] = 0
        inputs.pad(0, 0)
        self._copy_in.send(StepInputs.size(size, size))

    def _hidden(
        self, inputs: StepInputs[Tensor], query_lens: list[int], seq_lens: list[int]
    ) -> Tensor:
        """Final hidden states of the packed tokens, ``[T, H]``."""
        assert self.kv_cache is not None
        ids, positions = inputs.ids.long(), inputs.positions
        # The newest token of a row may be known to the device only.
        last = inputs.query_start[1:].long() - 1
        newest = self._sampled.index_select(0, inputs.source.clamp(min=0)).clamp(min=0).long()
        ids.index_copy_(0, last, torch.where(inputs.source >= 0, newest, ids.index_select(0, last)))
        meta = AttentionMetadata(
            slot_mapping=inputs.slots.long(),
            block_tables=self._block_tables.tensor.index_select(0, inputs.lanes),
            query_start=inputs.query_start,
            seq_lens=inputs.seq_lens,
            query_lens=query_lens,
            seq_lens_host=seq_lens,
            num_decodes=query_lens.count(1),
            prompt_lens=inputs.prompt_lens,
        )
        return self._forward_pass(ids, positions, self.kv_cache, meta)

    def _send_back(self, token_ids: Tensor, rows: list[ScheduledRequest]) -> OnDevice:
        """Keep the ids for the next step, and start their way to the host."""
        count = len(rows)
        self._turn = (self._turn + 1) % TURNS
        self._sampled[:count].copy_(token_ids)
        host_ids = self._host_ids[self._turn][:count]
        host_ids.copy_(self._sampled[:count], non_blocking=True)
        arrived = self._module.Event()
        arrived.record()
        places = {row.request.request_id: place for place, row in enumerate(rows)}
        return OnDevice(places, host_ids, arrived)
