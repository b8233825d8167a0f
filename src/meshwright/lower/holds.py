"""What a rank holds: parameters of each block after tensor and expert parallelism, and bytes saved for backward.

A column split keeps d_out/tp columns (never less than one KV head), a row split d_in/tp rows, everything else is whole.
Experts keep copies/ep of width/expert_tp. Saved tensors follow the same splits; `full` recompute keeps only each layer's
input (2·T·h bytes, sharded with sequence parallelism), `selective` drops what the attention core can make again.
"""

from __future__ import annotations

import numpy as np

from meshwright.describe.anatomy import Block, Linear, Saved
from meshwright.lower.batch import Batch
from meshwright.lower.op import Array, StepProgram
from meshwright.lower.stages import Holding

CORE = ("softmax", "softmax-mask", "softmax-dropped", "logsumexp")


def linear_parameters(b: Batch, linear: Linear) -> Array:
    if linear.part == "experts":
        per_copy = linear.d_in * linear.d_out / b.etp + (
            linear.d_out / (b.etp if linear.split == "column" else 1) if linear.bias else 0
        )
        return linear.copies / b.ep * per_copy
    if linear.split == "column":
        columns = np.maximum(linear.d_out / b.tp, min(linear.granule, linear.d_out))
        return linear.copies * (linear.d_in * columns + (columns if linear.bias else 0))
    if linear.split == "row":
        # The all-gather form splits it by columns, and the bias with them.
        bias = linear.d_out / np.where(b.gather_form, b.tp, 1.0) if linear.bias else 0.0
        return linear.copies * (linear.d_in / b.tp * linear.d_out + bias)
    return linear.parameters * np.ones(b.n)


def parameters(b: Batch, block: Block) -> dict[str, Array]:
    """Elements on one rank: `dense` is reduced over dp·cp, `expert` over expert_dp."""
    out = {"dense": np.zeros(b.n), "expert": np.zeros(b.n)}
    for linear in block.linears:
        out["expert" if linear.part == "experts" else "dense"] += linear_parameters(b, linear)
    for vector in block.vectors:
        split = b.tp if vector.name == "tokens" else 1.0
        out["dense"] += vector.parameters / split
    if block.kind == "head" and b.model.tied:  # a stage apart from the embedding's has a copy of its own
        out["dense"] += (b.pp > 1) * b.model.padded_vocab * b.model.hidden / b.tp
    return out


def matrices(block: Block) -> dict[str, float]:
    """Tensors of more than one dimension by how they are reduced; of experts, all copies are one."""
    experts = sum(linear.part == "experts" for linear in block.linears)
    tables = sum(vector.name in ("tokens", "positions") for vector in block.vectors)
    return {"dense": float(len(block.linears) - experts + tables), "expert": float(experts)}


def untrained(block: Block) -> float:
    """Elements without a gradient: biases that balance experts are moved by the load instead."""
    return float(sum(vector.parameters for vector in block.vectors if vector.name == "balance-bias"))


def partial(b: Batch, block: Block) -> dict[str, Array]:
    """Elements whose gradient is a partial sum over a rank's tensor-parallel peers, to be summed once a step.

    A norm of heads and a router see this rank's heads or tokens always; what stands between the products sees a share of the
    tokens under sequence parallelism; the bias behind a split expert's product is whole on each of its ranks.
    """
    always = sum(linear.parameters for linear in block.linears if linear.part == "router")
    always += sum(vector.parameters for vector in block.vectors if vector.name == "qk-norm")
    between = sum(
        v.parameters for v in block.vectors if (v.part == "norm" and v.name != "qk-norm") or v.name == "positions"
    )
    between += sum(x.parameters for x in block.linears if x.split == "none" and x.part != "router")
    between += sum(x.d_out for x in block.linears if x.split == "row" and x.bias and x.part != "experts")
    of_experts = sum(x.copies * x.d_out for x in block.linears if x.split == "row" and x.bias and x.part == "experts")
    copied = sum(x.copies * min(x.granule, x.d_out) * (x.d_in + x.bias) for x in block.linears if x.name in ("k", "v"))
    return {
        "partial": (b.tp > 1) * (always + between * b.sp),
        "kv_copies": (b.size("kv_copies") > 1) * copied,
        "expert_partial": (b.etp > 1) * of_experts / b.ep,
    }


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
            split = copies if linear.part == "experts" else row_split if linear.split == "row" else b.seq_split
            add(linear.part, b.tokens * linear.uses * linear.d_in * element / split)
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


def elements(program: StepProgram, holding: Holding) -> dict[str, Array]:
    """Parameters on this rank by how they are reduced: dense over dp·cp, expert over expert_dp."""
    out = {"dense": np.zeros(program.batch.n), "expert": np.zeros(program.batch.n)}
    for block, groups in program.parameters.items():
        for group, count in groups.items():
            out[group] = out[group] + holding.counts[block] * count
    return out


def reduced(program: StepProgram, holding: Holding) -> dict[str, Array]:
    """What this rank sums once a step: `elements`, and of them the `untrained`, those `partial` over tp and over expert_tp, the
    `tied` that another stage has too; and the `loads` of its routers."""
    batch, model = program.batch, program.batch.model
    out = elements(program, holding)
    for block, more in program.sums.items():
        for name, count in more.items():
            out[name] = out.get(name, 0.0) + holding.counts[block] * count
    if model.tied and np.any(batch.pp > 1):  # both ends on one rank, as in a V, need nobody's help
        apart = np.abs(holding.counts["embedding"] - holding.counts["head"])
        out["tied"] = apart * (batch.pp > 1) * model.padded_vocab * model.hidden / batch.tp
    return out
