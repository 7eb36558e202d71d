"""Published figures against arithmetic: claim by claim, what can be true on that chip.

A throughput is compared with three bounds (``bounds.uniform_bounds``): below *prefill, then
decode* any engine may reach it; below *overlapped* only one whose steps mix the two; above that
nothing can. "Out of memory" is compared with what fits (``reservation``). Figures that a
text derives from one another are derived again. Where a claim is about scheduling, the simulator
gives a figure of our own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from importlib import resources
from itertools import pairwise
from typing import Any

from minibatch.bounds import Bounds, UniformLoad, uniform_bounds
from minibatch.config import SchedulerConfig
from minibatch.cost_model import CostModel
from minibatch.errors import ConfigError
from minibatch.hardware import hardware
from minibatch.metrics import measure
from minibatch.model.presets import preset
from minibatch.reservation import KVMemory, Reservation, kv_memory, reservation
from minibatch.simulation import simulate
from minibatch.toy import static, utilization
from minibatch.workload import Workload, fixed, generate, uniform

STRATEGIES = ("static", "dynamic", "continuous")
ACTIVATION_BYTES = 2 * 2**30  # set aside, or not: no verdict may hang on it
SAME = 0.02  # figures printed with two or three digits


class Verdict(str, Enum):
    """What can be said of a claim."""

    REPRODUCED = "reproduced"  # the arithmetic, or the simulation, gives the same
    POSSIBLE = "possible"  # below what any engine may reach
    NEEDS_OVERLAP = "needs overlap"  # only if prefills and decodes share steps
    IMPOSSIBLE = "impossible"  # above every bound
    CONTRADICTS = "contradicts"  # another claim, or the arithmetic
    NO_MEASURE = "no measure"  # a figure that says nothing of what it is taken for


@dataclass(frozen=True)
class Finding:
    """One cell of one claim."""

    claim: str
    cell: str
    claimed: str
    verdict: Verdict
    bound: str
    arithmetic: str


def load_claims(name: str = "throughput_article") -> dict[str, Any]:
    """The claims of a text, as data, with its ``source``."""
    folder = resources.files("minibatch").joinpath("data/claims")
    return json.loads(folder.joinpath(f"{name}.json").read_text("utf-8"))


class Audit:
    """Checks the claims of the article on the chip and the load that it names."""

    def __init__(self) -> None:
        self.claims = load_claims()
        setup = self.claims["setup"]
        self.setup = setup
        self.chip = hardware(setup["hardware"])
        self.model = preset(setup["model"])
        self.ideal = CostModel.ideal(self.model, self.chip, setup["dtype"])
        self.usual = CostModel(self.model, self.chip, setup["dtype"])
        self.prompt_len: int = setup["prompt_len"]
        self.output_len: int = setup["output_len"]
        self.context = self.prompt_len + self.output_len // 2  # of a typical decode

    def run(self, claims: Collection[str] = ()) -> list[Finding]:
        """Check these claims, or all: T1 to T8, and the second text.

        Raises:
            ConfigError: there is no such claim.
        """
        checks: dict[str, Callable[[], list[Finding]]] = {
            "T1": self.t1,
            "T2": self.t2,
            "T3": self.t3,
            "T4": self.t4,
            "T5": self.t5,
            "T6": self.t6,
            "T7": self.t7,
            "T8": self.t8,
            "Text 2": self.interview,
        }
        unknown = [name for name in claims if name not in checks]
        if unknown:
            raise ConfigError(f"no claim {', '.join(unknown)}; there are {', '.join(checks)}.")
        return [
            finding
            for name, check in checks.items()
            if not claims or name in claims
            for finding in check()
        ]

    # -- what the checks share ----------------------------------------------------------------

    def bounds(self, batch: int) -> Bounds:
        load = UniformLoad(batch, self.prompt_len, self.output_len)
        return uniform_bounds(self.model, self.chip, load, self.setup["dtype"])

    def memory(self, activation_bytes: int = 0) -> KVMemory:
        return kv_memory(
            self.chip,
            self.model,
            dtype=self.setup["dtype"],
            gpu_memory_utilization=self.setup["gpu_memory_utilization"],
            activation_bytes=activation_bytes,
        )

    def room(self, policy: str, activation_bytes: int = 0) -> Reservation:
        """How many sequences of this load fit under a policy."""
        return reservation(
            policy,
            self.memory(activation_bytes).num_blocks,
            self.prompt_len,
            self.output_len,
            max_model_len=self.setup["max_model_len"],
        )

    def judge(self, claim: str, cell: str, rate: float, batch: int, note: str = "") -> Finding:
        """A throughput against the three bounds."""
        bounds = self.bounds(batch)
        if rate <= bounds.serial:
            verdict = Verdict.POSSIBLE
            arithmetic = f"{rate / bounds.serial:.0%} of prefill, then decode"
        elif rate <= bounds.overlapped:
            verdict = Verdict.NEEDS_OVERLAP
            arithmetic = (
                f"{rate / bounds.serial:.0%} of prefill, then decode; "
                f"{rate / bounds.overlapped:.0%} of overlapped"
            )
        else:
            verdict = Verdict.IMPOSSIBLE
            best = max(bounds.overlapped, bounds.decode_only)
            arithmetic = f"{rate / best:.2f} times the highest bound"
        bound = (
            f"decode only {bounds.decode_only:.0f}, serial {bounds.serial:.0f}, "
            f"overlapped {bounds.overlapped:.0f} tok/s"
        )
        text = f"{arithmetic}; {note}" if note else arithmetic
        return Finding(claim, cell, f"{rate:g} tok/s", verdict, bound, text)

    def judge_room(self, claim: str, cell: str, policy: str, batch: int, oom: bool) -> Finding:
        """Does "OOM" (or its absence) follow from how memory is reserved?"""
        most, least = self.room(policy), self.room(policy, ACTIVATION_BYTES)
        right = all(room.fits(batch) is not oom for room in (most, least))
        bound = f"{least.num_sequences}-{most.num_sequences} sequences fit"
        arithmetic = (
            f"{most.scheme}: {most.tokens_per_sequence} tokens each of "
            f"{self.memory(ACTIVATION_BYTES).num_tokens}-{self.memory().num_tokens}"
        )
        claimed = "OOM" if oom else f"{batch} run"
        verdict = Verdict.REPRODUCED if right else Verdict.CONTRADICTS
        return Finding(claim, cell, claimed, verdict, bound, arithmetic)

    def decode_ms(self, batch: float) -> float:
        """Milliseconds that the reads of a decode step take, for a batch that need not be whole."""
        one, two = (self.ideal.decode_cost(rows, self.context).memory_s for rows in (1, 2))
        return 1e3 * (one + (batch - 1) * (two - one))

    def decode_rows(self, milliseconds: float) -> float:
        """How many rows' reads fit in that time."""
        one, two = self.decode_ms(1), self.decode_ms(2)
        return 1 + (milliseconds - one) / (two - one)

    # -- the article --------------------------------------------------------------------------

    def t1(self) -> list[Finding]:
        claim = self.claims["T1"]
        batch = claim["concurrency"]
        row = next(r for r in self.claims["T2"]["rows"] if r["concurrency"] == batch)
        findings: list[Finding] = []
        for policy, rate in claim["tokens_per_s"].items():
            cell = f"{policy} @{batch}"
            if row[policy] == "OOM":
                room = self.room(policy)
                findings.append(
                    Finding(
                        "T1",
                        cell,
                        f"{rate} tok/s",
                        Verdict.CONTRADICTS,
                        f"{room.num_sequences} sequences fit",
                        f"T2 says OOM at {batch}, and the reservation of "
                        f"{room.tokens_per_sequence} tokens agrees",
                    )
                )
            else:
                findings.append(self.judge("T1", cell, rate, batch))
        low, high = (f"{share:.0%}" for share in claim["gpu_utilization"]["continuous"])
        findings.append(
            Finding(
                "T1",
                "GPU utilisation",
                f"{low}-{high}",
                Verdict.NO_MEASURE,
                "none",
                "NVML counts the time in which any kernel ran, not how much it did; MBU and MFU do",
            )
        )
        return findings

    def t2(self) -> list[Finding]:
        findings: list[Finding] = []
        for row in self.claims["T2"]["rows"]:
            batch = row["concurrency"]
            for policy in STRATEGIES:
                cell, value = f"{policy} @{batch}", row[policy]
                if value == "OOM":
                    findings.append(self.judge_room("T2", cell, policy, batch, oom=True))
                    continue
                fits = self.judge_room("T2", cell, policy, batch, oom=False)
                note = f"{fits.bound}; simulated {self.simulated_rate(policy, batch):.0f} tok/s"
                findings.append(self.judge("T2", cell, value, batch, note))
            if row["gain"] is not None and row["static"] != "OOM":
                findings.append(
                    derived("T2", f"gain @{batch}", row["gain"], row["continuous"], row["static"])
                )
        rows = [r for r in self.claims["T2"]["rows"] if 8 <= r["concurrency"] <= 32]
        steps = [1e3 * r["concurrency"] / r["continuous"] for r in rows]
        growth = self.decode_ms(rows[-1]["concurrency"]) / self.decode_ms(rows[0]["concurrency"])
        findings.append(
            Finding(
                "T2",
                "continuous, 8 to 32",
                f"{min(steps):.1f}-{max(steps):.1f} ms a step",
                Verdict.CONTRADICTS,
                f"the reads of a step grow {growth:.2f} times",
                "batch / throughput stays the same: a flat step, without prefill or growing KV",
            )
        )
        return findings

    def t3(self) -> list[Finding]:
        claim = self.claims["T3"]
        findings: list[Finding] = []
        batch = claim["static_batch"]
        findings.append(self.judge_room("T3", f"static batch {batch}", "static", batch, oom=False))
        ours: list[SpreadGain] = []
        for row in claim["rows"]:
            spread = f"{row['low']}-{row['high']} tokens"
            findings.append(
                derived("T3", f"gain at {spread}", row["gain"], row["continuous"], row["static"])
            )
            ours.append(self.spread_gain(row["low"], row["high"]))
        grows = all(a.slots < b.slots and a.paged < b.paged for a, b in pairwise(ours))
        findings.append(
            Finding(
                "T3",
                "gain grows with spread",
                " < ".join(f"{row['gain']}x" for row in claim["rows"]),
                Verdict.REPRODUCED if grows else Verdict.CONTRADICTS,
                "our simulation, as to direction",
                f"ours at {batch} slots each: "
                + ", ".join(f"{gain.slots:.2f}x" for gain in ours)
                + "; with the slots that paging adds: "
                + ", ".join(f"{gain.paged:.2f}x" for gain in ours),
            )
        )
        return findings

    def t4(self) -> list[Finding]:
        claim = self.claims["T4"]
        step_ms = claim["step_ms"]
        findings: list[Finding] = []
        for policy in ("static", "continuous"):
            rows, rate = claim[policy]["useful_rows"], claim[policy]["tokens_per_s"]
            findings.append(
                derived("T4", f"{policy}: {rows} rows / {step_ms} ms", rate, 1e3 * rows, step_ms)
            )
        rows = claim["continuous"]["useful_rows"]
        needed = self.decode_ms(rows)
        findings.append(
            Finding(
                "T4",
                f"{rows} rows in {step_ms} ms",
                f"{claim['continuous']['tokens_per_s']} tok/s",
                Verdict.IMPOSSIBLE,
                f"{needed:.1f} ms of reads, {1e3 * rows / needed:.0f} tok/s",
                f"T5 has {self.claims['T5']['memory_ms']} ms of reads, which are "
                f"{self.decode_rows(self.claims['T5']['memory_ms']):.1f} sequences of "
                f"{self.context} tokens",
            )
        )
        t2 = {r["concurrency"]: r["static"] for r in self.claims["T2"]["rows"]}
        most = max(batch for batch, rate in t2.items() if rate != "OOM")
        findings.append(
            Finding(
                "T4",
                f"static, {claim['static']['slots']} slots",
                f"{claim['static']['tokens_per_s']} tok/s",
                Verdict.CONTRADICTS,
                f"T2: {t2[claim['static']['slots']]} at {claim['static']['slots']} slots",
                f"T2's best static figure is {t2[most]} tok/s, at {most}",
            )
        )
        return findings

    def t5(self) -> list[Finding]:
        claim = self.claims["T5"]
        parts = [claim["kernels_ms"], claim["memory_ms"], claim["launches_ms"]]
        total = self.claims["T4"]["step_ms"]
        shares = [100 * part / sum(parts) for part in parts]
        adds_up = sum(parts) == total and all(
            abs(share - claimed) < 1
            for share, claimed in zip(shares, claim["shares_percent"], strict=True)
        )
        one = self.ideal.decode_cost(1, self.context).compute_s
        by_reads, by_kernels = self.decode_rows(claim["memory_ms"]), claim["kernels_ms"] / one / 1e3
        most = self.room("continuous").num_sequences
        share = self.ideal.decode_cost(most, self.context)
        low, high = claim["sm_utilization_large_batch"]
        return [
            Finding(
                "T5",
                "4 + 10 + 1 ms",
                f"{total} ms, {claim['shares_percent']} %",
                Verdict.REPRODUCED if adds_up else Verdict.CONTRADICTS,
                "none",
                "shares " + ", ".join(f"{value:.1f} %" for value in shares),
            ),
            Finding(
                "T5",
                "kernels and reads of one batch",
                f"{claim['kernels_ms']} and {claim['memory_ms']} ms",
                Verdict.CONTRADICTS,
                f"{1e6 * one:.0f} us of arithmetic a row at peak",
                f"the reads are those of {by_reads:.1f} rows, the arithmetic that of "
                f"{by_kernels:.0f}",
            ),
            Finding(
                "T5",
                "SM utilisation, large batch",
                f"{low:.0%}-{high:.0%}",
                Verdict.IMPOSSIBLE if share.compute_s / share.total_s < low else Verdict.POSSIBLE,
                f"{share.compute_s / share.total_s:.0%} of peak at {most} rows, all that fit",
                "each row brings its own KV to read: decode stays memory-bound",
            ),
        ]

    def t6(self) -> list[Finding]:
        claim = self.claims["T6"]
        prefill = self.ideal.work([(self.prompt_len, self.prompt_len, 0, True)])
        intensity = prefill.flops / (prefill.weight_bytes + prefill.kv_bytes)
        ridge = self.chip.ridge(self.setup["dtype"])
        prompt_ms = 1e3 * self.ideal.prefill_cost(1, self.prompt_len).total_s
        low, high = claim["prefill"]["ms"]
        most = self.room("continuous").num_sequences
        costs = [self.ideal.decode_cost(batch, self.context) for batch in range(1, most + 1)]
        bounded = all(cost.memory_s > cost.compute_s for cost in costs)
        fastest = 1e3 * self.ideal.step_weight_bytes / self.chip.memory_bandwidth
        fast, slow = claim["decode"]["ms"]
        return [
            Finding(
                "T6",
                "prefill is compute-bound",
                "yes",
                Verdict.REPRODUCED if intensity > ridge else Verdict.CONTRADICTS,
                f"ridge {ridge:.0f} FLOP/byte",
                f"{self.prompt_len} tokens: {prefill.flops / 1e12:.2f} TFLOP, {intensity:.0f} "
                "FLOP/byte",
            ),
            Finding(
                "T6",
                "prefill time",
                f"{low}-{high} ms",
                Verdict.POSSIBLE,
                f"{prompt_ms:.1f} ms for one prompt at peak",
                f"that is {low / prompt_ms:.1f} to {high / prompt_ms:.1f} prompts in a step",
            ),
            Finding(
                "T6",
                "decode is memory-bound",
                "yes",
                Verdict.REPRODUCED if bounded else Verdict.CONTRADICTS,
                f"at every batch from 1 to {most}",
                f"at {most}: {1e3 * costs[-1].memory_s:.1f} ms of reads, "
                f"{1e3 * costs[-1].compute_s:.1f} ms of arithmetic",
            ),
            Finding(
                "T6",
                "decode time, least",
                f"{fast} ms",
                Verdict.IMPOSSIBLE if fast < fastest else Verdict.POSSIBLE,
                f"{fastest:.2f} ms",
                f"{self.ideal.step_weight_bytes / 1e9:.2f} GB of weights alone at "
                f"{self.chip.memory_bandwidth / 1e12:.3f} TB/s",
            ),
            Finding(
                "T6",
                "decode time, most",
                f"{slow} ms",
                Verdict.POSSIBLE,
                f"{1e3 * costs[-1].total_s:.1f} ms at {most} rows",
                f"{slow} ms are {self.decode_rows(slow):.0f} rows",
            ),
            Finding(
                "T6",
                "utilisation of prefill and decode",
                f"{claim['prefill']['utilization']:.0%} and "
                + "-".join(f"{share:.0%}" for share in claim["decode"]["utilization"]),
                Verdict.NO_MEASURE,
                "none",
                "see T1; as a share of peak FLOP/s no prefill of a real engine reaches 95 %",
            ),
        ]

    def t7(self) -> list[Finding]:
        claim = self.claims["T7"]
        usual = self.usual
        moved = usual.cost(usual.work([], swapped_tokens=self.prompt_len))
        swap_ms = 1e3 * moved.link_s
        megabytes = self.prompt_len * usual.kv_token_bytes / 2**20
        peak_ms = 1e3 * self.ideal.prefill_cost(1, self.prompt_len).total_s
        at_half = 2 * peak_ms
        newer = hardware("h100")
        newer_ms = (
            1e3
            * self.prompt_len
            * usual.kv_token_bytes
            / (newer.link_bandwidth * usual.link_efficiency)
        )
        ideal_ms = swap_ms * usual.link_efficiency
        claimed_ratio = claim["recompute_ms"] / claim["swap_ms"]
        low, high = peak_ms / swap_ms, at_half / swap_ms
        return [
            Finding(
                "T7",
                f"swap in {self.prompt_len} tokens",
                f"{claim['swap_ms']} ms",
                Verdict.IMPOSSIBLE if claim["swap_ms"] < ideal_ms else Verdict.POSSIBLE,
                f"{ideal_ms:.1f} ms at the link's full rate",
                f"{megabytes:.0f} MiB at {usual.rates.link / 1e9:.0f} GB/s: {swap_ms:.1f} ms; "
                f"over PCIe 5 {newer_ms:.1f} ms",
            ),
            Finding(
                "T7",
                f"recompute {self.prompt_len} tokens",
                f"{claim['recompute_ms']} ms",
                Verdict.POSSIBLE,
                f"{peak_ms:.1f} ms at peak",
                f"{at_half:.0f} ms at half of peak; {claim['recompute_ms']} ms are "
                f"{peak_ms / claim['recompute_ms']:.0%} of peak",
            ),
            Finding(
                "T7",
                "recompute / swap",
                f"{claimed_ratio:.0f}x",
                Verdict.REPRODUCED if low <= claimed_ratio <= high else Verdict.CONTRADICTS,
                f"{low:.1f}x at peak, {high:.1f}x at half of it",
                "and it turns with length and link; swapping out took the link as long before",
            ),
        ]

    def t8(self) -> list[Finding]:
        claim = self.claims["T8"]
        gains = [self.spread_gain(row["low"], row["high"]) for row in self.claims["T3"]["rows"]]
        low, high = claim["continuous_batching"]
        ours = [gain.paged for gain in gains]
        batches = (32, 64, 128)
        mixed = {batch: self.bounds(batch) for batch in batches}
        most = max(b.overlapped / b.serial for b in mixed.values())
        separation = claim["prefill_decode_separation"]
        return [
            Finding(
                "T8",
                "continuous batching",
                f"{low}-{high}x",
                Verdict.POSSIBLE,
                f"ours {min(ours):.2f}-{max(ours):.2f}x over T3's spreads",
                "a property of the load, not of the mechanism: equal lengths gain "
                f"{gains[0].slots:.2f}x at equal slots",
            ),
            Finding(
                "T8",
                "separating prefill and decode",
                f"{separation[0]}-{separation[1]}x",
                Verdict.CONTRADICTS,
                f"mixing them may gain up to {most:.2f}x",
                "overlapped / serial: "
                + ", ".join(f"{b.overlapped / b.serial:.2f}x @{n}" for n, b in mixed.items())
                + "; in steps of their own, memory or cores stand idle",
            ),
        ]

    # -- the interview page -------------------------------------------------------------------

    def interview(self) -> list[Finding]:
        """What the second text says that can be counted."""
        claims = load_claims("interview_page")
        outputs, slots = claims["slot_steps"]["outputs"], claims["slot_steps"]["slots"]
        steps, busy = static(outputs, slots)
        first, second = self.decode_ms(1), self.decode_ms(2)
        paged = self.room("unified")
        defaults = {name: getattr(SchedulerConfig, name) for name in claims["defaults"]}
        return [
            Finding(
                "Text 2",
                "static wastes slots",
                "bubbles",
                Verdict.REPRODUCED,
                f"{busy} useful of {steps * slots} slot-steps",
                f"one answer of {max(outputs)} tokens and {slots - 1} of {min(outputs)}: "
                f"{utilization((steps, busy), slots):.0%}",
            ),
            Finding(
                "Text 2",
                "one more sequence is almost free",
                "yes",
                Verdict.REPRODUCED,
                f"a second row adds {second / first - 1:.1%} to a step",
                f"first wall: {paged.num_sequences} sequences fill the KV pool; the ridge of "
                f"{self.chip.ridge(self.setup['dtype']):.0f} FLOP/byte decode does not reach "
                "(T6), only prefill does",
            ),
            Finding(
                "Text 2",
                "defaults are caps",
                " and ".join(str(value) for value in claims["defaults"].values()),
                Verdict.REPRODUCED if defaults == claims["defaults"] else Verdict.CONTRADICTS,
                "none",
                f"{' and '.join(defaults)}: ours are the same, and how many run is decided anew "
                "every iteration",
            ),
        ]

    # -- simulated ----------------------------------------------------------------------------

    def simulated_rate(self, policy: str, batch: int) -> float:
        """Generated tokens/s of ``batch`` requests at once, with usual efficiencies."""
        workload = generate(batch, self.prompt_len, self.output_len)
        return self._rate(workload, policy, batch, self.setup["max_model_len"])

    def spread_gain(self, low: int, high: int) -> SpreadGain:
        """Continuous over static, for answers of ``low`` to ``high`` tokens."""
        return self._spread_gains[low, high]

    @cached_property
    def _spread_gains(self) -> dict[tuple[int, int], SpreadGain]:
        claim = self.claims["T3"]
        slots, longest = claim["static_batch"], 2048  # 4096 would not let 32 in
        gains: dict[tuple[int, int], SpreadGain] = {}
        for row in claim["rows"]:
            low, high = row["low"], row["high"]
            lengths = fixed(low) if low == high else uniform(low, high)
            workload = generate(claim["num_requests"], self.prompt_len, lengths)
            rate = {
                (policy, rows): self._rate(workload, policy, rows, longest)
                for policy, rows in (
                    ("static", slots),
                    ("continuous", slots),
                    ("continuous", claim["num_requests"]),
                )
            }
            base = rate["static", slots]
            gains[low, high] = SpreadGain(
                slots=rate["continuous", slots] / base,
                paged=rate["continuous", claim["num_requests"]] / base,
            )
        return gains

    def _rate(self, workload: Workload, policy: str, slots: int, max_model_len: int) -> float:
        knobs = {"max_num_seqs": slots, "max_model_len": max_model_len}
        trace = simulate(workload, cost_model=self.usual, policy=policy, knobs=knobs)
        return measure(trace).output_tokens_per_s


@dataclass(frozen=True)
class SpreadGain:
    """Continuous over static: with equally many ``slots``, and with those that ``paged`` memory
    allows besides.
    """

    slots: float
    paged: float


def derived(claim: str, cell: str, claimed: float, numerator: float, denominator: float) -> Finding:
    """A figure that a text derives from two others."""
    value = numerator / denominator
    same = abs(value / claimed - 1) <= SAME
    return Finding(
        claim,
        cell,
        f"{claimed:g}",
        Verdict.REPRODUCED if same else Verdict.CONTRADICTS,
        "none",
        f"{numerator:g} / {denominator:g} = {value:.4g}",
    )


def audit(claims: Collection[str] = ()) -> list[Finding]:
    """The findings on these claims, or on all, in their order."""
    return Audit().run(claims)
