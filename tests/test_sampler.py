"""The sampler against plain numpy, one row at a time, written here from the definitions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import minibatch.sampler as sampler_module
from minibatch.errors import MinibatchError, SamplingError
from minibatch.sampler import InvalidLogitsError, Sampler, SamplingRow, uniforms
from minibatch.sampling_params import SamplingParams

sample = Sampler()
LAST_UNIFORM = 1 - 2.0**-24  # the largest that `uniforms` can give


def row(seed: int = 0, position: int = 0, *, index: int = 0, **knobs: Any) -> SamplingRow:
    """A row from the sampling parameters that matter to the test."""
    history = {
        name: knobs.pop(name)
        for name in ("prompt_token_ids", "output_token_ids", "stop_token_ids")
        if name in knobs
    }
    knobs.setdefault("max_tokens", None)
    return SamplingRow(SamplingParams(**knobs), (seed, index), position, **history)


# ---- the reference ---------------------------------------------------------------------------


def splitmix64(state: int) -> int:
    """The generator's next output, in Python integers."""
    mask = 2**64 - 1
    z = (state + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def reference_uniform(seed: int, index: int, position: int) -> float:
    state = splitmix64((seed) % 2**64)
    state = splitmix64((state + index) % 2**64)
    return (splitmix64((state + position) % 2**64) >> 40) / 2**24


def reference_logits(logits: np.ndarray, one: SamplingRow) -> np.ndarray:
    """Mask and penalties, token by token. [V] float64"""
    params, result = one.params, []
    for token_id, logit in enumerate(logits.astype(np.float64)):
        if one.position < params.min_tokens and token_id in one.stop_token_ids:
            logit = -math.inf
        in_output = list(one.output_token_ids).count(token_id)
        if in_output or token_id in one.prompt_token_ids:
            factor = params.repetition_penalty
            logit = logit / factor if logit > 0 else logit * factor
        if in_output:
            logit -= params.presence_penalty + params.frequency_penalty * in_output
        result.append(logit)
    return np.array(result)


def reference_probabilities(logits: np.ndarray, params: SamplingParams, top_p: float) -> np.ndarray:
    """What a token is drawn from, each step renormalised as in the definitions. [V] float64"""
    scaled = (logits - logits.max()) / params.temperature
    p = np.exp(scaled)
    p /= p.sum()
    p = np.where(p >= params.min_p * p.max(), p, 0)
    if 0 < params.top_k < len(p):
        p = np.where(p >= sorted(p)[-params.top_k], p, 0)
    p /= p.sum()
    if top_p < 1:
        held = 0.0
        for probability in sorted(p, reverse=True):
            held += probability
            if held >= top_p:
                break
        p = np.where(p >= probability, p, 0)
    return p / p.sum()


def acceptable_tokens(logits: np.ndarray, one: SamplingRow) -> set[int]:
    """The reference's token; two or three where float32 may round across a border."""
    logits = reference_logits(logits, one)
    if one.params.greedy:
        return {int(np.argmax(logits))}
    uniform = reference_uniform(*one.seed_key, one.position)
    tokens = set()
    for wobble_p in (-1e-5, 0, 1e-5):
        top_p = one.params.top_p + wobble_p if one.params.top_p < 1 else 1.0
        cumulative = reference_probabilities(logits, one.params, top_p).cumsum()
        for wobble_u in (-1e-5, 0, 1e-5):
            target = min(max(uniform + wobble_u, 0), LAST_UNIFORM) * cumulative[-1]
            tokens.add(int(np.argmax(cumulative > target)))
    return tokens


# ---- random mixes against the reference ------------------------------------------------------

VOCAB = 23
token_ids = st.integers(0, VOCAB - 1)
sampling_rows = st.builds(
    lambda seed, index, position, prompt, output, stop, **knobs: row(
        seed,
        position,
        index=index,
        prompt_token_ids=prompt,
        output_token_ids=output,
        stop_token_ids=stop,
        **knobs,
    ),
    seed=st.integers(-(2**63), 2**64 - 1),
    index=st.integers(0, 7),
    position=st.integers(0, 9),
    prompt=st.lists(token_ids, max_size=6),
    output=st.lists(token_ids, max_size=9),
    stop=st.lists(token_ids, max_size=3),
    temperature=st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.0, 2.5]),
    top_p=st.sampled_from([1.0, 1.0, 0.05, 0.5, 0.93]),
    top_k=st.sampled_from([0, -1, 1, 2, 7, VOCAB, 10**9]),
    min_p=st.sampled_from([0.0, 0.0, 0.033, 0.41, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.7, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.0, -0.6, 1.5]),
    frequency_penalty=st.sampled_from([0.0, 0.0, -0.3, 0.9]),
    min_tokens=st.sampled_from([0, 0, 4]),
    logprobs=st.sampled_from([None, None, 0, 3]),
)
batches = st.lists(sampling_rows, min_size=1, max_size=6)


