"""The block manager by itself: counting, sharing, finding again, moving."""

from __future__ import annotations

from typing import Any

import pytest
from engine_helpers import published_nodes

from minibatch.block_manager import AllocStatus, BlockManager
from minibatch.errors import InvariantError
from minibatch.request import Request
from minibatch.sampling_params import SamplingParams


def request(token_ids: list[int], name: str = "A", **more: Any) -> Request:
    return Request(name, token_ids, SamplingParams(max_tokens=8), **more)


def cached(num_blocks: int = 8, **more: Any) -> BlockManager:
    return BlockManager(num_blocks, 0, 4, enable_prefix_caching=True, **more)


def compute(blocks: BlockManager, who: Request) -> None:
    """Give it what it lacks, as a step would, and pretend that the step has run."""
    hits = blocks.match_prefix(who)
    blocks.share(who, hits)
    who.num_computed_tokens = len(hits) * blocks.block_size
    blocks.allocate(who, who.num_tokens)
    blocks.publish(who, who.num_tokens)
    who.num_computed_tokens = who.num_tokens


# -- three answers ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "watermark", "answer"),
    [
        (5, 0, AllocStatus.OK),
        (6, 0, AllocStatus.LATER),  # 5 of 8 are free
        (8, 0, AllocStatus.LATER),
        (9, 0, AllocStatus.NEVER),
        (4, 1, AllocStatus.OK),
        (5, 1, AllocStatus.LATER),
        (7, 1, AllocStatus.LATER),
        (8, 1, AllocStatus.NEVER),
    ],
)
def test_ok_later_never(wanted: int, watermark: int, answer: AllocStatus) -> None:
    blocks = BlockManager(8, block_size=4)
    blocks.allocate(request([1] * 9), 9)
    assert blocks.num_free_blocks == 5
    assert blocks.can_allocate(wanted, watermark) is answer


@pytest.mark.parametrize("tokens", range(10))
def test_blocks_for_rounds_up(tokens: int) -> None:
    assert BlockManager(8, block_size=4).blocks_for(tokens) == (tokens + 3) // 4


def test_a_table_grows_only_at_block_boundaries() -> None:
    blocks = BlockManager(8, block_size=4)
    who = request([1] * 9)
    lengths = []
    for num_tokens in range(1, 10):
        blocks.allocate(who, num_tokens)
        lengths.append(len(who.block_table))
    assert lengths == [1, 1, 1, 1, 2, 2, 2, 2, 3]


def test_blocks_are_taken_from_the_front_and_come_back_tail_first() -> None:
    blocks = BlockManager(5, block_size=4)
    a, b = request([1] * 8, "A"), request([1] * 4, "B")
    blocks.allocate(a, 8)
    blocks.allocate(b, 4)
    assert (a.block_table, b.block_table) == ([0, 1], [2])
    blocks.free(a)
    assert a.block_table == []
    c = request([1] * 12, "C")
    blocks.allocate(c, 12)
    assert c.block_table == [0, 1, 3]  # without content they are reused first


def test_the_null_block_is_never_handed_out() -> None:
    blocks = BlockManager(4, block_size=4, reserve_null_block=True)
    assert blocks.num_usable_blocks == blocks.num_free_blocks == 3
    who = request([1] * 12)
    blocks.allocate(who, 12)
    assert sorted(who.block_table) == [1, 2, 3]


# -- contiguous reservations --------------------------------------------------------------------


def test_contiguous_first_fit_and_external_fragmentation() -> None:
    blocks = BlockManager(8, block_size=4)
    a, b, c, d = (request([1], name) for name in "ABCD")
    for who in (a, b, c):
        assert blocks.allocate_contiguous(who, 2)
    blocks.free(a)
    blocks.free(c)
    assert sorted(blocks.free_queue) == [0, 1, 4, 5, 6, 7]
    assert not blocks.allocate_contiguous(d, 5)  # 6 are free, but 4 in one piece
    assert d.block_table == [] and blocks.num_free_blocks == 6
    assert blocks.allocate_contiguous(d, 2)
    assert d.block_table == [0, 1]
    assert blocks.allocate_contiguous(a, 4)
    assert a.block_table == [4, 5, 6, 7]


# -- prefix cache -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "hit_tokens"), [(3, 0), (4, 0), (5, 4), (7, 4), (8, 4), (9, 8), (12, 8), (13, 12)]
)
def test_hits_are_whole_blocks_and_never_the_last_token(length: int, hit_tokens: int) -> None:
    blocks = cached()
    compute(blocks, request(list(range(13))))
    assert len(blocks.match_prefix(request(list(range(length)), "B"))) * 4 == hit_tokens


