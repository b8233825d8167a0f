"""Pipeline schedules as programs: build them by name, check them, simulate them, or search for one."""

from meshwright.describe.schedules import SCHEDULES
from meshwright.programs.pipelines.auto import BestSchedule, auto, lower_bound, search
from meshwright.programs.pipelines.check import check
from meshwright.programs.pipelines.formulas import bubble_fraction, bubble_overhead, in_flight, makespan
from meshwright.programs.pipelines.program import KINDS, Action, PipelineProgram, looped, program_of, v_shaped
from meshwright.programs.pipelines.registry import build
from meshwright.programs.pipelines.rules import name_of, refusal
from meshwright.programs.pipelines.walk import Durations, Walked, walk, walked_makespan

__all__ = [
    "KINDS",
    "SCHEDULES",
    "Action",
    "BestSchedule",
    "Durations",
    "PipelineProgram",
    "Walked",
    "auto",
    "bubble_fraction",
    "bubble_overhead",
    "build",
    "check",
    "in_flight",
    "looped",
    "lower_bound",
    "makespan",
    "name_of",
    "program_of",
    "refusal",
    "search",
    "v_shaped",
    "walk",
    "walked_makespan",
]  # fmt: skip
