"""One sampler for the whole batch: logits in, one token id a row out.

    logits -> min_tokens -> penalties -> temperature -> min_p -> top_k -> top_p -> draw

The order is vLLM's. Four things are worth reading for:

* **Randomness is counted, not consumed.** A draw is a hash of (seed, sample index, position).
  Nothing is stored between steps, so a step that runs twice, a request that is preempted and
  rebuilt, or other company in the batch give the same token.
* **Truncation is a threshold.** min_p, top_k and top_p each say "drop what weighs less than
  this", so the draw itself never needs sorted tokens, and equal weights share one fate.
* **Rows are independent.** No row's token depends on which rows are beside it. (On a CPU this is
  exact. A GPU may add up in another order for another batch size, in the last bit.)
* **Nothing is paid for that nobody asked for.** A greedy batch is a single argmax.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from minibatch.errors import SamplingError
from minibatch.sampling_params import Logprob, SamplingParams


class InvalidLogitsError(SamplingError):
    """Rows without a finite largest logit: the model gave NaN or +inf, or all is masked.

    ``rows`` holds their indices in the batch. The other rows can be sampled again without them,
    and give what they would have given.
    """

    def __init__(self, rows: Sequence[int]) -> None:
        self.rows = tuple(rows)
        super().__init__(
            f"no token can be drawn for rows {list(rows)} of the batch: their largest logit is "
            "NaN or infinite (a fault in the model's numbers), or min_tokens has masked every "
            "token that was left."
        )


class SamplingRow(NamedTuple):
    """What one row of the batch needs to be sampled.

    Args:
        params: its request's sampling parameters.
        seed_key: (seed, sample index); with ``position`` all that its draw depends on.
        position: number of output tokens it has so far.
        prompt_token_ids: read only if ``params.repetition_penalty`` is set.
        output_token_ids: read only if ``params.has_penalties``.
        stop_token_ids: the end and stop ids, out of reach while ``position < min_tokens``.
    """

    params: SamplingParams
    seed_key: tuple[int, int]
    position: int
    prompt_token_ids: Sequence[int] = ()
    output_token_ids: Sequence[int] = ()
    stop_token_ids: Sequence[int] = ()


class SamplerOutput(NamedTuple):
    """``token_ids`` has R ids; ``logprobs`` has R entries, ``None`` for rows that did not ask.

    An entry maps the sampled id (always its first key) and the top ids to their ``Logprob``.
    """

    token_ids: list[int]
    logprobs: list[dict[int, Logprob] | None]


class Sampler:
    """Stateless; call it with the logits of a step. The logits are left as they were."""

    @torch.inference_mode()
    def __call__(self, logits: Tensor, rows: Sequence[SamplingRow]) -> SamplerOutput:
        """Draw a token for each row.

        Results cross from the device in one transfer (and one more for each distinct
        ``logprobs`` value in the batch, and a single count for ``top_p``).

        Args:
            logits: [R, V], on any device, of any floating type; computed on in float32.
            rows: R entries.

        Raises:
            InvalidLogitsError: names the rows that no token can be drawn for.
        """
        if len(rows) != logits.shape[0]:
            raise ValueError(f"{logits.shape[0]} rows of logits, but {len(rows)} sampling rows")
        raw = logits.float()  # [R, V]
        logits = apply_penalties(mask_stop_tokens(raw, rows), rows)
        best, token_ids = largest(logits)  # [R], [R]
        random = [i for i, row in enumerate(rows) if not row.params.greedy]
        if random:
            token_ids[_indices(random, logits)] = draw(
                _select(logits, random),
                _select(best, random),
                _select(token_ids, random),
                [rows[i] for i in random],
            )
        # A NaN anywhere in a row is the row's maximum, so this looks at every logit for free.
        sampled = token_ids.where(best.isfinite(), -1).tolist()  # the transfer
        if -1 in sampled:
            raise InvalidLogitsError([i for i, token_id in enumerate(sampled) if token_id == -1])
        return SamplerOutput(sampled, gather_logprobs(raw, token_ids, rows))


def largest(logits: Tensor) -> Sequence[Tensor]:
    """The largest of each row, and where it is: [R], [R]. A NaN is larger than any number."""
    if not logits.is_cpu:
        return logits.max(dim=-1)
    # On a CPU torch walks along a row number by number, and numpy 16 at a time.
    token_ids = torch.from_numpy(logits.numpy().argmax(axis=-1))
    return logits.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1), token_ids


def mask_stop_tokens(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Put the end and stop ids of rows below their ``min_tokens`` out of reach. [R, V]"""
    vocab_size = logits.shape[-1]
    masked = [
        (i, token_id)
        for i, row in enumerate(rows)
        if row.position < row.params.min_tokens
        for token_id in row.stop_token_ids
        if token_id < vocab_size
    ]
    if not masked:
        return logits
    logits = logits.clone()
    logits[tuple(_indices(masked, logits).T)] = -torch.inf
    return logits


