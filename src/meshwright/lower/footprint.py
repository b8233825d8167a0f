"""What a rank holds: parameters of each block after tensor and expert parallelism, and bytes saved for backward.

Parameters are those of `describe.sharding`, as the fullest rank holds them: a column split keeps rows/tp (never
less than one KV head), a row split columns/tp, experts copies/ep of width/expert_tp, everything else is whole. Saved tensors follow
the same splits; `full` recompute keeps only each layer's input (2·T·h bytes, sharded with sequence parallelism), `selective` drops
what the attention core can recompute, or keeps the outputs of attention and of every second product (`Stack.selective`).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from meshwright.describe.model import Model
from meshwright.describe.sharding import (
    DATA_AXES,
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
from meshwright.describe.tensors import Linear, ParameterBlock, Saved
from meshwright.lower import attention_dropout
from meshwright.lower.batch import Batch
from meshwright.lower.compressed import factor_size
from meshwright.lower.program import DATA_PARALLEL, Array, Load, present

CORE = ("softmax", "softmax-in-fp32", "softmax-mask", "softmax-dropped", "logsumexp")
QUANTISED = {"fp8": 1.0, "mxfp8": 1 + 1 / 32, "fp4": 1 / 2 + 1 / 16}  # bytes of an element, with the scale of its block


class Tensor(NamedTuple):
    """The fullest rank's box of a parameter, before ZeRO; the shape has arrays where plans differ."""

    style: str
    shape: list[Array]
    learns: bool
    size: Array
    padding: Array = 0.0  # elements that ZeRO adds: rows up to a multiple of the ranks
    multiplied_in_fp8: bool = False  # in an fp8 workload
    frozen: bool = False
    packed: bool = False  # in the quantised format of a frozen base

    @property
    def group(self) -> str:
        return RULES[self.style].group


def degrees(b: Batch) -> Degrees:
    """The group sizes of a batch of plans, as the sharding rules read them."""
    gathers = b.gather_form if b.gather_form.any() else False
    return Degrees(b.tp, b.ep, b.etp, b.size("kv_copies"), b.sp, gathers)


def tensors(b: Batch, block: ParameterBlock) -> list[Tensor]:
    """Every parameter of a block."""
    model, d = b.model, degrees(b)
    counted: list[tuple[Parameter, Array]] = [(p, 1.0) for p in block_parameters(model, block)]
    # A stage without the embedding has a copy of it, if the head or multi-token prediction uses it.
    if block.kind == "head" and (model.tied or model.mtp_layers) and model.kind == "transformer":
        counted.append((tied_copy(model), b.pp > 1))
    boxes: dict[tuple[str, tuple[int, ...], bool], tuple[list[Array], Array, Array]] = {}  # many have equal shapes
    out = []
    for p, on in counted:
        key = p.style, tuple(p.shape), p.frozen
        if key not in boxes:
            shape = local_shape(p.style, p.shape, d)
            added = _padding(b, p.style, shape) if b.pads else 0.0
            if p.frozen:  # only ZeRO-3 shards it
                added = np.where(b.zero == 3, added, 0.0)
            boxes[key] = shape, math.prod(shape), added
        shape, size, added = boxes[key]
        in_fp8 = p.multiplied_in_fp8 and not p.packed
        out.append(Tensor(p.style, shape, p.learns, size * on, added * on, in_fp8, p.frozen, p.packed))
    return out


def parameters(b: Batch, block_tensors: list[Tensor]) -> dict[str, Array]:
    """Elements on one rank by group, without frozen ones: dense ones are reduced over dp·cp, experts over expert_dp."""
    updated = [t for t in block_tensors if not t.frozen]
    return {group: sum((t.size for t in updated if t.group == group), np.zeros(b.n)) for group in DATA_PARALLEL}


def frozen(b: Batch, block_tensors: list[Tensor]) -> dict[str, Array]:
    """Bytes of frozen parameters on one rank by group, with the rows that ZeRO-3 adds."""
    out: dict[str, Array] = dict.fromkeys(DATA_PARALLEL, np.zeros(b.n))
    for t in block_tensors:
        if t.frozen:
            count = t.size + t.padding
            out[t.group] = out[t.group] + (packed_bytes(b, t, count) if t.packed else count * b.param_bytes)
    return out


def packed_bytes(b: Batch, t: Tensor, count: Array) -> Array:
    """Bytes of `count` elements of a quantised weight: whole rows."""
    return count / t.shape[-1] * b.model.adapter.row_bytes(t.shape[-1])


def unpacked(b: Batch, block: ParameterBlock, element: float) -> Array:
    """Bytes of the largest quantised matrix of a block on one rank, as a product reads it."""
    sizes = [np.zeros(b.n)]
    for linear in block.linears:
        if linear.packed:
            copies = (linear.copies,) if linear.style.startswith("experts") else ()
            shape = local_shape(linear.style, (*copies, linear.d_out, linear.d_in), degrees(b))
            sizes.append(math.prod(shape) * element * np.ones(b.n))
    return np.maximum.reduce(sizes)