def test_a_hit_needs_the_same_tokens_from_the_beginning() -> None:
    blocks = cached()
    compute(blocks, request([1, 2, 3, 4, 5, 6, 7, 8]))
    assert blocks.match_prefix(request([5, 6, 7, 8, 9], "B")) == []  # same block, other prefix
    assert blocks.match_prefix(request([1, 2, 3, 9, 5, 6, 7, 8, 9], "B")) == []
    assert len(blocks.match_prefix(request([1, 2, 3, 4, 5, 6, 7, 9, 9], "B"))) == 1
    assert len(blocks.match_prefix(request([1, 2, 3, 4, 5, 6, 7, 8, 9], "B"))) == 2


def test_ids_with_equal_hashes_are_not_equal() -> None:
    """Python's hash of an integer is its remainder by 2**61 - 1; a tuple's follows from them."""
    modulus = 2**61 - 1
    first, twin = [1, 2, 3, 4], [1 + modulus, 2, 3, 4]
    assert hash(tuple(first)) == hash(tuple(twin))
    blocks = cached()
    compute(blocks, request([*first, 5]))
    assert blocks.match_prefix(request([*twin, 5], "B")) == []
    assert len(blocks.match_prefix(request([*first, 6], "C"))) == 1


def test_another_salt_shares_nothing() -> None:
    blocks = cached()
    compute(blocks, request([1, 2, 3, 4, 5]))
    assert blocks.match_prefix(request([1, 2, 3, 4, 5], "B", cache_salt="other")) == []


def test_cached_blocks_are_evicted_oldest_first_and_found_no_more() -> None:
    blocks = cached(num_blocks=4)
    a, b = request([1, 2, 3, 4, 5, 6, 7, 8], "A"), request([9, 9, 9, 9], "B")
    compute(blocks, a)
    blocks.free(a)
    compute(blocks, b)  # takes an empty block, not a cached one
    assert (blocks.num_free_blocks, blocks.num_cached_blocks) == (3, 2)
    assert len(blocks.match_prefix(request([1, 2, 3, 4, 5, 6, 7, 8, 0], "C"))) == 2
    big = request([7] * 8, "D")
    compute(blocks, big)  # one empty block is left, then the tail of A's prefix goes
    assert len(blocks.match_prefix(request([1, 2, 3, 4, 5, 6, 7, 8, 0], "C"))) == 1
    assert blocks.num_cached_blocks == 1


def test_a_hit_takes_a_cached_block_out_of_the_free_queue() -> None:
    blocks = cached(num_blocks=4)
    a = request([1, 2, 3, 4, 5])
    compute(blocks, a)
    kept = a.block_table[0]
    blocks.free(a)
    b = request([1, 2, 3, 4, 6], "B")
    hits = blocks.match_prefix(b)
    assert hits == [kept] and blocks.num_in_free_queue(hits) == 1
    blocks.share(b, hits)
    assert kept not in blocks.free_queue and blocks.num_cached_blocks == 0
    c = request([1, 2, 3, 4, 7], "C")
    assert blocks.num_in_free_queue(blocks.match_prefix(c)) == 0
    blocks.share(c, blocks.match_prefix(c))
    assert blocks.ref_counts[kept] == 2


def test_the_oldest_of_equal_blocks_is_hit_and_the_next_stands_in() -> None:
    blocks = cached(num_blocks=6)
    # In one step, so that neither finds the other's block.
    a, b = request([1, 2, 3, 4], "A"), request([1, 2, 3, 4], "B")
    for who in (a, b):
        blocks.allocate(who, 4)
    for who in (a, b):
        blocks.publish(who, 4)
        who.num_computed_tokens = 4
    probe = request([1, 2, 3, 4, 5], "C")
    assert blocks.match_prefix(probe) == a.block_table
    blocks.free(a)
    filler = request([8] * 20, "F")
    blocks.allocate(filler, 20)  # everything else, A's block too
    assert blocks.match_prefix(probe) == b.block_table


def test_a_prefix_is_found_again_when_its_beginning_is_computed_anew() -> None:
    """A node outlives its last block while longer prefixes hang on it."""
    blocks = cached(num_blocks=4)
    a, b = request([1, 2, 3, 4, 5, 6, 7, 8], "A"), request([1, 2, 3, 4], "B")
    for who in (a, b):  # side by side: B computes the first block once more
        blocks.allocate(who, who.num_tokens)
    blocks.publish(a, 8)
    head, tail = a.block_table
    probe = request([1, 2, 3, 4, 5, 6, 7, 8, 9], "C")
    assert blocks.match_prefix(probe) == [head, tail]
    blocks._unpublish(head)  # as when another request takes it
    assert blocks.match_prefix(probe) == []
    blocks.publish(b, 4)
    assert blocks.match_prefix(probe) == [*b.block_table, tail]


