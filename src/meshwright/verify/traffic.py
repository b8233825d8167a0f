"""Collectives the witness saw against the lowered step program: equal, or each difference explained by name.

Both are told by (axis, operation) as how many a step and how many bytes of n. What a step has to say is in the lowering, and
so in every prediction. What is left to this implementation, or to the data, and differs from it by amounts known to the byte:

    messages      the same bytes in other messages: `fully_shard` sends unit by unit, a stage has buckets of its own
    padding       rows padded to a multiple of the ranks, a vocabulary that does not divide over them
    compression   scales, and whole numbers of values and of rows, in compressed messages
    routing       how many copies of tokens each rank really has for the others (`expert_traffic`)
    average       replicas that train alone average in some steps; the lowering has the mean of all steps
    backward      torch asks for a saved input in I as well as in W, and under sequence parallelism it is gathered for each
    frozen        parameters a user does not train have no gradient

A difference that is no sum of these stays unexplained and fails the proof.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshwright.cost.memory import memory
from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.describe.stack import Stack
from meshwright.lower.op import StepProgram
from meshwright.lower.stages import holding
from meshwright.lower.step import step_program
from meshwright.lower.traffic import traffic
from meshwright.parallel.apply import Parallel, program_of
from meshwright.parallel.expert import experts_of
from meshwright.parallel.pieces import TIED_COPY, TIED_SOURCE, Piece
from meshwright.parallel.zero import Shards, buckets_of, parts_of, units
from meshwright.train.observe import canonical
from meshwright.train.records import Observed
from meshwright.verify.expert_traffic import expert_parallel, is_expert
from meshwright.verify.records import Amount, Explanation, Row

VOCABULARY = (TIED_SOURCE, TIED_COPY)
MESSAGES, PADDING, COMPRESSED = "the same bytes in other messages", "sizes that do not divide", "compressed to the byte"
SCALES = "fp8 operands have one scale on all ranks"
AVERAGED = "replicas average in some steps"
FROZEN, IN_BOTH = "frozen parameters have no gradient", "a saved input is gathered for I and for W"
Key = tuple[str, str]


def compare_traffic(parallel: Parallel, observed: Observed) -> list[Row]:
    """This rank's rows."""
    program = as_run(parallel)
    low = lowered(parallel, program)
    reasons = list(explanations(parallel, program))
    rows = []
    for key in sorted({*low, *observed.collectives}):
        expected, seen = low.get(key, (0.0, 0.0)), observed.collectives.get(key, (0, 0))
        row = Row(*key, expected, (float(seen[0]), float(seen[1])))
        here = [r for r in reasons if (r.axis, r.operation) == key and (r.count or r.bytes)]
        found = explain((row.observed[0] - expected[0], row.observed[1] - expected[1]), here)
        row.explained, row.unexplained = found or [], found is None
        rows.append(row)
    return rows


def explain(difference: Amount, reasons: list[Explanation]) -> list[str] | None:
    """The fewest reasons that add up to the difference; None if none do."""
    for size in range(len(reasons) + 1):
        for chosen in combinations(reasons, size):
            count, total = sum(r.count for r in chosen), sum(r.bytes for r in chosen)
            if abs(count - difference[0]) < 1e-6 and abs(total - difference[1]) < 0.5:
                return list(dict.fromkeys(r.name for r in chosen))
    return None


# What the lowered program says


def as_run(parallel: Parallel) -> StepProgram:
    """The step program in the dtype of this run (a proof trains in float64 and float32 whatever the plan says), and, of a
    schedule that was searched for, in the placement that was found."""
    plan, workload = parallel.plan, parallel.workload
    found = program_of(plan, workload)
    if found is not None and plan.schedule == "auto" and plan.virtual == 2 and found.rank_of[0] == found.rank_of[-1]:
        plan = plan.but(schedule="zbv")
    wide = {torch.float64: "fp64", torch.float32: "fp32"}.get(parallel.dtype)
    if wide is not None:
        plan = plan.but(param_dtype=wide, grad_dtype=wide, state_dtype=wide)
        workload = workload.but(precision=wide)
    return step_program(parallel.model, plan, workload, Stack())


