"""What a rank holds: parameters of each block after tensor and expert parallelism, and bytes saved for backward.

Parameters are those of `describe.sharding`, as the fullest rank holds them: a column split keeps rows/tp (never
less than one KV head), a row split columns/tp, experts copies/ep of width/expert_tp, everything else is whole. Saved tensors follow
the same splits; `full` recompute keeps only each layer's input (2·T·h bytes, sharded with sequence parallelism), `selective` drops
what the attention core can make again.

What is summed once a step goes in messages (`messages`): under ZeRO a unit each, of so many layers, of an end, of a layer's experts;
elsewhere the buckets of each stage by itself.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from meshwright.describe.anatomy import Block, Saved
from meshwright.describe.sharding import (
    DATA_AXES,
    KV_COPIES,
    RULES,
    Degrees,
    Parameter,
    block_parameters,
    compressible,
    local_shape,
    padding,
    partial_over,
    shard_dim,
    tied_copy,
)
from meshwright.lower import sync, tiles
from meshwright.lower.batch import Batch
from meshwright.lower.op import Array, StepProgram, present
from meshwright.lower.stages import StageBlocks, blocks_by_stage

CORE = ("softmax", "softmax-mask", "softmax-dropped", "logsumexp")
GROUPS = ("dense", "expert")  # reduced over dp·cp, and over expert_dp


class Tensor(NamedTuple):
    """The fullest rank's box of a parameter, before ZeRO; the shape has arrays where plans differ."""

    style: str
    shape: list[Array]
    learns: bool
    size: Array
    padding: Array = 0.0  # elements that ZeRO adds: rows up to a multiple of the ranks

    @property
    def group(self) -> str:
        return RULES[self.style].group


def degrees(b: Batch) -> Degrees:
    """What the sharding rules ask of a batch of plans."""
    gathers = b.gather_form if b.gather_form.any() else False
    return Degrees(b.tp, b.ep, b.etp, b.size("kv_copies"), b.sp, gathers)


def tensors(b: Batch, block: Block) -> list[Tensor]:
    """Every parameter of a block."""
    model, d = b.model, degrees(b)
    found: list[tuple[Parameter, Array]] = [(p, 1.0) for p in block_parameters(model, block)]
    if (
        block.kind == "head" and model.tied and model.kind == "transformer"
    ):  # a stage apart from the embedding's has a copy
        found.append((tied_copy(model), b.pp > 1))
    out = []
    for p, on in found:
        shape = local_shape(p.style, p.shape, d)
        out.append(
            Tensor(p.style, shape, p.learns, math.prod(shape) * on, _padding(b, p.style, shape) * on if b.pads else 0.0)
        )
    return out


def parameters(b: Batch, held: list[Tensor]) -> dict[str, Array]:
    """Elements on one rank by how they are reduced."""
    return {group: sum((t.size for t in held if t.group == group), np.zeros(b.n)) for group in GROUPS}


def summed(b: Batch, held: list[Tensor]) -> dict[str, Array]:
    """Of a block's elements what a step sums otherwise than the rest: those without a gradient (biases that balance experts are moved
    by the load instead), and those whose gradient is a partial sum over tensor-parallel peers.

    A norm of heads and a router see this rank's heads or tokens always; what stands between the products sees a share of the
    tokens under sequence parallelism; the bias behind a split expert's product is whole on each of its ranks. They are summed as
    ZeRO shares them out: of the fullest rank as many rows as of any padded tensor.
    """

    d = degrees(b)
    out: dict[str, Array] = {
        "untrained": sum((t.size for t in held if not t.learns), 0.0),
        **{f"partial_{axis}": 0.0 for axis in ("tp", KV_COPIES, "expert_tp")},
    }
    for t in held:
        for axis, on in partial_over(t.style, d).items() if t.learns else ():
            out[f"partial_{axis}"] = out[f"partial_{axis}"] + (t.size + t.padding) * on
    if b.pads:
        out["untrained_padding"] = sum((t.padding for t in held if not t.learns), 0.0)
        out |= {f"{group}_padding": sum((t.padding for t in held if t.group == group), 0.0) for group in GROUPS}
    if b.compresses:
        for group in GROUPS:
            mine = [t for t in held if t.group == group and t.learns]
            out[f"{group}_exact"] = sum(
                ((t.size + t.padding) * np.logical_not(compressible(t.style, d)) for t in mine), 0.0
            )
            out[f"{group}_factors"] = sum((_factors(b, t) * compressible(t.style, d) for t in mine), 0.0)
    return out


