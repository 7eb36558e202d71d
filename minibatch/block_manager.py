"""Who owns which block of KV memory.

KV memory is cut into blocks of ``block_size`` tokens. A request's ``block_table`` lists its
blocks in order; they may lie anywhere, so any free block serves anyone and only the last block
of a request can be part empty (PagedAttention, Kwon et al. 2023).

Three more things come from counting references instead of owning:

* **prefix caching**: a full block whose content is known stays findable after it is freed,
  until somebody needs its memory;
* **sharing**: several requests may hold the same block;
* **copy-on-write**: who must write into a shared block gets a copy first.

The manager moves no bytes. It decides, and notes the moves (``swap_out``, ``swap_in``,
``copies``) for the executor and the changes (``changes``) for the record.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from minibatch.errors import InvariantError
from minibatch.request import Request

NULL_BLOCK = 0


class AllocStatus(Enum):
    """Can it have its blocks? (vLLM 0.6.0's three answers.)"""

    OK = "ok"
    LATER = "later"  # not now: others hold too many
    NEVER = "never"  # not even in an empty pool


class PrefixNode:
    """The content of one full block *and of all blocks before it*: a node of a trie.

    vLLM chains a hash over the blocks of a prefix and compares hashes. Walking a trie asks the
    same question, and since a dict compares the token ids themselves, two prefixes with equal
    hashes can never be taken for each other.
    """

    __slots__ = ("parent", "tokens", "children", "blocks")

    def __init__(self, parent: PrefixNode | None, tokens: tuple[int, ...]) -> None:
        self.parent = parent
        self.tokens = tokens
        self.children: dict[tuple[int, ...], PrefixNode] = {}
        self.blocks: dict[int, None] = {}  # blocks with this content, the oldest first


@dataclass
class BlockChanges:
    """What happened to the block tables since the last record; ids in table order."""

    allocated: dict[str, list[int]] = field(default_factory=dict)
    freed: dict[str, list[int]] = field(default_factory=dict)
    cpu_allocated: dict[str, list[int]] = field(default_factory=dict)
    cpu_freed: dict[str, list[int]] = field(default_factory=dict)
    cached: dict[int, None] = field(default_factory=dict)  # became free but findable; a set


class BlockManager:
    """A device pool, a CPU pool, reference counts and the prefix trie.

    Args:
        num_gpu_blocks: size of the device pool. With ``reserve_null_block`` (vLLM's V1) block 0
            is never handed out, so one fewer can be used.
        num_cpu_blocks: size of the CPU pool, for swapped requests.
        block_size: tokens a block.
        enable_prefix_caching: keep full blocks findable by content.
    """

    def __init__(
        self,
        num_gpu_blocks: int,
        num_cpu_blocks: int = 0,
        block_size: int = 16,
        *,
        enable_prefix_caching: bool = False,
        reserve_null_block: bool = False,
    ) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        first = 1 if reserve_null_block else 0
        self.num_usable_blocks = num_gpu_blocks - first
        self.ref_counts = [0] * num_gpu_blocks
        # An ordered set: blocks are taken from the front, and cached ones wait at the back.
        self.free_queue: OrderedDict[int, None] = OrderedDict.fromkeys(range(first, num_gpu_blocks))
        self.num_cpu_blocks = num_cpu_blocks
        self.free_cpu_queue: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_cpu_blocks))
        self.prefix_roots: dict[Hashable, PrefixNode] = {}  # by the requests' cache_salt
        self.node_of: list[PrefixNode | None] = [None] * num_gpu_blocks
        self.num_cached_blocks = 0  # free blocks whose content is still findable
        self._held: list[tuple[Request, int]] | None = None  # to be published later, in order
        self.changes = BlockChanges()
        self.swap_out: list[tuple[int, int]] = []  # (device block, CPU block)
        self.swap_in: list[tuple[int, int]] = []  # (CPU block, device block)
        self.copies: list[tuple[int, int]] = []  # (device block, device block)

    # -- counting -----------------------------------------------------------------------------

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody holds, cached ones included: any of them can be taken."""
        return len(self.free_queue)

    @property
    def num_free_cpu_blocks(self) -> int:
        return len(self.free_cpu_queue)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` tokens fill, the last one perhaps in part."""
        return -(-num_tokens // self.block_size)

    def can_allocate(self, num_blocks: int, watermark: int = 0) -> AllocStatus:
        """``watermark`` blocks must be left over (vLLM 0.6.0, so that decodes do not evict)."""
        if self.num_usable_blocks - num_blocks < watermark:
            return AllocStatus.NEVER
        if len(self.free_queue) - num_blocks < watermark:
            return AllocStatus.LATER
        return AllocStatus.OK

    # -- allocating and freeing ---------------------------------------------------------------

    def allocate(self, request: Request, num_tokens: int) -> None:
        """Grow ``request``'s table until it covers ``num_tokens``, and make what will be written
        its own. The caller has checked that enough blocks are free.
        """
        table = request.block_table
        first_written = request.num_computed_tokens // self.block_size
        if first_written < len(table) and self.ref_counts[table[first_written]] > 1:
            self._copy_on_write(request, first_written)
        missing = self.blocks_for(num_tokens) - len(table)
        if missing > 0:
            taken = [self._take_free_block() for _ in range(missing)]
            table.extend(taken)
            self._log(self.changes.allocated, request, taken)

    def allocate_contiguous(self, request: Request, num_blocks: int) -> bool:
        """Give ``request`` a run of ``num_blocks`` neighbouring blocks, or nothing and False.

        How engines before PagedAttention reserved KV; first fit. Free memory in pieces that are
        too short is external fragmentation.
        """
        run = self._find_run(num_blocks)
        if run is None:
            return False
        for block in run:
            self._claim(block)
        request.block_table.extend(run)
        self._log(self.changes.allocated, request, list(run))
        return True

    def free(self, request: Request) -> None:
        """Drop all of ``request``'s blocks, on the device and on the CPU. The tail goes first,
        so that of a cached prefix the beginning, which more requests share, is evicted last.
        """
        table = request.block_table
        if table:
            for block in reversed(table):
                self._release(block)
            self._log(self.changes.freed, request, table)
            request.block_table = []
        if request.cpu_block_table:
            self.free_cpu_queue.update(dict.fromkeys(request.cpu_block_table))
            self._log(self.changes.cpu_freed, request, request.cpu_block_table)
            request.cpu_block_table = []

    # -- sharing ------------------------------------------------------------------------------

    def match_prefix(self, request: Request) -> list[int]:
        """Blocks that already hold the beginning of ``request``, in order.

        Whole blocks only, and never the last token: its logits are wanted, so at least one
        token must be computed.
        """
        if not self.enable_prefix_caching:
            return []
        assert self._held is None, "looked up while something is still to be published"
        hits: list[int] = []
        node, size = self._prefix_root(request), self.block_size
        for start in range(0, request.num_tokens - size, size):
            child = node.children.get(tuple(request.token_ids[start : start + size]))
            if child is None or not child.blocks:
                break
            hits.append(next(iter(child.blocks)))
            node = child
        return hits

    def num_in_free_queue(self, blocks: Iterable[int]) -> int:
        """How many of these are cached but unowned: holding them uses up free memory."""
        return sum(self.ref_counts[block] == 0 for block in blocks)

    def share(self, request: Request, blocks: Sequence[int]) -> None:
        """Put blocks that hold the beginning of ``request`` into its (empty) table."""
        if not blocks:
            return
        for block in blocks:
            if self.ref_counts[block] == 0:
                del self.free_queue[block]
                self._no_longer_cached(block)
            self.ref_counts[block] += 1
        request.block_table.extend(blocks)
        self._log(self.changes.allocated, request, list(blocks))

    def publish(self, request: Request, num_tokens: int) -> None:
        """Make the full blocks among the first ``num_tokens`` tokens findable.

        vLLM's V1 does this when the step is *scheduled*: a later request of the same step may
        hit them, since each layer stores all keys and values of a step before any row attends.
        """
        if not self.enable_prefix_caching:
            return
        if self._held is not None:
            self._held.append((request, num_tokens))
            return
        table, size = request.block_table, self.block_size
        last = num_tokens // size
        index = last
        while index > 0 and self.node_of[table[index - 1]] is None:
            index -= 1
        for i in range(index, last):
            parent = self.node_of[table[i - 1]] if i > 0 else self._prefix_root(request)
            assert parent is not None
            tokens = tuple(request.token_ids[i * size : (i + 1) * size])
            node = parent.children.get(tokens)
            if node is None:
                node = parent.children[tokens] = PrefixNode(parent, tokens)
            node.blocks[table[i]] = None
            self.node_of[table[i]] = node

    def hold_publishing(self) -> None:
        """Put ``publish`` off until ``publish_held``: a token of some block is not known yet. Until
        then nobody may look anything up.
        """
        if self.enable_prefix_caching:
            self._held = []

    def publish_held(self) -> None:
        """Publish what was put off, but for requests that have ended since."""
        held, self._held = self._held or [], None
        for request, num_tokens in held:
            if request.finish_reason is None:
                self.publish(request, num_tokens)

    def unpublish(self, request: Request) -> None:
        """Take back what ``publish`` promised of tokens that were then never computed."""
        for block in request.block_table[request.num_computed_tokens // self.block_size :]:
            if self.node_of[block] is not None:
                self._unpublish(block)

    # -- swapping -----------------------------------------------------------------------------

    def can_swap_out(self, request: Request) -> bool:
        return len(request.block_table) <= len(self.free_cpu_queue)

    def swap_request_out(self, request: Request) -> None:
        """Device blocks -> as many CPU blocks. A shared block is copied for this request only."""
        blocks = request.block_table
        cpu_blocks = [self.free_cpu_queue.popitem(last=False)[0] for _ in blocks]
        self.swap_out.extend(zip(blocks, cpu_blocks, strict=True))
        self.free(request)
        request.cpu_block_table = cpu_blocks
        self._log(self.changes.cpu_allocated, request, cpu_blocks)

    def swap_request_in(self, request: Request) -> None:
        """CPU blocks -> as many device blocks. The caller has checked that they are free."""
        cpu_blocks = request.cpu_block_table
        blocks = [self._take_free_block() for _ in cpu_blocks]
        self.swap_in.extend(zip(cpu_blocks, blocks, strict=True))
        self.free(request)
        request.block_table = blocks
        self._log(self.changes.allocated, request, blocks)

    # -- handing over -------------------------------------------------------------------------

    def take_changes(self) -> BlockChanges:
        """The changes since the last call."""
        changes, self.changes = self.changes, BlockChanges()
        return changes

    def take_moves(self) -> tuple[list[tuple[int, int]], ...]:
        """(swap_out, swap_in, copies) since the last call, for the executor."""
        moves = self.swap_out, self.swap_in, self.copies
        self.swap_out, self.swap_in, self.copies = [], [], []
        return moves

    def check_invariants(self, requests: Iterable[Request]) -> None:
        """Every block is exactly one of free and used, and every count is a table entry.

        Raises:
            InvariantError: naming the block and the numbers that disagree.
        """
        counts = [0] * len(self.ref_counts)
        cpu_holders: set[int] = set()
        for request in requests:
            for block in request.block_table:
                counts[block] += 1
            if cpu_holders & set(request.cpu_block_table):
                raise InvariantError(f"{request} shares a CPU block.")
            cpu_holders.update(request.cpu_block_table)
        for block, (held, counted) in enumerate(zip(counts, self.ref_counts, strict=True)):
            if held != counted:
                raise InvariantError(f"block {block}: {held} table entries, count {counted}.")
            if block in self.free_queue and counted:
                raise InvariantError(f"block {block} is free but has {counted} holders.")
        used = sum(count > 0 for count in counts)
        if used + len(self.free_queue) != self.num_usable_blocks:
            raise InvariantError(
                f"{used} used + {len(self.free_queue)} free != {self.num_usable_blocks} blocks."
            )
        cached = sum(self.node_of[block] is not None for block in self.free_queue)
        if cached != self.num_cached_blocks:
            raise InvariantError(f"{cached} cached blocks, {self.num_cached_blocks} counted.")
        if cpu_holders & self.free_cpu_queue.keys():
            raise InvariantError("a CPU block is both free and held.")
        if len(cpu_holders) + len(self.free_cpu_queue) != self.num_cpu_blocks:
            raise InvariantError("CPU blocks were lost.")

    def _prefix_root(self, request: Request) -> PrefixNode:
        return self.prefix_roots.setdefault(request.cache_salt, PrefixNode(None, ()))

    # -- one block ----------------------------------------------------------------------------

    def _take_free_block(self) -> int:
        block = next(iter(self.free_queue))
        self._claim(block)
        return block

    def _claim(self, block: int) -> None:
        """From free to used; whoever takes it will overwrite it, so it is found no more."""
        del self.free_queue[block]
        self.ref_counts[block] = 1
        if self.node_of[block] is not None:
            self._no_longer_cached(block)
            self._unpublish(block)

    def _release(self, block: int) -> None:
        self.ref_counts[block] -= 1
        if self.ref_counts[block] == 0:
            self.free_queue[block] = None
            if self.node_of[block] is None:  # nothing worth keeping: reuse it first
                self.free_queue.move_to_end(block, last=False)
            else:
                self.num_cached_blocks += 1
                self.changes.cached[block] = None

    def _no_longer_cached(self, block: int) -> None:
        self.num_cached_blocks -= 1
        self.changes.cached.pop(block, None)

    def _unpublish(self, block: int) -> None:
        node = self.node_of[block]
        assert node is not None
        self.node_of[block] = None
        del node.blocks[block]
        # A node stays while a longer prefix hangs on it: its content may be computed again.
        while node.parent is not None and not node.blocks and not node.children:
            del node.parent.children[node.tokens]
            node = node.parent

    def _copy_on_write(self, request: Request, index: int) -> None:
        shared = request.block_table[index]
        own = self._take_free_block()
        self.copies.append((shared, own))
        request.block_table[index] = own  # the count moves in the same breath as the entry
        self._release(shared)
        self._log(self.changes.freed, request, [shared])
        self._log(self.changes.allocated, request, [own])

    def _find_run(self, length: int) -> range | None:
        start, size = -1, 0
        for block in sorted(self.free_queue):
            if size and block == start + size:
                size += 1
            else:
                start, size = block, 1
            if size == length:
                return range(start, start + length)
        return None

    @staticmethod
    def _log(log: dict[str, list[int]], request: Request, blocks: list[int]) -> None:
        log.setdefault(request.request_id, []).extend(blocks)
