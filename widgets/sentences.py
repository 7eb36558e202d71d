"""What happened in a step, in a sentence; and why a request does not run, in another."""

from __future__ import annotations

from collections.abc import Callable

from minibatch.record import HeldBack, Preemption
from widgets.replay import Facts
from widgets.words import Words

Label = Callable[[str], str]


class Narrator:
    """Tells steps. The headline comes first: who was refused, evicted, let in, who finished.

    Args:
        words: the language.
        label: short names of requests.
        num_slots: ``max_num_seqs``, for "all 8 slots are taken".
        mixes_phases: prefills and decodes share steps, so whoever sits out lacks budget.
    """

    def __init__(self, words: Words, label: Label, num_slots: int, mixes_phases: bool) -> None:
        self.words = words
        self.label = label
        self.num_slots = num_slots
        self.mixes_phases = mixes_phases

    def clauses(self, facts: Facts) -> list[str]:
        """The most important first."""
        record, words = facts.record, self.words
        clauses = [
            words(
                "refused",
                who=self.label(r.request_id),
                needed=r.needed,
                knob=r.knob,
                available=r.available,
            )
            for r in record.refused
        ]
        clauses += self._evictions(facts)
        clauses += self._admissions(facts)
        clauses += self._finishes(facts)
        if record.held_back is not None and not record.preempted:
            who = self.label(record.held_back.request_id)
            clauses.append(words("held", who=who, reason=self.held_reason(record.held_back)))
        clauses += self._work(facts)
        return clauses

    def sentence(self, facts: Facts) -> str:
        """All clauses: ``Step 17: request G is evicted (recompute): ...; ...``"""
        words = self.words
        head = words("step", step=facts.record.step)
        return head + words("colon") + words("semicolon").join(self.clauses(facts)) + words("stop")

    def held_reason(self, held: HeldBack) -> str:
        words, key = self.words, f"held.{held.reason}"
        return words(
            key if key in words.table else "held.unknown",
            needed=held.needed,
            available=held.available,
            needed_blocks=words.count("block", held.needed),
            needed_tokens=words.count("token", held.needed),
            slots=self.num_slots,
        )

    # -- clauses ------------------------------------------------------------------------------

    def _evictions(self, facts: Facts) -> list[str]:
        words = self.words
        groups: dict[tuple, list[Preemption]] = {}
        for p in facts.record.preempted:
            # Victims of one request are told together; what was free is what it was at first.
            groups.setdefault((p.mode, p.victim_of), []).append(p)
        clauses: list[str] = []
        for (mode, culprit), victims in groups.items():
            names = [self.label(p.request_id) for p in victims]
            many = "" if len(victims) == 1 else ".many"
            if culprit is None:
                why = words("why.hand")
            else:
                alone = len(victims) == 1 and victims[0].request_id == culprit
                why = words(
                    "why.self" if alone else "why.needs",
                    other=self.label(culprit),
                    blocks=words.count("block", victims[0].needed),
                    free=victims[0].free,
                )
            who = words("request.one" if not many else "request.many", names=words.names(names))
            clauses.append(words(f"evicted.{mode}{many}", who=who, why=why))
            if culprit is not None:
                clauses += self._choice(facts, victims, culprit)
            clauses += [self._price(facts, p) for p in victims[:3]]
        return clauses

    def _choice(self, facts: Facts, victims: list[Preemption], culprit: str) -> list[str]:
        """Why these."""
        words = self.words
        if any(p.request_id == culprit for p in victims):
            return [words("newest.self")]
        evicted = [facts.evicted.get(p.request_id) for p in victims]
        if not all(entry is not None and entry[2] for entry in evicted):
            return []
        if len(victims) > 1:
            return [words("newest.many")]
        return [words("newest", who=self.label(victims[0].request_id))]

    def _price(self, facts: Facts, preemption: Preemption) -> str:
        """What the eviction costs."""
        words, name = self.words, self.label(preemption.request_id)
        tokens, blocks, _ = facts.evicted.get(preemption.request_id, (0, 0, False))
        if tokens == 0:
            return words("cost.none", who=name)
        if preemption.mode == "swap":
            return words("cost.swap", who=name, blocks=words.count("block", blocks))
        return words(
            "cost.recompute",
            who=name,
            blocks=words.count("block", blocks),
            tokens=words.count("token", tokens),
        )

    def _finishes(self, facts: Facts) -> list[str]:
        words, moves = self.words, facts.block_moves
        freed = {**moves.lost, **moves.released}
        done: list[str] = []
        kept: list[str] = []
        aborted: list[str] = []
        for finish in facts.record.finished:
            name = self.label(finish.request_id)
            if finish.reason in ("abort", "error"):
                aborted.append(name)
            elif finish.request_id in freed:
                done.append(name)
            else:
                kept.append(name)
        clauses: list[str] = []
        if done:
            clauses.append(
                words.some(
                    "finished",
                    len(done),
                    who=words.names(done),
                    blocks=words.count("block", facts.num_released),
                )
            )
        if kept:
            clauses.append(words.some("finished.kept", len(kept), who=words.names(kept)))
        if aborted:
            clauses.append(words.some("aborted", len(aborted), who=words.names(aborted)))
        return clauses

    def _admissions(self, facts: Facts) -> list[str]:
        words = self.words
        if not facts.record.admitted and not facts.prefix_hits:
            return []
        tokens = dict(zip(facts.rows.request_id, facts.rows.num_tokens, strict=True))
        groups: dict[str, list[str]] = {}
        for admission in facts.record.admitted:
            groups.setdefault(admission.how, []).append(admission.request_id)
        clauses = [
            words.some(
                f"admitted.{how}",
                len(ids),
                who=words.names([self.label(name) for name in ids]),
                tokens=words.count("token", tokens.get(ids[0], 0)),
            )
            for how, ids in groups.items()
        ]
        if facts.prefix_hits and "forked" not in groups:
            clauses.append(words("prefix", tokens=words.count("token", facts.prefix_hits)))
        return clauses

    def _work(self, facts: Facts) -> list[str]:
        words, rows = self.words, facts.rows
        decode, padding, sits_out = map(rows.phase.count, ("decode", "padding", "sits_out"))
        prefill = prompt_padding = 0
        if decode + padding + sits_out < len(rows.phase):
            prefill = rows.tokens_of("prefill", "recompute")
            beside = zip(rows.phase, rows.num_padding_tokens, strict=True)
            prompt_padding = sum(n for phase, n in beside if phase in ("prefill", "recompute"))
        clauses: list[str] = []
        if prefill:
            clauses.append(words("work.prefill", tokens=words.count("token", prefill)))
        if prompt_padding:
            text = words.count("token", prompt_padding)
            clauses.append(words("work.prompt_padding", tokens=text))
        if decode:
            clauses.append(words.some("work.decode", decode))
        if padding:
            clauses.append(words.some("work.padding", padding))
        if sits_out and prefill and not self.mixes_phases:
            clauses.append(words.some("work.sits_out", sits_out))
        return clauses or [words("work.idle")]
