"""Lowering: from (model, plan, workload, stack) to the operations of one training step, for a batch of plans or for one rank."""

from meshwright.lower.batch import Batch
from meshwright.lower.program import Op, StepProgram
from meshwright.lower.rank import Given, traffic_of_rank
from meshwright.lower.step import lower, step_program
from meshwright.lower.traffic import Record, batch_traffic, traffic

__all__ = [
    "Batch",
    "Given",
    "Op",
    "Record",
    "StepProgram",
    "batch_traffic",
    "lower",
    "step_program",
    "traffic",
    "traffic_of_rank",
]
