"""The number of rows that the routers of a step sent: the size of an all-to-all is data-dependent.

Each rank sends t·k copies of its tokens (fewer where a capacity drops some) and receives the copies for its experts; an
all-gather over expert_tp is padded to its fullest rank. A layer records these numbers for every dispatch of the step; here they
are put in the order of layers and micro-batches, which the lowering expects. Dispatches of recomputed forwards are left out: the
lowering knows which layers are recomputed.
"""

from __future__ import annotations

from typing import Any

from meshwright.lower.rank import Routed
from meshwright.models.moe import MixtureOfExperts
from meshwright.parallel.apply import Parallel
from meshwright.parallel.expert.dispatch import ParallelPlacement


def routed(parallel: Parallel) -> dict[int, list[Routed]] | None:
    """By layer, one entry per micro-batch; None for a model without experts."""
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