def random_logits(seed: int, num_rows: int, vocab_size: int = VOCAB) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_rows, vocab_size, generator=generator) * 3
    logits[torch.rand(logits.shape, generator=generator) < 0.05] = -torch.inf
    logits[:, 0] = 0.0  # never a row without a token
    return logits


@settings(max_examples=300, deadline=None)
@given(batch=batches, seed=st.integers(0, 10**6))
def test_matches_the_reference(batch: list[SamplingRow], seed: int) -> None:
    batch = [r._replace(stop_token_ids=[t for t in r.stop_token_ids if t != 0]) for r in batch]
    logits = random_logits(seed, len(batch))
    for token_id, one, its_logits in zip(
        sample(logits, batch).token_ids, batch, logits.numpy(), strict=True
    ):
        assert token_id in acceptable_tokens(its_logits, one)


@settings(max_examples=200, deadline=None)
@given(batch=batches, seed=st.integers(0, 10**6), data=st.data())
def test_a_row_does_not_know_its_company(
    batch: list[SamplingRow], seed: int, data: st.DataObject
) -> None:
    batch = [r._replace(stop_token_ids=[t for t in r.stop_token_ids if t != 0]) for r in batch]
    logits = random_logits(seed, len(batch))
    together = sample(logits, batch)
    chosen = data.draw(st.permutations(range(len(batch))))[: data.draw(st.integers(1, len(batch)))]
    apart = sample(logits[chosen], [batch[i] for i in chosen])
    assert apart.token_ids == [together.token_ids[i] for i in chosen]
    for i, entry in zip(chosen, apart.logprobs, strict=True):
        expected = together.logprobs[i]
        assert (entry is None) == (expected is None)
        if entry is not None and expected is not None:
            assert list(entry) == list(expected)
            for token_id, logprob in entry.items():
                assert logprob.rank == expected[token_id].rank
                assert logprob.logprob == pytest.approx(expected[token_id].logprob, abs=1e-5)


def test_a_large_vocabulary_alone_and_in_company() -> None:
    logits = random_logits(7, 12, 50_000)
    knobs: list[dict[str, Any]] = [{}, {"top_p": 0.9}, {"top_k": 40}, {"min_p": 0.02}] * 3
    batch = [row(i, i, temperature=0.5 + 0.1 * i, **kw) for i, kw in enumerate(knobs)]
    together = sample(logits, batch).token_ids
    for i, one in enumerate(batch):
        assert sample(logits[i : i + 1], [one]).token_ids == [together[i]]
        assert together[i] in acceptable_tokens(logits[i].numpy(), one)


def test_running_a_step_again_changes_nothing() -> None:
    logits, batch = random_logits(3, 5), [row(i, 9, index=2, logprobs=2) for i in range(5)]
    before = logits.clone()
    first = sample(logits, batch)
    sample(random_logits(4, 5), batch)
    assert sample(logits, batch) == first
    assert torch.equal(logits, before)


