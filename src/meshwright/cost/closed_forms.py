"""Closed forms of papers and texts on one's own sizes, beside those that the cost model itself uses.

    tensor parallelism   4 all-reduces of b·s·h per layer (2 forward, 2 backward), each sends 2(T−1)/T of its buffer
    pipeline             2 messages (activations, gradients) per micro-batch and boundary, P−1 boundaries
    activations          per layer, in 16 bits, with dropout and stored probabilities (Korthikanti et al. 2022, "Reducing Activation
                         Recomputation in Large Transformer Models", table 2):

                             sbh(34 + 5as/h)                 one device
                             sbh(10 + 24/t + 5as/(ht))       tensor parallel
                             sbh/t·(34 + 5as/h)              with sequence parallelism
                             the same without 5as/h          selective recompute
                             2sbh, or 2sbh/t                 full recompute: the input of each layer

    KV cache             per sequence and layer: what a token leaves (K and V of each group of heads; with MLA the latent), times the
                         positions that are kept: all, or those of the window; other mixers: `describe.cache`

`Model.activations` counts what our own layers save, tensor by tensor; a test compares it with Korthikanti's form for the layer of that paper.
"""

from typing import Literal

from meshwright.describe.cache import cache_by_mixer
from meshwright.describe.model import Model
from meshwright.lower.program import sent

Recompute = Literal["none", "selective", "full"]


def tensor_parallel_bytes(batch: float, seq: float, hidden: float, tp: int, dtype_bytes: float = 2) -> float:
    """Bytes that one rank sends per layer and micro-batch: 4 · 2(T−1)/T · b·s·h·bytes."""
    return 4 * float(sent("all_reduce", batch * seq * hidden * dtype_bytes, tp))


def pipeline_bytes(message: float, microbatches: int, stages: int) -> float:
    """Bytes between all stages in one step: an activation forward and its gradient backward for each micro-batch and boundary."""
    return 2 * message * microbatches * (stages - 1)


def layer_activations(
    seq: float,
    batch: float,
    hidden: float,
    heads: float,
    tp: int = 1,
    sequence_parallel: bool = False,
    recompute: Recompute = "none",
) -> float:
    """Bytes that one layer of Korthikanti's transformer saves on one rank for backward, in 16-bit mixed precision."""
    size = seq * batch * hidden
    if recompute == "full":
        return 2 * size / (tp if sequence_parallel else 1)
    scores = 0.0 if recompute == "selective" else 5 * heads * seq / hidden
    if sequence_parallel:
        return size / tp * (34 + scores)
    return size * (10 + 24 / tp + scores / tp)


def cache_bytes(elements: float, positions: float, layers: float, batch: float = 1, dtype_bytes: float = 2) -> float:
    """Bytes of the KV cache of layers that keep `elements` per position."""
    return elements * positions * layers * batch * dtype_bytes


def model_cache(model: Model, seq: int, batch: int = 1, dtype_bytes: float = 2) -> float:
    """Bytes of the KV cache of a model, states of linear mixers included (`describe.cache`)."""
    caches = cache_by_mixer(model, seq).values()
    return sum(cache_bytes(cache.elements, 1, number, batch, dtype_bytes) for number, cache in caches)
