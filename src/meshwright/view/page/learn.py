"""The twelve lessons as data. The last one asks about the present plan."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from meshwright.view.page import lessons_basics as basics
from meshwright.view.page import lessons_plans as plans
from meshwright.view.page.lesson import Lesson
from meshwright.view.page.subject import Subject

LESSONS: tuple[Callable[[], Lesson], ...] = (
    basics.state_memory,
    basics.zero,
    basics.number_formats,
    basics.all_reduce,
    basics.latency,
    basics.tensor_parallel,
    plans.pipeline_bubble,
    plans.better_schedules,
    plans.recompute,
    plans.long_sequences,
    plans.experts,
)


@cache
def general() -> list[dict[str, Any]]:
    """The lessons that do not depend on the plan."""
    return [lesson().as_dict() for lesson in LESSONS]


def data(subject: Subject) -> dict[str, Any]:
    """Twelve lessons, each with text, a view to open, and questions with their answers."""
    p = subject.estimate.prediction
    return {"lessons": [*general(), plans.whole_plan(p.step_time_s, p.tokens_per_s or 1.0).as_dict()]}
