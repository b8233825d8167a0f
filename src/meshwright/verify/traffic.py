"""Collectives the witness saw against the lowered step program: equal, or each difference explained by name.

Both are told by (axis, operation) as how many a step and how many bytes of n. What a real stack does beside the
lowered program is listed in `explanations`, each with the exact count and bytes it adds or takes away; a difference
that is no sum of these stays unexplained and fails the proof. Where the lowering already tells one of them, the
difference is zero and the explanation is not needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any

import numpy as np
from torch.distributed.tensor import DTensor

from meshwright.cost.memory import elements, memory
from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.describe.stack import Stack
from meshwright.lower import sync
from meshwright.lower.layer import COPIES
from meshwright.lower.op import Op, StepProgram
from meshwright.lower.stages import Holding, holding
from meshwright.lower.step import step_program
from meshwright.parallel.apply import Parallel, program_of
from meshwright.parallel.expert import experts_of
from meshwright.parallel.pieces import TIED_COPY, TIED_SOURCE, Piece
from meshwright.parallel.zero import Buckets, Shards, buckets_of, parts_of, units
from meshwright.train.observe import canonical
from meshwright.train.records import Observed
from meshwright.verify.expert_traffic import expert_parallel, is_expert
from meshwright.verify.records import Amount, Explanation, Row

VOCABULARY = (TIED_SOURCE, TIED_COPY)


def compare_traffic(parallel: Parallel, observed: Observed) -> list[Row]:
    """This rank's rows."""
    low = lowered(parallel)
    reasons = list(explanations(parallel, low))
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
                return [r.name for r in chosen]
    return None


# What the lowered program says


def lowered(parallel: Parallel, part: str = "", only: str = "") -> dict[tuple[str, str], Amount]:
    """By axis and operation; of one part of the program, or one operation, where it is named."""
    program = step_program(parallel.model, parallel.plan, parallel.workload, Stack())
    batch, mesh = program.batch, parallel.mesh
    here = holding(batch, np.full(1, float(mesh.index("pp"))))
    out: dict[tuple[str, str], Amount] = {}

    def add(op: Op, times: float) -> None:
        count = number(op.count) * times
        if count and number(batch.size(op.axis)) > 1 and part in ("", op.part) and only in ("", op.name):
            key = canonical(mesh, op.axis), op.collective
            before = out.get(key, (0.0, 0.0))
            out[key] = before[0] + count, before[1] + count * number(op.message_bytes)

    microbatches = number(batch.microbatches)
    for key, ops in program.blocks.items():
        for op in ops:
            if op.axis:
                add(op, microbatches * number(here.times(*key)))
    for op in once_a_step(program, here):
        if op.axis:
            add(op, 1.0)
    for name, way in (("boundary-F", 1), ("boundary-I", -1)):
        for op in program.sync.get(name, ()):
            add(op, microbatches * sends(parallel, way))
    return out


def once_a_step(program: StepProgram, here: Holding) -> list[Op]:
    ops: list[Op] = []
    for group, count in elements(program, here).items():
        ops += [
            *sync.gradient_reduction(program.batch, count, group),
            *sync.parameter_gather(program.batch, count, group),
        ]
        ops += sync.parameter_average(program.batch, count, group) if group == "dense" else []
    return ops + sync.optimizer(program.batch, 1.0, 1.0)


def sends(parallel: Parallel, way: int) -> int:
    """Stages of this rank whose neighbour, after (1) or before (−1) them, sits on another rank."""
    program = program_of(parallel.plan, parallel.workload)
    if program is None:
        return 0
    ranks = program.rank_of
    neighbours = [(s, s + way) for s in parallel.stages if 0 <= s + way < len(ranks)]
    return sum(int(ranks[a] != ranks[b]) for a, b in neighbours)


def predicted_memory(parallel: Parallel) -> float:
    """Bytes the cost model expects of tensors on this rank: without driver context and allocator slack."""
    program = step_program(parallel.model, parallel.plan, parallel.workload, Stack())
    parts = memory(program, holding(program.batch, np.full(1, float(parallel.mesh.index("pp")))))
    return sum(number(size) for part, size in parts.items() if part not in ("context", "slack"))


def number(value: Any) -> float:
    return float(np.broadcast_to(value, 1)[0])


# What this stack does beside it


