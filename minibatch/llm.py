"""``LLM``: vLLM's offline interface over one engine. Prompts in, text out."""

from __future__ import annotations

import asyncio
import string
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

from minibatch.closing import Closing
from minibatch.config import EngineConfig
from minibatch.engine import Engine
from minibatch.errors import ConfigError, InvalidRequestError
from minibatch.outputs import RequestOutput
from minibatch.progress import progress_bar
from minibatch.record import StepRecord
from minibatch.sampling_params import SamplingParams
from minibatch.trace import Trace

Prompt = str | Sequence[int] | Mapping[str, Any]
Message = Mapping[str, str]


class Stream(Iterator[RequestOutput]):
    """What is new of one request, as it comes. Reading it steps the engine, for all requests.

    A stream that is closed, or that nobody holds any more, ends its request.
    """

    def __init__(self, llm: LLM, request_id: str) -> None:
        self._llm = llm
        self._news: deque[RequestOutput] = deque()
        self.closed = False
        self.request_id = request_id
        llm._news[request_id] = self._news

    def __next__(self) -> RequestOutput:
        while not self.closed and not self._news:
            self._llm._step()
        if self.closed:
            raise StopIteration
        return self._take()

    def take_news(self) -> Iterator[RequestOutput]:
        """What has come already, without stepping the engine."""
        while self._news:
            yield self._take()

    @property
    def has_news(self) -> bool:
        return bool(self._news)

    def _take(self) -> RequestOutput:
        output = self._news.popleft()
        if output.finished:
            self.close()
        return output

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._llm._news.pop(self.request_id, None)
            self._llm.forget([self.request_id])

    def __del__(self) -> None:
        self.close()


