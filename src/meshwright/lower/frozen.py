"""How far backward goes where a user trains some parameters only, and which exchanges it makes on the way.

A gradient flows back to a point of the network if something that is trained lies before it. Parameters stand in the order in which
forward meets them, so the first that is trained decides: behind it all exchanges of backward happen, before it none do. (A pipeline's
later stages ask for the gradient of their input whatever is trained.) An exchange is *at* the point where its own backward happens:

    attention-in-grad     before q, k and v          attention-out-grad   behind the output projection
    keys and values       before the output projection                    … of the feed-forward network likewise
    dispatch-grad         before the experts         combine-grad         behind the experts' last product

Beside that, the input of a region is gathered again for the gradients of the matrices it enters: if none of those is trained,
nobody asks for it.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.describe.model import Model
from meshwright.describe.sharding import TOKENS, Box
from meshwright.describe.sharding.parameters import ORDER, module_of

# As forward meets them: norms behind a part right behind it, and the router beside the experts, whose input it does not make.
FORWARD = [name for name in ORDER if name not in ("attention_post_norm", "moe.router")]
FORWARD.insert(FORWARD.index("ffn_norm"), "attention_post_norm")
FORWARD.insert(FORWARD.index("moe.shared_scale") + 1, "moe.router")
REGIONS = {"attention": ("attention.",), "ffn": ("ffn.",), "shared": ("moe.shared.",), "head": ("head.project.",)}
INTO = (
    ".q.weight",
    ".k.weight",
    ".v.weight",
    ".q_b.weight",
    ".kv_b.weight",
    ".gate.weight",
    ".up.weight",
    ".project.weight",
)
BEFORE, BEHIND = -0.5, 0.5
# Exchanges of backward, by the module that they happen before or behind.
POINTS = {
    "embedding-grad": ("embedding.tokens", BEHIND), "reduce": ("linear", BEHIND), "head-in-grad": ("head.project", BEFORE),
    "attention-inner-grad": ("attention.o", BEFORE), "attention-out-grad": ("attention.o", BEHIND),
    "ring-kv-again": ("attention.o", BEFORE), "ring-kv-grad": ("attention.o", BEFORE),
    "gather-kv-again": ("attention.o", BEFORE), "scatter-kv-grad": ("attention.o", BEFORE),
    "ulysses-qkv": ("attention.o", BEFORE), "ulysses-out": ("attention.o", BEFORE),
    "attention-in-grad": ("attention.q", BEFORE), "ffn-in-grad": ("ffn.gate", BEFORE),
    "ffn-inner-grad": ("ffn.down", BEFORE), "ffn-out-grad": ("ffn.down", BEHIND),
    "shared-in-grad": ("ffn_norm", BEHIND), "shared-inner-grad": ("moe.shared.down", BEFORE),
    "shared-out-grad": ("moe.shared.down", BEHIND), "experts-out-grad": ("ffn_norm", BEHIND),
    "dispatch-grad": ("ffn_norm", BEHIND), "expert-scatter": ("ffn_norm", BEHIND),
    "combine-grad": ("moe.experts.down", BEHIND), "expert-gather": ("moe.experts.down", BEHIND),
}  # fmt: skip
Point = tuple[int, float]  # block of the stage in forward order, place in it


@dataclass(frozen=True)
class Flow:
    """Of one stage: where backward ends, and what is trained."""

    model: Model
    layers: range
    first: Point  # where the first of the trained parameters stands
    trained: frozenset[str]

    @classmethod
    def of(cls, model: Model, layers: range, held: list[Box], later: bool) -> Flow:
        """Of the stage that holds `layers`; a `later` stage of a pipeline is asked for the gradient of its input."""
        trained = frozenset(s.name for s in held if s.learns)
        points = [point_of(name, layers) for name in trained]
        return cls(model, layers, (-1, 0.0) if later else min(points, default=(len(layers) + 2, 0.0)), trained)

    def happens(self, op: str, layer: int, block: str) -> bool:
        """Whether an exchange of backward does; what is no exchange of backward happens always."""
        if op not in POINTS:
            return True
        module, side = POINTS[op]
        if self.model.attention == "mla" and module.startswith("attention."):
            module = module.replace("attention.", "attention.heads.")
        return self.first < (self._block(layer, block), FORWARD.index(module) + side)

    def reaches(self, layer: int, block: str) -> bool:
        """Whether backward goes through a block, some of it or all."""
        return self.first < (self._block(layer, block) + 1, -1.0)

    def products(self, layer: int) -> float:
        """The share of a layer's products that have a gradient."""
        block, linears = self._block(layer, ""), self.model.blocks[self.model.layer_kinds[layer]].linears
        from_here = self.first[1] if self.first[0] == block else float(self.first[0] > block) * len(FORWARD)
        paths = [module_of(self.model, linear) for linear in linears if linear.part not in ("router", "experts")]
        return sum(FORWARD.index(path) >= from_here for path in paths) / len(paths)

    def region(self, name: str, layer: int) -> bool:
        """Whether some matrix that a region's input enters is trained."""
        prefix = "" if name == "head" else f"layers.{layer}."
        inside = tuple(f"{prefix}{part}" for part in REGIONS[name])
        tied = name == "head" and self.model.tied and TOKENS in self.trained
        return tied or any(p.startswith(inside) and p.endswith(INTO) for p in self.trained)

    def _block(self, layer: int, block: str) -> int:
        if layer >= 0:
            return layer - self.layers.start + 1
        return 0 if block == "embedding" else len(self.layers) + 1


def point_of(name: str, layers: range) -> Point:
    """Where a parameter stands."""
    if name.startswith("layers."):
        _, layer, inside = name.split(".", 2)
        return int(layer) - layers.start + 1, float(FORWARD.index(inside.rpartition(".")[0]))
    return 0 if name.startswith("embedding.") else len(layers) + 1, float(FORWARD.index(name.rpartition(".")[0]))