def test_the_callers_logits_are_left_alone() -> None:
    logits = random_logits(5, 2)
    before = logits.clone()
    knobs: dict[str, Any] = {"repetition_penalty": 2.0, "min_tokens": 5, "top_p": 0.5, "min_p": 0.1}
    sample(logits, [row(output_token_ids=[1, 2], stop_token_ids=[3], **knobs)] * 2)
    assert torch.equal(logits, before)


# ---- greedy and temperature ------------------------------------------------------------------


def test_greedy_takes_the_likeliest_and_the_first_of_equals() -> None:
    logits = torch.tensor([[0.0, 5.0, 5.0, 1.0], [9.0, 1.0, 2.0, 9.0]])
    assert sample(logits, [row(temperature=0)] * 2).token_ids == [1, 0]
    assert sample(logits, [row(temperature=0), row(top_k=1, seed=5)]).token_ids[0] == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1e-5, 1e-4, 1e-2])
def test_tiny_temperatures(dtype: torch.dtype, temperature: float) -> None:
    logits = torch.tensor([[30.0, 29.0, -torch.inf, 0.0], [-30.0, -torch.inf, -29.0, -30.0]])
    batch = [row(seed, temperature=temperature) for seed in range(2)]
    for position in range(50):
        again = [r._replace(position=position) for r in batch]
        assert sample(logits.to(dtype), again).token_ids == [0, 2]


def test_a_huge_temperature_is_uniform_over_what_is_possible() -> None:
    logits = torch.tensor([[30.0, -30.0, -torch.inf, 0.0]]).expand(3000, 4)
    counts = np.bincount(
        sample(logits, [row(i, temperature=1e30) for i in range(3000)]).token_ids, minlength=4
    )
    assert counts[2] == 0
    assert chi_square(counts[[0, 1, 3]], np.full(3, 1000)) < limit(2)


# ---- truncation ------------------------------------------------------------------------------


@pytest.mark.parametrize("top_k", [0, -1, 1, 10, 11, 12, 10**9])
def test_top_k_of_any_size(top_k: int) -> None:
    logits = torch.arange(11.0).div(10).expand(2000, 11)
    drawn = sample(logits, [row(i, top_k=top_k) for i in range(2000)]).token_ids
    kept = 11 if top_k <= 0 else min(top_k, 11)
    assert set(drawn) == set(range(11 - kept, 11))


def test_top_k_keeps_tokens_equal_to_the_last_one() -> None:
    logits = torch.tensor([[2.0, 1.0, 1.0, 0.0]]).expand(500, 4)
    assert set(sample(logits, [row(i, top_k=2) for i in range(500)]).token_ids) == {0, 1, 2}


def test_top_p_keeps_at_least_one_and_the_token_that_crosses() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log().expand(500, 3)
    for top_p, kept in [(1e-9, {0}), (0.4, {0}), (0.6, {0, 1}), (0.9, {0, 1, 2})]:
        drawn = sample(logits, [row(i, top_p=top_p) for i in range(500)]).token_ids
        assert set(drawn) == kept


def test_top_p_is_of_what_top_k_left() -> None:
    # Of 0.4, 0.3, 0.2, 0.1 top_k=2 leaves 0.4 and 0.3, that is 4/7 = 0.571 and 3/7.
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log().expand(500, 4)
    for top_p, kept in [(0.56, {0}), (0.58, {0, 1})]:
        drawn = sample(logits, [row(i, top_k=2, top_p=top_p) for i in range(500)]).token_ids
        assert set(drawn) == kept


def test_min_p_is_relative_to_the_likeliest_after_temperature() -> None:
    logits = torch.tensor([[0.6, 0.3, 0.1]]).log().expand(500, 3)
    for temperature, min_p, kept in [(1.0, 0.4, {0, 1}), (1.0, 0.6, {0}), (0.5, 0.4, {0})]:
        rows = [row(i, min_p=min_p, temperature=temperature) for i in range(500)]
        assert set(sample(logits, rows).token_ids) == kept


