"""Engines over a model made of paper, and a second set of books to audit them with.

``PaperExecutor`` stands in for a model: the "KV" of a token is a digest of all tokens up to it,
written into real slots and read back through real block tables. A block that is shared wrongly,
swapped to the wrong place, copied too late or read before it was written is noticed at once, and
tokens depend on nothing but the text so far, so they can be foretold without an engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

from minibatch.block_manager import BlockManager, PrefixNode
from minibatch.clock import VirtualClock
from minibatch.config import SchedulerConfig
from minibatch.engine import Engine
from minibatch.executor.base import SampledToken
from minibatch.output_processor import TokenizerLike
from minibatch.record import HELD_BACK_REASONS, StepRecord
from minibatch.request import Request, RequestStatus
from minibatch.sampling_params import SamplingParams
from minibatch.scheduler import Scheduler, SchedulerOutput

VOCAB = 50

# -- a model made of paper ----------------------------------------------------------------------


def digests(token_ids: Sequence[int]) -> list[int]:
    """The KV of each token: it depends on the token and on all before it."""
    values: list[int] = []
    value = 0
    for token_id in token_ids:
        value = crc32(b"%d," % token_id, value)
        values.append(value)
    return values


def next_token(token_ids: Sequence[int], sample_index: int = 0) -> int:
    """What the paper model says after ``token_ids``."""
    return crc32(b"%d of %d" % (sample_index, sum(digests(token_ids)))) % VOCAB


def foretell(
    prompt: Sequence[int],
    max_tokens: int,
    *,
    sample_index: int = 0,
    stop: Collection[int] = (),
    max_model_len: int = 10**9,
) -> list[int]:
    """The output of a request, whatever the engine does to it."""
    tokens = list(prompt)
    while len(tokens) < min(len(prompt) + max_tokens, max_model_len):
        tokens.append(next_token(tokens, sample_index))
        if tokens[-1] in stop:
            break
    return tokens[len(prompt) :]


class PaperExecutor:
    """See the top of this file.

    Args:
        config: sizes of the pools.
        clock: moved on by ``seconds(output)`` each time a step is executed.
        seconds: how long a step takes.

    Attributes:
        watch: called with each step before it is computed, when its decisions are made and
            nothing of it is done.
        errors: by step, raised instead of computing it (once each), the first first.
        speechless: ids of requests that no token can be drawn for.
        scripts: tokens that a request says, whatever was said before.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        clock: VirtualClock | None = None,
        seconds: Callable[[SchedulerOutput], float] = lambda output: 1.0,
    ) -> None:
        size = config.block_size
        self.block_size = size
        self.device: list[list[int | None]] = [[None] * size for _ in range(config.num_gpu_blocks)]
        self.host: list[list[int | None]] = [[None] * size for _ in range(config.num_cpu_blocks)]
        self.clock = clock
        self.seconds = seconds
        self.watch: Callable[[SchedulerOutput], None] = lambda output: None
        self.errors: dict[int, list[BaseException]] = {}
        self.speechless: set[str] = set()
        self.scripts: dict[str, Sequence[int]] = {}
        self.closed = False

    def execute(self, output: SchedulerOutput) -> dict[str, SampledToken]:
        self.watch(output)
        if self.errors.get(output.step):
            raise self.errors[output.step].pop(0)
        if self.clock is not None:
            self.clock.advance(self.seconds(output))
        self._move(output)
        for row in output.scheduled:  # each layer stores all KV of a step before any row reads
            values = digests(row.request.token_ids)
            last = row.end if row.phase != "padding" else row.start + 1
            for position in range(row.start, last):
                block = self.device[row.request.block_table[position // self.block_size]]
                block[position % self.block_size] = values[position]
        return {
            row.request.request_id: self._sample(row.request)
            for row in output.scheduled
            if row.samples
        }

    def close(self) -> None:
        self.closed = True

    def read(self, request: Request) -> list[int | None]:
        """The KV of all its tokens, found through its block table."""
        blocks = [self.device[block] for block in request.block_table]
        return [value for block in blocks for value in block][: request.num_tokens]

    def _move(self, output: SchedulerOutput) -> None:
        pools = {
            "swap_out": (self.device, self.host),
            "swap_in": (self.host, self.device),
            "copies": (self.device, self.device),
        }
        for name in output.MOVES[output.moves_made :]:
            source, target = pools[name]
            contents = [list(source[block]) for block, _ in getattr(output, name)]
            for (_, block), content in zip(getattr(output, name), contents, strict=True):
                target[block] = content
            output.moves_made += 1

    def _sample(self, request: Request) -> SampledToken:
        seen = self.read(request)
        for position, (found, right) in enumerate(
            zip(seen, digests(request.token_ids), strict=True)
        ):
            assert found == right, f"{request} reads foreign or missing KV at position {position}"
        if request.request_id in self.speechless:
            return SampledToken(None)
        script = self.scripts.get(request.request_id, ())
        if request.num_output_tokens < len(script):
            return SampledToken(script[request.num_output_tokens])
        return SampledToken(next_token(request.token_ids, request.sample_index))


class Alphabet:
    """A tokenizer whose tokens are the given strings; text must be a chain of single letters."""

    def __init__(self, tokens: Sequence[str], special: Collection[int] = ()) -> None:
        self.tokens = list(tokens)
        self.special_token_ids = frozenset(special)
        self.byte_token_ids: Mapping[int, int] = {}

    def id_to_token(self, token_id: int) -> str | None:
        return self.tokens[token_id] if token_id < len(self.tokens) else None

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        hidden = self.special_token_ids if skip_special_tokens else frozenset()
        return "".join(self.tokens[i] for i in token_ids if i not in hidden)

    def encode(self, text: str) -> list[int]:
        return [self.tokens.index(letter) for letter in text]


# -- engines and workloads ----------------------------------------------------------------------

DEFAULT_KNOBS: dict[str, Any] = {
    "num_gpu_blocks": 32,
    "num_cpu_blocks": 32,
    "block_size": 4,
    "max_model_len": 64,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
}


def make_config(**knobs: Any) -> SchedulerConfig:
    return SchedulerConfig(**(DEFAULT_KNOBS | knobs))


def make_engine(
    *,
    seconds: Callable[[SchedulerOutput], float] = lambda output: 1.0,
    tokenizer: TokenizerLike | None = None,
    eos_token_ids: Sequence[int] = (),
    keep_records: int | None = None,
    **knobs: Any,
) -> Engine:
    """An engine over paper and a virtual clock; every step takes a second unless told otherwise."""
    config = make_config(**knobs)
    clock = VirtualClock()
    return Engine(
        config,
        PaperExecutor(config, clock, seconds),
        clock=clock,
        tokenizer=tokenizer,
        vocab_size=VOCAB,
        eos_token_ids=eos_token_ids,
        keep_records=keep_records,
        check=True,
    )


def paper(engine: Engine) -> PaperExecutor:
    assert isinstance(engine.executor, PaperExecutor)
    return engine.executor


def greedy(max_tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **more)


def run(engine: Engine, limit: int = 5000) -> list[StepRecord]:
    """Step until nothing is left."""
    records: list[StepRecord] = []
    while engine.has_unfinished:
        assert len(records) < limit, f"not done after {limit} steps"
        records.append(engine.step())
    return records


def tokens_of(engine: Engine, request_id: str) -> list[int]:
    return engine.output(request_id).outputs[0].token_ids


def table(records: Iterable[StepRecord]) -> list[str]:
    """Each step in shorthand: ``A:p5 B:d1 C:x1`` (prefill of 5, decode, padding of 1), evictions
    as ``-B``, swaps in as ``+B``, and who was held back for what.
    """
    return [shorthand(record) for record in records]


def shorthand(record: StepRecord) -> str:
    marks = {"prefill": "p", "decode": "d", "padding": "x"}
    words = [f"-{p.request_id}/{p.mode[0]}" for p in record.preempted]
    words += [f"+{request_id}" for request_id in record.swapped_in]
    for row in record.scheduled:
        tokens = row.num_tokens or row.num_padding_tokens
        padding = f"+{row.num_padding_tokens}" if row.num_tokens and row.num_padding_tokens else ""
        words.append(f"{row.request_id}:{marks[row.phase]}{tokens}{padding}")
    if record.held_back is not None:
        words.append(f"| {record.held_back.request_id} {record.held_back.reason}")
    return " ".join(words)


# -- the second set of books --------------------------------------------------------------------


def assert_all_free(engine: Engine) -> None:
    """With nobody left, every block is in its pool."""
    blocks = engine.scheduler.block_manager
    assert not engine.scheduler.requests
    assert blocks.num_free_blocks == blocks.num_usable_blocks
    assert blocks.num_free_cpu_blocks == blocks.num_cpu_blocks
    assert not any(blocks.ref_counts)


def holders(scheduler: Scheduler) -> list[Request]:
    """Whoever may have blocks: the living, and in ``static`` the dead of an undrained batch."""
    batch: list[Request] = getattr(scheduler, "batch", [])
    return list({*scheduler.requests.values(), *batch})


def published_nodes(blocks: BlockManager) -> list[tuple[PrefixNode, list[int]]]:
    """Every node of the prefix trie and all tokens from its root to its end."""
    found: list[tuple[PrefixNode, list[int]]] = []
    stack = [(root, list[int]()) for root in blocks.prefix_roots.values()]
    while stack:
        node, tokens = stack.pop()
        for child in node.children.values():
            found.append((child, tokens + list(child.tokens)))
            stack.append(found[-1])
    return found


def audit_blocks(scheduler: Scheduler) -> None:
    """Each block is exactly one of free, cached and used, as often counted as held."""
    blocks = scheduler.block_manager
    held = Counter(block for request in holders(scheduler) for block in request.block_table)
    for request in holders(scheduler):
        assert len(set(request.block_table)) == len(request.block_table), f"{request} repeats one"
    published = {block for node, _ in published_nodes(blocks) for block in node.blocks}
    first = len(blocks.ref_counts) - blocks.num_usable_blocks
    assert not {*held, *blocks.free_queue} & set(range(first)), "the null block was handed out"
    free = cached = used = 0
    for block in range(first, len(blocks.ref_counts)):
        is_free = block in blocks.free_queue and block not in published
        is_cached = block in blocks.free_queue and block in published
        is_used = held[block] > 0
        assert is_free + is_cached + is_used == 1, f"block {block} is not exactly one thing"
        assert blocks.ref_counts[block] == held[block], f"block {block} is miscounted"
        assert (blocks.node_of[block] is not None) == (block in published)
        free, cached, used = free + is_free, cached + is_cached, used + is_used
    assert free + cached + used == blocks.num_usable_blocks
    assert blocks.num_free_blocks == free + cached
    assert blocks.num_cached_blocks == cached
    on_host = Counter(b for request in holders(scheduler) for b in request.cpu_block_table)
    assert all(count == 1 for count in on_host.values()), "a CPU block has two owners"
    assert not on_host.keys() & blocks.free_cpu_queue.keys()
    assert len(on_host) + blocks.num_free_cpu_blocks == blocks.num_cpu_blocks


def audit_published(scheduler: Scheduler, executor: PaperExecutor) -> None:
    """Whatever the prefix cache promises is what stands in the block."""
    size = executor.block_size
    for node, tokens in published_nodes(scheduler.block_manager):
        for block in node.blocks:
            assert executor.device[block] == digests(tokens)[-size:], f"block {block} lies"


def audit_queues(scheduler: Scheduler) -> None:
    """Each live request stands in exactly one place, and has what it should have there."""
    unborn = [request for family in scheduler.samples.values() for request in family]
    places = [*scheduler.waiting, *scheduler.running, *scheduler.swapped, *unborn]
    assert len(places) == len(scheduler.requests)
    assert {request.request_id for request in places} == scheduler.requests.keys()
    size = scheduler.config.block_size
    for request in (*scheduler.waiting, *unborn):
        assert request.status is RequestStatus.WAITING
        assert not request.block_table and not request.cpu_block_table
        assert request.num_computed_tokens == 0 and not request.is_prefill
    for request in scheduler.running:
        assert request.status is RequestStatus.RUNNING
        assert not request.cpu_block_table
        assert len(request.block_table) * size >= request.num_computed_tokens
    for request in scheduler.swapped:
        assert request.status is RequestStatus.SWAPPED
        assert not request.block_table
        assert len(request.cpu_block_table) * size >= request.num_computed_tokens
    assert len(scheduler.running) <= scheduler.config.max_num_seqs
    lanes = [request.slot for request in scheduler.running]
    assert len(set(lanes)) == len(lanes) and all(lane >= 0 for lane in lanes)


@dataclass
class Replay:
    """The run as its records tell it: nothing here looks at the engine.

    A block table is what was allocated, in order, less the first of each freed block.
    """

    tables: dict[str, list[int]] = field(default_factory=dict)
    host_tables: dict[str, list[int]] = field(default_factory=dict)
    cached: set[int] = field(default_factory=set)
    lanes: dict[str, int] = field(default_factory=dict)
    waiting: set[str] = field(default_factory=set)
    running: set[str] = field(default_factory=set)
    swapped: set[str] = field(default_factory=set)
    unborn: dict[str, set[str]] = field(default_factory=dict)  # by leader
    lingering: set[str] = field(default_factory=set)  # static: done, but the batch is not

    def take(self, record: StepRecord, policy: str) -> None:
        self._blocks(self.tables, record.blocks_allocated, record.blocks_freed)
        self._blocks(self.host_tables, record.cpu_blocks_allocated, record.cpu_blocks_freed)
        for source, target in record.blocks_copied:
            owners = [i for i, blocks in record.blocks_allocated.items() if target in blocks]
            assert len(owners) == 1 and source in record.blocks_freed[owners[0]]
        self.cached -= {block for blocks in record.blocks_allocated.values() for block in blocks}
        self.cached |= set(record.blocks_cached)
        self._queues(record, policy)

    def _blocks(
        self,
        tables: dict[str, list[int]],
        allocated: Mapping[str, list[int]],
        freed: Mapping[str, list[int]],
    ) -> None:
        for request_id, blocks in allocated.items():
            tables.setdefault(request_id, []).extend(blocks)
        for request_id, blocks in freed.items():
            for block in blocks:
                tables[request_id].remove(block)
            if not tables[request_id]:
                del tables[request_id]

    def _queues(self, record: StepRecord, policy: str) -> None:
        queued = {*record.waiting, *record.running, *record.swapped}  # once all was decided
        ended = {finish.request_id for finish in record.finished}
        for arrival in record.arrived:
            leader, _, index = arrival.request_id.partition("#")
            if index and index != "0" and policy in ("continuous", "unified"):
                self.unborn.setdefault(f"{leader}#0", set()).add(arrival.request_id)
            else:
                self.waiting.add(arrival.request_id)
        between = ended - queued  # ended before the step was decided
        self._leave(between, policy)
        for preemption in record.preempted:
            self.running.remove(preemption.request_id)
            del self.lanes[preemption.request_id]
            swap = preemption.mode == "swap"
            (self.swapped if swap else self.waiting).add(preemption.request_id)
        for admission in record.admitted:
            swapped_in = admission.how == "swapped_in"
            (self.swapped if swapped_in else self.waiting).remove(admission.request_id)
            self.running.add(admission.request_id)
            lane = min(set(range(len(self.lanes) + 1)) - set(self.lanes.values()))
            self.lanes[admission.request_id] = lane  # the lowest that is free
        assert set(record.running) == self.running and set(record.swapped) == self.swapped
        assert set(record.waiting) == self.waiting
        for row in record.scheduled:
            assert row.slot == self.lanes[row.request_id], f"{row} is not in its lane"
        for leader in [i for i in self.unborn if i in record.sampled]:
            self.waiting |= self.unborn.pop(leader)
        self._leave(ended - between, policy)

    def _leave(self, ended: set[str], policy: str) -> None:
        for leader in ended & self.unborn.keys():
            self.waiting |= self.unborn.pop(leader)
        for family in self.unborn.values():
            family -= ended
        self.waiting -= ended
        self.swapped -= ended
        self.lingering |= ended & self.lanes.keys()
        self.running -= ended
        if policy != "static" or not self.running:
            for request_id in self.lingering:
                del self.lanes[request_id]
            self.lingering.clear()


class Auditor:
    """Audits every step of an engine over paper, between decision and model and after it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.replay = Replay()
        self.records: list[StepRecord] = []
        self.free_at_decision = 0
        paper(engine).watch = self._between

    def step(self) -> StepRecord:
        record = self.engine.step()
        self.after(record)
        return record

    def _between(self, output: SchedulerOutput) -> None:
        scheduler = self.engine.scheduler
        audit_blocks(scheduler)
        if output.scheduled:  # else it was taken back after its requests were aborted
            self.free_at_decision = scheduler.block_manager.num_free_blocks
            assert output.free_blocks == self.free_at_decision
            assert output.free_cpu_blocks == scheduler.block_manager.num_free_cpu_blocks
            assert output.cached_blocks == scheduler.block_manager.num_cached_blocks

    def after(self, record: StepRecord) -> None:
        scheduler, config = self.engine.scheduler, self.engine.config
        audit_blocks(scheduler)
        audit_queues(scheduler)
        audit_published(scheduler, paper(self.engine))
        self.replay.take(record, config.policy)
        actual = {r.request_id: r.block_table for r in holders(scheduler) if r.block_table}
        assert self.replay.tables == actual
        blocks = scheduler.block_manager
        assert self.replay.cached == {b for b in blocks.free_queue if blocks.node_of[b]}
        on_host = {r.request_id: r.cpu_block_table for r in holders(scheduler)}
        assert self.replay.host_tables == {i: held for i, held in on_host.items() if held}
        rows = record.scheduled
        assert record.num_batched_tokens == sum(row.num_tokens for row in rows)
        assert record.num_padding_tokens == sum(row.num_padding_tokens for row in rows)
        computed = record.num_batched_tokens + record.num_padding_tokens
        assert computed <= config.max_num_batched_tokens
        assert len(rows) == len({row.request_id for row in rows}) <= config.max_num_seqs
        assert record.held_back is None or record.held_back.reason in HELD_BACK_REASONS
        assert record.step == len(self.records)
        self.records.append(record)
