"""The operations of a layer of any kind: its mixer, then its channel part (`describe.layers`)."""

from __future__ import annotations

from collections.abc import Callable

from meshwright.lower.layer import LayerLowering
from meshwright.lower.linear import linear_mixer
from meshwright.lower.moe import experts
from meshwright.lower.op import Op


def layer(low: LayerLowering) -> dict[str, list[Op]]:
    """The operations of one layer, by phase."""
    if low.m.kind == "mlp":
        return low.square()
    mixer, channel = low.m.parts_of(low.block.kind)
    if mixer:
        MIXERS[mixer](low)
    if channel:
        CHANNELS[channel](low)
    low.shared_scales()
    low.recomputed(f"{channel or mixer}-out")
    return low.phases


def feed_forward(low: LayerLowering) -> None:
    """Add the FFN of a dense layer."""
    low.norm("norm-2")
    low.feed_forward("ffn", low.m.ffn)
    if low.m.norms_per_layer == 4:
        low.norm("norm-4")
    low.residual("ffn-residual")


MIXERS: dict[str, Callable[[LayerLowering], None]] = {"attention": LayerLowering.attention, "linear": linear_mixer}
CHANNELS: dict[str, Callable[[LayerLowering], None]] = {"ffn": feed_forward, "experts": experts}
