"""The parity matrix as a list of layouts: every strategy, every legal pair, and common triples.

Strategies are fragments of a plan. Pairs are generated: every member of a family with every member of every other family, unless
the combined plan is illegal. A test checks that no generated pair is missing. Starting ranks is expensive and training a small
layout is cheap, so layouts of one world size train one after the other in one set of processes, each with new groups.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any, NamedTuple

import inexact

from meshwright.describe import legality, schedules
from meshwright.describe.adapter import Adapter
from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.describe.workload import Workload
from meshwright.errors import MeshwrightError
from meshwright.proof.prove import one_device
from meshwright.proof.records import Job

WORKLOAD = Workload(batch=8, seq=8)
STEPS = 2
SHAPE: dict[str, Any] = {"hidden": 16, "layers": 4, "heads": 4, "kv_heads": 2, "ffn": 24, "vocab": 33}
BIASED = {"qkv_bias": True, "out_bias": True, "ffn_bias": True}
EXPERTS = {**SHAPE, "layers": 3, "experts": 4, "top_k": 2, "expert_ffn": 12}
LATENT = {"attention": "mla", "kv_heads": 0, "kv_rank": 10, "nope_dim": 6, "rope_dim": 4, "value_dim": 5}
YARN = {"kind": "yarn", "factor": 4.0, "original_positions": 4, "beta_fast": 4.0}
MODELS = {
    "llama": Model(**SHAPE),
    "qwen": Model(**SHAPE, tied=True, qk_norm=True, qkv_bias=True),
    "gpt": Model(**{**SHAPE, "kv_heads": 0}, tied=True, norm="layernorm", positions="learned", max_positions=8,
                 activation="gelu", embedding_norm=True, **BIASED),
    "gemma": Model(**SHAPE, tied=True, norms_per_layer=4, window=3, full_every=2, head_dim=6, activation="geglu", norm_offset=1.0,
                   embedding_scale=4.0, attention_softcap=1.0, logit_softcap=1.0, window_rope_theta=100.0),
    # as OLMo 2
    "one-kv": Model(**{**SHAPE, "kv_heads": 1}, norm_position="post", qk_norm=True, qk_norm_width="projection"),
    # as Cohere 2
    "five": Model(**{**SHAPE, "layers": 5}, tied=True, norm="layernorm", norm_parameters="weight", norms_per_layer=1, parallel_residual=True,
                  window=3, full_every=2, nope_every=2, logit_scale=0.5),
    "bert": Model(**{**SHAPE, "kv_heads": 0}, causal=False, norm="layernorm", activation="gelu", **BIASED),
    "mlp": Model(kind="mlp", hidden=16, layers=4, ffn_bias=True),
    "mixtral": Model(**EXPERTS),
    "qwen-moe": Model(**EXPERTS, shared_experts=1, shared_gate=True, router_bias=True, ffn_bias=True, tied=True,
                      activation="gelu"),
    "deepseek": Model(**{**EXPERTS, **LATENT}, q_rank=8, shared_experts=2, dense_layers=1, balance_bias=True),
    "gpt-oss": Model(**EXPERTS, sinks=True, window=3, full_every=2, router_bias=True, swiglu_limit=0.5, swiglu_alpha=1.7,
                     swiglu_shift=1.0, rope={**YARN, "truncate": False}, **BIASED),
    "long": Model(**SHAPE, head_dim=8, rope_dim=4, rope={"kind": "dynamic", "factor": 4.0}, max_positions=4, window=3,
                  full_layers=(0,), residual_scale=0.5, parallel_residual=True, attention_scale=0.4, attention_scale_by_layer=True,
                  activation="geglu-tanh"),
    "llama4": Model(**EXPERTS, shared_experts=1, moe_every=2, router={"score": "sigmoid", "normalise": False, "weigh_inputs": True},
                    qk_norm=True, qk_norm_weights=False, window=3, window_kind="chunk", full_layers=(1,), nope_layers=(1,),
                    temperature_scale=0.5, temperature_floor=2, rope={"interleaved": True}),
    "latent-yarn": Model(**{**EXPERTS, **LATENT}, q_rank=8, latent_norm_epsilon=1e-3,
                         rope={**YARN, "interleaved": True, "mscale": 0.7, "mscale_all_dim": 1.3}),
}  # fmt: skip

FAMILIES: dict[str, dict[str, dict[str, Any]]] = {
    "data": {
        "dp": {"replicate": 2, "bucket": 2000},
        "zero1": {"shard": 2, "zero": 1},
        "zero2": {"shard": 2, "zero": 2},
        "zero3": {"shard": 2, "zero": 3},
        "hsdp": {"replicate": 2, "shard": 2, "zero": 3},
    },
    "tensor": {"tp": {"tp": 2}, "sp": {"tp": 2, "sp": True}},
    "context": {kind: {"cp": 2, "cp_kind": kind} for kind in ("ring", "all-gather", "ulysses")},
    "pipeline": {"1f1b": {"pp": 2}, "zbv": {"pp": 2, "schedule": "zbv", "virtual": 2}},
    "expert": {"ep": {"ep": 2}},
    "recompute": {kind: {"recompute": kind} for kind in ("selective", "full")},
}
# What the pairs leave to be shown alone.
SCHEDULES = [
    ("gpipe", 1),
    ("naive", 1),
    ("zb-h1", 1),
    ("zb-h2", 1),
    ("interleaved", 2),
    ("looped-bfs", 2),
    ("interleaved-zb", 2),
    ("dualpipev", 2),
    ("auto", 1),
    ("auto", 2),
]
# Models alternate, so that each is used with many layouts; experts need a model that has them.
DENSE = ("llama", "qwen", "gpt", "gemma")
SPARSE = ("mixtral", "qwen-moe", "deepseek")
Z3 = {"shard": 2, "zero": 3}
ZBV = {"pp": 2, "schedule": "zbv", "virtual": 2}
SP = {"tp": 2, "sp": True}
CP = {"cp": 2}

TRIPLES: list[tuple[str, dict[str, Any]]] = [
    # four ranks: two axes, and options that add no ranks
    ("qwen", {"replicate": 2, "tp": 2, "recompute": "full", "microbatch": 2}),
    ("gpt", {**Z3, **SP, "recompute": "selective"}),
    ("gemma", {**Z3, "pp": 2, "recompute": "full"}),
    ("llama", {**SP, **ZBV, "recompute": "full"}),
    ("gpt", {**CP, **Z3, "recompute": "full", "microbatch": 2}),
    ("five", {"tp": 2, "pp": 2, "recompute": "selective", "layers_per_stage": (3, 2)}),
    ("five", {"replicate": 2, "pp": 2, "schedule": "zb-h1", "layers_per_stage": (1, 4)}),
    ("qwen", {**CP, **ZBV, "recompute": "full"}),
    ("mixtral", {"replicate": 2, "tp": 2, "ep": 2, "microbatch": 2}),
    ("qwen-moe", {"replicate": 2, **SP, "ep": 2, "recompute": "full"}),
    ("deepseek", {**Z3, "tp": 2, "ep": 2}),
    ("mixtral", {**Z3, "pp": 2, "ep": 2}),
    ("qwen-moe", {"replicate": 2, "pp": 2, "ep": 2, "schedule": "zb-h1"}),
    ("deepseek", {"replicate": 2, "pp": 2, "ep": 2, "recompute": "full"}),
    ("mixtral", {**CP, "replicate": 2, "ep": 2}),
    ("qwen-moe", {**CP, **Z3, "ep": 2}),
    ("deepseek", {**CP, "tp": 2, "ep": 2}),
    ("qwen-moe", {**SP, "pp": 2, "ep": 2, "expert_tp": 1}),
    ("mixtral", {**CP, "pp": 2, "ep": 2}),
    ("mixtral", {"replicate": 2, **Z3, "ep": 2, "recompute": "full"}),
    ("mlp", {**Z3, "tp": 2, "microbatch": 2}),
    ("mlp", {"tp": 2, **ZBV, "recompute": "full"}),
    ("one-kv", {"cp": 2, "cp_kind": "ulysses", "replicate": 2, "recompute": "selective"}),
    # of eight
    ("qwen", {"replicate": 2, **SP, "pp": 2, "microbatch": 2}),
    ("gpt", {**Z3, "tp": 2, **ZBV}),
    ("llama", {"replicate": 2, **Z3, "tp": 2}),
    ("gemma", {**Z3, **CP, "tp": 2}),
    ("qwen-moe", {**SP, "pp": 2, "replicate": 2, "ep": 2}),
    ("qwen-moe", {"zero": 3, **CP, **SP, "pp": 2, "ep": 2, "recompute": "full"}),  # all five: ZeRO shards over cp
]
EXTRAS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"microbatch": 2}),
    ("llama", {"replicate": 4, "bucket": 2000}),
    ("few", {"shard": 4, "zero": 3}),
    ("gpt", {**Z3, "reshard": False, "microbatch": 2}),
    ("gpt", {**Z3, "reduce": "step", "microbatch": 2}),
    ("gpt", {"tp": 4}),
    ("gpt", {"tp": 4, "sp": True}),
    ("llama", {"pp": 4}),
    ("llama", {"cp": 4}),
    ("bert", {"cp": 2}),
    ("llama", {"cp": 4, "overlap": ()}),
    ("bert", {**SP, "microbatch": 2}),
    ("one-kv", {"cp": 4, "cp_kind": "ulysses"}),
    ("five", {"pp": 2}),
    ("five", {"pp": 2, "layers_per_stage": (1, 4)}),
    ("five", {"pp": 2, "schedule": "interleaved", "virtual": 2}),
    ("gpt", {**Z3, "pp": 2, "schedule": "interleaved", "virtual": 2}),
    ("llama", {"tp": 2, "pp": 2, "order": ("dp", "pp", "cp", "tp")}),
    ("mlp", {"tp": 2, "pp": 2}),
    ("mlp", {"replicate": 2, "tp": 2}),
    ("mixtral", {"tp": 2, "expert_tp": 1, "ep": 2}),
    ("mixtral", {"replicate": 4, "ep": 2}),
    ("qwen-moe", {"replicate": 2, "ep": 2, "overlap": ("ep",)}),
    ("llama", {"recompute": "full", "recompute_every": 2, "microbatch": 2}),
    ("qwen", {"recompute": "auto", "recompute_budget": 20e3, "microbatch": 2}),
    ("five", {**SP, "recompute": "full", "recompute_every": 3}),
    ("five", {**ZBV, "replicate": 2, "recompute": "full", "recompute_layers": 1}),
    ("gpt", {"replicate": 2, "reduce": "microbatch"}),
    ("llama", {"replicate": 2, "pp": 2, "reduce": "microbatch", "bucket": 2000}),
    ("qwen", {"replicate": 2, **ZBV, "reduce": "microbatch"}),
    ("mixtral", {**Z3, "pp": 2, "ep": 2, "reduce": "microbatch"}),
    ("qwen", {"replicate": 2, "tp": 2, "reduce": "microbatch", "recompute": "selective"}),
    ("gemma", {**Z3, "wrap": 3, "prefetch": False}),
    ("qwen", {"shard": 2, "zero": 2, **SP, "wrap": 0}),
    ("llama", {"replicate": 2, "average_every": 2}),
    ("qwen", {"replicate": 2, **SP, "average_every": 1}),
    ("gpt", {"replicate": 2, "pp": 2, "average_every": 2, "recompute": "full"}),
]
ONE_KIND = {"tp": 2, "tp_form": "all-gather"}  # of collective forward: the lecture's form
ULYSSES = {"cp": 2, "cp_kind": "ulysses"}
COPIED = [
    ("one-kv", fields)
    for fields in (  # a KV head on several ranks
        {"tp": 2},
        {"tp": 4, "sp": True},
        {**Z3, **SP},
        {**ZBV, "tp": 2, "recompute": "full"},
        {**CP, **SP},
        {**ULYSSES, "tp": 2},
        {"replicate": 2, "tp": 2, "recompute": "selective", "bucket": 2000},
        {**ONE_KIND, "pp": 2},
    )
]
COPIED += [
    ("qwen", {"tp": 4}),
    ("qwen", {"tp": 4, "sp": True, "pp": 2}),
    ("gemma", {"tp": 4, **Z3}),
    ("llama", {**ULYSSES, "cp": 4}),
]
COPIED += [("gpt", {**ULYSSES, "zero": 1})]  # shards over cp alone
GATHERED = [
    (model, {**ONE_KIND, **fields})
    for model, fields in (
        ("llama", {}),
        ("gpt", {"replicate": 2}),
        ("qwen", Z3),
        ("gemma", {"pp": 2, "schedule": "zb-h1"}),
        ("gpt", CP),
        ("qwen", {"recompute": "full"}),
        ("qwen-moe", {"recompute": "full"}),
        ("deepseek", {"replicate": 2, "ep": 2}),
        ("gpt", {**ZBV, "recompute": "full"}),
    )
]
DROPPED = [
    ("drops", fields)
    for fields in (
        {},
        {"replicate": 2},
        {**Z3, "recompute": "full"},
        {"tp": 2},
        SP,
        CP,
        {**ULYSSES, **SP},
        {"pp": 2, "recompute": "full"},
        {**SP, "recompute": "full"},
        {**CP, **SP, "recompute": "full"},
        {**ZBV, "replicate": 2, "recompute": "full", "microbatch": 1},
        {**SP, "pp": 2, "schedule": "zb-h1"},
        ONE_KIND,
    )
]
DROPPED += [("moe-drops", {"replicate": 2, **SP, "ep": 2}), ("mlp-drops", {"tp": 2, "pp": 2}), ("mlp-drops", Z3)]
# On the host meanwhile: states, what layers save for backward, or both.
AWAY = [
    (model, {**fields, "offload": where})
    for model, fields, where in (
        ("gpt", SP, "activations"),
        ("qwen", {**SP, **ZBV}, "activations"),
        ("llama", {}, "states"),
        ("gpt", {}, "both"),
        ("llama", {"replicate": 2, "bucket": 2000}, "activations"),
        ("five", {"pp": 2, "offload_layers": 1}, "activations"),
        ("five", {**ZBV, "offload_layers": 1, "recompute": "full"}, "activations"),
        ("mixtral", {"replicate": 2, "ep": 2, "offload_layers": 1}, "both"),
        ("qwen", {"shard": 2, "zero": 1}, "states"),
        ("gpt", Z3, "both"),
        ("gemma", {"tp": 2}, "both"),
        ("llama", CP, "activations"),
        ("qwen", {"pp": 2}, "both"),
        ("mlp", ZBV, "activations"),
        ("mixtral", {"replicate": 2, "ep": 2}, "both"),
        ("gpt", {**CP, "recompute": "full"}, "both"),
        ("qwen-moe", {"shard": 4, "zero": 3, "ep": 2}, "activations"),
        ("llama", {"recompute": "selective"}, "activations"),
    )
]
# Sinks, scaled rotary positions, and other parts that models of Hugging Face have.
PARTS: list[tuple[str, dict[str, Any]]] = [
    ("gpt-oss", {**SP, "ep": 2, "replicate": 2}),
    ("gpt-oss", CP),
    ("gpt-oss", {"cp": 2, "cp_kind": "all-gather", "tp": 2}),
    (
        "gpt-oss",
        {"pp": 2, "schedule": "zb-h1", "cp": 2, "cp_kind": "all-gather"},
    ),  # the backward of sinks repeats that of attention
    ("gpt-oss", {**ULYSSES, "replicate": 2, "ep": 2}),
    ("gpt-oss", {**ULYSSES, "tp": 2, "recompute": "selective"}),
    ("gpt-oss", {**Z3, "recompute": "selective"}),
    ("gpt-oss", {"pp": 2, **Z3, "recompute": "full"}),
    ("gpt-oss", ONE_KIND),
    ("long", {**CP, **SP}),
    ("long", {**ULYSSES, "pp": 2}),
    ("long", {"tp": 2, "pp": 2, "recompute": "selective"}),
    ("llama4", {**SP, "ep": 2, "replicate": 2}),
    ("llama4", {**CP, "ep": 2}),
    ("llama4", {"cp": 2, "cp_kind": "all-gather", "tp": 2}),
    ("llama4", {**ULYSSES, **Z3}),
    ("llama4", {"pp": 2, **Z3, "recompute": "full"}),
    ("latent-yarn", {**CP, "tp": 2, "ep": 2}),
    ("latent-yarn", {**SP, "pp": 2}),
]
EXTRAS += [(model, {"microbatch": 2, **fields}) for model, fields in (*COPIED, *GATHERED, *DROPPED, *AWAY, *PARTS)]
FROZEN: list[tuple[str, dict[str, Any]]] = [  # of llama the embedding too: backward ends in the network's second layer
    ("qwen", {"replicate": 2, "bucket": 2000}), ("qwen", {**Z3, "microbatch": 2}), ("llama", {**Z3, "prefetch": False}),
    ("llama", {"tp": 2}), ("qwen", SP), ("llama", {**SP, "recompute": "full"}), ("qwen", {"pp": 2}), ("llama", ZBV),
    ("llama", {**CP, "microbatch": 2}), ("qwen", {**CP, "microbatch": 2}),
]  # fmt: skip
# Statistics of the router are the whole batch's, so one device sees it in one micro-batch and so do the ranks together.
ROUTED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("mixtral", {"replicate": 2, "ep": 2, "microbatch": 4}, {"aux": 0.1, "z": 0.01}),
    ("qwen-moe", {**SP, "microbatch": 8}, {"aux": 0.1, "capacity": 1.0}),
    ("mixtral", {"replicate": 2, "tp": 2, "ep": 2, "microbatch": 4}, {"capacity": 0.75}),
    ("mixtral", {**Z3, "ep": 2, "microbatch": 4}, {"choice": "expert"}),
    ("qwen-moe", {**CP, "ep": 2, "microbatch": 8}, {"choice": "expert"}),
    ("deepseek", {**CP, "tp": 2, "microbatch": 8}, {"capacity": 1.0, "aux": 0.1}),
    ("mixtral", {"replicate": 2, "pp": 2, "ep": 2}, {"capacity": 1.25, "z": 0.01, "normalise": False, "scale": 2.5}),
    ("deepseek", {**Z3, "tp": 2, "ep": 2, "microbatch": 2}, {"aux": 0.1, "score": "softmax", "balance_rate": 0.01}),
    ("deepseek", {**CP, "tp": 2, "microbatch": 2}, {"aux": 0.1, "aux_scope": "sequence"}),
    ("mixtral", {**SP, "replicate": 2, "microbatch": 2}, {"aux": 0.1, "aux_scope": "sequence"}),
]


# Muon under every strategy: whole matrices are brought together over the axes that cut them.
MUON: list[tuple[str, dict[str, Any]]] = [
    ("gpt", {"microbatch": 2}), ("llama", {"replicate": 2, "bucket": 2000}), ("qwen", {"shard": 2, "zero": 1}),
    ("gpt", {"shard": 2, "zero": 2}), ("llama", Z3), ("few", {"shard": 4, "zero": 3}), ("gemma", {"tp": 2}), ("qwen", SP),
    ("one-kv", {"tp": 2}), ("qwen", {"tp": 4}), ("gpt", ONE_KIND), ("llama", {**CP, **Z3}), ("gpt", ULYSSES),
    ("gemma", {"pp": 2}), ("qwen", {**ZBV, "tp": 2}), ("five", {**Z3, "pp": 2}), ("llama", {**Z3, **SP}),
    ("deepseek", {"shard": 4, "zero": 1, "ep": 2}), ("mixtral", {"replicate": 2, "ep": 2}),
    ("deepseek", {"tp": 2, "ep": 2, "expert_tp": 1}), ("qwen-moe", {**Z3, "tp": 2, "microbatch": 2}),
    ("deepseek", {**Z3, "tp": 2, "ep": 2}), ("mixtral", {"replicate": 2, **Z3, "ep": 2}), ("mlp", {**Z3, "tp": 2}),
    ("gpt", {**Z3, "offload": "states"}), ("gpt", {"replicate": 2, "tp": 2, "average_every": 2}),
    ("llama", {**Z3, "recompute": "full"}),
]  # fmt: skip


# Low-rank adapters over a frozen base, in the dtype of the plan or quantised: each strategy, and pairs with tensor, expert and pipeline parallelism.
ADAPTED: list[tuple[str, dict[str, Any]]] = [
    ("lora", {"replicate": 2, "bucket": 2000}), ("lora", {"shard": 2, "zero": 1}), ("lora-gpt", {"shard": 2, "zero": 2}),
    ("qlora", {"shard": 2, "zero": 2}), ("lora", Z3), ("qlora", Z3), ("qlora-double", {**Z3, "recompute": "full"}), ("lora", {"tp": 2}),
    ("lora-gpt", SP), ("lora", SP), ("qlora", {"tp": 2}), ("qlora-double", SP), ("qlora-fp8", SP), ("qlora-int8", {**SP, "recompute": "full"}),
    ("lora", {"pp": 2}), ("qlora", ZBV), ("lora-gpt", {"pp": 2, "schedule": "zb-h1"}), ("lora", CP), ("qlora", ULYSSES),
    ("lora-gpt", {**CP, "recompute": "full"}), ("lora", {"replicate": 2, "average_every": 2}), ("lora", {**Z3, "offload": "both"}),
    ("lora-moe", {"replicate": 2, "ep": 2}), ("qlora-moe", {"replicate": 2, "ep": 2}), ("qlora-mla", {"tp": 2, "ep": 2, "expert_tp": 1}),
    ("lora-moe", {"tp": 2}), ("qlora-moe", SP), ("qlora-mla", Z3), ("lora-moe", {**Z3, "ep": 2}), ("qlora-mla", {"pp": 2}),
    ("lora-moe", {**CP, "ep": 2}), ("lora", {**Z3, **SP}), ("qlora", {**Z3, "tp": 2}), ("lora-gpt", {**CP, "tp": 2}), ("qlora", {"pp": 2, **SP}),
    ("lora", {"pp": 2, **Z3}), ("qlora-double", {"pp": 2, "shard": 2, "zero": 1}), ("lora-moe", {**Z3, "tp": 2, "ep": 2}),
    ("qlora-moe", {"pp": 2, "replicate": 2, "ep": 2}), ("lora", {"replicate": 2, **Z3}), ("qlora-fp8", {"tp": 4, "sp": True}), ("lora", {**CP, **Z3}),
    ("lora", {"replicate": 2, "tp": 2}), ("qlora", {"replicate": 2, **SP}), ("qlora-fp8", {"shard": 2, "zero": 1, "tp": 2}),
    ("qlora-double", {"shard": 2, "zero": 1, **SP}), ("lora-gpt", {"shard": 2, "zero": 2, "tp": 2}), ("qlora-int8", {"shard": 2, "zero": 2, **SP}),
    ("lora-gpt", {"replicate": 2, **CP}), ("lora", {"shard": 2, "zero": 1, **ULYSSES}), ("qlora", {"shard": 2, "zero": 2, **CP}),
    ("lora", {"shard": 2, "zero": 2, "pp": 2}), ("lora-moe", {"shard": 2, "zero": 1, "ep": 2}), ("qlora-moe", {"shard": 2, "zero": 2, "ep": 2}),
    ("qlora", {**CP, **SP}), ("lora", {"tp": 2, **ZBV}), ("lora", {**CP, "pp": 2}), ("qlora-moe", {**SP, "ep": 2, "expert_tp": 1}),
]  # fmt: skip


PAIRED = {"data": ("dp", "zero1", "zero2", "zero3"), "tensor": ("tp", "sp"), "context": ("cp",), "pipeline": ("pp",), "expert": ("ep",)}  # fmt: skip


def strategies_of(fields: dict[str, Any]) -> set[str]:
    """The strategies of a plan under the names of `PAIRED`."""
    plan = Plan(**fields)
    found = {
        name for name, size in (("dp", plan.replicate), ("cp", plan.cp), ("pp", plan.pp), ("ep", plan.ep)) if size > 1
    }
    found |= {f"zero{plan.zero}"} if plan.shard > 1 else set()
    return found | ({"sp" if plan.sp else "tp"} if plan.tp > 1 else set())


class Layout(NamedTuple):
    model: str
    plan: Plan
    prepare: str = ""
    router: tuple[tuple[str, Any], ...] = ()
    emulated: Plan | None = None  # the ranks that one device emulates, if they do not compute the same as one device
    precision: str = "bf16"  # of the workload: fp8 changes the products
    dtype: str = "fp64"  # of the arithmetic
    kv_copies: int = 1  # how often one device makes each KV head
    batch: int = 0  # samples of a step; 0: as many as `workload_of` says
    layers: int = 0  # 0: as many as `layers_of` says
    optimizer: str = "adamw"
    is_reference: bool = False  # one device, to which ranks are held

    @property
    def title(self) -> str:
        p = self.plan
        more = [f"virtual {p.virtual}"] if p.virtual > 1 else []
        more += [f"stages {'-'.join(map(str, p.layers_per_stage))}"] if p.layers_per_stage else []
        more += [
            word for word, value in (("order", p.order), ("overlap", p.overlap), ("frozen", self.prepare)) if value
        ]
        more += ["kept"] if not p.reshard else []
        more += [f"reduced each {p.reduce}"] if p.reduce != "auto" else []
        more += [f"wrapped by {p.wrap}"] if p.wrap != 1 else []
        more += [f"sent as {p.wire}"] if p.wire != "none" else []
        more += [f"gradients in {p.grad_dtype}"] if p.grad_dtype != "fp32" else []
        more += ["no masters"] if not p.master else []
        more += [f"expert tp {p.expert_tp}"] if p.expert_tp else []
        more += ["gathers"] if p.tp_form == "all-gather" else []
        more += [f"offload {p.offload}"] if p.offload != "none" else []
        more += [f"{name} {value}" for name, value in self.router]
        more += [self.optimizer] if self.optimizer != "adamw" else []
        more += [self.precision] if self.precision == "fp8" or self.dtype != "fp64" else []
        return " · ".join([self.model, p.title(), *more])

    @property
    def splits_fp8_products(self) -> bool:
        return self.precision == "fp8" and self.plan.pp > 1 and schedules.SCHEDULES[self.plan.schedule].splits

    def job(self) -> Job:
        layers = self.layers or layers_of(self.model, self.plan)
        model = MODELS[self.model].but(router=dict(self.router), layers=layers)
        batch = self.batch or workload_of(self.plan, bool(self.router)).batch
        workload = WORKLOAD.but(precision=self.precision, batch=batch, optimizer=self.optimizer)
        return Job(
            model,
            self.plan,
            workload,
            steps=STEPS,
            dtypes=(self.dtype,),
            prepare=self.prepare,
            emulated=self.emulated,
            kv_copies=self.kv_copies,
            watch=self.plan.world > 1,
            reference=self.is_reference,
        )

    @property
    def reference(self) -> Layout:
        """The same training on one device: the full batch in one forward, or an emulation of the ranks."""
        one = one_device(self.job())
        sizes = {"batch": one.workload.batch, "layers": one.model.layers, "is_reference": True}
        return self._replace(plan=one.plan, emulated=one.emulated, kv_copies=one.kv_copies, **sizes)


def layers_of(model: str, plan: Plan) -> int:
    """Two layers if the model is not cut into stages: a first and a last layer are sufficient."""
    layers = MODELS[model].layers
    return 2 if layers in (3, 4) and plan.pp == 1 and plan.recompute_every == 1 else layers


def workload_of(plan: Plan, whole: bool = False) -> Workload:
    """The batch for a plan: only as many micro-batches as needed to test accumulation, unless `whole` asks for the full batch.

    Three are a first, a middle and a last one, which data parallelism may reduce at different times; a pipeline of P stages has 2P."""
    most = 3 if plan.world == plan.dp <= 2 else 2
    if plan.pp > 1:
        most = 2 * plan.pp if plan.world <= 4 else plan.pp
    most = WORKLOAD.batch if whole else most
    return WORKLOAD.but(batch=plan.dp * plan.microbatch * min(plan.microbatches(WORKLOAD), most))


def refused(model: str, fields: dict[str, Any]) -> MeshwrightError | None:
    """The reason why this cannot run, or None."""
    try:
        legality.check(Plan(**fields), MODELS[model], WORKLOAD, trainer=True)
    except MeshwrightError as error:
        return error
    return None


def single_strategies() -> list[tuple[str, dict[str, Any]]]:
    members = [m for family in FAMILIES.values() for m in family.values()]
    members += [{"pp": 2, "schedule": name, "virtual": virtual} for name, virtual in SCHEDULES]
    return [turn(i, fields) for i, fields in enumerate(members)]


def pairs() -> list[tuple[str, dict[str, Any]]]:
    """Every member of a family with every member of every other family."""
    found = []
    for one, other in combinations(FAMILIES.values(), 2):
        found += [{**a, **b} for a in one.values() for b in other.values()]
    return [turn(i, fields) for i, fields in enumerate(found)]


def turn(i: int, fields: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The i-th layout with alternating models; expert parallelism adds no ranks, so on its own it has two replicas."""
    if "ep" not in fields:
        return DENSE[i % len(DENSE)], {"microbatch": 1 + i // 2 % 2, **fields}
    wide = {"replicate", "shard", "tp", "cp"} & set(fields)
    model = SPARSE[i % len(SPARSE)] if fields.get("virtual", 1) == 1 else "wide"
    carried = {} if wide else {"replicate": 2}
    if set(fields) >= {"tp"} and not {"replicate", "shard", "cp"} & set(fields):
        carried = {"expert_tp": 1}
    return model, {**carried, **fields}


MODELS["wide"] = MODELS["mixtral"].but(layers=4)
MODELS["few"] = MODELS["mixtral"].but(experts=2, top_k=1)  # fewer than ranks to shard them over
MODELS["drops"] = MODELS["gpt"].but(dropout_rate=0.2, attention_dropout=0.3)
MODELS["moe-drops"] = MODELS["qwen-moe"].but(dropout_rate=0.2)
ALL_LINEAR: dict[str, Any] = {"rank": 3, "alpha": 5.0, "targets": ("all-linear",)}
for name, of, options in (
    ("lora", "llama", {"dropout": 0.1}),
    ("lora-gpt", "gpt", {"trains": ("*norm",), "targets": ("attention.*",)}),
    ("lora-moe", "qwen-moe", {}),
    ("qlora", "llama", {"base": "nf4", "dropout": 0.1}),
    ("qlora-double", "llama", {"base": "nf4", "double_quantised": True}),
    ("qlora-int8", "gemma", {"base": "int8", "scaling": "root"}),
    ("qlora-fp8", "one-kv", {"base": "fp8"}),
    ("qlora-moe", "mixtral", {"base": "nf4", "expert_rank": 2}),
    ("qlora-mla", "deepseek", {"base": "int8"}),
):
    MODELS[name] = MODELS[of].but(adapter=Adapter(**ALL_LINEAR | options))
MODELS["mlp-drops"] = MODELS["mlp"].but(dropout_rate=0.2)


def all_layouts() -> list[Layout]:
    fields = [*single_strategies(), *pairs(), *TRIPLES, *EXTRAS]
    out = [Layout(model, Plan(**plan)) for model, plan in fields if refused(model, plan) is None]
    out += [Layout(model, Plan(**plan), "layouts:freeze") for model, plan in FROZEN]
    out += [Layout(model, Plan(**plan), router=tuple(router.items())) for model, plan, router in ROUTED]
    out += [Layout(model, Plan(**plan), precision="fp8") for model, plan in inexact.FP8]
    out += [
        Layout(model, Plan(**plan), router=tuple(router.items()), precision="fp8")
        for model, plan, router in inexact.FP8_COUNTED
    ]
    out += [Layout(model, Plan(**plan), "layouts:freeze", optimizer="muon") for model, plan in FROZEN[-4:-3]]
    out += [Layout(model, Plan(**plan), optimizer="muon") for model, plan in MUON]
    out += [Layout(model, Plan(**plan)) for model, plan in ADAPTED]
    return list(dict.fromkeys(out))


def narrow_layouts() -> list[Layout]:
    return [
        Layout(model, Plan(**{"microbatch": 2, **plan}), precision=dtype, dtype=dtype)
        for model, plan, dtype in inexact.NARROW
    ]


def lossy_layouts() -> list[Layout]:
    out = [Layout(model, Plan(**plan)) for model, plan in inexact.COMPRESSED]
    out += [Layout(model, Plan(**plan), router=tuple(router.items())) for model, plan, router in inexact.COUNTED]
    return out + [Layout(model, Plan(**plan), precision="fp8") for model, plan in inexact.FP8_COMPRESSED]


# In the ranks


def freeze() -> None:
    """Freeze the first layer, the embedding (unless it is tied), and some parameters of later layers, as in fine-tuning."""
    from meshwright.parallel import apply

    build = apply.build

    def frozen(*args: Any, **options: Any) -> Any:
        module = build(*args, **options)
        for name, parameter in module.named_parameters():
            embedding = () if args[0].tied else ("embedding.",)
            still = ("layers.0.", "layers.1.attention.k", "layers.2.attention.k", "layers.3.ffn_norm", *embedding)
            parameter.requires_grad_(not name.startswith(still))
        return module

    apply.build = frozen


def train_all(context: Any, jobs: list[Job]) -> list[Any]:
    """The traces of the jobs on this rank, one after the other. A fault that is injected for one job stays for the next."""
    from torch import distributed

    from meshwright.proof.trace import record_one
    from meshwright.training.launch.rank import function_of

    if jobs[0].prepare:
        function_of(jobs[0].prepare)()
    out = []
    for job in jobs:
        out.append(record_one(context, job, job.dtypes[-1]))
        distributed.barrier()
        for group in list(distributed.distributed_c10d._world.pg_map):
            if group is not distributed.group.WORLD:
                distributed.destroy_process_group(group)
    return out
