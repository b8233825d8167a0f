"""The share of saved activations that stays in the GPU's memory with selective recompute and offloading, by the modules that settings name.

The plan's `recompute = "selective"` recomputes attention's softmax only, or what the stack says. Megatron-Core's `recompute_modules` names
more. With h the hidden size and f the width of an expert, an expert layer saves h + 3·f values per routed token: the input, gate and up, and
their product.

    layernorm      outputs of norms                         moe_act      the product of gate and up: f of h + 3·f
    mla_up_proj    queries, keys and values of latent attention, not their latents
    mlp            the dense FFN                            moe          router, experts and shared experts

Fine-grained offloading sends the inputs of the modules that `offload_modules` names to host memory; offloading of n layers all that they save.

    core_attn      queries, keys and values                 attn_proj    the output of attention
    qkv_linear     the input of attention                   *_norm       the input of a norm
    expert_fc1     the input of experts: h of h + 3·f       moe_act      gate and up: 2·f        fused_group_mlp    all that experts save
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from meshwright.describe.attentions import ATTENTIONS
from meshwright.describe.model import Model
from meshwright.interop.keys import Facts
from meshwright.lower.op import StepProgram

ENDS = ("head", "embedding")
PARTS = ("attention", "ffn", "norm", "router", "experts", "shared")


def kept_share(program: StepProgram, model: Model, facts: Facts) -> float:
    """Bytes that stay in memory of the layers' saved activations, as a share of what the estimate counts."""
    kept = dict.fromkeys(PARTS, 1.0)
    if facts.get("recompute") == "selective":
        _recompute(kept, model, _names(facts.get("recompute_modules")))
    if facts.get("offloads_modules") and facts.get("recompute") != "full":
        _offload(kept, model, _names(facts.get("offload_modules")))
    total = left = 0.0
    for block, parts in program.saved.items():
        if block in ENDS:
            continue
        count = max(1, model.layer_kinds.count(block)) if block in model.layer_kinds else 0
        for part, size in parts.items():
            bytes_of = count * float(np.broadcast_to(size, program.batch.n)[0])
            total += bytes_of
            left += bytes_of * kept.get(part, 1.0)
    on_device = 1 - min(1.0, (facts.get("offload_layers") or 0) / max(1, model.layers))
    return on_device * left / total if total else on_device


def _names(named: Any) -> Iterable[str]:
    return named if isinstance(named, list | tuple) else str(named or "").strip("[]").replace(",", " ").split()


def _recompute(kept: dict[str, float], model: Model, names: Iterable[str]) -> None:
    """Lower the shares of the parts whose modules are recomputed."""
    for name in names:
        if name == "layernorm":
            kept["norm"] = 0.5
        elif name == "mla_up_proj" and ATTENTIONS[model.attention].reads("kv_rank"):
            values = _attention_values(model)
            kept["attention"] = 1 - values["core_attn"] / sum(values.values())
        elif name == "mlp":
            kept["ffn"] = 0.0
        elif name == "shared_experts":
            kept["shared"] = 0.0
        elif name == "moe_act":
            kept["experts"] = min(kept["experts"], 1 - model.expert_width / _expert_values(model))
        elif name == "moe":
            kept |= {"experts": 0.0, "shared": 0.0, "router": 0.0}


def _offload(kept: dict[str, float], model: Model, names: Iterable[str]) -> None:
    """Lower the shares of the parts whose modules send their inputs to host memory."""
    values = _attention_values(model)
    for name in names:
        if name in values:
            kept["attention"] = max(0.0, kept["attention"] - values[name] / sum(values.values()))
        elif name in ("attn_norm", "mlp_norm"):
            kept["norm"] = max(0.0, kept["norm"] - 0.5)
        elif name in ("expert_fc1", "moe_act"):
            share = (model.hidden if name == "expert_fc1" else 2 * model.expert_width) / _expert_values(model)
            kept["experts"] = max(0.0, kept["experts"] - share)
        elif name == "fused_group_mlp":
            kept["experts"] = 0.0


def _attention_values(model: Model) -> dict[str, int]:
    """Values per token that attention saves, by the module whose input they are."""
    block = next(model.blocks[kind] for kind in model.kinds if model.blocks[kind].attention)
    core = block.attention
    assert core is not None
    latents = sum(linear.d_out for linear in block.linears if linear.name in ("q_a", "kv_a"))
    heads = core.heads * core.qk + core.kv_heads * (core.qk + core.v)
    return {"qkv_linear": model.hidden + latents, "core_attn": heads, "attn_proj": core.heads * core.v}


def _expert_values(model: Model) -> int:
    return model.hidden + 3 * model.expert_width if model.experts else 4 * model.hidden
