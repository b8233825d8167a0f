"""Every parameter of a model by name, shape and style, in the order in which the network registers them.

`describe.anatomy` lists the matrices and vectors of each block with their style; here each becomes a named tensor. Weights are
[out, in] as in `nn.Linear`, experts [expert, out, in]. The head of a model with tied embeddings has no separate weight, except on a
pipeline stage that does not hold the embedding: there it has a copy.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from meshwright.describe.model import Model
from meshwright.describe.tensors import Linear, ParameterBlock, Vector
from meshwright.describe.variants import ATTENTIONS

TOKENS, PROJECT = "embedding.tokens.weight", "head.project.weight"
NORMS = {
    "norm-1": "attention_norm",
    "norm-2": "ffn_norm",
    "norm-3": "attention_post_norm",
    "norm-4": "ffn_post_norm",
    "q-norm": "attention.q_a_norm",
    "kv-norm": "attention.kv_a_norm",
    "embedding-norm": "embedding.norm",
    "final-norm": "head.norm",
    "mtp-norm-1": "mtp.hidden_norm",
    "mtp-norm-2": "mtp.embedding_norm",
    "mtp-norm-3": "mtp.norm",
}
FLAT = {  # vectors that are one flat parameter: convolutions and decays of linear mixers, norms that are not `Model.norm`
    "conv": "linear.conv",
    "decay": "linear.decay",
    "steps-norm": "linear.steps_norm",
    "scan-norm": "linear.norm",
    "index-norm": "attention.index_norm",
    "sinks": "attention.sinks",
    "compress-bias": "attention.compress_bias",
    "compress-norm": "attention.compress_norm",
    "index-bias": "attention.index_bias",
    "streams-1-base": "mixer_streams_base",
    "streams-2-base": "channel_streams_base",
    "streams-out-base": "head.streams_base",
}
STREAMS = {"streams-1": "mixer_streams", "streams-2": "channel_streams", "streams-out": "head.streams"}
# The modules of a block in the order in which the network registers them.
ORDER = (
    "embedding.tokens", "embedding.positions", "embedding.norm", "embedding.project_in",
    "mtp.hidden_norm", "mtp.embedding_norm", "mtp.join", "linear", "mixer_streams", "mixer_streams_base", "attention_norm",
    "linear.in", "linear.conv", "linear.steps", "linear.steps_norm", "linear.rate", "linear.decay", "linear.norm", "linear.out",
    "attention.q_a", "attention.q_a_norm", "attention.kv_a", "attention.kv_a_norm",
    "attention.q", "attention.k", "attention.v", "attention.q_norm", "attention.k_norm", "attention.sinks",
    "attention.q_b", "attention.kv", "attention.compress_kv", "attention.compress_gate", "attention.compress_bias", "attention.compress_norm",
    "attention.index_kv", "attention.index_gate", "attention.index_bias", "attention.index_q", "attention.index_k",
    "attention.index_norm", "attention.index_weights", "attention.gate",
    "attention.o_a", "attention.o",
    "attention.heads.q", "attention.heads.q_b", "attention.heads.kv_b", "attention.heads.o",
    "channel_streams", "channel_streams_base", "ffn_norm",
    "moe.router", "moe.latent_down", "moe.experts.gate", "moe.experts.up", "moe.experts.down",
    "moe.latent_up", "moe.shared.gate", "moe.shared.up", "moe.shared.down", "moe.shared_scale",
    "ffn.gate", "ffn.up", "ffn.down", "attention_post_norm", "ffn_post_norm", "mtp.norm",
    "head.streams", "head.streams_base", "head.norm", "head.project_out", "head.project",
)  # fmt: skip


@dataclass(frozen=True)
class Parameter:
    """A whole tensor of the model. One that does not learn has no gradient: balancing biases are moved by the routers' load."""

    name: str
    shape: tuple[int, ...]
    style: str
    learns: bool = True
    block: str = ""  # embedding | a kind of layer | head | mtp
    layer: int = -1  # -1: in no layer

    @property
    def expert(self) -> bool:
        """Whether it belongs to a routed expert, which has separate data-parallel groups."""
        return self.style.startswith("experts")

    @property
    def role(self) -> str:
        """Return how an optimizer treats it: `matrix` of a layer, `router`, `embedding`, `head`, or `vector` (norm weights, biases)."""
        if len(self.shape) < 2 or self.name.endswith("bias"):
            return "vector"
        if self.block in ("embedding", "head"):
            return self.block
        return "router" if self.module.endswith(("moe.router", "moe.shared_scale")) else "matrix"

    @property
    def multiplied_in_fp8(self) -> bool:
        """Whether an fp8 workload multiplies by it in fp8: the matrices of a layer, except its router."""
        matrix = len(self.shape) > 1 and self.name.endswith(".weight")
        return matrix and self.block not in ("embedding", "head") and not self.module.endswith("moe.router")

    @property
    def module(self) -> str:
        return self.name.rpartition(".")[0]


def parameters(model: Model, layers: range) -> list[Parameter]:
    """The parameters of the stage that holds `layers`: the embedding belongs to the first layer, the head to the last."""
    if model.resnet.stages:
        return [_of_resnet(name, shape) for name, shape in model.resnet.tensors.items()]
    out: list[Parameter] = []
    first, last = layers.start == 0, layers.stop == model.layers
    if first:
        out += block_parameters(model, model.blocks["embedding"])
    for layer in layers:
        for p in block_parameters(model, model.blocks[model.layer_kinds[layer]]):
            out.append(replace(p, name=f"layers.{layer}.{p.name}", layer=layer))
    if last:
        out += block_parameters(model, model.blocks["head"])
        if model.tied and not first and model.kind == "transformer":
            out.append(tied_copy(model))
        for module in range(model.mtp_layers):
            for p in block_parameters(model, model.blocks["mtp"]):
                out.append(replace(p, name=f"mtp.{module}.{p.name}"))
    return out


