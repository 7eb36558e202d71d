"""From sampled ids to what a caller reads: text, stop strings, log-probabilities, times."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from minibatch.detokenizer import IncrementalDetokenizer, TextDecoder
from minibatch.executor.base import SampledToken
from minibatch.outputs import CompletionOutput, RequestMetrics, RequestOutput
from minibatch.record import StepRecord
from minibatch.request import FinishReason, Request
from minibatch.sampling_params import Logprob


class TokenizerLike(TextDecoder, Protocol):
    """What the engine asks of a tokenizer."""

    def encode(self, text: str) -> list[int]: ...


@dataclass
class SequenceState:
    """One continuation under way."""

    request: Request
    metrics: RequestMetrics
    detokenizer: IncrementalDetokenizer | None = None
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    num_cached_tokens: int = 0
    num_delivered_tokens: int = 0


@dataclass
class Group:
    """A prompt and the state of its ``n`` continuations."""

    request_id: str
    prompt: str | None
    members: list[SequenceState]

    @property
    def finished(self) -> bool:
        return all(member.request.finish_reason is not None for member in self.members)

    def has_news(self, record: StepRecord) -> bool:
        """Did this step give it a token, or end it?"""
        ids = {member.request.request_id for member in self.members}
        sampled = any(request_id in record.sampled for request_id in ids)
        return sampled or any(finish.request_id in ids for finish in record.finished)


class OutputProcessor:
    """Keeps what callers will ask for, until they release it.

    Args:
        tokenizer: None leaves all text empty (stop strings then cannot hit).
        max_model_len: the last position of a sequence.
    """

    def __init__(self, tokenizer: TokenizerLike | None, max_model_len: int) -> None:
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.groups: dict[str, Group] = {}
        self.sequences: dict[str, SequenceState] = {}

    def add(self, request_id: str, prompt: str | None, requests: list[Request]) -> None:
        members = [
            SequenceState(request, RequestMetrics(request.arrival_s), self._detokenizer(request))
            for request in requests
        ]
        self.groups[request_id] = Group(request_id, prompt, members)
        for member in members:
            self.sequences[member.request.request_id] = member

    def take_token(self, request: Request, sampled: SampledToken) -> FinishReason | None:
        """Take one new token, already at the end of ``request.token_ids``; does it end there?"""
        state = self.sequences.get(request.request_id)
        if state is None:  # released while its last step was pending: nobody will ask for it
            return None
        assert sampled.token_id is not None
        state.metrics.num_generated_tokens = request.num_output_tokens
        if sampled.logprobs is not None:
            state.logprobs.append(self._with_text(sampled.logprobs))
            state.cumulative_logprob += sampled.logprobs[sampled.token_id].logprob
        reason = request.token_stop_reason(self.max_model_len)
        shown = (
            reason is not FinishReason.STOP or request.sampling_params.include_stop_str_in_output
        )
        if state.detokenizer is not None and shown:  # an end token is no part of the text
            stop_string = state.detokenizer.append(sampled.token_id)
            if stop_string is not None and reason is not FinishReason.STOP:
                reason = FinishReason.STOP
                request.stop_reason = stop_string
        return reason

    def take_record(self, record: StepRecord) -> None:
        """Note the times of what this step did."""
        for admission in record.admitted:
            state = self.sequences.get(admission.request_id)
            if state is not None and state.metrics.first_scheduled_time is None:
                state.metrics.first_scheduled_time = record.start_s
                state.num_cached_tokens = admission.prefix_hit_tokens
        for request_id in record.sampled:
            state = self.sequences.get(request_id)
            if state is None:
                continue
            metrics = state.metrics
            if metrics.first_token_time is None:
                metrics.first_token_time = record.end_s
            metrics.last_token_time = record.end_s
        for finish in record.finished:
            self.finish(finish.request_id, record.end_s)

    def finish(self, request_id: str, time_s: float) -> None:
        """It ended, one way or another; text that was held back is let go."""
        state = self.sequences.get(request_id)
        if state is None or state.metrics.finished_time is not None:
            return
        if state.request.finish_reason is None:  # an earlier request of that name ended
            return
        state.metrics.finished_time = time_s
        state.metrics.num_preemptions = state.request.num_preemptions
        if state.detokenizer is not None:
            state.detokenizer.finish()

    def output(self, request_id: str, delta: bool = False) -> RequestOutput:
        """The state of a request as a caller sees it; ``delta``: only what is new since the last
        such call.
        """
        group = self.groups[request_id]
        leader = group.members[0]
        return RequestOutput(
            request_id=request_id,
            prompt=group.prompt,
            prompt_token_ids=leader.request.prompt_token_ids,
            outputs=[self._completion(member, delta) for member in group.members],
            finished=group.finished,
            metrics=leader.metrics,
            num_cached_tokens=leader.num_cached_tokens,
        )

    def release(self, request_id: str) -> None:
        """Forget a request. Unknown ids are passed over."""
        group = self.groups.pop(request_id, None)
        for member in group.members if group else ():
            if self.sequences.get(member.request.request_id) is member:
                del self.sequences[member.request.request_id]

    def _completion(self, state: SequenceState, delta: bool) -> CompletionOutput:
        request = state.request
        token_ids = request.output_token_ids
        text = state.detokenizer.text if state.detokenizer is not None else ""
        logprobs = state.logprobs
        if delta:
            start = state.num_delivered_tokens
            token_ids, logprobs = token_ids[start:], logprobs[start:]
            text = state.detokenizer.take_delta() if state.detokenizer is not None else ""
            state.num_delivered_tokens = request.num_output_tokens
        wants_logprobs = request.sampling_params.logprobs is not None
        return CompletionOutput(
            index=request.sample_index,
            text=text,
            token_ids=token_ids,
            cumulative_logprob=state.cumulative_logprob if wants_logprobs else None,
            logprobs=list(logprobs) if wants_logprobs else None,
            finish_reason=request.finish_reason.value if request.finish_reason else None,
            stop_reason=request.stop_reason,
        )

    def _detokenizer(self, request: Request) -> IncrementalDetokenizer | None:
        if self.tokenizer is None:
            return None
        params = request.sampling_params
        return IncrementalDetokenizer(
            self.tokenizer,
            request.prompt_token_ids,
            skip_special_tokens=params.skip_special_tokens,
            stop=params.stop,
            include_stop_str_in_output=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )

    def _with_text(self, logprobs: dict[int, Logprob]) -> dict[int, Logprob]:
        if self.tokenizer is None:
            return logprobs
        return {
            token_id: entry._replace(
                decoded_token=self.tokenizer.decode([token_id], skip_special_tokens=False)
            )
            for token_id, entry in logprobs.items()
        }
