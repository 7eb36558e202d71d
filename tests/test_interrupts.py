"""Ctrl-C at any moment: the engine goes on as if nothing had been."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
from engine_helpers import (
    Auditor,
    assert_all_free,
    audit_blocks,
    audit_queues,
    foretell,
    greedy,
    make_engine,
    paper,
)

from minibatch.engine import Engine
from minibatch.interrupts import deferred_interrupts
from minibatch.record import StepRecord

# -- holding Ctrl-C back ------------------------------------------------------------------------


def ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0)  # Python runs its handlers between two instructions


@pytest.fixture(autouse=True)
def usual_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_it_is_delivered_at_the_end_of_the_block() -> None:
    reached: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        with deferred_interrupts():
            ctrl_c()
            ctrl_c()  # twice is once
            reached.append("end")
        reached.append("after")
    assert reached == ["end"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_without_one_nothing_happens() -> None:
    with deferred_interrupts():
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_nested_blocks_deliver_at_the_end_of_the_outer_one() -> None:
    reached: list[str] = []
    with pytest.raises(KeyboardInterrupt), deferred_interrupts():
        with deferred_interrupts():
            ctrl_c()
        reached.append("between")
        with deferred_interrupts():
            reached.append("second")
    assert reached == ["between", "second"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_in_the_block_is_kept_as_context() -> None:
    with pytest.raises(KeyboardInterrupt) as caught, deferred_interrupts():
        ctrl_c()
        raise LookupError
    assert isinstance(caught.value.__context__, LookupError)
    with pytest.raises(LookupError), deferred_interrupts():
        raise LookupError
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_somebody_else_s_handler_is_called_and_put_back() -> None:
    seen: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        seen.append(number)

    signal.signal(signal.SIGINT, handler)
    with deferred_interrupts():
        ctrl_c()
        assert seen == []
    assert seen == [signal.SIGINT]
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.parametrize("handler", [signal.SIG_IGN, None])
def test_where_nobody_handles_it_nothing_is_changed(handler: Any) -> None:
    if handler is not None:
        signal.signal(signal.SIGINT, handler)
        with deferred_interrupts():
            ctrl_c()
            assert signal.getsignal(signal.SIGINT) is handler


def test_other_threads_have_nothing_to_hold_back() -> None:
    errors: list[BaseException] = []

    def work() -> None:
        try:
            with deferred_interrupts():
                assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not errors


# -- an engine under fire -----------------------------------------------------------------------

PROMPTS = {"A": [1, 2, 3, 4, 5, 6, 7], "B": [1, 2, 3, 4, 5], "C": [1, 2], "D": [1, 2, 3, 4, 9, 9]}

SETTINGS: dict[str, dict[str, Any]] = {
    "static": {"policy": "static", "max_model_len": 32},
    "dynamic": {"policy": "dynamic"},
    "recompute": {"policy": "continuous", "num_gpu_blocks": 8, "max_model_len": 24},
    "swap": {
        "policy": "continuous",
        "preemption_mode": "swap",
        "num_gpu_blocks": 8,
        "max_model_len": 24,
    },
    "chunked": {
        "policy": "continuous",
        "enable_chunked_prefill": True,
        "num_gpu_blocks": 9,
        "max_num_batched_tokens": 6,
        "enable_prefix_caching": True,
    },
    "unified": {
        "policy": "unified",
        "num_gpu_blocks": 9,
        "max_num_batched_tokens": 6,
        "enable_prefix_caching": True,
    },
}


def submit(engine: Engine) -> None:
    for name, prompt in PROMPTS.items():
        engine.add_request(name, prompt, greedy(9, n=2 if name == "D" else 1))


def check_texts(engine: Engine) -> None:
    for name, prompt in PROMPTS.items():
        for index, part in enumerate(engine.output(name).outputs):
            assert part.token_ids == foretell(prompt, 9, sample_index=index), name
    assert_all_free(engine)


def timeless(records: list[StepRecord]) -> list[dict[str, Any]]:
    times = ("start_s", "duration_s", "schedule_s", "arrived")
    return [
        {key: value for key, value in record.to_dict().items() if key not in times}
        for record in records
    ]


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_executor_is_cut_short_in_every_step(setting: str) -> None:
    calm = make_engine(**SETTINGS[setting])
    submit(calm)
    undisturbed = list(calm.run())
    engine = make_engine(**SETTINGS[setting])
    auditor = Auditor(engine)
    submit(engine)
    paper(engine).errors = {step: [KeyboardInterrupt()] * 2 for step in range(200)}
    interrupts = 0
    while engine.has_unfinished:
        try:
            auditor.step()
        except KeyboardInterrupt:
            interrupts += 1
    assert interrupts == 2 * len(undisturbed)
    assert timeless(auditor.records) == timeless(undisturbed)
    check_texts(engine)


class Sniper:
    """Sends a real SIGINT after a random number of executed lines of the engine's code.

    A trace function counts lines in the files of this package, so that every line of ``step`` is
    as likely to be hit as any other, which a timer could not promise.
    """

    def __init__(self, seed: int, most: int) -> None:
        self.random = random.Random(seed)
        self.most = most
        self.left = self.random.randrange(most)
        self.hits: set[tuple[str, int]] = set()

    def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
        if "minibatch" not in frame.f_code.co_filename:
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                self.left = self.random.randrange(1, self.most)
                self.hits.add((os.path.basename(frame.f_code.co_filename), frame.f_lineno))
                os.kill(os.getpid(), signal.SIGINT)
        return self


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_real_signal_at_any_line_of_a_step(setting: str) -> None:
    calm = make_engine(**SETTINGS[setting])
    submit(calm)
    undisturbed = list(calm.run())
    lines: set[tuple[str, int]] = set()
    interrupts = 0
    for seed in range(12):
        engine = make_engine(**SETTINGS[setting])
        submit(engine)
        sniper = Sniper(seed, most=60 * (seed + 1))
        while engine.has_unfinished:
            before = sys.gettrace()
            try:
                sys.settrace(sniper)
                engine.step()
            except KeyboardInterrupt:
                interrupts += 1
            finally:
                sys.settrace(before)
            if engine._pending is None:  # else its decisions are made, and checked by the next
                audit_queues(engine.scheduler)
            audit_blocks(engine.scheduler)
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert timeless(engine.trace.steps) == timeless(undisturbed)  # not one record is missing
        check_texts(engine)
        lines |= sniper.hits
    assert interrupts > 50
    assert {"base.py", "engine.py", "block_manager.py"} <= {name for name, _ in lines}


@pytest.fixture
def alarm_is_ctrl_c() -> Iterator[None]:
    """A timer sends SIGALRM: pass it on. The timer of pytest-timeout is put back afterwards."""
    before = signal.signal(signal.SIGALRM, lambda number, frame: ctrl_c())
    left = signal.setitimer(signal.ITIMER_REAL, 0)
    yield
    signal.setitimer(signal.ITIMER_REAL, *left)
    signal.signal(signal.SIGALRM, before)


def test_a_real_signal_from_a_timer(alarm_is_ctrl_c: None) -> None:
    """No trace function here: the interpreter as users have it."""
    rng = random.Random(4)
    interrupts = 0
    deadline = time.monotonic() + 10
    while interrupts < 150 and time.monotonic() < deadline:
        engine = make_engine(**SETTINGS["unified"])
        submit(engine)
        while engine.has_unfinished and time.monotonic() < deadline:
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, 4e-4))
                try:
                    engine.step()
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                interrupts += 1
            audit_blocks(engine.scheduler)
        if not engine.has_unfinished:
            check_texts(engine)
    assert interrupts >= 20


@pytest.mark.parametrize(
    "action",
    [
        lambda engine: engine.add_request("new", [3, 3, 3], greedy(4)),
        lambda engine: engine.abort("B"),
        lambda engine: engine.abort("D"),
    ],
    ids=["add", "abort", "abort samples"],
)
def test_a_real_signal_while_requests_come_and_go(action: Callable[[Engine], None]) -> None:
    """All or nothing: a request is in the queues and in the books of outputs, or in neither."""
    interrupted, line = True, 0
    while interrupted:  # until the line counted to lies beyond the end of the action
        line += 1
        engine = make_engine(**SETTINGS["unified"])
        submit(engine)
        auditor = Auditor(engine)
        for _ in range(3):
            auditor.step()
        sniper = Sniper(0, most=10**9)
        sniper.left = line
        before = sys.gettrace()
        try:
            sys.settrace(sniper)
            action(engine)
            interrupted = False
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        audit_queues(engine.scheduler)
        assert ("new" in engine.outputs.groups) == ("new" in engine.scheduler.requests)
        while engine.has_unfinished:
            auditor.step()
        if "new" in engine.outputs.groups:
            assert engine.output("new").outputs[0].token_ids == foretell([3, 3, 3], 4)
        for name in "AC":
            assert engine.output(name).outputs[0].token_ids == foretell(PROMPTS[name], 9)
        assert_all_free(engine)
    assert line > 40
