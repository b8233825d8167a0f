"""Rules of the machine, the batch, the training stack, the dtypes and the optimizer."""

import numpy as np

from meshwright.describe.axes import axis_size
from meshwright.describe.legality.case import (
    Case,
    Flag,
    Problem,
    Reading,
    divisors,
    fitting_microbatch,
    lookup,
    rule,
    values,
)
from meshwright.describe.plan_fields import GATHER_DTYPES
from meshwright.describe.schedules import MOST_ACTIONS, SCHEDULES, action_count
from meshwright.describe.variants import OPTIMIZERS
from meshwright.describe.workload import FP8

FP8_GATHERS = GATHER_DTYPES.index("fp8")


# The batch


@rule("MW-PLAN-011", "workload")
def batch_divides(p: Case) -> Reading:
    batch, unit = p.workload.batch, p.unit
    yield batch % unit != 0
    batches = [b for b in (batch // unit * unit, (batch // unit + 1) * unit) if b]
    size = fitting_microbatch(batch, p.dp, p.microbatch)
    smaller = [size] if size else []
    yield Problem(
        f"batch {batch} is not a multiple of microbatch × dp = {p.microbatch} × {p.dp} = {unit}",
        why="batch = micro-batch × accumulation × dp",
        valid=[*(f"batch={b}" for b in batches), *(f"microbatch={b}" for b in smaller)],
        fixes=[*values("workload.batch", batches, batch), *({"plan.microbatch": b} for b in smaller)],
    )


@rule("MW-PLAN-016", "workload")
def schedule_has_microbatches(p: Case) -> Reading:
    yield (p.pp > 1) & (p.microbatches < lookup(SCHEDULES.column("least_microbatches_per_rank"), p.schedule) * p.pp)
    name = p.word("schedule")
    least = SCHEDULES[name].least_microbatches_per_rank * p.pp
    smaller = [d for d in divisors(p.workload.batch // p.dp) if p.workload.batch // p.dp // d >= least]
    yield Problem(
        f"schedule {name} on pp={p.pp} needs {least} micro-batches, not {p.microbatches}",
        why="Both stages of every rank must be filled",
        valid=[f"{least} or more micro-batches"],
        fixes=[
            *values("plan.microbatch", smaller, p.microbatch),
            {"workload.batch": least * p.unit},
            {"plan.schedule": "zbv"},
        ],
    )


@rule("MW-PLAN-017", "workload")
def program_is_bounded(p: Case) -> Reading:
    yield (p.pp > 1) & (action_count(p.pp, p.microbatches, p.virtual) > MOST_ACTIONS)
    yield Problem(
        f"{p.pp} ranks × {p.microbatches} micro-batches × {p.virtual} stages per rank",
        why=f"A pipeline program has at most {MOST_ACTIONS:,} actions",
        fixes=values("plan.microbatch", divisors(p.workload.batch // p.dp)[-24:], p.microbatch),
    )


def round_size(p: Case) -> Flag:
    """Micro-batches that the stack takes together: their number is a multiple of this."""
    interleaved = p.stack.interleaved_rounds & lookup(SCHEDULES.column("in_rounds"), p.schedule) & (p.virtual > 1)
    return 1 + interleaved * (p.pp - 1)


@rule("MW-PLAN-012", "workload", "stack")
def interleaved_rounds(p: Case) -> Reading:
    """Our programs take any number of micro-batches; Megatron's interleaved schedules take rounds of pp."""
    yield p.microbatches % round_size(p) != 0
    rounds = max(1, round(p.microbatches / p.pp))
    local = p.workload.batch // p.dp
    sizes = [d for d in divisors(local) if local // d % p.pp == 0]
    yield Problem(
        f"{p.microbatches} micro-batches are not a multiple of pp={p.pp}",
        why=f"{p.stack.name} runs interleaved schedules in rounds of pp micro-batches",
        valid=["schedule=1f1b with virtual=1"],
        fixes=[
            {"workload.batch": rounds * p.pp * p.unit},
            *values("plan.microbatch", sizes, p.microbatch),
            {"plan.schedule": "1f1b", "plan.virtual": 1},
        ],
    )


# The dtypes


@rule("MW-PLAN-018", "workload")
def gathers_need_fp8_products(p: Case) -> Reading:
    yield (p.gather_dtype == FP8_GATHERS) & (p.workload.precision not in FP8)
    yield Problem(
        f"plan.gather_dtype=fp8 with workload.precision={p.workload.precision}",
        why="A tensor is gathered in fp8 because the product that reads it multiplies in fp8; other products would lose precision",
        valid=["gather_dtype=same", *(f"precision={name}" for name in FP8)],
        fixes=[{"plan.gather_dtype": "same"}, *({"workload.precision": name} for name in FP8)],
    )


@rule("MW-PLAN-024", "workload")
def row_scaling_needs_fp8(p: Case) -> Reading:
    yield p.workload.scaling == "row" and p.workload.precision != "fp8"
    yield Problem(
        f"workload.scaling=row with workload.precision={p.workload.precision}",
        why="Only fp8 products have scales that can be chosen",
        fixes=[{"workload.scaling": "tensor"}],
    )


@rule("MW-PLAN-024", "workload")
def row_scaling_needs_whole_rows(p: Case) -> Reading:
    yield (p.workload.scaling == "row") & ((p.tp > 1) | (p.cp > 1))
    fields = [f"plan.{name}={p.setting(f'plan.{name}')}" for name in ("tp", "cp") if p.setting(f"plan.{name}") > 1]
    yield Problem(
        f"workload.scaling=row with {' and '.join(fields)}",
        why="A rank needs whole rows and columns of each operand to scale them",
        valid=["scaling=tensor", "tp=1, cp=1"],
        fixes=[{"workload.scaling": "tensor"}],
    )


@rule("MW-PLAN-024", "model", "workload")
def row_scaling_gathers_experts(p: Case) -> Reading:
    experts = (p.model.experts > 0) & (p.zero == 3) & (axis_size(p, "expert_shard") > 1)
    yield (p.workload.scaling == "row") & (p.gather_dtype == FP8_GATHERS) & np.logical_not(experts)
    yield Problem(
        "workload.scaling=row with plan.gather_dtype=fp8 and no experts that ZeRO-3 shards",
        why="Forward scales a dense weight by rows and backward by columns: it is gathered in 16 bits; experts have one scale each",
        valid=["scaling=tensor", "gather_dtype=same"],
        fixes=[{"workload.scaling": "tensor"}, {"plan.gather_dtype": "same"}],
    )


# The optimizer


@rule("MW-PLAN-022", "model", "workload")
def muon_needs_matrices(p: Case) -> Reading:
    yield OPTIMIZERS[p.workload.optimizer].by_matrix and p.model.kind == "counts"
    yield Problem(
        f"workload.optimizer={p.workload.optimizer} with {p.model.name or 'a model'}, which is costed by its totals",
        why="Its update depends on the shapes of the matrices",
        valid=[f"optimizer={name}" for name, kind in OPTIMIZERS.items() if not kind.by_matrix],
        fixes=[{"workload.optimizer": "adamw"}],
    )