def lowered(parallel: Parallel, program: StepProgram, part: str = "") -> dict[Key, Amount]:
    """By axis and operation; of one part of the program only, where one is named. Axes of the same ranks are one."""
    mesh = parallel.mesh
    out: dict[Key, Amount] = {}
    for record in traffic(program, mesh.index("pp"), part):
        if number(program.batch.size(record.axis)) > 1:
            axis = {"ends": "pp", "kv_copies": "tp"}.get(record.axis, record.axis)
            key = canonical(mesh, axis), record.collective
            count, total = out.get(key, (0.0, 0.0))
            out[key] = count + record.count, total + record.bytes
    return {key: amount for key, amount in out.items() if any(amount)}


def predicted_memory(parallel: Parallel) -> float:
    """Bytes the cost model expects of tensors on this rank: without driver context and allocator slack."""
    program = as_run(parallel)
    parts = memory(program, holding(program.batch, np.full(1, float(parallel.mesh.index("pp")))))
    return sum(number(size) for part, size in parts.items() if part not in ("context", "slack"))


def number(value: Any) -> float:
    return float(np.broadcast_to(value, 1)[0])


# What this stack does beside it


def explanations(parallel: Parallel, program: StepProgram) -> Iterator[Explanation]:
    yield from expert_parallel(parallel)
    yield from split_backward(parallel)
    yield from fp8_scales(parallel)
    yield from spared_gathers(parallel)
    yield from small_sums(parallel, program)
    if parallel.local is not None:
        key = canonical(parallel.mesh, "replicate"), "all_reduce"
        count, total = lowered(parallel, program, "dense")[key]
        times = number(program.batch.average_every) - 1 if parallel.local.since == 0 else -1
        yield Explanation(AVERAGED, *key, times * count, times * total)
        yield Explanation(PADDING, *key, 0, unevenness(parallel) * number(program.batch.param_bytes))
    for kind in ("dense", "expert") if parallel.model.experts else ("dense",):
        pieces = [p for p in parallel.pieces if is_expert(p.name) == (kind == "expert")]
        explain_kind = sharded if any(isinstance(p.parameter, DTensor) for p in pieces) else bucketed
        yield from explain_kind(parallel, program, kind, pieces)


def bucketed(parallel: Parallel, program: StepProgram, kind: str, pieces: list[Piece]) -> Iterator[Explanation]:
    """Gradients of one kind of parameters in buckets."""
    low, width = lowered(parallel, program, kind), number(program.batch.comm_bytes)
    axis = "dp_cp" if kind == "dense" else "expert_dp"
    key = canonical(parallel.mesh, axis), "all_reduce"
    group = parallel.mesh.group(axis)
    buckets = [r for r in buckets_of(parallel.reductions) if r.group is not None and r.group is group]
    if not buckets:
        return
    rounds = parallel.plan.microbatches(parallel.workload) if buckets[0].each else 1
    yield Explanation(MESSAGES, *key, rounds * sum(len(r.messages) for r in buckets) - low.get(key, (0.0, 0.0))[0])
    yield Explanation(FROZEN, *key, 0, -rounds * width * sum(p.local.numel() for p in pieces if frozen(p)))
    yield Explanation(PADDING, *key, 0, rounds * width * unevenness(parallel) if kind == "dense" else 0.0)
    said: list[tuple[str, int]] = []
    for r in buckets if any(r.compressor is not None for r in buckets) else ():
        for i, (message, layout) in enumerate(zip(r.messages, r.layouts, strict=True)):
            args = message.numel(), message.element_size(), layout, r.group.size() if r.group is not None else 1
            as_it_is = [("all_reduce", message.nbytes)]
            for back in range(rounds):
                said += r.compressor.traffic(*args, index=i, back=back) if r.compressor is not None else as_it_is
    yield from compressed(said, low, key[0])


def compressed(
    said: list[tuple[str, int]], low: dict[Key, Amount], axis: str, beside: str = ""
) -> Iterator[Explanation]:
    """What compressed messages say to the byte in the place of what was lowered: scales, whole numbers of values, the layers'
    own shapes, and what goes beside them as it is. The operation `beside` is lowered for something else too."""
    operations = {op for place, op in low if place == axis and op != beside} if said else set()
    for operation in operations | {op for op, _ in said}:
        sizes = [size for op, size in said if op == operation]
        count, total = low.get((axis, operation), (0.0, 0.0)) if operation != beside else (0.0, 0.0)
        yield Explanation(COMPRESSED, axis, operation, len(sizes) - count, sum(sizes) - total)


