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

SCHEDULES.provide("naive", build=naive, paths=formulas.naive, in_flight=formulas.one_in_flight)
SCHEDULES.provide("gpipe", build=gpipe, paths=formulas.gpipe, in_flight=formulas.all_in_flight)
SCHEDULES.provide(
    "1f1b", build=one_forward_one_backward, paths=formulas.one_forward_one_backward, in_flight=formulas.in_flight_1f1b
)
SCHEDULES.provide(
    "interleaved", build=interleaved, paths=formulas.interleaved, in_flight=formulas.in_flight_interleaved
)
SCHEDULES.provide("looped-bfs", build=looped_bfs, paths=formulas.looped_bfs, in_flight=formulas.all_in_flight)
SCHEDULES.provide("zb-h1", build=zb_h1, paths=formulas.zb_h1, in_flight=formulas.in_flight_zb_h1)
SCHEDULES.provide("zb-h2", build=zb_h2, paths=formulas.zb_h2, in_flight=formulas.in_flight_zb_h2)
SCHEDULES.provide(
    "interleaved-zb",
    build=interleaved_zb,
    paths=formulas.interleaved_zb,
    in_flight=formulas.in_flight_interleaved_zb,
)
SCHEDULES.provide("zbv", build=zbv, paths=formulas.zbv, in_flight=formulas.in_flight_zbv)
SCHEDULES.provide("dualpipev", build=dualpipev, paths=formulas.dualpipev, in_flight=formulas.in_flight_dualpipev)
SCHEDULES.provide("auto", build=auto)


def build(schedule: str, ranks: int, microbatches: int, virtual: int | None = None, **options: Any) -> PipelineProgram:
    """Return the program of a schedule; `virtual` defaults to the schedule's usual number of stages per rank (1 or 2)."""
    name = name_of(schedule)
    stages = SCHEDULES[name].virtual if virtual is None else virtual
    program: PipelineProgram = SCHEDULES.part(name, "build")(ranks, microbatches, stages, **options)
    return program
