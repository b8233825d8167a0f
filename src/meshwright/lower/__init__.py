"""Lowering: from (model, plan, workload, stack) to the operations of one training step, for a whole batch of plans at once."""

from meshwright.lower.batch import Batch
from meshwright.lower.issued import Given, issued
from meshwright.lower.op import Op, StepProgram
from meshwright.lower.step import lower, step_program
from meshwright.lower.traffic import Record, traffic

__all__ = ["Batch", "Given", "Op", "Record", "StepProgram", "issued", "lower", "step_program", "traffic"]
