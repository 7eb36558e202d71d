"""A request: its tokens, how many of them have KV, and where that KV lives.

Two numbers drive everything. ``num_tokens`` counts the tokens known (prompt and generated);
``num_computed_tokens`` those whose keys and values stand in the cache. Prefill and decode are
the same thing, the second number catching up with the first: right after a prompt arrives it
is a prompt behind, and between two decode steps it is one behind, because the newest token was
sampled but not yet fed to the model.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from enum import Enum

from minibatch.sampling_params import SamplingParams


class RequestStatus(str, Enum):
    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"


class FinishReason(str, Enum):
    STOP = "stop"  # an end token, a stop token or a stop string
    LENGTH = "length"  # max_tokens, or the model's last position
    ABORT = "abort"  # the caller changed their mind
    ERROR = "error"  # no token could be drawn for it (NaN logits)


class Request:
    """One sequence to be continued. ``n > 1`` samples are ``n`` requests with one ``leader``.

    Args:
        request_id: unique among live requests.
        prompt_token_ids: at least one id.
        sampling_params: how to continue it.
        arrival_s: seconds on the engine's clock.
        max_tokens: tokens to generate at most; by default what ``sampling_params`` says, which
            must then be a number.
        eos_token_ids: ids that end the text, unless ``ignore_eos``.
        seed: what the sampler's draws depend on, with ``sample_index`` and the position.
        leader: for the second and later of ``n`` samples, the first one, whose prompt KV it
            may share.
        cache_salt: requests of different salts never share cached prefixes (vLLM's name).
    """

    __slots__ = (
        "request_id",
        "sampling_params",
        "arrival_s",
        "max_tokens",
        "eos_token_ids",
        "seed",
        "leader",
        "sample_index",
        "cache_salt",
        "token_ids",
        "num_prompt_tokens",
        "num_computed_tokens",
        "prefill_end",
        "block_table",
        "cpu_block_table",
        "status",
        "slot",
        "num_preemptions",
        "finish_reason",
        "stop_reason",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling_params: SamplingParams,
        *,
        arrival_s: float = 0.0,
        max_tokens: int | None = None,
        eos_token_ids: Sequence[int] = (),
        seed: int = 0,
        leader: Request | None = None,
        sample_index: int = 0,
        cache_salt: Hashable = None,
    ) -> None:
        self.request_id = request_id
        self.sampling_params = sampling_params
        self.arrival_s = arrival_s
        most = sampling_params.max_tokens if max_tokens is None else max_tokens
        assert most is not None, "the engine resolves max_tokens=None"
        self.max_tokens = most
        self.eos_token_ids = frozenset(eos_token_ids)
        self.seed = seed
        self.leader = leader
        self.sample_index = sample_index
        self.cache_salt = cache_salt
        self.token_ids: list[int] = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.num_computed_tokens = 0
        self.prefill_end = 0  # num_tokens when it was last admitted without its KV
        self.block_table: list[int] = []
        self.cpu_block_table: list[int] = []
        self.status = RequestStatus.WAITING
        self.slot = -1  # its lane of the timeline while running
        self.num_preemptions = 0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None  # the stop token or stop string that hit

    @property
    def num_tokens(self) -> int:
        """Tokens known: prompt and generated."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def is_prefill(self) -> bool:
        """Still rebuilding, or first building, the KV of tokens it came in with."""
        return self.num_computed_tokens < self.prefill_end

    @property
    def max_num_tokens(self) -> int:
        """The longest it can get. Its last token is sampled but never needs KV."""
        return self.num_prompt_tokens + self.max_tokens

    def token_stop_reason(self, max_model_len: int) -> FinishReason | None:
        """Does its newest token end it? (Stop *strings* are the detokenizer's business.)"""
        params = self.sampling_params
        newest = self.token_ids[-1]
        if self.num_output_tokens >= params.min_tokens:
            if newest in self.eos_token_ids and not params.ignore_eos:
                return FinishReason.STOP
            if newest in params.stop_token_ids:
                self.stop_reason = newest
                return FinishReason.STOP
        if self.num_output_tokens >= self.max_tokens or self.num_tokens >= max_model_len:
            return FinishReason.LENGTH
        return None

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.value}, "
            f"{self.num_computed_tokens}/{self.num_tokens} tokens computed)"
        )