def test_a_flat_nucleus_larger_than_the_first_guess() -> None:
    logits = torch.zeros(1, 20_000)
    logits[0, :10] = 0.5
    params = row(top_p=0.9).params
    weights = (logits - 0.5).exp()
    sampler_module.truncate(weights, [params])
    assert (weights > 0).all()  # 19,990 equal tokens: one cannot be cut without another
    logits = -torch.arange(20_000.0)[None] / 4000
    weights = logits.exp()
    sampler_module.truncate(weights, [params])
    expected = reference_probabilities(logits[0].numpy().astype(np.float64), params, 0.9)
    assert abs(int((weights > 0).sum()) - int((expected > 0).sum())) <= 1


def test_borders_belong_to_one_side(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_module, "uniforms", lambda rows: [0.0, 0.25, 0.5, 0.75])
    assert sample(torch.zeros(4, 4), [row()] * 4).token_ids == [0, 1, 2, 3]
    weights = torch.tensor([[1.0, 0.5, 0.25, 0.25]])  # half of the total is the first alone
    sampler_module.truncate(weights, [row(top_p=0.5).params])
    assert weights.tolist() == [[1.0, 0.0, 0.0, 0.0]]


@pytest.mark.parametrize("uniform", [0.0, 2.0**-24, 0.5, LAST_UNIFORM])
@pytest.mark.parametrize("vocab_size", [3, 1000, 128_256])
def test_no_token_without_weight_and_none_past_the_end(
    uniform: float, vocab_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler_module, "uniforms", lambda rows: [uniform] * len(rows))
    flat = torch.zeros(vocab_size)
    flat[0] = flat[-1] = -torch.inf
    steep = -torch.linspace(0, 200, vocab_size)  # fades below what float32 can hold
    one_hot = torch.full((vocab_size,), -torch.inf)
    one_hot[vocab_size // 2] = -5.0
    logits = torch.stack([flat, steep, one_hot])
    drawn = sample(logits, [row(), row(), row()]).token_ids
    for token_id, its_logits in zip(drawn, logits, strict=True):
        assert 0 <= token_id < vocab_size
        assert (its_logits[token_id] - its_logits.max()).exp() > 0
    assert drawn[2] == vocab_size // 2


# ---- randomness ------------------------------------------------------------------------------


def chi_square(observed: np.ndarray, expected: np.ndarray) -> float:
    return float((((observed - expected) ** 2) / expected).sum())


def limit(degrees: int) -> float:
    """Five standard deviations above the mean of a chi-square variable."""
    return degrees + 5 * math.sqrt(2 * degrees) + 5


def test_splitmix64_known_answers() -> None:
    gamma, state, outputs = 0x9E3779B97F4A7C15, 1234567, []
    for _ in range(3):
        outputs.append(splitmix64(state))
        state = (state + gamma) % 2**64
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@given(st.integers(-(2**63), 2**64 - 1), st.integers(0, 2**20), st.integers(0, 2**20))
def test_uniforms_match_plain_integers(seed: int, index: int, position: int) -> None:
    (uniform,) = uniforms([row(seed, position, index=index)])
    assert uniform == reference_uniform(seed, index, position)
    assert 0 <= uniform <= LAST_UNIFORM


ANY = SamplingParams()


def draws(seeds: Any = 0, indices: Any = 0, positions: Any = 0) -> np.ndarray:
    """Uniforms along the axes that are arrays."""
    keys = np.stack(np.broadcast_arrays(seeds, indices, positions), axis=-1).tolist()
    return np.array(uniforms([SamplingRow(ANY, (s, i), p) for s, i, p in keys]))


def test_uniforms_are_uniform_along_every_axis() -> None:
    n, bins = 40_000, 100
    axis = np.arange(n)
    for values in (draws(axis), draws(0, axis), draws(0, 0, axis), draws(axis << 40)):
        counts = np.bincount((values * bins).astype(int), minlength=bins)
        assert chi_square(counts, np.full(bins, n / bins)) < limit(bins - 1)


def test_neighbouring_draws_are_independent() -> None:
    n, bins = 40_000, 10
    seeds = np.arange(n)
    base = draws(seeds, 3, 5)
    for other in (
        draws(seeds + 1, 3, 5),
        draws(seeds, 4, 5),
        draws(seeds, 3, 6),
        draws(seeds, 5, 3),  # index and position are not interchangeable
    ):
        pairs = (base * bins).astype(int) * bins + (other * bins).astype(int)
        counts = np.bincount(pairs, minlength=bins * bins)
        assert chi_square(counts, np.full(bins * bins, n / bins**2)) < limit(bins**2 - 1)
        assert abs(np.corrcoef(base, other)[0, 1]) < 5 / math.sqrt(n)


def test_tokens_come_as_often_as_their_probability_says() -> None:
    logits, n = random_logits(11, 1)[0], 20_000
    params = row(temperature=0.8, top_k=12).params
    drawn = sample(
        logits.expand(n, -1), [SamplingRow(params, (42, 0), i) for i in range(n)]
    ).token_ids
    p = reference_probabilities(logits.numpy().astype(np.float64), params, 1.0)
    counts = np.bincount(drawn, minlength=VOCAB)
    likely = p * n >= 5
    assert counts[p == 0].sum() == 0
    assert chi_square(counts[likely], p[likely] * n) < limit(int(likely.sum()))


def test_n_samples_are_independent_draws() -> None:
    """Drawing the n first tokens without replacement made them all different."""
    logits = torch.tensor([0.9, 0.05, 0.03, 0.02]).log().expand(8, 4)
    first_tokens = [
        sample(logits, [row(seed, index=i) for i in range(8)]).token_ids for seed in range(200)
    ]
    counts = np.bincount(np.concatenate(first_tokens), minlength=4)
    assert chi_square(counts, 1600 * np.array([0.9, 0.05, 0.03, 0.02])) < limit(3)
    all_equal = sum(tokens == [0] * 8 for tokens in first_tokens) / 200
    assert abs(all_equal - 0.9**8) < 5 * math.sqrt(0.43 * 0.57 / 200)


def test_positions_and_seeds_give_other_tokens() -> None:
    logits = torch.zeros(1, 1000)
    by_position = {sample(logits, [row(1, p)]).token_ids[0] for p in range(50)}
    by_seed = {sample(logits, [row(s, 1)]).token_ids[0] for s in range(50)}
    assert len(by_position) > 40 and len(by_seed) > 40


# ---- penalties and min_tokens ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("knobs", "expected"),
    [
        # logits 4, 3, 2, -1; token 0 in the prompt, token 1 twice and token 3 once in the output
        ({"repetition_penalty": 2.0}, [2.0, 1.5, 2.0, -2.0]),
        ({"presence_penalty": 0.5}, [4.0, 2.5, 2.0, -1.5]),
        ({"frequency_penalty": 0.5}, [4.0, 2.0, 2.0, -1.5]),
        ({"presence_penalty": -1.0, "frequency_penalty": 0.25}, [4.0, 3.5, 2.0, -0.25]),
        ({"repetition_penalty": 2.0, "presence_penalty": 1.0}, [2.0, 0.5, 2.0, -3.0]),
    ],
)
def test_penalties_by_hand(knobs: dict[str, float], expected: list[float]) -> None:
    logits = torch.tensor([[4.0, 3.0, 2.0, -1.0]] * 2)
    history = {"prompt_token_ids": [0, 0], "output_token_ids": [1, 3, 1]}
    batch = [row(**history), row(**history, **knobs)]
    changed = sampler_module.apply_penalties(logits, batch)
    assert changed.tolist() == [[4.0, 3.0, 2.0, -1.0], pytest.approx(expected)]