def sharded(parallel: Parallel, program: StepProgram, kind: str, pieces: list[Piece]) -> Iterator[Explanation]:
    """`fully_shard` works unit by unit and pads rows to a multiple of the ranks."""
    low, batch = lowered(parallel, program, kind), program.batch
    plan, mesh, dense = parallel.plan, parallel.mesh, kind == "dense"
    over, copied = ("shard_cp", "replicate") if dense else ("expert_shard", "expert_replicate")
    ranks = mesh.size(over)
    parts = [part for module in parallel.stages.values()
             for part in (units(module, plan.wrap) or [[module]] if dense else experts_of(module))]  # fmt: skip
    rounds = plan.microbatches(parallel.workload) if plan.pp == 1 else 1
    gathers = 2 * rounds if plan.zero == 3 and plan.reshard and plan.pp == 1 else 1
    reductions = rounds if plan.reduces_each else 1
    still, moved = [p for p in pieces if frozen(p)], [p for p in pieces if p.parameter.requires_grad]
    uneven = unevenness(parallel) if dense else 0.0
    scatters = [s for r in parts_of(parallel.reductions) if isinstance(r, Shards) for s in r.scatters]
    mine = {p.parameter for p in pieces}
    said = [sent for s in scatters if s.ranks == ranks and mine.issuperset(s.lossy)
            for back in range(reductions) for sent in s.traffic(pieces[0].local.element_size(), back)]  # fmt: skip
    yield from compressed(said, low, canonical(mesh, over), beside="all_gather")
    for operation, axis, times, share in (
        ("all_gather", over, gathers, 1), ("reduce_scatter", over, reductions, 1), ("all_reduce", copied, reductions, ranks),
    ):  # fmt: skip
        key = canonical(mesh, axis), operation
        if key not in low:
            continue
        learns = operation != "all_gather"
        here = [part for part in parts if trains(part)] if learns else parts
        yield Explanation(MESSAGES, *key, len(here) * times - low[key][0])
        each = times / share * number(batch.comm_bytes if learns else batch.param_bytes)
        yield Explanation(PADDING, *key, 0, each * (padded(moved if learns else pieces, ranks) + uneven))
        if learns:
            yield Explanation(FROZEN, *key, 0, -each * sum(p.parameter.numel() for p in still))


def frozen(piece: Piece) -> bool:
    """Not trained by the user's choice; a balancing bias has no gradient in the lowering either."""
    return not piece.parameter.requires_grad and not piece.name.endswith("balance_bias")


def trains(unit: Any) -> bool:
    return any(p.requires_grad for part in (unit if isinstance(unit, list) else [unit]) for p in part.parameters())


def padded(pieces: list[Piece], ranks: int) -> int:
    """Elements of the rows that make each parameter's a multiple of the ranks."""
    return sum(-p.parameter.shape[0] % ranks * int(np.prod(p.parameter.shape[1:])) for p in pieces)


def unevenness(parallel: Parallel) -> float:
    """Elements of this rank above (or below) an even share of the vocabulary."""
    tp, vocabulary = parallel.plan.tp, parallel.model.padded_vocab
    cut = [p.parameter for p in parallel.pieces if tp > 1 and p.name in VOCABULARY]
    return sum((p.shape[0] - vocabulary / tp) * p.shape[1] for p in cut)


def small_sums(parallel: Parallel, program: StepProgram) -> Iterator[Explanation]:
    """Sums of single pieces: where a shard has no equal share of the rows, and where a user froze some."""
    mesh, low, width = parallel.mesh, lowered(parallel, program, "closing"), number(program.batch.grad_bytes)
    tied = [p for p in parallel.pieces if p.tied]
    summed = {canonical(mesh, "pp"): [tied if len(tied) == 1 else []]}
    for over, axis in (("tp", "tp"), ("kv_copies", "tp"), ("expert_tp", "expert_tp")):
        summed.setdefault(canonical(mesh, axis), []).append([p for p in parallel.pieces if p.partial == over])
    for name, groups in summed.items():
        count, total = low.get((name, "all_reduce"), (0.0, 0.0))
        summed_here = [p for pieces in groups for p in pieces]
        bytes_ = width * sum(p.local.numel() for p in summed_here)
        if any(frozen(p) for p in parallel.pieces):
            yield Explanation(FROZEN, name, "all_reduce", sum(map(bool, groups)) - count, bytes_ - total)
        elif unevenness(parallel) or any(p.local.numel() * ranks_of(p) != p.parameter.numel() for p in summed_here):
            yield Explanation(PADDING, name, "all_reduce", 0, bytes_ - total)


