"""The workshop of the lessons: what notebooks import, and what builds and checks them.

from lessons import facts, interview, source, table, timeline
"""

from __future__ import annotations

from lessons.cards import interview
from lessons.exercise import Exercise, Verdict
from lessons.show import facts, life, setting, source, table, tell, timeline

__all__ = [
    "Exercise",
    "Verdict",
    "facts",
    "interview",
    "life",
    "setting",
    "source",
    "table",
    "tell",
    "timeline",
]