def test_end_ids_are_out_of_reach_until_min_tokens() -> None:
    logits = torch.tensor([[0.0, 9.0, 8.0, 1.0]])
    for position, expected in [(0, 3), (2, 3), (3, 1), (4, 1)]:
        one = row(0, position, temperature=0, min_tokens=3, stop_token_ids=[1, 2, 99])
        assert sample(logits, [one]).token_ids == [expected]
    drawn = {
        sample(logits, [row(s, 2, min_tokens=3, stop_token_ids=(1, 2))]).token_ids[0]
        for s in range(200)
    }
    assert drawn == {0, 3}


# ---- log-probabilities -----------------------------------------------------------------------


def test_logprobs_are_the_models_own() -> None:
    logits = random_logits(21, 4)
    batch = [
        row(1, temperature=0.2, top_k=3, logprobs=0),
        row(2),
        row(3, temperature=2.0, logprobs=3, presence_penalty=2.0, output_token_ids=[0, 1, 2]),
        row(4, temperature=0, logprobs=10**6),
    ]
    output = sample(logits, batch)
    assert output.logprobs[1] is None
    for i, num_top in [(0, 0), (2, 3), (3, VOCAB)]:
        raw = logits[i].double().numpy()
        expected = raw - np.log(np.exp(raw).sum())
        entry, token_id = output.logprobs[i], output.token_ids[i]
        assert entry is not None
        assert next(iter(entry)) == token_id
        likeliest = np.argsort(-raw, kind="stable")[:num_top].tolist()
        assert set(likeliest) | {token_id} >= set(entry)
        assert len(entry) == len(set(likeliest) | {token_id})
        for one, logprob in entry.items():
            assert logprob.logprob == pytest.approx(expected[one], rel=1e-5)
            if math.isfinite(expected[one]):
                assert logprob.rank == 1 + int((raw > raw[one]).sum())
            assert logprob.decoded_token is None


