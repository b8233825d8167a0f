"""How the routers of a step really sent tokens: what an all-to-all carries is the data's to say, not the plan's.

Each rank sends t·k copies of its tokens (fewer where a capacity drops some) and receives what others have for its experts; an
all-gather over expert_tp is padded to its fullest rank. A layer writes these numbers down for every journey of the step; here they
are put in the order of layers and micro-batches, which is what the lowering asks for. Journeys of layers that backward made
again are left out: the lowering knows which layers those are.
"""

from __future__ import annotations

from typing import Any

from meshwright.lower.issued import Routed
from meshwright.models.moe import MixtureOfExperts
from meshwright.parallel.apply import Parallel
from meshwright.parallel.expert.dispatch import Spread


def routed(parallel: Parallel) -> dict[int, list[Routed]] | None:
    """By layer, one a micro-batch; None of a model without experts."""
    if not parallel.model.experts:
        return None
    out: dict[int, list[Routed]] = {}
    for stage in parallel.stages.values():
        every: Any = stage.layers
        layers = {int(name): layer.moe for name, layer in every.items() if hasattr(layer, "moe")}
        for i, (layer, experts) in enumerate(layers.items()):
            assert isinstance(experts, MixtureOfExperts)
            assert isinstance(experts.place, Spread)  # one a stage: its layers write into the same list, in turn
            first = [journey for *journey, again in experts.place.made if not again]
            out[layer] = [Routed(*journey) for journey in first[i :: len(layers)]]
    return out
