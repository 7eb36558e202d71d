"""The packed form of a trace: same in, same out; nothing lost; nothing sent twice."""

from __future__ import annotations

import hashlib

import demo_traces
import numpy as np
import pytest

from widgets.codec import pack, squeeze, unpack
from widgets.columns import MOST_WAITING, STEP_COLUMNS, ColumnWriter, describe, encode
from widgets.names import Names
from widgets.view import view

# Of the columns of the "prefix" run. A change here is a change of format: raise SCHEMA.
GOLDEN = "9118da9ca3f683cc"


def whole(name: str) -> tuple[dict, dict[str, np.ndarray]]:
    trace = demo_traces.load(name)
    return unpack(encode(trace))


def test_packing_is_undone_by_unpacking() -> None:
    columns = {
        "a": ("i4", range(5)),
        "none": ("i4", ()),
        "b": ("f8", [1.5]),
        "c": ("u1", [7, 255, 0]),
        "d": ("u2", (65535,)),
    }
    header, back = unpack(squeeze(pack({"x": "é"}, columns)))
    assert header == {"x": "é"}
    for name, (dtype, values) in columns.items():
        assert back[name].tolist() == list(values)
        assert back[name].dtype.str[1:] == dtype
    assert unpack(pack({}, columns))[0] == {}
    with pytest.raises(ValueError, match="not a packed trace"):
        unpack(b"something else")


@pytest.mark.parametrize("name", list(demo_traces.DEMOS))
def test_equal_traces_give_equal_bytes(name: str) -> None:
    assert encode(demo_traces.load(name)) == encode(demo_traces.load(name))


def test_columns_hold_what_the_records_hold() -> None:
    trace = demo_traces.load("continuous")
    header, columns = whole("continuous")
    assert header["steps"] == len(trace)
    assert columns["free"].tolist() == [step.free_blocks for step in trace]
    assert columns["waiting_count"].tolist() == [len(step.waiting) for step in trace]
    assert columns["lane_n"].sum() == sum(len(view(trace, t).lanes) for t in range(len(trace)))
    assert [clauses[0] for clauses in header["clauses"]] == [
        view(trace, t).headline for t in range(len(trace))
    ]


def test_chunks_join_to_the_whole() -> None:
    trace = demo_traces.load("swap")
    writer = ColumnWriter(trace.meta, Names([trace]))
    chunks = []
    for record in trace:
        writer.add(record)
        assert writer.pending == 1
        chunks.append(unpack(writer.take()))
    header, columns = whole("swap")
    for name in columns:
        joined = np.concatenate([chunk[1][name] for chunk in chunks])
        assert np.array_equal(joined, columns[name], equal_nan=columns[name].dtype.kind == "f")
    for key in ("requests", "texts", "clauses"):
        assert [entry for chunk in chunks for entry in chunk[0][key]] == header[key]


def test_a_long_queue_is_cut_and_counted() -> None:
    from minibatch.simulation import simulate
    from minibatch.workload import RequestSpec

    specs = [RequestSpec(f"r{i}", 0.0, 4, 2) for i in range(MOST_WAITING + 60)]
    trace = simulate(specs, "a100-80gb", "llama-2-7b", "continuous", demo_traces.SMALL)
    _, columns = unpack(encode(trace))
    assert columns["waiting_n"][0] == MOST_WAITING
    assert columns["waiting_count"][0] == len(trace[0].waiting) > MOST_WAITING


def test_the_frame_is_known_before_the_first_step() -> None:
    trace = demo_traces.load("static")
    about = describe(trace.meta, trace)
    assert about["lanes"] == 4 and about["blocks"] == 32
    assert about["most_waiting"] == max(len(step.waiting) for step in trace)
    assert set(STEP_COLUMNS) <= set(whole("static")[1])


def test_the_format_is_the_golden_one() -> None:
    """Bytes before zipping, so that another zlib does not matter."""
    trace = demo_traces.load("prefix")
    writer = ColumnWriter(trace.meta, Names([trace]))
    for record in trace:
        writer.add(record)
    _, columns = unpack(writer.take())
    digest = hashlib.sha256()
    for key, values in columns.items():
        digest.update(f"{key} {values.dtype.str}".encode() + values.tobytes())
    assert digest.hexdigest().startswith(GOLDEN), digest.hexdigest()[:16]