def loads(b: Batch, block_tensors: list[Tensor]) -> dict[str, Load]:
    """Elements of a block that data parallelism gathers and reduces, by group."""
    return {group: _load(b, [t for t in block_tensors if t.group == group]) for group in DATA_PARALLEL}


def _load(b: Batch, block_tensors: list[Tensor]) -> Load:
    learns = [t for t in block_tensors if t.learns]
    exact: Array
    whole, sent, exact = (sum((t.size + t.padding for t in some), 0.0) for some in (block_tensors, learns, ()))
    if b.compresses:
        d = degrees(b)
        exact = sum(((t.size + t.padding) * np.logical_not(compressible(t.style, d)) for t in learns), 0.0) * b.lossy
    first, second = (sum((sums[k] for sums in compressed(b, learns)), 0.0) for k in (1, 2))
    fp8 = sum((t.size + t.padding for t in block_tensors if t.multiplied_in_fp8), 0.0) if b.gathers_fp8 else 0.0
    base = [t for t in block_tensors if t.frozen]
    quantised = [t for t in base if t.packed]
    kept, packed = (sum((t.size + t.padding for t in some), 0.0) for some in (base, quantised))
    stored = sum((packed_bytes(b, t, t.size + t.padding) for t in quantised), 0.0)
    return Load(whole, sent - exact, exact, first, second, fp8, kept, packed, stored)


def fp8_weights(model: Model, kind: str, group: str) -> int:
    """Weights of a group in a block that an fp8 workload multiplies by in fp8; the weights of all experts of a layer count as one."""
    parameters_of_group = [p for p in block_parameters(model, model.blocks[kind]) if RULES[p.style].group == group]
    return sum(p.multiplied_in_fp8 for p in parameters_of_group)


def compressed(b: Batch, block_tensors: list[Tensor]) -> list[tuple[Array, Array, Array]]:
    """(elements, PowerSGD's two sums) of each parameter that a plan compresses, where plans use PowerSGD."""
    if not present(b.sends_factors):
        return []
    d, out = degrees(b), []
    for t in block_tensors:
        ranks = b.size(DATA_AXES[t.group].shard)
        # Parts stacked along rows
        stacked = np.where(b.sharded(t.group) & (shard_dim(t.shape, ranks) == 1), ranks, 1.0)
        shape = [t.shape[0] * stacked, math.prod(t.shape[1:]) / stacked] if len(t.shape) > 1 else t.shape
        on = compressible(t.style, d) * (t.size > 0) * t.learns
        out.append((t.size * on, *(x * on for x in factor_size(shape, b.compression_rank))))
    return out


def partial_sums(b: Batch, block_tensors: list[Tensor]) -> dict[str, Array]:
    """Axis → elements whose gradient is a partial sum over it, after ZeRO.

    A norm of heads and a router see this rank's heads or tokens always; modules between the tensor-parallel regions see a share of
    the tokens under sequence parallelism; the bias behind a split expert's product is whole on each of its ranks.
    """
    d, out = degrees(b), dict[str, Array]()
    for t in block_tensors:
        for axis, on in partial_over(t.style, d).items() if t.learns else ():
            if present(on):
                out[axis] = out.get(axis, 0.0) + on * own_elements(b, t)
    return out


def own_elements(b: Batch, t: Tensor) -> Array:
    """Elements of the fullest rank after ZeRO."""
    return (t.size + t.padding) / np.where(b.zero >= 1, b.size(DATA_AXES[t.group].shard), 1.0)


def _padding(b: Batch, style: str, shape: list[Array]) -> Array:
    group = RULES[style].group
    more = padding(shape, b.size(DATA_AXES[group].shard))
    return np.where(b.sharded(group), more, 0.0) if present(more) else 0.0


