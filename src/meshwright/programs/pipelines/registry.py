"""All schedules by name. To add one, write a builder and add a line to `describe.schedules.RULES`."""

from __future__ import annotations

from typing import Any

from meshwright.describe.schedules import RULES
from meshwright.programs.pipelines.auto import auto
from meshwright.programs.pipelines.program import PipelineProgram
from meshwright.programs.pipelines.rules import name_of
from meshwright.programs.pipelines.schedules import HANDMADE, Builder

SCHEDULES: dict[str, Builder] = {**HANDMADE, "auto": auto}


def build(schedule: str, ranks: int, microbatches: int, virtual: int | None = None, **options: Any) -> PipelineProgram:
    """Return the program of a schedule; `virtual` defaults to the schedule's usual number of stages per rank (1 or 2)."""
    name = name_of(schedule)
    return SCHEDULES[name](ranks, microbatches, RULES[name].virtual if virtual is None else virtual, **options)