def explanations(parallel: Parallel, low: dict[tuple[str, str], Amount]) -> Iterator[Explanation]:
    yield from bookkeeping(parallel, low)
    yield from tensor_parallel(parallel)
    yield from recomputed_layers(parallel)
    yield from expert_parallel(parallel)
    for kind in ("dense", "expert") if parallel.model.experts else ("dense",):
        pieces = [p for p in parallel.pieces if is_expert(p.name) == (kind == "expert")]
        explain_kind = sharded if any(isinstance(p.parameter, DTensor) for p in pieces) else bucketed
        yield from explain_kind(parallel, lowered(parallel, kind), kind, pieces)


def bucketed(
    parallel: Parallel, low: dict[tuple[str, str], Amount], kind: str, pieces: list[Piece]
) -> Iterator[Explanation]:
    """Gradients in buckets; `low` is what was lowered of this kind of parameters."""
    axis = "dp_cp" if kind == "dense" else "expert_dp"
    key = canonical(parallel.mesh, axis), "all_reduce"
    buckets = [
        r for r in buckets_of(parallel.reductions) if r.group is not None and r.group is parallel.mesh.group(axis)
    ]
    if kind == "expert" and parallel.plan.zero and (buckets or low):
        yield from unsharded_experts(
            low, key, sum(len(r.messages) for r in buckets), sum(r.flat.nbytes for r in buckets)
        )
        return
    if not buckets:
        return
    frozen = sum(p.local.nbytes for p in pieces if not p.parameter.requires_grad)
    yield Explanation("the balancing bias has no gradient", *key, 0, -frozen)
    if kind == "dense":
        copies = sum(p.local.nbytes for p in parallel.pieces if p.tied_copy)
        yield Explanation("a tied embedding has a copy on the last stage", *key, 0, copies)
        yield Explanation("the vocabulary is cut unevenly", *key, 0, unevenness(parallel))
    yield from compressed(low, key[0], buckets)
    messages, whole = sum(len(r.messages) for r in buckets), sum(r.flat.nbytes for r in buckets) + frozen
    together = max(1, -(-whole // max(int(parallel.plan.bucket), 1)))
    yield Explanation("each pipeline stage has buckets of its own", *key, messages - together)
    if parallel.plan.reduces_each:
        spared = parallel.plan.microbatches(parallel.workload) - 1
        yield Explanation("buckets are reduced once a step", *key, -spared * together, -spared * whole)


def unsharded_experts(
    low: dict[tuple[str, str], Amount], key: tuple[str, str], messages: int, size: int
) -> Iterator[Explanation]:
    """Under ZeRO, experts that no two ranks of a shard group share are summed in buckets, once a step."""
    name = "experts held by one rank of a shard group are summed whole"
    for there in {*low, key}:
        count, total = low.get(there, (0.0, 0.0))
        now, bytes_now = (messages, size) if there == key else (0, 0)
        yield Explanation(name, *there, now - count, bytes_now - total)


def compressed(low: dict[tuple[str, str], Amount], axis: str, buckets: list[Buckets]) -> Iterator[Explanation]:
    """What compressed messages say to the byte: scales, padding, whole numbers of values, the layers' own shapes; and
    what goes beside them as it is."""
    exact: dict[str, list[int]] = {}
    for r in buckets if any(r.compressor is not None for r in buckets) else ():
        for i, (message, layout) in enumerate(zip(r.messages, r.layouts, strict=True)):
            args = message.numel(), message.element_size(), layout, r.group.size() if r.group is not None else 1
            said = (
                r.compressor.traffic(*args, index=i) if r.compressor is not None else [("all_reduce", message.nbytes)]
            )
            for operation, size in said:
                exact.setdefault(operation, []).append(size)
    yield from to_the_byte(exact, low, axis)


def to_the_byte(
    exact: dict[str, list[int]], low: dict[tuple[str, str], Amount], axis: str, beside: str = ""
) -> Iterator[Explanation]:
    """What is sent in the place of the lowered sums; the operation `beside` is lowered for something else."""
    for operation in {*exact, *(op for place, op in low if exact and place == axis and op != beside)}:
        sizes = exact.get(operation, [])
        count, total = low.get((axis, operation), (0.0, 0.0)) if operation != beside else (0.0, 0.0)
        yield Explanation("compressed to the byte, message by message", axis, operation, len(sizes) - count,
                          sum(sizes) - total)  # fmt: skip


def unevenness(parallel: Parallel) -> float:
    """Bytes of parameters above (or below) an even share of the vocabulary."""
    tp, vocabulary = parallel.plan.tp, parallel.model.padded_vocab
    cut = [p.parameter for p in parallel.pieces if tp > 1 and p.name in VOCABULARY]
    return sum((p.shape[0] - vocabulary / tp) * p.shape[1] * p.element_size() for p in cut)


def bookkeeping(parallel: Parallel, low: dict[tuple[str, str], Amount]) -> Iterator[Explanation]:
    mesh = parallel.mesh
    if parallel.local is not None:
        yield from averaged(parallel, low)
        return
    if mesh.size("dp_cp") > 1:
        yield Explanation("valid tokens are counted over dp", canonical(mesh, "dp_cp"), "all_reduce", 1, 8)
    if mesh.size("world") > 1:
        world = canonical(mesh, "world")
        if parallel.workload.clip:
            yield Explanation("the norm travels as float64 with the loss", world, "all_reduce", 0, 12)
        else:
            yield Explanation("norm and loss are summed even unclipped", world, "all_reduce", 1, 16)
    tied = [p for p in parallel.pieces if p.tied]
    if len(tied) == 1:
        yield Explanation("the two ends sum a tied embedding's gradient", "pp", "all_reduce", 1, tied[0].local.nbytes)


def averaged(parallel: Parallel, low: dict[tuple[str, str], Amount]) -> Iterator[Explanation]:
    """Replicas average in some steps and are quiet in others; the lowered program has the mean of them."""
    assert parallel.local is not None
    key = canonical(parallel.mesh, "replicate"), "all_reduce"
    count, total = low[key]
    now = (1, sum(p.local.nbytes for p in parallel.pieces) + parallel.pieces[0].local.element_size())
    name = "parameters are averaged in this step" if parallel.local.since == 0 else "parameters are not averaged yet"
    yield Explanation(
        name, *key, *((now[0] - count, now[1] - total) if parallel.local.since == 0 else (-count, -total))
    )
    for axis in ("tp", "pp"):
        if parallel.mesh.size(axis) > 1:
            yield Explanation(
                "a replica sums its norm and its loss", canonical(parallel.mesh, axis), "all_reduce", 1, 16
            )


def tensor_parallel(parallel: Parallel) -> Iterator[Explanation]:
    model, plan = parallel.model, parallel.plan
    if plan.tp == 1:
        return
    tp = canonical(parallel.mesh, "tp")
    microbatches = plan.microbatches(parallel.workload)
    partial = [p.local.nbytes for p in parallel.pieces if p.partial == "tp"]
    if partial:
        yield Explanation("whole vectors with partial gradients are summed", tp, "all_reduce", 1, sum(partial))
    copied = [p.local.nbytes for p in parallel.pieces if p.partial == "kv_copies"]
    count, total = lowered(parallel, only=COPIES).get((tp, "all_reduce"), (0.0, 0.0))
    yield Explanation("copies of KV heads are summed in one message", tp, "all_reduce", bool(copied) - count,
                      sum(copied) - total)  # fmt: skip
    has_last = max(parallel.stages) == plan.stages - 1
    if has_last and model.kind == "mlp":
        n = plan.microbatch * model.hidden * parallel.pieces[0].local.element_size()
        yield Explanation(
            "the last layer's gradient is whole already", tp, "reduce_scatter", -microbatches, -microbatches * n
        )
    if has_last and model.kind == "transformer":
        yield Explanation("the loss sums two values a token in one message", tp, "all_reduce", -microbatches)
    program = program_of(plan, parallel.workload)
    if plan.sp and program is not None and program.splits_backward:
        n = plan.microbatch * parallel.workload.seq // plan.cp * parallel.pieces[0].local.element_size()
        inputs = [a.stage for a in program.actions(parallel.mesh.index("pp")) if a.kind == "I" and a.stage > 0]
        again = [width for stage in inputs for width in regions(parallel.stages[stage], model, plan)]
        yield Explanation("a split backward gathers again in I and in W", tp, "all_gather", len(again), sum(again) * n)


def regions(stage: Any, model: Model, plan: Plan) -> list[int]:
    """Widths of the gathered inputs that are not kept: of a recomputed layer they are, from I to W."""
    again = made_again(stage, plan)
    layers = [width for layer in stage.layers.values() if layer not in again for width in regions_of(layer, model)]
    return layers + [model.hidden] * (stage.head is not None)


def made_again(stage: Any, plan: Plan) -> list[Any]:
    layers = list(stage.layers.values())
    return [layers[i] for i in plan.made_again(range(len(layers)))]


def regions_of(layer: Any, model: Model) -> list[int]:
    """Attention's and the feed-forward network's; of experts only the shared ones are split as that is."""
    latents = (model.q_rank or model.hidden) + model.kv_rank + model.rope_dim
    split = not hasattr(layer, "moe") or layer.moe.shared is not None
    return [latents if model.attention == "mla" else model.hidden] + [model.hidden] * split


def recomputed_layers(parallel: Parallel) -> Iterator[Explanation]:
    """Forward is rerun only as far as backward needs it, and what it gathers on the way is there for the weights."""
    model, plan = parallel.model, parallel.plan
    if plan.recompute != "full" or plan.tp == 1:
        return
    tp, rows = canonical(parallel.mesh, "tp"), parallel.workload.seq // plan.cp if model.kind == "transformer" else 1
    n = plan.microbatch * rows * model.hidden * parallel.pieces[0].local.element_size()
    layers = [layer for stage in parallel.stages.values() for layer in made_again(stage, plan)]
    rounds = plan.microbatches(parallel.workload)
    experts = rounds * sum(hasattr(layer, "moe") for layer in layers)
    runs = rounds * len(layers) - experts
    gathers = model.kind == "mlp" or plan.tp_form == "all-gather"
    last = "all_gather" if gathers else "reduce_scatter" if plan.sp else "all_reduce"
    yield Explanation("a layer's last exchange is not made again", tp, last, -runs, -runs * n)
    if not plan.sp:
        yield Explanation("a layer's last exchange is not made again", tp, "all_gather", -experts, -experts * n)
    if plan.sp:
        widths = [width for layer in layers for width in regions_of(layer, model)]
        yield Explanation("a layer made again gathers once for input and weights", tp, "all_gather", -rounds * len(widths),
                          -rounds * sum(widths) * n / model.hidden)  # fmt: skip


def sharded(
    parallel: Parallel, low: dict[tuple[str, str], Amount], kind: str, pieces: list[Piece]
) -> Iterator[Explanation]:
    """`fully_shard` works unit by unit, pads rows to a multiple of the ranks, and a pipeline gathers and reduces
    once."""
    plan, mesh, dense = parallel.plan, parallel.mesh, kind == "dense"
    over, copied = ("shard_cp", "replicate") if dense else ("expert_shard", "expert_replicate")
    shard, ranks = canonical(mesh, over), mesh.size(over)
    parts = sum(len(units(module) if dense else experts_of(module)) for module in parallel.stages.values())
    size = pieces[0].local.element_size()
    names = {p.parameter: p.name for p in pieces}

    def padded(chosen: list[Piece]) -> int:
        return sum((-p.parameter.shape[0] % ranks) * int(np.prod(p.parameter.shape[1:])) for p in chosen) * size

    frozen = [p for p in pieces if not p.parameter.requires_grad]
    spared = padded(frozen) + sum(p.parameter.numel() for p in frozen) * size
    copy = sum(int(np.prod(p.parameter.shape)) for p in pieces if p.tied_copy) * size
    uneven = unevenness(parallel) if dense else 0.0
    padding = padded(pieces)
    rounds = plan.microbatches(parallel.workload)
    gathers = 2 * rounds if plan.zero == 3 and plan.reshard else 1
    reductions = rounds if plan.reduces_each else 1
    exact: dict[str, list[int]] = {}
    for scatter in (s for r in parts_of(parallel.reductions) if isinstance(r, Shards) for s in r.scatters):
        if scatter.ranks == ranks and all(p in names for p in scatter.lossy):
            for back in range(1 if plan.pp > 1 else reductions):
                for operation, n in scatter.traffic(size, back):
                    exact.setdefault(operation, []).append(n)
    yield from to_the_byte(exact, low, shard, beside="all_gather")
    for operation, axis, times, part in (
        ("all_gather", shard, gathers, 1), ("reduce_scatter", shard, 0 if exact else reductions, 1),
        ("all_reduce", canonical(mesh, copied), reductions, ranks),
    ):  # fmt: skip
        count, total = low.get((axis, operation), (0.0, 0.0))
        if not count or not times:
            continue
        really = 1 if plan.pp > 1 else times
        each = count / times
        if really != times:
            yield Explanation("a pipeline gathers and reduces once a step", axis, operation, each * (really - times),
                              total / times * (really - times))  # fmt: skip
        yield Explanation("fully_shard works unit by unit", axis, operation, (parts - each) * really)
        if operation != "all_gather":
            yield Explanation("the balancing bias has no gradient", axis, operation, 0, -spared / part * really)
        yield Explanation("rows are padded to a multiple of the ranks", axis, operation, 0, padding / part * really)
        yield Explanation("a tied embedding has a copy on the last stage", axis, operation, 0, copy / part * really)
        yield Explanation("the vocabulary is cut unevenly", axis, operation, 0, uneven / part * really)