class LLM(Closing):
    """A model and its engine.

    Args:
        model: a folder, a ``.gguf`` file, a hub id, or a short name (``smollm2-135m``...).
        knobs: anything in ``EngineConfig``, under vLLM's names.

    All methods are plain synchronous and work inside a notebook, whose event loop runs already;
    ``stream_async`` is their async sister. One engine serves them all: requests of several
    streams run side by side.

    ``close()``, or leaving the ``with`` block, gives weights and cache back, whoever still holds
    this object.
    """

    def __init__(self, model: str, **knobs: Any) -> None:
        from minibatch.builder import build_engine  # torch, and with it seconds, only here

        self.engine: Engine = build_engine(make_config(model, knobs))
        self._lock = threading.Lock()
        self._num_requests = 0
        self._news: dict[str, deque[RequestOutput]] = {}  # of requests that are streamed

    # -- prompts in, text out -----------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput] | Iterator[Iterator[RequestOutput]]:
        """Continue every prompt; outputs come in the order of the prompts.

        With ``SamplingParams(stream=True)`` the result is an iterator with one stream for each
        prompt, which yields ``RequestOutput``s holding what is new. All prompts run at once,
        whichever stream is being read.

        Args:
            prompts: one or many; text, token ids, or vLLM's ``{"prompt_token_ids": [...]}``.
            sampling_params: one for all, or one each.
            use_tqdm: show a progress bar with live tokens/s.

        Raises:
            InvalidRequestError: a prompt that cannot run. None of this call's prompts runs then;
                what else is in flight goes on.
        """
        prompts = as_prompt_list(prompts)
        params = as_params_list(sampling_params, len(prompts))
        streaming = [p.stream for p in params]
        if any(streaming) and not all(streaming):
            raise InvalidRequestError("stream must be set for all prompts of a call, or for none.")
        ids = self.submit(prompts, params)
        if any(streaming):
            return self._open_streams(ids)
        return self._finish_all(ids, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput] | Iterator[Iterator[RequestOutput]]:
        """``generate`` for conversations: ``[{"role": "user", "content": ...}, ...]``, or a list
        of those. The model's own chat template turns them into prompts.
        """
        tokenizer = self.engine.tokenizer
        if tokenizer is None:
            raise InvalidRequestError("chat needs a tokenizer with a chat template.")
        if not messages:
            raise InvalidRequestError("chat got no messages.")
        one = isinstance(messages[0], Mapping)
        conversations = [messages] if one else messages
        prompts = [
            {
                "prompt": tokenizer.render_chat_template(conversation),
                "prompt_token_ids": tokenizer.apply_chat_template(conversation),
            }
            for conversation in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    async def stream_async(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """What is new, of all prompts, as it comes; ``request_id`` tells whose it is.

        Steps run in a worker thread, so the event loop stays free; several of these may run at
        once and share the engine's batches.
        """
        prompts = as_prompt_list(prompts)
        params = as_params_list(sampling_params, len(prompts))
        ids = self.submit(prompts, params)
        streams = {request_id: Stream(self, request_id) for request_id in ids}
        try:
            while streams:
                for stream in list(streams.values()):
                    for output in stream.take_news():
                        yield output
                    if stream.closed:
                        del streams[stream.request_id]
                if streams and not any(stream.has_news for stream in streams.values()):
                    await asyncio.to_thread(self._step)
        finally:
            for stream in streams.values():
                stream.close()

    # -- step by step -----------------------------------------------------------------------

    def submit(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> list[str]:
        """Queue prompts without running them, all or none; returns their request ids.

        ``llm.run()``, or whoever steps the engine, then runs them.
        """
        ids: list[str] = []
        try:
            for number, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
                request_id = self._next_id()
                try:
                    self.engine.add_request(request_id, prompt, param)
                except InvalidRequestError as error:
                    error.args = (f"prompt {number} of {len(prompts)}: {error}",)
                    raise
                ids.append(request_id)
        except BaseException:
            self.forget(ids)
            raise
        return ids

    def run(self) -> Iterator[StepRecord]:
        """Run what was submitted, a record an iteration; sleeps where a policy waits."""
        while self.engine.has_unfinished:
            yield self._step()

    def forget(self, ids: Sequence[str]) -> None:
        """Forget requests, and end those that still run."""
        for request_id in ids:
            self.engine.abort(request_id)
            self.engine.outputs.release(request_id)

    # -- the engine's keys --------------------------------------------------------------------

    @property
    def trace(self) -> Trace:
        """The record of every iteration so far."""
        return self.engine.trace

    def close(self) -> None:
        """Give weights, cache and buffers back. Idempotent."""
        self.engine.close()

    # -- how ----------------------------------------------------------------------------------

    def _finish_all(self, ids: Sequence[str], use_tqdm: bool) -> list[RequestOutput]:
        groups = self.engine.outputs.groups
        left = set(ids)
        try:
            with progress_bar(len(ids), enabled=use_tqdm) as bar:
                while left:
                    record = self._step()
                    done = {request_id for request_id in left if groups[request_id].finished}
                    left -= done
                    bar.update(len(done), record.num_generated_tokens)
            return [self.engine.output(request_id) for request_id in ids]
        finally:
            self.forget(ids)

    def _open_streams(self, ids: Sequence[str]) -> Iterator[Iterator[RequestOutput]]:
        streams = [Stream(self, request_id) for request_id in ids]

        def one_by_one() -> Iterator[Iterator[RequestOutput]]:
            try:
                yield from streams
            except GeneratorExit:  # left early: the prompts not read yet are not wanted either
                for stream in streams:
                    stream.close()
                raise

        return one_by_one()

    def _step(self) -> StepRecord:
        """One iteration; what is new goes to the streams that are open.

        One at a time: several streams may be read from several threads.
        """
        with self._lock:
            time.sleep(self.engine.seconds_to_wait)
            record = self.engine.step()
            for request_id, news in list(self._news.items()):
                group = self.engine.outputs.groups.get(request_id)
                if group is not None and group.has_news(record):
                    news.append(self.engine.outputs.output(request_id, delta=True))
        return record

    def _next_id(self) -> str:
        """A, B ... Z, AA, AB ...: short enough to be read in a picture."""
        number, name = self._num_requests, ""
        self._num_requests += 1
        while True:
            name = string.ascii_uppercase[number % 26] + name
            number = number // 26 - 1
            if number < 0:
                return name


def make_config(model: str, knobs: Mapping[str, Any]) -> EngineConfig:
    """Knobs by name; an unknown one is an error that names the known ones."""
    known = set(EngineConfig.__dataclass_fields__)
    unknown = sorted(set(knobs) - known)
    if unknown:
        raise ConfigError(
            f"unknown knob {', '.join(unknown)}; EngineConfig has {', '.join(sorted(known))}."
        )
    return EngineConfig(model=model, **knobs)


def as_prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many? A flat list of integers is one prompt."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    items = list(prompts)
    if items and all(hasattr(item, "__index__") for item in items):
        return [items]  # type: ignore[list-item]
    return items  # type: ignore[return-value]


def as_params_list(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    """One for all, or one each.

    Raises:
        InvalidRequestError: another number of them.
    """
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    items = list(params)
    if len(items) != count:
        raise InvalidRequestError(f"{len(items)} sampling_params for {count} prompts.")
    return items