def ranks_of(piece: Piece) -> int:
    """Ranks that share a parameter out."""
    placed = piece.parameter
    return int(placed.device_mesh.size(-1)) if isinstance(placed, DTensor) else 1


def split_backward(parallel: Parallel) -> Iterator[Explanation]:
    plan, program = parallel.plan, program_of(parallel.plan, parallel.workload)
    if plan.tp == 1 or not plan.sp or program is None or not program.splits_backward:
        return
    n = plan.microbatch * parallel.workload.seq // plan.cp * parallel.pieces[0].local.element_size()
    inputs = [a.stage for a in program.actions(parallel.mesh.index("pp")) if a.kind == "I" and a.stage > 0]
    again = [width for s in inputs for width in regions(parallel.stages[s], parallel.model, plan)]
    yield Explanation(IN_BOTH, canonical(parallel.mesh, "tp"), "all_gather", len(again), sum(again) * n)


def fp8_scales(parallel: Parallel) -> Iterator[Explanation]:
    """Ranks that hold parts of a product's operands agree on their largest: two numbers forward, and one backward."""
    if parallel.workload.precision != "fp8":
        return
    plan, rounds = parallel.plan, parallel.plan.microbatches(parallel.workload)
    program = program_of(plan, parallel.workload)
    forward = backward = 0
    for index, stage in parallel.stages.items():
        layers: list[Any] = list(stage.layers.values())  # type: ignore[operator]
        products = [sum(isinstance(part, nn.Linear) for part in layer.modules()) for layer in layers]
        forward += rounds * (sum(products) + sum(products[i] for i in plan.made_again(range(len(layers)))))
        twice = program is not None and program.splits_backward and index > 0  # the gradients' largest in I and in W
        backward += rounds * sum(products) * (2 if twice else 1)
    for axis in ("tp", "cp"):
        if parallel.mesh.size(axis) > 1:
            key = canonical(parallel.mesh, axis), "all_reduce"
            yield Explanation(SCALES, *key, forward + backward, 8 * forward + 4 * backward)


def spared_gathers(parallel: Parallel) -> Iterator[Explanation]:
    """Where no weight of a region is trained, nobody saves its gathered input, and nobody gathers it again."""
    plan, model = parallel.plan, parallel.model
    if plan.tp == 1 or not plan.sp or not any(frozen(p) for p in parallel.pieces):
        return
    layers: list[Any] = [layer for stage in parallel.stages.values() for layer in stage.layers.values()]  # type: ignore[operator]
    still = [
        part
        for layer in layers
        for name, part in layer.named_children()
        if name in ("attention", "ffn") and not trains(part)
    ]
    count = len(still) * plan.microbatches(parallel.workload)
    n = plan.microbatch * parallel.workload.seq // plan.cp * model.hidden * parallel.pieces[0].local.element_size()
    yield Explanation(FROZEN, canonical(parallel.mesh, "tp"), "all_gather", -count, -count * n)


def regions(stage: Any, model: Model, plan: Plan) -> list[int]:
    """Widths of the gathered inputs that are not kept: of a recomputed layer they are, from I to W."""
    all_layers = list(stage.layers.values())
    again = [all_layers[i] for i in plan.made_again(range(len(all_layers)))]
    layers = [width for layer in all_layers if layer not in again for width in regions_of(layer, model)]
    return layers + [model.hidden] * (stage.head is not None)


def regions_of(layer: Any, model: Model) -> list[int]:
    """Attention's and the feed-forward network's; of experts only the shared ones are split as that is."""
    latents = (model.q_rank or model.hidden) + model.kv_rank + model.rope_dim
    split = not hasattr(layer, "moe") or layer.moe.shared is not None
    return [latents if model.attention == "mla" else model.hidden] + [model.hidden] * split
