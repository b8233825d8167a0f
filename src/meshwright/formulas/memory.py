"""Memory on one's own sizes: model states by ZeRO stage, saved activations, KV cache, buffers of ring attention."""

from typing import Any, NamedTuple

from meshwright.cost import advice, closed_forms
from meshwright.cost import memory as cost
from meshwright.describe.config import load_model
from meshwright.describe.model import Model
from meshwright.formulas import arguments
from meshwright.formulas.arguments import Quantity


class StateMemory(NamedTuple):
    """Bytes of model state on one device."""

    parameters: float
    gradients: float
    optimizer: float
    total: float


def state_memory(
    parameters: Quantity, ranks: int = 1, stage: int = 0, param: float = 2, grad: float = 2, optimizer: float = 12
) -> StateMemory:
    """Bytes of parameters, gradients and optimizer states on one of `ranks` devices: 2N + 2N + 12N with bf16 and Adam. ZeRO-1 divides
    the optimizer states, 2 also the gradients, 3 (FSDP) also the parameters; stage 0 is DDP."""
    n, p = arguments.count("parameters", parameters), arguments.whole("ranks", ranks)
    stage = arguments.whole("stage", stage, least=0, most=3)
    w, g, o = (
        arguments.above_zero(name, x) for name, x in (("param", param), ("grad", grad), ("optimizer", optimizer))
    )
    weights, gradients, states = ((w, 0, 0), (0, g, 0), (0, 0, o))
    w_bytes, g_bytes, o_bytes = (cost.zero_state_bytes(n, p, stage, *one) for one in (weights, gradients, states))
    return StateMemory(w_bytes, g_bytes, o_bytes, cost.zero_state_bytes(n, p, stage, w, g, o))


def gpus_for_state(parameters: Quantity, memory: Quantity, bytes_per_parameter: float = 16) -> int:
    """The smallest number of devices whose memory holds the model state, divided evenly."""
    per = arguments.above_zero("bytes_per_parameter", bytes_per_parameter)
    return cost.minimum_gpus(arguments.count("parameters", parameters), arguments.size("memory", memory), per)


def largest_model(memory: Quantity, bytes_per_parameter: float = 16) -> float:
    """The largest number of parameters whose state one device holds, without activations: the limit of DDP."""
    per = arguments.above_zero("bytes_per_parameter", bytes_per_parameter)
    return cost.largest_model(arguments.size("memory", memory), per)


def activation_memory(
    seq: int,
    batch: int,
    hidden: int,
    heads: int,
    layers: int = 1,
    tp: int = 1,
    sequence_parallel: bool = False,
    recompute: str = "none",
) -> float:
    """Bytes that the layers of Korthikanti's transformer save on one rank: s·b·h·(34 + 5·a·s/h) per layer in 16 bits on one device;
    `recompute` is none, selective or full (docs/formulas.md has the six forms)."""
    named = {"seq": seq, "batch": batch, "hidden": hidden, "heads": heads, "tp": tp}
    s, b, h, a, t = (arguments.whole(name, value) for name, value in named.items())
    kind: Any = arguments.one_of("recompute", recompute, ("none", "selective", "full"))
    number = arguments.whole("layers", layers)
    return number * closed_forms.layer_activations(s, b, h, a, t, sequence_parallel, kind)


def model_activations(model: Any, seq: int, batch: int = 1, dtype_bytes: float = 2, flash: bool = True) -> float:
    """Bytes that one device saves for backward in a model (a catalog name, a file or a `Model`), counted tensor by tensor."""
    described = _model(model)
    parts = described.activations(arguments.whole("seq", seq), arguments.above_zero("dtype_bytes", dtype_bytes), flash)
    return arguments.whole("batch", batch) * sum(parts.values())


def kv_cache(
    seq: int,
    layers: int,
    kv_heads: int = 0,
    head_dim: int = 0,
    batch: int = 1,
    dtype_bytes: float = 2,
    window: int = 0,
    latent: int = 0,
    rope_dim: int = 0,
) -> float:
    """Bytes of the KV cache: 2 · kv_heads · head_dim per token and layer with grouped queries (kv_heads = heads: multi-head), latent + rope_dim with
    MLA. A window keeps min(seq, window) positions."""
    s, n, b = (arguments.whole(name, x) for name, x in (("seq", seq), ("layers", layers), ("batch", batch)))
    if latent:
        if kv_heads or head_dim:
            raise arguments.refused(
                "latent", latent, "Latent attention keeps no keys and values of heads: leave out kv_heads and head_dim"
            )
        elements = arguments.whole("latent", latent) + arguments.whole("rope_dim", rope_dim, least=0)
    else:
        elements = 2 * arguments.whole("kv_heads", kv_heads) * arguments.whole("head_dim", head_dim)
    kept = min(s, arguments.whole("window", window, least=0) or s)
    return closed_forms.cache_bytes(elements, kept, n, b, arguments.above_zero("dtype_bytes", dtype_bytes))


def model_kv_cache(model: Any, seq: int, batch: int = 1, dtype_bytes: float = 2) -> float:
    """Bytes of the KV cache of a model (a catalog name, a file or a `Model`), layer by layer: grouped queries, MLA, windows, indexers, compressed
    attention, and the states of linear mixers."""
    counts, described = (arguments.whole("seq", seq), arguments.whole("batch", batch)), _model(model)
    if described.kind != "transformer":
        raise arguments.refused(
            "model", described.name, "It has no layers that mix positions, so it keeps nothing of a sequence"
        )
    return closed_forms.model_cache(described, *counts, arguments.above_zero("dtype_bytes", dtype_bytes))


def ring_attention_buffer(seq: int, ranks: int, kv_width: int, dtype_bytes: float = 2) -> float:
    """Bytes of double-buffered K and V blocks: 4 · (s/P) · width · bytes; the width is kv_heads · head_dim."""
    s, p, width = (arguments.whole(name, x) for name, x in (("seq", seq), ("ranks", ranks), ("kv_width", kv_width)))
    return advice.ring_buffer(s, p, width, arguments.above_zero("dtype_bytes", dtype_bytes))


def _model(model: Any) -> Model:
    return model if isinstance(model, Model) else load_model(str(model))
