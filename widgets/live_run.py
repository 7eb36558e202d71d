"""An engine that runs in a thread of its own while somebody watches.

The thread steps the engine and packs records; it never prints, draws or touches a widget's values.
Orders (step, run, pause, stop, preempt, add) are queued and obeyed between two steps, so a button
never waits for a lock. A stop is heeded within one step.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from minibatch.record import StepRecord
from minibatch.sampling_params import SamplingParams
from minibatch.trace import Trace
from widgets.columns import ColumnWriter
from widgets.names import Names

UPDATES_PER_S = 30.0
IDLE_S = 60.0

Send = Callable[[bytes, int, int], None]  # packed steps, index of the first, how many
Tell = Callable[[str, str], None]  # state, error


class LiveRun:
    """Runs an engine, or a simulation, when told to.

    Args:
        source: an ``Engine``, an ``LLM``, or a ``Simulation`` (whose requests come by themselves).
        send: gets the packed steps, at most ``UPDATES_PER_S`` times a second.
        tell: gets every change of state: paused, running, done, stopped.
        speed: steps a second at most; None: as fast as it goes.
        make_request: keyword arguments of ``Engine.add_request`` for the Add button.
    """

    def __init__(
        self,
        source: Any,
        send: Send,
        tell: Tell,
        *,
        speed: float | None = None,
        make_request: Callable[[Any], dict[str, Any]] | None = None,
        lang: str = "en",
    ) -> None:
        self.engine = getattr(source, "engine", source)
        self.speed = speed
        self.state = "paused"
        self.error: BaseException | None = None
        self.writer = ColumnWriter(self.engine.trace.meta, Names(), lang)
        self.num_sent = 0
        self._fresh: list[StepRecord] = []  # not packed yet
        self._records: Iterator[StepRecord] | None = None
        if source is not self.engine and callable(getattr(source, "run", None)):
            self._records = source.run()
        self._send = send
        self._tell = tell
        self._make_request = make_request or some_request
        self._orders: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._steps_left = 0.0  # infinite while running
        self._next_update = 0.0
        self._next_step = 0.0
        self._rested = threading.Event()  # nothing is going on
        self._listeners: list[Callable[[], None]] = []
        self._thread: threading.Thread | None = None
        for record in self.engine.trace:  # what it did before anybody watched
            self.writer.add(record)

    @property
    def trace(self) -> Trace:
        return self.engine.trace

    # -- orders -------------------------------------------------------------------------------

    def order(self, name: str, value: Any = None) -> None:
        """Queue an order; the thread starts with the first one."""
        if self.state == "stopped":
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="minibatch-live", daemon=True)
            self._thread.start()
        self._rested.clear()
        self._orders.put((name, value))

    def wait(self, timeout: float | None = None) -> bool:
        """Block until it rests: paused, done or stopped. False: not within ``timeout``."""
        return self._thread is None or self._rested.wait(timeout)

    def when_over(self, callback: Callable[[], None]) -> None:
        """Call back, in the thread, once it is done or stopped."""
        self._listeners.append(callback)

    # -- the thread ---------------------------------------------------------------------------

    def _loop(self) -> None:
        try:
            while self._obey():
                if self._steps_left > 0:
                    self._one_step()
        except Exception as error:
            self.error = error
            self._change("stopped", f"{type(error).__name__}: {error}")
        finally:
            self._flush()
            if self.state != "stopped":
                self._change("stopped")
            self._rest()

    def _obey(self) -> bool:
        """Carry out what was ordered; wait where there is nothing to do. False: stop."""
        while True:
            pause = self._next_step - time.perf_counter() if self._steps_left > 0 else IDLE_S
            if self._steps_left <= 0 and self._orders.empty():
                self._flush()
                if self.state != "done":
                    self._change("paused")
                self._rest()
            try:
                name, value = self._orders.get(pause > 0, max(pause, 0))
            except queue.Empty:
                if self._steps_left > 0:
                    return True
                continue
            if name == "stop":
                return False
            self._carry_out(name, value)

    def _carry_out(self, name: str, value: Any) -> None:
        try:
            if name == "run":
                self._steps_left = float("inf")
                self._change("running")
            elif name == "step":
                running = self._steps_left == float("inf")
                self._steps_left = value + (0 if running else self._steps_left)
                self._change("paused")
            elif name == "pause":
                self._steps_left = 0
            elif name == "preempt":
                self.engine.preempt(value)
            elif name == "add":
                self.engine.add_request(**(value or self._make_request(self.engine)))
                if self.state == "done":
                    self._change("paused")
        except Exception as error:
            self._tell(self.state, str(error))

    def _one_step(self) -> None:
        record = self._next_record()
        now = time.perf_counter()
        if record is None:
            self._steps_left = 0
            self._flush()
            self._change("done")
            self._over()
            return
        self._fresh.append(record)
        self._steps_left -= 1
        if self.speed:
            self._next_step = max(self._next_step + 1 / self.speed, now - 1 / self.speed)
        if now >= self._next_update:
            self._flush()

    def _next_record(self) -> StepRecord | None:
        if self._records is not None:
            record = next(self._records, None)
            if record is not None:
                return record
            self._records = None  # all requests of the workload have come
        return self.engine.step() if self.engine.has_unfinished else None

    def _flush(self) -> None:
        # All at once: after a step of the model, caches have forgotten the first, not the others.
        fresh, self._fresh = self._fresh, []
        for record in fresh:
            self.writer.add(record)
        count = self.writer.pending
        if count:
            first, self.num_sent = self.num_sent, self.num_sent + count
            # By the clock, so that steps of any length give as many updates a second.
            earliest = time.perf_counter() - 1 / UPDATES_PER_S
            self._next_update = max(self._next_update, earliest) + 1 / UPDATES_PER_S
            self._send(self.writer.take(), first, count)

    def _change(self, state: str, error: str = "") -> None:
        if state != self.state or error:
            self.state = state
            self._tell(state, error)

    def _rest(self) -> None:
        self._rested.set()
        if self.state == "stopped":
            self._over()

    def _over(self) -> None:
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            listener()


def some_request(engine: Any) -> dict[str, Any]:
    """A request for the Add button: invented token ids, a letter that is not in use."""
    seen = engine.trace.requests
    live = getattr(engine.scheduler, "requests", {})
    name = next(n for n in _letters() if n not in seen and n not in live)
    chance = random.Random(name)
    vocabulary = engine.vocab_size or 1000
    limit = engine.config.max_model_len
    length = chance.randint(4, max(4, min(24, limit // 2)))
    return {
        "request_id": name,
        "prompt_token_ids": [chance.randrange(vocabulary) for _ in range(length)],
        "sampling_params": SamplingParams(
            max_tokens=max(1, min(16, limit - length)), ignore_eos=True
        ),
    }


def _letters() -> Iterator[str]:
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    yield from letters
    for first in letters:
        for second in letters:
            yield first + second
