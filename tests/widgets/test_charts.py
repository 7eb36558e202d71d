"""Curves that show without plotly."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import demo_traces
import pytest

import widgets
from widgets.charts import Chart, nice_ticks


def test_ticks_are_round_numbers() -> None:
    assert nice_ticks(7.3) == [0, 2, 4, 6, 8]
    assert nice_ticks(0.9) == [0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert nice_ticks(0) == [0]
    assert nice_ticks(1000)[-1] == 1000


def test_a_chart_has_all_its_saved_forms() -> None:
    traces = {name: demo_traces.load(name) for name in ("static", "continuous")}
    chart = widgets.tokens_over_time(traces)
    forms = chart._repr_mimebundle_()[0]
    assert set(forms) == {"text/plain", "text/html", "image/png"}
    assert forms["text/plain"].startswith("Tokens generated against milliseconds. static: 0 at 0")
    assert len(forms["image/png"]) < 20_000
    for theme in ("light", "dark"):
        root = ElementTree.fromstring(chart.svg(theme))
        texts = [node.text for node in root.iter("{http://www.w3.org/2000/svg}text")]
        assert {"static", "continuous", "milliseconds"} <= set(texts)


def test_a_cdf_ends_at_one() -> None:
    chart = widgets.latency_cdf({"a": [3.0, 1.0, 2.0]})
    assert chart.curves["a"] == [(1.0, pytest.approx(1 / 3)), (2.0, pytest.approx(2 / 3)), (3.0, 1)]


def test_what_cannot_be_drawn_is_refused() -> None:
    with pytest.raises(ValueError, match="no points"):
        Chart({}, "x", "y")
    with pytest.raises(ValueError, match="log_x"):
        Chart({"a": [(0, 1)]}, "x", "y", log_x=True)
    assert Chart({"a": [(1, 1), (100, 2)]}, "x", "y", log_x=True).svg()


def test_plotly_on_demand() -> None:
    pytest.importorskip("plotly", reason="plotly is not installed")
    figure = Chart({"a": [(1, 2), (3, 4)], "b": [(1, 1)]}, "x", "y").plotly()
    assert [list(trace.y) for trace in figure.data] == [[2, 4], [1]]
