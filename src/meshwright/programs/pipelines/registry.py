"""Join the builders of our schedules to `describe.schedules.SCHEDULES`, and build a program by name.

    part         arguments                                  what it returns
    build        ranks, microbatches, virtual, **options    the PipelineProgram
    paths        p, m, v, overlap (arrays)                  the chains of actions of which one is the longest (`formulas`)
    in_flight    p, m, v, r (arrays)                        the most activations, in (stage, micro-batch), that rank r holds

A schedule of your own is one `SCHEDULES.register(Schedule(...))` with these parts: docs/extending.md.
"""

from typing import Any

from meshwright.describe.schedules import SCHEDULES
from meshwright.programs.pipelines import formulas
from meshwright.programs.pipelines.auto import auto
from meshwright.programs.pipelines.looped_schedules import (
    gpipe,
    interleaved,
    interleaved_zb,
    looped_bfs,
    naive,
    one_forward_one_backward,
    zb_h1,
    zb_h2,
)
from meshwright.programs.pipelines.program import PipelineProgram
from meshwright.programs.pipelines.rules import name_of
from meshwright.programs.pipelines.v_schedules import dualpipev, zbv

BUILDERS = {
    "naive": naive,
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved,
    "looped-bfs": looped_bfs,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "interleaved-zb": interleaved_zb,
    "zbv": zbv,
    "dualpipev": dualpipev,
}
for _name, _build in BUILDERS.items():
    SCHEDULES.provide(_name, build=_build, paths=formulas.PATHS[_name], in_flight=formulas.IN_FLIGHT[_name])
SCHEDULES.provide("auto", build=auto)


def build(schedule: str, ranks: int, microbatches: int, virtual: int | None = None, **options: Any) -> PipelineProgram:
    """Return the program of a schedule; `virtual` defaults to the schedule's usual number of stages per rank (1 or 2)."""
    name = name_of(schedule)
    stages = SCHEDULES[name].virtual if virtual is None else virtual
    program: PipelineProgram = SCHEDULES.part(name, "build")(ranks, microbatches, stages, **options)
    return program
