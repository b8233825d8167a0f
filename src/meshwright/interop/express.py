"""All facts of a plan: the inverse of `assemble`. A framework's table writes those that it has keys for."""

from __future__ import annotations

from typing import Any

from meshwright.describe.config import Config
from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.describe.workload import FP8, Workload
from meshwright.interop.assemble import STAGES
from meshwright.interop.keys import Facts
from meshwright.interop.switches import switch_facts

SHAPE = (
    "hidden", "layers", "heads", "kv_heads", "head_dim", "ffn", "vocab", "vocab_multiple", "tied", "max_positions", "experts", "top_k", "expert_ffn",
    "shared_experts", "shared_ffn", "dense_layers", "attention", "q_rank", "kv_rank", "rope_dim", "nope_dim", "value_dim", "activation", "norm",
    "positions", "qk_norm", "qkv_bias",
)  # fmt: skip


def express(config: Config) -> Facts:
    """Every fact that a configuration states."""
    plan, workload, model = config.plan, config.workload, config.model
    return {
        **_degrees(plan, model),
        **_pipeline(plan, model),
        **_batch(plan, workload),
        **_memory(plan, workload),
        **_shape(model),
        **switch_facts(config),
    }


def _degrees(plan: Plan, model: Model) -> Facts:
    return {
        "tp": plan.tp,
        "sp": plan.sp,
        "cp": plan.cp,
        "cp_kind": plan.cp_kind if plan.cp > 1 else None,
        "pp": plan.pp,
        "ep": plan.ep if model.experts else None,
        "expert_tp": plan.etp if model.experts else None,
        "replicate": plan.replicate,
        "shard": plan.shard,
        "dp": plan.dp,
        "gpus": plan.world,
        "sharding": STAGES[plan.zero],
        "zero": plan.zero,
        "reshard": plan.reshard if plan.zero == 3 else None,
    }


def _pipeline(plan: Plan, model: Model) -> Facts:
    if plan.pp == 1:
        return {}
    each = plan.stage_layers(model.layers)
    return {
        "virtual": plan.virtual,
        "schedule": plan.schedule,
        "layers_per_chunk": max(each) if len(set(each)) == 1 else None,
        "stage_layers": list(plan.layers_per_stage) or None,
    }


def _batch(plan: Plan, workload: Workload) -> Facts:
    local = plan.microbatch if plan.pp == 1 else workload.batch // plan.dp
    return {
        "batch": workload.batch,
        "microbatch": plan.microbatch,
        "local_batch": local,
        "pipeline_microbatch": plan.microbatch if plan.pp > 1 else None,
        "accumulation": plan.microbatches(workload),
        "seq": workload.seq,
    }


def _memory(plan: Plan, workload: Workload) -> Facts:
    narrow = workload.precision if workload.precision in (*FP8, "fp4") else None
    return {
        "recompute": plan.recompute,
        "recompute_every": plan.recompute_every,
        "recompute_layers": plan.recompute_layers or None,
        "half": plan.param_dtype,
        "eight": narrow,
        "grad_dtype": plan.grad_dtype,
        "state_dtype": plan.state_dtype,
        "optimizer": workload.optimizer,
        "offload_states": plan.offload in ("states", "both"),
        "offload_activations": plan.offload in ("activations", "both"),
        "bucket": int(plan.bucket),
        "bucket_mb": round(plan.bucket / 1e6),
        "bucket_elements": int(plan.bucket) // 2,
    }


def _shape(model: Model) -> Facts:
    if model.kind != "transformer":
        return {"model": model.name}
    fields: dict[str, Any] = {f"model.{name}": getattr(model, name) or None for name in SHAPE}
    fields["model.shared_ffn"] = model.shared_width or None  # the width of all shared experts
    bias = model.qkv_bias or model.ffn_bias or model.out_bias
    return {**fields, "model": model.name, "without_bias": not bias, "gated": model.gated, "untied": not model.tied}
