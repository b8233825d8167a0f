"""The lessons' shape: a few sentences, a view to open, and questions whose answers our own functions compute.

A question is a number or a choice. Its answer is never typed: it is the value of the function that the commands use, and a choice
is decided by comparing such values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

GB, MB, MIB = 1e9, 1e6, 2**20
TOLERANCE = 0.02  # of a number: two correct digits are enough


@dataclass(frozen=True)
class Question:
    """`options` empty: the answer is a number in `unit`, else the index of the right option. `why` has the arithmetic."""

    ask: str
    answer: float
    why: str
    unit: str = ""
    options: tuple[str, ...] = ()
    tolerance: float = TOLERANCE


@dataclass(frozen=True)
class Lesson:
    """`view` is opened with `changes` of the state."""

    title: str
    text: tuple[str, ...]
    view: str
    questions: tuple[Question, ...]
    look: str = ""
    changes: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values: lists, not tuples."""
        questions = [asdict(question) | {"options": list(question.options)} for question in self.questions]
        return asdict(self) | {"text": list(self.text), "questions": questions}


def number(ask: str, answer: float, unit: str, why: str) -> Question:
    return Question(ask, float(answer), why, unit)


def largest(ask: str, values: Sequence[tuple[str, float]], why: str, equal: str = "") -> Question:
    """A choice between named values: the largest is right, or `equal` if all are the same."""
    options = [name for name, _ in values]
    sizes = [value for _, value in values]
    if equal:
        options.append(equal)
        if np.ptp(sizes) <= 1e-9 * max(map(abs, sizes)):
            return Question(ask, len(options) - 1, why, options=tuple(options))
    return Question(ask, int(np.argmax(sizes)), why, options=tuple(options))
