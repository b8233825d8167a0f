"""The index in one device's batch of every token that the ranks of a stage hold.

One device has tokens in the order (sample, position). The ranks of a stage hold them as

    dp       runs of samples
    cp       runs of positions: with zigzag, an early and a late run
    tp       with sequence parallelism, an equal share of those positions; without it, an equal slice of the flat
             (sample, position) list, which all tp ranks have

Routing that compares tokens with each other (a capacity limit, expert choice) must break ties in an order that does not
depend on the layout. It uses this index.
"""

from __future__ import annotations

import torch

from meshwright.describe.layout import Layout
from meshwright.describe.model import Model
from meshwright.parallel.context.blocks import position_ids
from meshwright.parallel.context.sequence import is_zigzag, runs_of


def token_order(layout: Layout, rank: int, model: Model, rows: int, length: int) -> torch.Tensor:
    """[rank of the stage, token of that rank] → index in one device's micro-batch; a layer sees [rows, length] tokens on
    each rank."""
    plan = layout.plan
    shared = length * (plan.tp if plan.sp else 1)  # positions of one tp group
    seq = shared * plan.cp
    runs = runs_of(seq, plan.cp, is_zigzag(model, plan.cp_kind, seq, plan.cp)) if plan.cp > 1 else ((range(seq),),)
    out = []
    for other in layout.group_of("stage", rank):
        at = layout.coordinates(other)
        if plan.sp:
            flat = (torch.arange(rows)[:, None] * shared + at["tp"] * length + torch.arange(length)).flatten()
        else:
            flat = torch.arange(rows * length).chunk(plan.tp)[at["tp"]]
        sample = (at["replicate"] * plan.shard + at["shard"]) * rows + flat // shared
        out.append(sample * seq + position_ids(runs[at["cp"]])[flat % shared])
    return torch.stack(out)
