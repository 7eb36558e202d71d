"""A request's letter and colour: given once, the same in every panel and every compared trace."""

from __future__ import annotations

from collections.abc import Iterable

from minibatch.trace import Trace

LONGEST_LABEL = 4


class Names:
    """Numbers requests in order of arrival; the number decides colour and, if need be, label.

    A short id (``A``, ``A#1``, ``17``) is its own label. A longer one gets ``#1``, ``#2``..., and
    pictures show the id itself where there is room.
    """

    def __init__(self, traces: Iterable[Trace] = ()) -> None:
        self.index: dict[str, int] = {}
        self.labels: list[str] = []
        for trace in traces:
            for record in trace:
                for arrival in record.arrived:
                    self.number(arrival.request_id)
                for refusal in record.refused:
                    self.number(refusal.request_id)

    def number(self, request_id: str) -> int:
        """Its number; a new one for a request that was never seen."""
        number = self.index.get(request_id)
        if number is None:
            number = self.index[request_id] = len(self.labels)
            short = len(request_id) <= LONGEST_LABEL
            self.labels.append(request_id if short else f"#{number + 1}")
        return number

    def label(self, request_id: str) -> str:
        return self.labels[self.number(request_id)]