def _of_resnet(name: str, shape: tuple[int, ...]) -> Parameter:
    part, _, rest = name.partition(".")
    layer = int(rest.partition(".")[0]) if part == "layers" else -1
    return Parameter(
        name, shape, "between", block={"stem": "embedding", "layers": "dense"}.get(part, part), layer=layer
    )


def tied_copy(model: Model) -> Parameter:
    """The head's copy of a tied embedding, on a stage that does not hold the embedding."""
    return Parameter(PROJECT, (model.padded_vocab, model.token_width), "logits", block="head")


def block_parameters(model: Model, block: ParameterBlock) -> list[Parameter]:
    """The parameters of one block; names without the layer."""
    items = [p for linear in block.linears if linear.copies for p in _matrix(model, linear)]
    items += [p for vector in block.vectors for p in _vector(model, vector)]
    return [replace(p, block=block.kind) for p in sorted(items, key=lambda p: position(ORDER, p.module))]


def position(order: Sequence[str], module: str) -> int:
    """The place of a module in an order of modules: a plug-in's own modules of attention before its output, extra weights last."""
    if module not in order and module.startswith("attention."):
        return order.index("attention.o")
    return order.index(module) if module in order else len(order)


def module_styles(model: Model) -> tuple[tuple[str, str], ...]:
    """(pattern of module names, style) of all modules that have parameters; `*` is the layer index."""
    out: dict[str, str] = {}
    for kind, block in model.blocks.items():
        prefix = "layers.*." if kind in model.kinds else "mtp.*." if kind == "mtp" else ""
        for p in block_parameters(model, block):
            out.setdefault(prefix + p.module, p.style)
    if model.tied:
        out.setdefault(tied_copy(model).module, tied_copy(model).style)
    return tuple(out.items())


def module_of(model: Model, linear: Linear) -> str:
    """The module of a block that holds a matrix."""
    if linear.name in STREAMS:
        return STREAMS[linear.name]
    if linear.part == "extra":
        return f"extra.{linear.name}"
    if linear.part == "attention":
        heads_in = ATTENTIONS[model.attention].heads_in
        return f"{'attention' if linear.style == 'between' else heads_in}.{linear.name}"
    if linear.name in ("router", "shared-scale", "latent-down", "latent-up"):
        return f"moe.{linear.name.replace('-', '_')}"
    if linear.name == "head":
        return "head.project"
    if linear.name in ("embedding-in", "embedding-out"):
        return f"{linear.part}.project_{linear.name.rpartition('-')[2]}"
    if linear.part in ("linear", "mtp"):
        return linear.name.replace("-", ".")
    part, _, kind = linear.name.partition("-")
    return linear.name if not kind else f"{'' if part == 'ffn' else 'moe.'}{part}.{kind}"


def _matrix(model: Model, linear: Linear) -> Iterator[Parameter]:
    path = module_of(model, linear)
    experts = (linear.copies,) if linear.style.startswith("experts") else ()
    yield Parameter(f"{path}.weight", (*experts, linear.d_out, linear.d_in), linear.style)
    if linear.bias:
        style = f"{linear.style}-bias" if linear.style in ("row", "experts-row") else linear.style
        yield Parameter(f"{path}.bias", (*experts, linear.d_out), style)


def _vector(model: Model, vector: Vector) -> Iterator[Parameter]:
    if vector.part == "extra":
        columns = next(e.columns for e in model.extra if e.name == vector.name)
        shape = (vector.size // columns, columns) if vector.style == "vocabulary" else (vector.size,)
        yield Parameter(f"extra.{vector.name}.weight", shape, vector.style)
        return
    match vector.name:
        case "tokens":
            yield Parameter(TOKENS, (model.padded_vocab, model.token_width), vector.style)
        case "positions":
            yield Parameter("embedding.positions.weight", (model.max_positions, model.hidden), vector.style)
        case "qk-norm":
            if model.qk_norm_width == "projection":  # one weight per row of the projection, cut with it
                yield Parameter("attention.q_norm.weight", (model.heads * model.head_width,), "column")
                yield Parameter("attention.k_norm.weight", (model.kv_groups * model.head_width,), "keys")
            else:
                for name in ("q_norm", "k_norm"):
                    yield Parameter(f"attention.{name}.weight", (model.head_width,), vector.style)
        case "q-only-norm":
            yield Parameter("attention.q_norm.weight", (vector.size,), vector.style)
        case "balance-bias":
            yield Parameter("moe.router.balance_bias", (vector.size,), vector.style, learns=False)
        case name if name in FLAT or vector.part == "attention":  # a plug-in's vector bears the name of its module
            module = FLAT.get(name) or f"{ATTENTIONS[model.attention].heads_in}.{name}"
            yield Parameter(f"{module}.weight", (vector.size,), vector.style)
        case _:
            for name in model.norm_affine:
                size = vector.size // len(model.norm_affine)
                yield Parameter(f"{NORMS[vector.name]}.{name}", (size,), vector.style)
