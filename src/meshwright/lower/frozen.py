"""How far backward runs if some parameters are frozen, and which operations it has on the way.

A gradient flows back to a point of the network if a trained parameter lies before it. Parameters are listed in the order in which
forward uses them, so the first trained one decides: after it all exchanges of backward happen, before it none do. (A later stage of a
pipeline computes the gradient of its input whatever is trained.) Each exchange has a *point*, before or after a module:

    attention-in-grad     before q, k and v          attention-out-grad   after the output projection
    keys and values       before the output projection                    … of the feed-forward network likewise
    dispatch-grad         before the experts         combine-grad         after the experts' last product

The other operations of backward are listed in the order of forward: a product is before its matrix, the rest after the product or norm
that it follows (`points_of_gradients`). `lower.rank` asks for any set of frozen parameters; the step program of an adapter has the blocks that
backward does not reach, and the operations of the block in which it ends, in phase E (`stages`).

The input of a tensor-parallel region is gathered again only for the gradients of the matrices that multiply it: if none of them is
trained, it is not gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from meshwright.describe.model import Model
from meshwright.describe.module_names import NORMS, module_of, vector_module
from meshwright.describe.sharding import TOKENS, Box
from meshwright.describe.sharding.parameters import ORDER, position
from meshwright.describe.tensors import ParameterBlock, Saved
from meshwright.describe.variants import ATTENTIONS
from meshwright.lower.builder import JOINED
from meshwright.lower.program import Op

# The order of forward: a norm after a part follows that part, and the router comes with the experts, whose input it does not produce.
FORWARD = [name for name in ORDER if name not in ("attention_post_norm", "moe.router")]
FORWARD.insert(FORWARD.index("ffn_norm"), "attention_post_norm")
FORWARD.insert(FORWARD.index("moe.shared_scale") + 1, "moe.router")
REGIONS = {
    "attention": ("attention.",),
    "linear": ("linear.",),
    "ffn": ("ffn.",),
    "shared": ("moe.shared.",),
    "head": ("head.project.",),
}
INTO = (
    ".q.weight",
    ".k.weight",
    ".v.weight",
    ".q_b.weight",
    ".kv_b.weight",
    ".gate.weight",
    ".up.weight",
    ".project.weight",
    "linear.in.weight",
)
BEFORE, AFTER = -0.5, 0.5
# Exchanges of backward, by the module that they happen before or after.
POINTS = {
    "embedding-grad": ("embedding.tokens", AFTER), "reduce": ("linear", AFTER), "head-in-grad": ("head.project", BEFORE),
    "attention-inner-grad": ("attention.o", BEFORE), "attention-out-grad": ("attention.o", AFTER),
    "ring-kv-again": ("attention.o", BEFORE), "ring-kv-grad": ("attention.o", BEFORE),
    "gather-kv-again": ("attention.o", BEFORE), "scatter-kv-grad": ("attention.o", BEFORE),
    "ulysses-qkv": ("attention.o", BEFORE), "ulysses-out": ("attention.o", BEFORE),
    "attention-in-grad": ("attention.q", BEFORE), "ffn-in-grad": ("ffn.gate", BEFORE),
    "ffn-inner-grad": ("ffn.down", BEFORE), "ffn-out-grad": ("ffn.down", AFTER),
    "shared-in-grad": ("ffn_norm", AFTER), "shared-inner-grad": ("moe.shared.down", BEFORE),
    "shared-out-grad": ("moe.shared.down", AFTER), "experts-out-grad": ("ffn_norm", AFTER),
    "dispatch-grad": ("ffn_norm", AFTER), "expert-scatter": ("ffn_norm", AFTER),
    "combine-grad": ("moe.experts.down", AFTER), "expert-gather": ("moe.experts.down", AFTER),
    "router-dgrad": ("ffn_norm", AFTER), "latent-down-dgrad": ("ffn_norm", AFTER),
}  # fmt: skip
Point = tuple[int, float]  # block of the stage in forward order, position in it


@dataclass(frozen=True)
class BackwardReach:
    """The point at which the backward of one stage ends, and the parameters that are trained."""

    model: Model
    layers: range
    first: Point  # of the first trained parameter
    trained: frozenset[str]

    @classmethod
    def of(cls, model: Model, layers: range, stage_boxes: list[Box], later: bool) -> BackwardReach:
        """The reach in the stage that holds `layers`; a `later` stage of a pipeline computes the gradient of its input."""
        trained = frozenset(s.name for s in stage_boxes if s.learns)
        points = [point_of(name, layers) for name in trained]
        return cls(model, layers, (-1, 0.0) if later else min(points, default=(len(layers) + 2, 0.0)), trained)

    def happens(self, op: str, layer: int, block: str) -> bool:
        """Whether an operation runs: a backward exchange only if backward reaches it, any other always."""
        return op not in POINTS or self.first < (self._block(layer, block), _known_point(self.model, op))

    def reaches(self, layer: int, block: str) -> bool:
        """Whether backward runs through a block, or a part of it."""
        return self.first < (self._block(layer, block) + 1, -1.0)

    def products(self, layer: int) -> float:
        """The share of a layer's products that have a gradient."""
        block, linears = self._block(layer, ""), self.model.blocks[self.model.layer_kinds[layer]].linears
        begin = self.first[1] if self.first[0] == block else float(self.first[0] > block) * len(FORWARD)
        paths = [module_of(self.model, linear) for linear in linears if linear.part not in ("router", "experts")]
        return sum(position(FORWARD, path) >= begin for path in paths) / len(paths)

    def region(self, name: str, layer: int) -> bool:
        """Whether some matrix that multiplies a region's input is trained."""
        prefix = "" if name == "head" else f"layers.{layer}."
        inside = tuple(f"{prefix}{part}" for part in REGIONS[name])
        tied = name == "head" and self.model.tied and TOKENS in self.trained
        into = (p.replace(".lora_a.", ".") for p in self.trained if p.startswith(inside))
        return tied or any(p.endswith(INTO) for p in into)

    def _block(self, layer: int, block: str) -> int:
        if layer >= 0:
            return layer - self.layers.start + 1
        return 0 if block == "embedding" else len(self.layers) + 1


