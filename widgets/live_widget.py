"""``live(engine)``: watch a real engine run, stop it, evict a request, add one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from minibatch.trace import Trace
from widgets.base import TraceWidget
from widgets.columns import describe, join
from widgets.live_run import LiveRun
from widgets.picture import PANELS, Picture

HEARTBEAT_S = 0.2


class Live(TraceWidget):
    """A picture with an engine behind it. Nothing runs before ``start()`` or a button.

    ``await run.done()`` lets the rest of the notebook wait while buttons stay alive; to interrupt
    the cell pauses the engine.
    """

    def __init__(
        self,
        source: Any,
        *,
        speed: float | None = None,
        make_request: Callable[[Any], dict[str, Any]] | None = None,
        panels: tuple[str, ...] = PANELS,
        lang: str = "en",
        title: str | None = None,
        key: str | None = None,
    ) -> None:
        self.run = LiveRun(
            source, self._send_steps, self._tell, speed=speed, make_request=make_request, lang=lang
        )
        self._chunks: list[tuple[int, bytes]] = []
        meta = self.run.engine.trace.meta
        about = {**describe(meta), "title": title or f"{meta.policy}"}
        state = {
            "mode": "live",
            "lang": lang,
            "panels": list(panels),
            "series": [{"about": about, "data": b""}],
        }
        super().__init__(state, key)

    # -- orders -------------------------------------------------------------------------------

    def start(self) -> Live:
        """Run until nothing is left, or until told otherwise."""
        self.run.order("run")
        return self

    def pause(self) -> None:
        self.run.order("pause")

    def step_once(self, count: int = 1) -> None:
        """Run ``count`` iterations."""
        self.run.order("step", count)

    def stop(self) -> None:
        """For good; within one iteration."""
        self.run.order("stop")

    def preempt(self, request_id: str) -> None:
        """Evict a running request at the next step."""
        self.run.order("preempt", request_id)

    def add_request(self, **request: Any) -> None:
        """Queue a request: arguments of ``Engine.add_request``, or none for an invented one."""
        self.run.order("add", request or None)

    @property
    def state(self) -> str:
        """paused, running, done or stopped."""
        return self.run.state

    @property
    def error(self) -> BaseException | None:
        """What ended the run, if it was an error."""
        return self.run.error

    @property
    def trace(self) -> Trace:
        """The engine's trace so far."""
        return self.run.trace

    async def done(self) -> Trace:
        """Wait until nothing is left to run; starts the run if nobody did.

        Raises:
            Exception: what the engine raised.
        """
        if self.state == "paused":
            self.start()
        if self.state not in ("done", "stopped"):
            loop = asyncio.get_running_loop()
            future: asyncio.Future[None] = loop.create_future()

            def over() -> None:
                with suppress(RuntimeError):  # nobody waits any more: the loop is closed
                    loop.call_soon_threadsafe(lambda: future.done() or future.set_result(None))

            self.run.when_over(over)
            try:
                # A sleeping event loop would notice an interrupt only with its next event.
                while not future.done() and self.state not in ("done", "stopped"):
                    await asyncio.wait([future], timeout=HEARTBEAT_S)
            except (asyncio.CancelledError, KeyboardInterrupt):
                self.pause()
                raise
        if self.error is not None:
            raise self.error
        return self.trace

    def wait(self, timeout: float | None = None) -> bool:
        """For scripts: block until it rests. In a notebook, ``await run.done()`` instead."""
        return self.run.wait(timeout)

    def close(self) -> None:
        """Stop the run and close the widget."""
        if hasattr(self, "run"):
            self.run.order("stop")
        self._chunks = []
        super().close()

    # -- to and from the page -----------------------------------------------------------------

    def _send_steps(self, data: bytes, first: int, count: int) -> None:
        self._chunks.append((first, data))
        if self.comm is not None:
            self.send({"kind": "append", "from": first, "n": count}, [data])

    def _tell(self, state: str, error: str) -> None:
        if self.comm is not None:
            self.send({"kind": "state", "state": state, "error": error})

    def _handle_custom_msg(self, content: dict[str, Any], buffers: list[Any]) -> None:
        kind = content.get("kind")
        if kind in ("ready", "sync"):
            self._catch_up(int(content.get("have", 0)))
        elif kind == "step":
            self.step_once()
        elif kind == "preempt":
            self.preempt(str(content.get("request")))
        elif kind == "add":
            self.add_request()
        elif kind in ("run", "pause", "stop"):
            self.run.order(kind)

    def _catch_up(self, have: int) -> None:
        """Send what a page lacks: it was opened late, or lost a message."""
        missing = [data for first, data in self._chunks if first >= have]
        if missing:
            data = join(missing)
            self.send({"kind": "append", "from": have, "n": self.run.num_sent - have}, [data])
        self._tell(self.state, "" if self.error is None else str(self.error))

    def still(self) -> Picture:
        return Picture([self.trace], lang=self.lang, panels=tuple(self.panels))

    def __repr__(self) -> str:
        trace = self.trace
        return f"<Live {trace.meta.policy}: {len(trace)} steps, {self.state}>"


def live(source: Any, **options: Any) -> Live:
    """A live picture of an engine, an ``LLM`` or a simulation; paused at first.

    Args:
        source: what to run.
        options: of ``Live``: ``speed`` (steps a second at most), ``make_request`` (for the Add
            button), ``panels``, ``lang``, ``title``, ``key``.
    """
    return Live(source, **options)