def _padding(b: Batch, style: str, shape: list[Array]) -> Array:
    group = RULES[style].group
    more = padding(shape, b.size(DATA_AXES[group].shard))
    return np.where(sync.sharded(b, group), more, 0.0) if np.any(more) else 0.0


def _factors(b: Batch, t: Tensor) -> Array:
    """Elements that PowerSGD sends of it: two factors of some columns, or all where they are not smaller."""
    ranks = b.size(DATA_AXES[t.group].shard)
    below = np.where(
        sync.sharded(b, t.group) & (shard_dim(t.shape, ranks) == 1), ranks, 1.0
    )  # parts one below the other
    rows, rest = t.shape[0] * below, math.prod(t.shape[1:]) / below
    r = np.minimum(b.compression_rank, np.minimum(rows, rest)) * (len(t.shape) > 1)
    small = r * (rows + rest)
    return np.where((r > 0) & (small < t.size), small, t.size)


def saved(b: Batch, block: Block, element: float, recompute: bool = True) -> dict[str, Array]:
    """Bytes one micro-batch keeps for backward in one such block, by part; `recompute=False` as if nothing were recomputed."""
    conditions = {"", "stored-softmax" if b.stack.attention == "stored" else "flash"}
    if b.model.dropout:
        conditions.add("dropout")
    if "norm" not in b.stack.fused:
        conditions.add("unfused-norm")
    if "activation" not in b.stack.fused:
        conditions.add("unfused-activation")
    splits = {"tensor": b.tp, "sequence": b.seq_split, "expert": b.tp / b.model.router.busiest(b.workload.imbalance)}
    # A KV head is never cut; the all-gather form brings a row-split product's input whole to every rank.
    kv_split = np.minimum(b.tp, block.attention.kv_heads) if block.attention else b.tp
    row_split = np.where(b.gather_form, 1.0, b.tp)
    kept_core = (b.recompute == 0) | (not recompute)
    out: dict[str, Array] = {}

    def add(part: str, size: Array) -> None:
        out[part] = out.get(part, 0.0) + size * np.ones(b.n)

    for s in block.saved:
        if s.condition in conditions:
            split = kv_split if s.name in ("k", "v") else splits[s.split]
            size = b.tokens * _width(b, s, element) / split
            add(s.part, size * np.where(kept_core, 1.0, 0.0) if s.name in CORE else size)
    for linear in block.linears:
        if linear.saves_input:
            copies = b.tp / b.model.router.travelling
            split = copies if linear.part == "experts" else row_split if linear.style == "row" else b.seq_split
            add(linear.part, b.tokens * linear.uses * linear.d_in * element / split)
    if tiles.hashes(b) and block.kind != "head":
        add("norm", b.tokens / b.seq_split * tiles.TOKEN_BYTES * (1 if block.kind == "embedding" else 2))
    if block.kind in ("dense", "moe") and recompute:
        full = b.recompute == 2
        out = {part: np.where(full, 0.0, size) for part, size in out.items()}
        add("input", np.where(full, b.tokens * b.model.hidden * element / b.seq_split, 0.0))
    return out


def _width(b: Batch, s: Saved, element: float) -> Array:
    size = element if not s.bytes_ else s.bytes_
    if s.name == "logits" and "loss" in b.stack.fused:
        size = element
    return (s.width + s.per_position * b.workload.seq) * size


def elements(program: StepProgram, holding: StageBlocks) -> dict[str, Array]:
    """Parameters on this rank by how they are reduced: dense over dp·cp, expert over expert_dp."""
    return {group: _of(program, holding.counts, group) + np.zeros(program.batch.n) for group in GROUPS}


