"""Every parameter of a model by name and shape, and what of each one rank of a plan holds.

The anatomy of a block (`describe.anatomy`) has its matrices and vectors; here each becomes a named tensor, in the order in
which the network makes them, with a *style* that says how tensor and expert parallelism treat it:

    column, keys     rows of the weight [out, in] split over tp; keys by whole heads, copied where there are fewer than ranks
    row, row-bias    weight split by input, its bias whole; in the all-gather form both split by output
    vocabulary       rows split over tp, as even as can be: the first V mod tp ranks have one more
    between, inside  whole; its gradient is a partial sum over tp under sequence parallelism, or always
    experts, experts-row, experts-row-bias    the expert over ep, then columns, rows or nothing over expert_tp

A `Share` is one rank's box before ZeRO, which cuts its first dimension: ⌈n/P⌉ rows a rank, the last ones fewer or none, and all
padded to as many where they travel. Few experts over many ranks would be mostly padding, and the first ranks would hold them all:
where there is not a row for each rank, the second dimension is cut, if it divides (`shard_dim`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from meshwright.describe.anatomy import Block, Linear, Vector
from meshwright.describe.layout import Layout
from meshwright.describe.model import Model
from meshwright.describe.plan import Plan

TOKENS, PROJECT = "embedding.tokens.weight", "head.project.weight"
NORMS = {
    "norm-1": "attention_norm", "norm-2": "ffn_norm", "norm-3": "attention_post_norm", "norm-4": "ffn_post_norm",
    "q-norm": "attention.q_a_norm", "kv-norm": "attention.kv_a_norm", "embedding-norm": "embedding.norm",
    "final-norm": "head.norm",
}  # fmt: skip
# The modules of a block in the order in which the network makes them.
ORDER = (
    "embedding.tokens", "embedding.positions", "embedding.norm",
    "linear", "attention_norm", "attention.q_a", "attention.q_a_norm", "attention.kv_a", "attention.kv_a_norm",
    "attention.q", "attention.k", "attention.v", "attention.q_norm", "attention.k_norm", "attention.sinks", "attention.o",
    "attention.heads.q", "attention.heads.q_b", "attention.heads.kv_b", "attention.heads.o", "ffn_norm",
    "moe.router", "moe.experts.gate", "moe.experts.up", "moe.experts.down",
    "moe.shared.gate", "moe.shared.up", "moe.shared.down", "moe.shared_scale",
    "ffn.gate", "ffn.up", "ffn.down", "attention_post_norm", "ffn_post_norm", "head.norm", "head.project",
)  # fmt: skip


@dataclass(frozen=True)
class Parameter:
    """A whole tensor of the model. One without a gradient is moved by something else than the optimizer."""

    name: str
    shape: tuple[int, ...]
    style: str
    learns: bool = True

    @property
    def expert(self) -> bool:
        """Whether it belongs to a routed expert: those have groups of their own."""
        return ".moe.experts." in self.name


@dataclass(frozen=True)
class Share:
    """What one rank has of a parameter before ZeRO. `partial` names the axis over which its gradient is still to be summed."""

    name: str
    shape: tuple[int, ...]
    whole: bool  # nothing was cut off
    learns: bool
    expert: bool
    partial: str = ""
    tied: bool = False  # one of the two copies of a tied embedding that live on different stages

    @property
    def size(self) -> int:
        return math.prod(self.shape)


# The whole model


def parameters(model: Model, layers: range) -> list[Parameter]:
    """Of the stage that holds these layers: the embedding with the first of all, the head with the last."""
    out: list[Parameter] = []
    first, last = layers.start == 0, layers.stop == model.layers
    if first:
        out += block_parameters(model, model.blocks["embedding"])
    for layer in layers:
        for p in block_parameters(model, model.blocks[model.layer_kinds[layer]]):
            out.append(Parameter(f"layers.{layer}.{p.name}", p.shape, p.style, p.learns))
    if last:
        out += block_parameters(model, model.blocks["head"])
        if model.tied and not first and model.kind == "transformer":  # a copy of its own
            out.append(Parameter(PROJECT, (model.padded_vocab, model.hidden), "vocabulary"))
    return out


def block_parameters(model: Model, block: Block) -> list[Parameter]:
    """Names without their layer."""
    items = [p for linear in block.linears if linear.copies for p in _matrix(model, linear)]
    items += [p for vector in block.vectors for p in _vector(model, vector)]
    return sorted(items, key=lambda p: ORDER.index(p.name.rpartition(".")[0]))


def _matrix(model: Model, linear: Linear) -> Iterator[Parameter]:
    path = module_of(model, linear)
    experts = linear.part == "experts"
    several = (linear.copies,) if experts else ()
    style = {"column": "column", "row": "row", "none": "inside" if linear.part == "router" else "between"}[linear.split]
    if path == "head.project":
        style = "vocabulary"
    elif path in ("attention.k", "attention.v"):
        style = "keys"
    if experts:
        style = "experts-row" if linear.split == "row" else "experts"
    yield Parameter(f"{path}.weight", (*several, linear.d_out, linear.d_in), style)
    if linear.bias:
        yield Parameter(f"{path}.bias", (*several, linear.d_out), f"{style}-bias" if linear.split == "row" else style)


def module_of(model: Model, linear: Linear) -> str:
    """Where in its block the network keeps a matrix."""
    if linear.part == "attention":
        inside = model.attention == "mla" and linear.split != "none"
        return f"attention.heads.{linear.name}" if inside else f"attention.{linear.name}"
    if linear.name in ("router", "shared-scale"):
        return f"moe.{linear.name.replace('-', '_')}"
    if linear.name == "head":
        return "head.project"
    part, _, kind = linear.name.partition("-")
    return linear.name if not kind else f"{'' if part == 'ffn' else 'moe.'}{part}.{kind}"


def _vector(model: Model, vector: Vector) -> Iterator[Parameter]:
    match vector.name:
        case "tokens":
            yield Parameter(TOKENS, (model.padded_vocab, model.hidden), "vocabulary")
        case "positions":
            yield Parameter("embedding.positions.weight", (model.max_positions, model.hidden), "between")
        case "qk-norm":
            for name in ("q_norm", "k_norm"):
                yield Parameter(f"attention.{name}.weight", (model.head_width,), "inside")
        case "balance-bias":
            yield Parameter("moe.router.balance_bias", (vector.size,), "inside", learns=False)
        case "sinks":
            yield Parameter("attention.sinks.weight", (vector.size,), "column")
        case _:
            affine = ("weight", "bias") if model.norm == "layernorm" else ("weight",)
            for name in affine:
                yield Parameter(f"{NORMS[vector.name]}.{name}", (vector.size // len(affine),), "between")


# One rank's


def share_of(length: int, parts: int, index: int) -> int:
    """How many of `length` the index-th of `parts` has, as even as can be."""
    return length // parts + (index < length % parts)


def shard_dim(shape: Sequence[int], parts: int) -> int:
    """The dimension that ZeRO cuts."""
    return int(len(shape) > 1 and shape[0] < parts and shape[1] % parts == 0)


def laid(shape: Sequence[int], parts: int) -> tuple[int, ...]:
    """The shape as it travels, cut by rows: parts of the second dimension stand one below the other."""
    if shard_dim(shape, parts):
        return parts * shape[0], shape[1] // parts, *shape[2:]
    return tuple(shape)


def padded(shape: Sequence[int], parts: int) -> int:
    """Elements of all ranks' shards together: rows padded to a multiple of the ranks."""
    rows, *rest = laid(shape, parts)
    return -(-rows // parts) * parts * math.prod(rest)


def shard_size(shape: Sequence[int], parts: int, index: int) -> int:
    """Elements that the index-th of `parts` keeps: ⌈n/P⌉ rows, until there are no more."""
    rows, *rest = laid(shape, parts)
    each = -(-rows // parts)
    return min(max(rows - index * each, 0), each) * math.prod(rest)


def shares(model: Model, plan: Plan, layout: Layout, rank: int, layers: range, frozen: frozenset[str]) -> list[Share]:
    """What this rank has of the stage that holds `layers`; `frozen` parameters do not learn."""
    place = {axis: layout.group_of(axis, rank).index(rank) for axis in ("tp", "ep", "expert_tp")}
    copies = max(1, plan.tp // model.kv_groups) if model.kind == "transformer" else 1
    both = layers.start == 0 and layers.stop == model.layers
    out = []
    for p in parameters(model, layers):
        shape = list(p.shape)
        for dim, axis in cuts(p.style, plan):
            shared = copies if p.style == "keys" else 1
            shape[dim] = share_of(shape[dim], layout.size(axis) // shared, place[axis] // shared)
        learns = p.learns and p.name not in frozen and not (p.name == PROJECT and model.tied and TOKENS in frozen)
        tied = model.tied and not both and p.name in (TOKENS, PROJECT)
        over = partial_over(p.style, plan, copies) if learns else ""
        out.append(Share(p.name, tuple(shape), tuple(shape) == p.shape, learns, p.expert, over, tied))
    return out


def cuts(style: str, plan: Plan) -> tuple[tuple[int, str], ...]:
    """(dimension, axis) along which tensor and expert parallelism split a parameter of a style."""
    by_columns = plan.tp_form == "all-gather"
    return {
        "column": ((0, "tp"),),
        "keys": ((0, "tp"),),
        "vocabulary": ((0, "tp"),),
        "row": ((0 if by_columns else 1, "tp"),),
        "row-bias": ((0, "tp"),) if by_columns else (),
        "experts": ((0, "ep"), (1, "expert_tp")),
        "experts-row": ((0, "ep"), (2, "expert_tp")),
        "experts-row-bias": ((0, "ep"),),
    }.get(style, ())


def partial_over(style: str, plan: Plan, copies: int) -> str:
    """The axis over which a gradient is a partial sum once data parallelism is done with it."""
    if style == "experts-row-bias":
        return "expert_tp" if plan.etp > 1 else ""
    if plan.tp == 1:
        return ""
    if style == "keys":
        return "kv_copies" if copies > 1 else ""
    return "tp" if style == "inside" or (plan.sp and style in ("between", "row-bias")) else ""
