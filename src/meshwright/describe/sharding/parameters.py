"""Every parameter of a model by name, shape and style, in the order in which the network registers them.

`describe.anatomy` lists the matrices and vectors of each block with their style; here each becomes a named tensor. Weights are
[out, in] as in `nn.Linear`, experts [expert, out, in]. The head of a model with tied embeddings has no separate weight, except on a
pipeline stage that does not hold the embedding: there it has a copy.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from meshwright.describe.model import Model
from meshwright.describe.module_names import FLAT, NORMS, PROJECT, TOKENS, module_of, vector_module
from meshwright.describe.tensors import Linear, ParameterBlock, Vector

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


ADAPTER_MODULES = (".lora_a", ".lora_b")


@dataclass(frozen=True)
class Parameter:
    """A whole tensor of the model. One that does not learn has no gradient: balancing biases are moved by the routers' load, and an adapter
    leaves its base `frozen`, which may be quantised (`packed`)."""

    name: str
    shape: tuple[int, ...]
    style: str
    learns: bool = True
    block: str = ""  # embedding | a kind of layer | head | mtp
    layer: int = -1  # -1: in no layer
    frozen: bool = False
    packed: bool = False

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
        matrix = len(self.shape) > 1 and self.name.endswith(".weight") and not self.is_adapter
        return matrix and self.block not in ("embedding", "head") and not self.module.endswith("moe.router")

    @property
    def is_adapter(self) -> bool:
        """Whether it is A or B of an adapter."""
        return self.module.endswith(ADAPTER_MODULES)

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
    frozen = not model.adapter.learns(TOKENS.rpartition(".")[0])
    shape = (model.padded_vocab, model.token_width)
    return Parameter(PROJECT, shape, "logits", block="head", learns=not frozen, frozen=frozen)


def block_parameters(model: Model, block: ParameterBlock) -> list[Parameter]:
    """The parameters of one block; names without the layer."""
    items = [p for linear in block.linears if linear.copies for p in _matrix(model, linear)]
    for vector in block.vectors:
        frozen = not vector.learns
        items += [replace(p, learns=p.learns and not frozen, frozen=frozen) for p in _vector(model, vector)]
    return [replace(p, block=block.kind) for p in sorted(items, key=lambda p: position(ORDER, p.module))]


def position(order: Sequence[str], module: str) -> int:
    """The place of a module in an order of modules, an adapter's at its matrix; a plug-in's own modules of attention before its output, extra
    weights last."""
    module = module.removesuffix(".lora_a").removesuffix(".lora_b")
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


def adapter_styles(style: str) -> tuple[str, str]:
    """The styles of A and B of a matrix of a style.

    Where tensor parallelism cuts the outputs, B is cut with them and A is whole: each rank adds a part of A's gradient. Where it cuts the inputs, A
    is cut with them and B is whole: each rank's B·(A·x) is a partial sum as the base's output is, and is reduced with it.
    """
    if style in ("row", "experts-row"):
        return style, "experts-inside" if style == "experts-row" else "inside"
    return {"experts": "experts-inside", "between": "between"}.get(style, "inside"), style


def _matrix(model: Model, linear: Linear) -> Iterator[Parameter]:
    path = module_of(model, linear)
    experts = (linear.copies,) if linear.style.startswith("experts") else ()
    frozen, row = not linear.learns, linear.style in ("row", "experts-row")
    shape = (*experts, linear.d_out, linear.d_in)
    yield Parameter(f"{path}.weight", shape, linear.style, not frozen, frozen=frozen, packed=linear.packed)
    if linear.bias:
        style = f"{linear.style}-bias" if row else linear.style
        yield Parameter(f"{path}.bias", (*experts, linear.d_out), style, not frozen, frozen=frozen)
    if linear.rank:
        a, b = adapter_styles(linear.style)
        yield Parameter(f"{path}.lora_a.weight", (*experts, linear.rank, linear.d_in), a)
        yield Parameter(f"{path}.lora_b.weight", (*experts, linear.d_out, linear.rank), b)


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
            yield Parameter(f"{vector_module(model, vector)}.weight", (vector.size,), vector.style)
        case _:
            for name in model.norm_affine:
                size = vector.size // len(model.norm_affine)
                yield Parameter(f"{NORMS[vector.name]}.{name}", (size,), vector.style)
