"""Compare the issued collectives of a rank with the lowered ones; if they differ, the proof fails.

Both are given by (axis, operation): their number in a step, and their bytes n. The lowered ones are the step program of
(model, plan, workload), read for this rank by `lower.rank`; no sizes or messages come from the run, only the facts that it decides:

    the step       its number: replicas under local SGD average in some steps
    the user       parameters that are not trained
    the data       how many copies of tokens the routers sent (`routed`), how many values were above a threshold

A data-dependent row is marked (`explained`) and must be equal too. The step program is lowered in the dtype of the
run: a proof trains in float64 and float32 whatever the plan's dtypes are.
"""

from dataclasses import replace
from typing import Any

import torch

from meshwright.cost.memory import memory
from meshwright.describe.own_stack import own_stack
from meshwright.describe.plan import Plan
from meshwright.describe.result import OVERHEAD
from meshwright.describe.variants import COMPRESSIONS
from meshwright.lower.program import scalar
from meshwright.lower.rank import OURS, Given, Routed, traffic_of_rank
from meshwright.lower.step import step_program
from meshwright.models.moe import MixtureOfExperts
from meshwright.parallel.apply import Parallel
from meshwright.parallel.data.buckets import Buckets
from meshwright.parallel.data.reduction import reductions_in
from meshwright.parallel.data.zero import ShardedGradients
from meshwright.parallel.expert.dispatch import ParallelPlacement
from meshwright.parallel.numerics.compress.schemes import Threshold
from meshwright.parallel.stages import program_of
from meshwright.proof.records import Amount, Row
from meshwright.training.hooks import Observed
from meshwright.training.measure.observe import canonical

ROUTED, PASSED = "routing depends on the tokens", "the number of values above the threshold depends on the gradients"
WIDE = {torch.float64: ("fp64", 8.0), torch.float32: ("fp32", 4.0)}
Key = tuple[str, str]


def compare_traffic(parallel: Parallel, observed: Observed) -> list[Row]:
    """One row for each axis and operation of this rank."""
    given = given_of(parallel)
    low, rows = lowered(parallel, given), []
    reasons = {ROUTED: replace(given, routed=None)} if given.routed is not None else {}
    reasons |= {PASSED: replace(given, passed=None)} if given.passed is not None else {}
    without = {reason: lowered(parallel, less) for reason, less in reasons.items()}
    for key in sorted({*low, *observed.collectives}):
        expected, seen = low.get(key, (0.0, 0.0)), observed.collectives.get(key, (0, 0))
        row = Row(*key, expected, (float(seen[0]), float(seen[1])))
        row.unexplained = not equal(expected, row.observed)
        if not row.unexplained:
            row.explained = [why for why, other in without.items() if not equal(other.get(key, (0.0, 0.0)), expected)]
        rows.append(row)
    return rows


def equal(one: Amount, other: Amount) -> bool:
    """Whether counts and bytes are equal. Both are integers; a mean over micro-batches has a rounding error."""
    return abs(one[0] - other[0]) < 1e-6 and abs(one[1] - other[1]) < 0.5


def lowered(parallel: Parallel, given: Given) -> dict[Key, Amount]:
    """Lowered collectives by axis and operation; axes with the same ranks are merged."""
    mesh, out = parallel.mesh, dict[Key, Amount]()
    element = WIDE[parallel.dtype][1] if parallel.dtype in WIDE else 0.0
    program = step_program(parallel.model, as_run(parallel), parallel.workload, OURS, element)
    for record in traffic_of_rank(program, as_run(parallel), mesh.rank, mesh.layout.order, given):
        key = canonical(mesh, {"ends": "pp", "kv_copies": "tp"}.get(record.axis, record.axis)), record.collective
        count, total = out.get(key, (0.0, 0.0))
        out[key] = count + record.count, total + record.bytes
    return {key: amount for key, amount in out.items() if any(amount)}


