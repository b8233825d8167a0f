"""The share of saved activations that a framework's selective recompute keeps, by the modules that it names.

The plan's `recompute = "selective"` recomputes attention's softmax only, or what the stack says. Megatron-Core's `recompute_modules` names
more. With h the hidden size and f the width of an expert, an expert layer saves h + 3·f values per routed token: the input, gate and up, and
their product.

    layernorm      outputs of norms                         moe_act      the product of gate and up: f of h + 3·f
    mla_up_proj    queries, keys and values of latent attention, not their latents
    mlp            the dense FFN                            moe          router, experts and shared experts
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from meshwright.describe.model import Model
from meshwright.interop.keys import Facts
from meshwright.lower.op import StepProgram

ENDS = ("head", "embedding")
PARTS = ("attention", "ffn", "norm", "router", "experts", "shared")


def kept_share(program: StepProgram, model: Model, facts: Facts) -> float:
    """Bytes that selective recompute keeps of the layers' saved activations, as a share of what the estimate counts."""
    if facts.get("recompute") != "selective":
        return 1.0
    kept = _modules(model, facts.get("recompute_modules"))
    total = left = 0.0
    for block, parts in program.saved.items():
        if block in ENDS:
            continue
        count = max(1, model.layer_kinds.count(block)) if block in model.layer_kinds else 0
        for part, size in parts.items():
            bytes_of = count * float(np.broadcast_to(size, program.batch.n)[0])
            total += bytes_of
            left += bytes_of * kept.get(part, 1.0)
    return left / total if total else 1.0


def _modules(model: Model, named: Any) -> dict[str, float]:
    names: Iterable[str] = (
        named if isinstance(named, list | tuple) else str(named or "").strip("[]").replace(",", " ").split()
    )
    kept = dict.fromkeys(PARTS, 1.0)
    for name in names:
        if name == "layernorm":
            kept["norm"] = 0.5
        elif name == "mla_up_proj" and model.attention == "mla":
            latents = model.q_rank + model.kv_rank + model.rope_dim + model.heads * model.value_dim + model.hidden
            heads = model.heads * (2 * (model.nope_dim + model.rope_dim) + 2 * model.value_dim)
            kept["attention"] = latents / (latents + heads - model.heads * model.value_dim)
        elif name == "mlp":
            kept["ffn"] = 0.0
        elif name == "shared_experts":
            kept["shared"] = 0.0
        elif name == "moe_act":
            kept["experts"] = min(kept["experts"], 1 - model.expert_width / _expert_values(model))
        elif name == "moe":
            kept |= {"experts": 0.0, "shared": 0.0, "router": 0.0}
    return kept


def _expert_values(model: Model) -> int:
    return model.hidden + 3 * model.expert_width if model.experts else 4 * model.hidden