def points_of_gradients(model: Model, kind: str, ops: Sequence[Op]) -> list[float]:
    """The position of each operation of the phase I of a block: it runs if a trained parameter is before it."""
    linears = {linear.name: module_of(model, linear) for linear in model.blocks[kind].linears}
    out, at = [], BEFORE
    for op in ops:
        name, _, rest = op.name.partition("-lora-")
        product = op.name.removesuffix("-dgrad").removesuffix("-dequantise-grad")
        same_input = [names for joined, names in JOINED.items() if name in names and joined != "q-latents"]
        joined = JOINED.get(name if rest else product, (name if rest else product,))
        names = [*same_input, joined][0] if rest else joined
        places = [position(FORWARD, linears[one]) for one in names if one in linears]
        if op.name in POINTS:
            out.append(_known_point(model, op.name))
        elif rest in ("b-dgrad", "scale-grad"):  # A needs the gradient of A·x
            out.append(max(position(FORWARD, linears[one]) for one in joined if one in linears) + AFTER)
        elif rest:
            out.append(min(places) + BEFORE)
        elif places and product != op.name:
            out.append(min(places) + BEFORE)
            at = max(places) + AFTER
        else:
            if norm := NORMS.get(op.name.removesuffix("-grad")):
                at = position(FORWARD, norm) + AFTER
            out.append(at)
    return out


def _known_point(model: Model, op: str) -> float:
    module, side = POINTS[op]
    if module.startswith("attention."):
        module = module.replace("attention", ATTENTIONS[model.attention].heads_in, 1)
    return FORWARD.index(module) + side


def first_trained(model: Model, kind: str) -> float | None:
    """The position of the first trained parameter of a block; None: it has none."""
    block = model.blocks[kind]
    modules = [module_of(model, linear) for linear in block.linears if (linear.learns or linear.rank) and linear.copies]
    modules += [vector_module(model, vector) for vector in block.vectors if vector.learns]
    return float(min(position(FORWARD, module) for module in modules)) if modules else None


def first_trained_layer(model: Model) -> int:
    """The first layer with a trained parameter; the number of layers: none has one."""
    kinds = [kind for kind in model.kinds if first_trained(model, kind) is not None]
    return min((model.layer_kinds.index(kind) for kind in kinds), default=model.layers)


def after_first_trained(model: Model, kind: str, ops: Sequence[Op]) -> list[Op]:
    """Of the operations of the phase I of a block those that run if nothing before the block is trained."""
    first = first_trained(model, kind)
    if first is None:
        return []
    return [op for op, point in zip(ops, points_of_gradients(model, kind, ops), strict=True) if first < point]


def saving_after_first(model: Model, block: ParameterBlock) -> ParameterBlock:
    """The block with those of its saved tensors that backward reads if nothing before the block is trained."""
    first = first_trained(model, block.kind)
    if first is None:
        return replace(block, saved=(), linears=())
    core = first < _known_point(model, "attention-inner-grad")  # it reads the input of `o`
    kept = [one for one in block.linears if one.name != "o" or core or one.learns or one.rank]
    saved = [s for s in block.saved if first < _saved_point(model, s)]
    return replace(block, saved=tuple(saved), linears=tuple(kept))


def _saved_point(model: Model, s: Saved) -> float:
    """The position of the operation that reads a saved tensor: a norm, the core of attention, an activation."""
    norm = next((module for name, module in NORMS.items() if s.name.startswith(f"{name}-")), "")
    if s.part == "norm" and norm:
        return position(FORWARD, norm) + AFTER
    if s.part not in ("attention", "ffn") or "-lora" in s.name:
        return float(len(FORWARD))
    return _known_point(model, f"{s.part}-inner-grad")


def point_of(name: str, layers: range) -> Point:
    """The point of a parameter."""
    if name.startswith("layers."):
        _, layer, inside = name.split(".", 2)
        return int(layer) - layers.start + 1, float(position(FORWARD, inside.rpartition(".")[0]))
    return 0 if name.startswith("embedding.") else len(layers) + 1, float(position(FORWARD, name.rpartition(".")[0]))