def as_run(parallel: Parallel) -> Plan:
    """The plan in the dtypes of this run; a narrower dtype of gradient messages is kept."""
    plan = parallel.plan
    if parallel.dtype not in WIDE:
        return plan
    wide, _ = WIDE[parallel.dtype]
    sent = plan.comm_dtype if plan.wire == plan.comm_dtype else None
    return plan.but(param_dtype=wide, grad_dtype=wide, state_dtype=wide, comm_dtype=sent)


def given_of(parallel: Parallel) -> Given:
    """Collect the facts that the plan does not fix: the step number, frozen parameters, routing, thresholds."""
    frozen = frozenset(p.name for p in parallel.pieces if not p.parameter.requires_grad)
    return Given(parallel.step + 1, frozen, routed(parallel), values_sent(parallel))


def values_sent(parallel: Parallel) -> list[list[int]] | None:
    """For each message under a threshold, in the order of the lowering: the number of values that each reduction of the step sent."""
    if not COMPRESSIONS[parallel.plan.wire].counts_values:
        return None
    out: list[list[int]] = []
    for part in reductions_in(parallel.reductions):
        if isinstance(part, Buckets) and isinstance(part.compressor, Threshold) and part.group is not None:
            rounds = parallel.plan.microbatches(parallel.workload) if part.per_microbatch else 1
            out += [part.compressor.sent_counts[i][-rounds:] for i in range(len(part.messages))]
        elif isinstance(part, ShardedGradients):
            rounds = parallel.plan.microbatches(parallel.workload) if parallel.plan.pp == 1 else 1
            rounds = rounds if parallel.plan.reduces_each else 1
            passed = [s.compressor for s in part.scatters if len(s.lossy)]
            out += [c.sent_counts[0][-rounds:] for c in passed if isinstance(c, Threshold)]
    return out


# Memory


def predicted_memory(parallel: Parallel) -> float:
    """Bytes of tensors that the cost model predicts for this rank on the device that runs it. An observed step is not compiled, and the
    observer sees tensors alone: no driver context, workspace of products or allocator slack."""
    plan, workload = as_run(parallel), parallel.workload
    found = program_of(plan, workload)
    if found is not None and plan.schedule == "auto" and plan.virtual == 2 and found.rank_of[0] == found.rank_of[-1]:
        plan = plan.but(schedule="zbv")  # the cost model needs the placement that the search found
    if parallel.dtype in WIDE:
        workload = workload.but(precision=WIDE[parallel.dtype][0])
    stack = own_stack(torch.device(parallel.mesh.device).type, compiled=False).but(workspace=0)
    program = step_program(parallel.model, plan, workload, stack, every_rank=True)
    parts = memory(program, program.ranks[parallel.mesh.index("pp")])
    return sum(scalar(size) for part, size in parts.items() if part not in OVERHEAD)


def routed(parallel: Parallel) -> dict[int, list[Routed]] | None:
    """The rows that routers sent, by layer, one entry per micro-batch; None for a model without experts.

    Each rank sends t·k copies of its tokens (fewer where a capacity drops some) and receives the copies for its experts; an all-gather over
    expert_tp is padded to its fullest rank. A layer records these numbers for every dispatch of the step; here they are in the order of layers
    and micro-batches, which the lowering expects. It knows which layers are recomputed: dispatches of recomputed forwards are left out.
    """
    if not parallel.model.experts:
        return None
    out: dict[int, list[Routed]] = {}
    for stage in parallel.stages.values():
        every: Any = stage.layers
        layers = {int(name): layer.moe for name, layer in every.items() if hasattr(layer, "moe")}
        for i, (layer, experts) in enumerate(layers.items()):
            assert isinstance(experts, MixtureOfExperts)
            # One per stage: its layers append to one list, in turn.
            assert isinstance(experts.placement, ParallelPlacement)
            first = [d.rows for d in experts.placement.last_dispatches if not d.recomputed]
            out[layer] = first[i :: len(layers)]
    return out