def paddings(program: StepProgram, holding: StageBlocks) -> dict[str, Array]:
    """What ZeRO adds to them."""
    return {group: _of(program, holding.counts, f"{group}_padding") for group in GROUPS}


def reduced(program: StepProgram, holding: StageBlocks) -> dict[str, Array]:
    """What this rank sums once a step: `elements`, and of them the `untrained`, those `partial` over tp and over expert_tp, the
    `tied` that another stage has too; the `loads` of its routers; and how many messages its gradients are."""
    batch, model = program.batch, program.batch.model
    out = elements(program, holding)
    for block, more in program.sums.items():
        for name, count in more.items():
            out[name] = out.get(name, 0.0) + holding.counts[block] * count
    if model.tied and np.any(batch.pp > 1):  # both ends on one rank, as in a V, need nobody's help
        apart = np.abs(holding.counts["embedding"] - holding.counts["head"])
        out["tied"] = apart * (batch.pp > 1) * model.padded_vocab * model.hidden / batch.tp
    for group in GROUPS if model.experts else GROUPS[:1]:
        if present(batch.size("dp_cp" if group == "dense" else "expert_dp") > 1):
            out |= _messages(program, holding, group)
    return out


def _messages(program: StepProgram, holding: StageBlocks, group: str) -> dict[str, Array]:
    """How many messages the gradients of a group are, and those of them that are not compressed."""
    batch, sharded = program.batch, sync.sharded(program.batch, group) & program.batch.units
    names = [group, f"{group}_exact"] if batch.compresses else [group]
    out = {name: _units(program, holding, name) if present(sharded) else 0.0 for name in names}
    if not sharded.all():
        lots: dict[str, Array] = dict.fromkeys(names, 0.0)
        for often, counts in blocks_by_stage(batch, holding):
            total = _of(program, counts, group) - (_of(program, counts, "untrained") if group == "dense" else 0.0)
            apart = _of(program, counts, f"{group}_exact") * batch.lossy if batch.compresses else 0.0
            for name, size in zip(names, (total - apart, apart), strict=False):
                lots[name] = lots[name] + often * sync.cut(batch, size)
        out = {name: np.where(sharded, count, lots[name]) for name, count in out.items()}
    return {f"{name}_messages": count for name, count in out.items()}


def _of(program: StepProgram, counts: dict[str, Array], name: str) -> Array:
    """Elements of these blocks that go by a name."""
    return sum((counts[block] * _named(program, block, name) for block in program.parameters), 0.0)


def _named(program: StepProgram, block: str, name: str) -> Array:
    return (program.parameters[block] if name in GROUPS else program.sums.get(block, {})).get(name, 0.0)


def _units(program: StepProgram, holding: StageBlocks, name: str) -> Array:
    """Units of ZeRO on a rank that have such elements: a layer's experts; so many layers, each end by itself, both where they share
    a weight; or all of a stage but experts."""
    batch, counts, model = program.batch, holding.counts, program.batch.model
    has = {block: (_named(program, block, name) > 0) * 1.0 for block in program.parameters}
    if name.startswith("expert"):
        return counts["moe"] * has["moe"]
    layers = sum(counts[kind] * has[kind] for kind in ("dense", "moe") if kind in has)
    ends = {end: counts[end] * has[end] for end in ("embedding", "head")}
    both = ends["embedding"] * ends["head"] * (batch.pp == 1) if model.tied else 0.0
    if not batch.wraps:
        return layers + sum(ends.values()) - both
    wrapped = sum(
        often * np.ceil(sum(part[kind] * has[kind] for kind in ("dense", "moe") if kind in has) / batch.wrap)
        for often, part in blocks_by_stage(batch, holding)
    )
    whole = (layers > 0) * np.where(batch.pp > 1, batch.virtual, 1.0)
    return np.where(batch.one_unit, whole, wrapped + sum(ends.values()) - both)
