"""The operations of a layer of any kind: its mixer, then its channel part (`describe.shape_checks`)."""

from collections.abc import Callable

from meshwright.describe.variants import ATTENTIONS
from meshwright.lower.compressed_attention import compressed_attention
from meshwright.lower.layer import LayerLowering
from meshwright.lower.linear import linear_mixer
from meshwright.lower.moe import experts
from meshwright.lower.program import Op


def layer(low: LayerLowering) -> dict[str, list[Op]]:
    """The operations of one layer, by phase."""
    if low.m.kind == "mlp":
        return low.square()
    last = parts(low)
    low.extra_products()
    low.shared_scales()
    low.recomputed(last)
    return low.phases


def parts(low: LayerLowering) -> str:
    """Add the mixer and the channel part of a layer; return the name of its last exchange."""
    mixer, channel = low.m.parts_of(low.block.kind)
    if mixer == "linear":
        linear_mixer(low)
    elif mixer:
        ATTENTIONS.part(low.m.attention, "lower")(low)
    if channel:
        CHANNELS[channel](low)
    return f"{channel or ('linear' if mixer == 'linear' else 'attention')}-out"


def feed_forward(low: LayerLowering) -> None:
    """Add the FFN of a dense layer."""
    if low.m.norms_per_layer != 1:
        low.norm("norm-2")
    low.feed_forward("ffn", low.m.ffn)
    if low.m.norms_per_layer == 4:
        low.norm("norm-4")
    low.residual("ffn-residual")


ATTENTIONS.provide("gqa", lower=lambda low: low.attention(low.project_grouped))
ATTENTIONS.provide("mla", lower=lambda low: low.attention(low.project_latents))
ATTENTIONS.provide("compressed", lower=compressed_attention)
CHANNELS: dict[str, Callable[[LayerLowering], None]] = {"ffn": feed_forward, "experts": experts}
