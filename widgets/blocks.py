"""What a record says of KV blocks, sorted by when it happened.

A record lists the blocks that each request gained and lost in the step. Those lost by a request
that took part in the step were lost after the model ran (it finished); those of anybody else
before it (evicted, swapped out, aborted), so that the step's newcomers may hold them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from minibatch.record import StepRecord

Tables = dict[str, list[int]]


class BlockMoves(NamedTuple):
    """In this order: gained, replaced, lost; the model runs; released."""

    gained: Mapping[str, list[int]]
    replaced: list[tuple[str, int, int]]  # copy-on-write: (request, shared block, its own copy)
    lost: Mapping[str, list[int]]
    released: Mapping[str, list[int]]


def block_moves(record: StepRecord, tables: Mapping[str, list[int]]) -> BlockMoves:
    """The record's block changes. ``tables`` are those before the step."""
    freed = record.blocks_freed
    if not freed:
        return BlockMoves(record.blocks_allocated, [], {}, {})
    replaced = _copies(record)
    taken_over = {(request_id, old) for request_id, old, _ in replaced}
    took_part = {row.request_id for row in record.scheduled}
    reborn = {a.request_id for a in record.arrived if a.request_id in tables}
    lost: Tables = {}
    released: Tables = {}
    for request_id, blocks in freed.items():
        blocks = [block for block in blocks if (request_id, block) not in taken_over]
        if request_id in reborn:  # an aborted one's id, used again at once
            before = len(tables[request_id])
            lost[request_id], blocks = blocks[:before], blocks[before:]
        if blocks:
            target = released if request_id in took_part else lost
            target.setdefault(request_id, []).extend(blocks)
    return BlockMoves(record.blocks_allocated, replaced, lost, released)


def _copies(record: StepRecord) -> list[tuple[str, int, int]]:
    """Whose copies they are: it gained the new block and lost the old one."""
    copies: list[tuple[str, int, int]] = []
    for old, new in record.blocks_copied:
        for request_id, gained in record.blocks_allocated.items():
            if new in gained and old in record.blocks_freed.get(request_id, ()):
                copies.append((request_id, old, new))
                break
    return copies


def apply_moves(tables: Tables, moves: BlockMoves) -> None:
    """Tables as they stand while the model runs."""
    for request_id, blocks in moves.gained.items():
        table = tables.get(request_id)
        if table is None:
            tables[request_id] = list(blocks)
        else:
            table.extend(blocks)
    for request_id, old, new in moves.replaced:
        table = tables[request_id]
        table.remove(new)
        table[table.index(old)] = new
    remove_blocks(tables, moves.lost)


def remove_blocks(tables: Tables, lost: Mapping[str, list[int]]) -> None:
    for request_id, blocks in lost.items():
        table = tables.get(request_id)
        if table is None:
            continue
        if table == blocks:
            del tables[request_id]
            continue
        for block in blocks:
            if block in table:
                table.remove(block)
        if not table:
            del tables[request_id]