def apply_penalties(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Make tokens that occurred before less likely. [R, V]

    repetition_penalty (CTRL's, arXiv:1909.05858) divides positive and multiplies negative logits
    of tokens in prompt or output; presence_penalty and frequency_penalty are OpenAI's: taken off
    the logit once, and once per occurrence, for tokens of the output.
    """
    where: list[tuple[int, int]] = []  # (row, token id), each pair once
    how: list[tuple[float, float]] = []  # (repetition penalty, amount to take off)
    for i, row in enumerate(rows):
        params = row.params
        if not params.has_penalties:
            continue
        counts = Counter(row.output_token_ids)
        for token_id, count in counts.items():
            where.append((i, token_id))
            amount = params.presence_penalty + params.frequency_penalty * count
            how.append((params.repetition_penalty, amount))
        if params.repetition_penalty != 1.0:
            for token_id in set(row.prompt_token_ids) - counts.keys():
                where.append((i, token_id))
                how.append((params.repetition_penalty, 0.0))
    if not where:
        return logits
    places = tuple(_indices(where, logits).T)
    repetition, amount = _floats(how, logits).T
    values = logits[places]
    values = torch.where(values > 0, values / repetition, values * repetition) - amount
    return logits.index_put(places, values)


def draw(logits: Tensor, best: Tensor, argmax: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """One random token for each row, by inverting the cumulative distribution.

    Args:
        logits: [R, V]. best, argmax: [R], its largest value and where that is.

    Returns:
        [R] token ids; meaningless where ``best`` is not finite.
    """
    temperature, uniform = _floats(
        [(row.params.temperature, u) for row, u in zip(rows, uniforms(rows), strict=True)], logits
    ).T.unsqueeze(-1)  # [R, 1] each
    # A softmax without its division. The maximum comes off first: the largest weight is 1 and
    # the rest can only fade to 0, however small the temperature.
    weights = (logits - best.unsqueeze(-1)).div_(temperature).exp_()  # [R, V]
    truncate(weights, [row.params for row in rows])
    cumulative = weights.cumsum(dim=-1)  # [R, V]
    target = uniform * cumulative[:, -1:]  # [R, 1], below the total since uniform < 1
    drawn = torch.searchsorted(cumulative, target, right=True)  # first one above the target
    # A step up belongs to a token with weight, but a GPU's parallel sum may wobble in the last
    # bit and step up elsewhere. Such a draw (about one in ten million) takes the likeliest token.
    drawn.clamp_(max=logits.shape[-1] - 1)
    return torch.where(weights.gather(-1, drawn) > 0, drawn, argmax.unsqueeze(-1)).squeeze(-1)


def truncate(weights: Tensor, params: Sequence[SamplingParams]) -> None:
    """Put the weights of tokens that min_p, top_k or top_p drop to 0, in place.

    Each looks at what the one before has left. Tokens as heavy as the last one kept are kept too.

    Args:
        weights: [R, V], proportional to probabilities; the largest of each row is 1.
    """
    vocab_size = weights.shape[-1]

    members = [i for i, p in enumerate(params) if p.min_p > 0]
    if members:
        min_p = _floats([params[i].min_p for i in members], weights).unsqueeze(-1)  # [M, 1]
        _drop_lighter(weights, members, min_p)

    members = [i for i, p in enumerate(params) if 0 < p.top_k < vocab_size]
    if members:
        top_k = [params[i].top_k for i in members]
        heaviest = _select(weights, members).topk(max(top_k), dim=-1).values  # [M, K], descending
        last = _indices(top_k, weights).unsqueeze(-1) - 1  # [M, 1]
        _drop_lighter(weights, members, heaviest.gather(-1, last))

    members = [i for i, p in enumerate(params) if p.top_p < 1]
    if members:
        top_p = _floats([params[i].top_p for i in members], weights).unsqueeze(-1)  # [M, 1]
        _drop_lighter(weights, members, nucleus_edge(_select(weights, members), top_p))


def nucleus_edge(weights: Tensor, top_p: Tensor) -> Tensor:
    """The lightest weight of the smallest set that holds ``top_p`` of the total: [M, 1].

    Args:
        weights: [M, V]. top_p: [M, 1].
    """
    vocab_size = weights.shape[-1]
    # The end of a running sum, because `sum()` adds in another order for another M.
    goal = top_p * weights.cumsum(dim=-1)[:, -1:]  # [M, 1]
    num_candidates = min(1024, vocab_size)  # a nucleus is small: seldom is a full sort needed
    while True:
        candidates = weights.topk(num_candidates, dim=-1).values  # [M, C], descending
        held = candidates.cumsum(dim=-1)
        if num_candidates == vocab_size or bool((held[:, -1:] >= goal).all()):
            break
        num_candidates = min(8 * num_candidates, vocab_size)
    edge = (held < goal).sum(dim=-1, keepdim=True).clamp_(max=num_candidates - 1)  # [M, 1]
    return candidates.gather(-1, edge)


def _drop_lighter(weights: Tensor, members: Sequence[int], least: Tensor) -> None:
    """Drop what is lighter than ``least`` [M, 1] in rows ``members`` of ``weights`` [R, V]."""
    floor = weights.new_zeros(len(weights), 1)
    floor[_indices(members, weights)] = least
    weights.masked_fill_(weights < floor, 0)


def uniforms(rows: Sequence[SamplingRow]) -> list[float]:
    """One number in [0, 1) a row, a pure function of its seed key and position.

    Three rounds of SplitMix64's mixer (Steele, Lea and Flood, "Fast splittable pseudorandom
    number generators", 2014), one for each part of the key. 24 bits, all that float32 holds.
    """
    mask = 2**64 - 1
    keys = [(row.seed_key[0] & mask, row.seed_key[1] & mask, row.position) for row in rows]
    state = np.zeros(len(rows), dtype=np.uint64)
    for part in np.array(keys, dtype=np.uint64).reshape(-1, 3).T:
        state = state + part + np.uint64(0x9E3779B97F4A7C15)  # wraps, as intended
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = state ^ (state >> np.uint64(31))
    return ((state >> np.uint64(40)) * 2.0**-24).tolist()


def gather_logprobs(
    raw: Tensor, token_ids: Tensor, rows: Sequence[SamplingRow]
) -> list[dict[int, Logprob] | None]:
    """Log-probabilities of the model itself, before penalties and temperature.

    That is what vLLM calls ``raw_logprobs``, its default.

    Args:
        raw: [R, V] logits as the model gave them. token_ids: [R], the sampled ones.
    """
    result: list[dict[int, Logprob] | None] = [None] * len(rows)
    askers: dict[int, list[int]] = defaultdict(list)  # number of top tokens -> rows
    for i, row in enumerate(rows):
        if row.params.logprobs is not None:
            askers[min(row.params.logprobs, raw.shape[-1])].append(i)
    for num_top, members in askers.items():
        logits = _select(raw, members)  # [G, V]
        sampled = _select(token_ids, members).unsqueeze(-1)  # [G, 1]
        sampled_logit = logits.gather(-1, sampled)
        rank = (logits > sampled_logit).sum(dim=-1, keepdim=True) + 1
        top_logits, top_ids = logits.topk(num_top, dim=-1)  # [G, N] each
        log_total = logits.logsumexp(dim=-1, keepdim=True)
        # float64 holds ids and ranks exactly, so that all can travel in one tensor.
        columns = [sampled, rank, sampled_logit - log_total, top_ids, top_logits - log_total]
        packed = torch.cat([column.double() for column in columns], dim=-1).tolist()
        for i, (token_id, its_rank, logprob, *top) in zip(members, packed, strict=True):
            entry = {int(token_id): Logprob(logprob, int(its_rank))}
            for place in range(num_top):
                entry[int(top[place])] = Logprob(top[num_top + place], place + 1)
            result[i] = entry
    return result


def _select(tensor: Tensor, members: Sequence[int]) -> Tensor:
    """Those rows of a tensor; the tensor itself, not a copy, if they are all of its rows."""
    return tensor if len(members) == len(tensor) else tensor[_indices(members, tensor)]


def _indices(values: Sequence, like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=like.device)


def _floats(values: Sequence, like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=like.device)