# ---- bad logits ------------------------------------------------------------------------------


def test_rows_without_a_finite_maximum_are_named() -> None:
    logits = random_logits(31, 6)
    logits[1, 4] = torch.nan
    logits[3] = -torch.inf
    logits[4, 2] = torch.inf
    batch = [row(i, temperature=i % 2) for i in range(6)]
    with pytest.raises(InvalidLogitsError, match=r"rows \[1, 3, 4\]") as raised:
        sample(logits, batch)
    assert raised.value.rows == (1, 3, 4)
    assert isinstance(raised.value, SamplingError) and isinstance(raised.value, MinibatchError)
    sound = [0, 2, 5]
    assert len(sample(logits[sound], [batch[i] for i in sound]).token_ids) == 3


def test_min_tokens_that_leaves_nothing_is_an_error() -> None:
    with pytest.raises(InvalidLogitsError, match="min_tokens"):
        sample(torch.zeros(1, 2), [row(min_tokens=1, stop_token_ids=[0, 1])])


def test_rows_and_logits_must_agree() -> None:
    with pytest.raises(ValueError, match="2 rows of logits, but 1"):
        sample(torch.zeros(2, 4), [row()])


def test_an_empty_batch() -> None:
    assert sample(torch.zeros(0, 4), []) == ([], [])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_the_same_tokens_on_a_gpu() -> None:
    logits = random_logits(41, 64, 5000)
    batch = [
        row(i, i, temperature=0.1 * (i % 12), top_p=[1.0, 0.8][i % 2], top_k=[0, 20, 300][i % 3])
        for i in range(64)
    ]
    here, there = sample(logits, batch), sample(logits.cuda(), batch)
    differing = sum(a != b for a, b in zip(here.token_ids, there.token_ids, strict=True))
    assert differing <= 1  # a draw within a rounding error of a border
