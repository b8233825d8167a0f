"""Where the tokens of every rank of a stage stand in one device's batch.

One device has tokens in the order (sample, position). The ranks of a stage hold them as

    dp       runs of samples
    cp       runs of positions, early and late ones where a causal ring is zigzag-balanced
    tp       the next share of those positions under sequence parallelism; without it, an even slice of the flat
             (sample, position) list that all tp ranks hold alike

What compares tokens with each other, a capacity or an expert that chooses, must break ties in an order that does not
depend on who holds what: this one.
"""

from __future__ import annotations

import torch

from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.parallel.blocks import places
from meshwright.parallel.context import is_zigzag, runs_of
from meshwright.parallel.mesh import Mesh


def token_order(mesh: Mesh, plan: Plan, model: Model, rows: int, length: int) -> torch.Tensor:
    """[rank of the stage, own token] → place in one device's micro-batch; a layer sees [rows, length] tokens here."""
    shared = length * (plan.tp if plan.sp else 1)  # positions of one tp group
    seq = shared * plan.cp
    runs = runs_of(seq, plan.cp, is_zigzag(model, plan.cp_kind, seq, plan.cp)) if plan.cp > 1 else ((range(seq),),)
    out = []
    for rank in mesh.layout.group_of("stage", mesh.rank):
        at = mesh.layout.coordinates(rank)
        if plan.sp:
            flat = (torch.arange(rows)[:, None] * shared + at["tp"] * length + torch.arange(length)).flatten()
        else:
            flat = torch.arange(rows * length).chunk(plan.tp)[at["tp"]]
        sample = (at["replicate"] * plan.shard + at["shard"]) * rows + flat // shared
        out.append(sample * seq + places(runs[at["cp"]])[flat % shared])
    return torch.stack(out)