def saved(b: Batch, block: ParameterBlock, element: float, recompute: bool = True) -> dict[str, Array]:
    """Bytes one micro-batch keeps for backward in one such block, by part; `recompute=False` as if nothing were recomputed."""
    conditions = {"", "stored-softmax" if b.stack.attention == "stored" else "flash"}
    if b.stack.attention == "stored" and "softmax" not in b.stack.fused:
        conditions.add("unfused-softmax")
    if b.model.dropout:
        conditions.add("dropout")
    if b.model.adapter.dropout:
        conditions.add("adapter-dropout")
    casts = b.stack.casts_inputs and b.model.adapter.rank and not any(linear.learns for linear in block.linears)
    if casts:
        conditions.add("cast-inputs")
    conditions.add("fused-norm" if "norm" in b.stack.fused else "unfused-norm")
    if "activation" not in b.stack.fused:
        conditions.add("unfused-activation")
    if not b.stack.weighs_activations:
        conditions.add("weighted-outputs")
    splits: dict[str, Array] = {"tensor": b.tp, "sequence": b.seq_split, "expert": b.tp / b.busiest, "whole": 1.0}
    # A KV head is never cut; the all-gather form brings a row-split product's input whole to every rank.
    kv_split = np.minimum(b.tp, block.attention.kv_heads) if block.attention else b.tp
    row_split = np.where(b.gather_form, 1.0, b.tp)
    kept_core = (b.recompute == 0) | (not recompute)
    out: dict[str, Array] = {}
    zero = np.zeros(b.n)

    def add(part: str, size: Array) -> None:
        out[part] = out.get(part, zero) + size

    for s in block.saved:
        if s.condition in conditions:
            split = kv_split if s.name in ("k", "v") else splits[s.split]
            size = b.tokens * _width(b, s, element) / split
            if s.name == "logits" and b.stack.logits_chunk:
                size = np.where(b.fuses_loss, 0.0, size)  # a chunk of them is working memory
            add(s.part, size * np.where(kept_core, 1.0, 0.0) if s.name in CORE else size)
    for linear in block.linears:
        if linear.saves_input and not (casts and linear.name != "o"):
            kept: Array = kept_bytes(b, linear, element)
            if b.stack.reuses_saved and linear.style in ("column", "keys"):
                # A compiled layer gathers the output of a norm again, which it computes again from the input of the norm.
                kept = np.where(b.sp & (b.tp > 1), 0.0, kept)
            # Ranks that split an expert have all of its tokens, and a part of its width.
            travelling = b.model.router.travelling
            splits_of = {"experts": b.tp / b.etp / travelling, "experts-row": b.tp / travelling, "row": row_split}
            if b.stack.keeps_gathered and linear.style in ("column", "keys", "logits"):
                splits_of[linear.style] = 1.0
                if b.stack.fp8_passes and b.workload.precision == "fp8":  # a gathered input is not computed again
                    kept = np.where(b.sp & (b.tp > 1), np.maximum(kept, QUANTISED["fp8"]), kept)
            split = splits_of.get(linear.style, b.seq_split)
            add(linear.part, b.tokens * linear.uses * linear.d_in * kept / split)
    if drops := attention_dropout.computed_masks(b, block.kind):
        add("norm", b.tokens / b.seq_split * attention_dropout.TOKEN_BYTES * drops)
    if b.stack.saved != 1 and block.kind in b.model.kinds:
        out = {part: size * b.stack.saved for part, size in out.items()}
    if block.kind in b.model.kinds and recompute:
        if b.stack.selective == "operators" and present(b.recompute == 1):
            selective = b.recompute == 1
            out = {part: np.where(selective, 0.0, size) for part, size in out.items()}
            add("operators", np.where(selective, _saved_outputs(b, block, element), 0.0))
        full = b.recompute == 2
        out = {part: np.where(full, 0.0, size) for part, size in out.items()}
        add("input", np.where(full, b.tokens * b.model.residual_width * element / b.seq_split, 0.0))
    return out


def kept_bytes(b: Batch, linear: Linear, element: float) -> float:
    """Bytes of an element of a product's input that is kept for backward.

    A stack with `keeps_quantised` keeps what it multiplied by (`QUANTISED`). One that quantises in compiled layers, with one scale per tensor, does
    so too. It keeps nothing where the input is the output of a norm or of an activation: backward computes that again from tensors that are kept
    anyway. The backward of attention reads its output in 16 bits too. Routed experts are not compiled."""
    precision, compiled = b.workload.precision, b.stack.fp8_passes > 0
    if (
        compiled and "activation" not in b.stack.fused
    ):  # torchao's layers, not compiled, save the input before it is quantised
        return element
    quantised = b.workload.scaling == "tensor" and precision == "fp8" if compiled else b.stack.keeps_quantised
    if not quantised or precision not in QUANTISED or linear.part in ("head", "router"):
        return element
    if linear.name == "o":
        return element + QUANTISED[precision]
    return 0.0 if compiled and linear.part != "experts" else QUANTISED[precision]


def _saved_outputs(b: Batch, block: ParameterBlock, element: float) -> Array:
    """Bytes that selective recompute by operators keeps of a layer: its input, the output of attention, every second product's output."""
    core = block.attention.heads * block.attention.v / b.tp if block.attention else 0.0
    return b.tokens * element * (b.model.hidden / b.seq_split + core + _product_outputs(b, block.linears) / 2)


def _product_outputs(b: Batch, linears: Sequence[Linear]) -> Array:
    """Elements per token of the outputs of products."""
    split = {"column": b.tp, "keys": b.tp, "experts": b.tp, "experts-row": b.tp, "logits": b.tp}
    return sum((linear.uses * linear.d_out / split.get(linear.style, b.seq_split) for linear in linears), 0.0)


def output_gradients(b: Batch, block: ParameterBlock, element: float) -> Array:
    """Bytes of the gradients from which the second half of a split backward computes those of the weights: of the outputs of all products and
    norms of a block, for one micro-batch."""
    norms = sum(s.width for s in block.saved if s.part == "norm" and s.name.endswith("-in"))
    trained = [linear for linear in block.linears if linear.learns or linear.rank]
    return b.tokens * element * (_product_outputs(b, trained) + norms / b.seq_split)


def _width(b: Batch, s: Saved, element: float) -> Array:
    size = element if not s.bytes_ else s.bytes_
    if s.name == "logits" and "loss" in b.stack.fused:
        size = element
    return (s.width + s.per_position * b.seq) * size