def test_the_trie_forgets_what_no_block_holds() -> None:
    blocks = cached(num_blocks=3)
    for letter in range(50):
        who = request([letter] * 12)
        compute(blocks, who)
        blocks.free(who)
    assert len(published_nodes(blocks)) == 3


def test_unpublish_takes_back_only_what_was_not_computed() -> None:
    blocks = cached()
    who = request(list(range(12)))
    blocks.allocate(who, 12)
    blocks.publish(who, 12)
    who.num_computed_tokens = 4  # the step that should have computed the rest is not run
    blocks.unpublish(who)
    assert blocks.match_prefix(request(list(range(13)), "B")) == who.block_table[:1]
    blocks.publish(who, 12)
    assert len(blocks.match_prefix(request(list(range(13)), "B"))) == 3


def test_without_caching_nothing_is_found() -> None:
    blocks = BlockManager(8, block_size=4)
    compute(blocks, request(list(range(9))))
    assert blocks.match_prefix(request(list(range(9)), "B")) == []


# -- sharing and copy-on-write ------------------------------------------------------------------


def test_writing_into_a_shared_block_copies_it_first() -> None:
    blocks = BlockManager(8, block_size=4)
    leader, sample = request(list(range(6)), "A#0"), request(list(range(6)), "A#1")
    compute(blocks, leader)
    first, second = leader.block_table
    blocks.share(sample, [first, second])
    sample.num_computed_tokens = 5
    assert [blocks.ref_counts[b] for b in (first, second)] == [2, 2]
    blocks.allocate(sample, 6)
    own = sample.block_table[1]
    assert sample.block_table == [first, own] and own != second
    assert [blocks.ref_counts[b] for b in (first, second, own)] == [2, 1, 1]
    assert blocks.take_moves() == ([], [], [(second, own)])
    blocks.check_invariants([leader, sample])


def test_a_block_of_ones_own_is_written_in_place() -> None:
    blocks = BlockManager(8, block_size=4)
    who = request(list(range(6)))
    compute(blocks, who)
    before = list(who.block_table)
    blocks.allocate(who, 7)
    assert who.block_table == before and blocks.take_moves() == ([], [], [])


# -- swapping -----------------------------------------------------------------------------------


def test_swapping_out_and_in() -> None:
    blocks = BlockManager(4, 3, block_size=4)
    a, b = request([1] * 8, "A"), request([1] * 8, "B")
    compute(blocks, a)
    compute(blocks, b)
    assert blocks.can_swap_out(a)
    blocks.swap_request_out(a)
    assert (a.block_table, a.cpu_block_table) == ([], [0, 1])
    assert blocks.take_moves() == ([(0, 0), (1, 1)], [], [])
    assert not blocks.can_swap_out(b)  # one CPU block is left
    blocks.swap_request_in(a)
    assert a.cpu_block_table == [] and len(a.block_table) == 2
    assert blocks.take_moves()[1] == [(0, a.block_table[0]), (1, a.block_table[1])]
    blocks.check_invariants([a, b])
    blocks.free(a)
    blocks.free(b)
    assert (blocks.num_free_blocks, blocks.num_free_cpu_blocks) == (4, 3)


def test_freeing_a_swapped_request_frees_its_cpu_blocks() -> None:
    blocks = BlockManager(4, 3, block_size=4)
    who = request([1] * 8)
    compute(blocks, who)
    blocks.swap_request_out(who)
    blocks.free(who)
    assert (blocks.num_free_blocks, blocks.num_free_cpu_blocks) == (4, 3)
    assert blocks.take_changes().cpu_freed == {"A": [0, 1]}


# -- its own watchman ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spoil",
    [
        lambda blocks, who: who.block_table.pop(),
        lambda blocks, who: who.block_table.append(who.block_table[0]),
        lambda blocks, who: blocks.free_queue.popitem(),
        lambda blocks, who: blocks.free_queue.update({who.block_table[0]: None}),
        lambda blocks, who: setattr(blocks, "num_cached_blocks", 1),
        lambda blocks, who: blocks.free_cpu_queue.popitem(),
        lambda blocks, who: who.cpu_block_table.append(0),
    ],
    ids=["lost entry", "repeated entry", "lost free block", "free and used", "cached count",
         "lost CPU block", "CPU block free and held"],
)  # fmt: skip
def test_check_invariants_sees(spoil: Any) -> None:
    blocks = BlockManager(4, 2, block_size=4)
    who = request([1] * 8)
    compute(blocks, who)
    blocks.check_invariants([who])
    spoil(blocks, who)
    with pytest.raises(InvariantError):
        blocks.check_invariants([who])
