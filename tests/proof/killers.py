"""Which layouts a mutant of a module is tried on: those of its own, one by one, then the jury, several in one set of ranks.

Of few ranks and many paths of the module, the cheapest first. What they let go stands before the jury: combinations of
four ranks.
"""

from __future__ import annotations

from typing import Any

Z3, SP, ZB = {"shard": 2, "zero": 3}, {"tp": 2, "sp": True}, {"pp": 2, "schedule": "zb-h1"}
ZBV, DP = {"pp": 2, "schedule": "zbv", "virtual": 2}, {"replicate": 2, "bucket": 2000}
LOCAL = ("llama", {"replicate": 2, "average_every": 2})
LOSSY = ("qwen", {"replicate": 2, "tp": 2, "compression": "int8"})
KEPT = {"compression_ratio": 0.1}
OFF: list[tuple[str, dict[str, Any]]] = [("gpt", {"offload": "both"}), ("gpt", {**SP, "offload": "activations"})]
OWN: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "tensor": [("gpt", SP), ("qwen", {"tp": 2}), ("mlp", {"tp": 2}), ("one-kv", {"tp": 2}), ("drops", SP),
               ("gpt", {"tp": 2, "tp_form": "all-gather"})],
    "vocabulary": [("llama", {"tp": 2}), ("gpt", SP)],
    "exchange": [("gpt", SP), ("qwen", {"tp": 2}), ("mlp", {"tp": 2})],
    "regather": [("gpt", SP), ("llama", SP), ("gpt", {**SP, "recompute": "full"}), ("gpt", {**SP, "offload": "activations"})],
    "keep": [("gpt", {**SP, "offload": "activations"})],
    "zero": [("llama", {"microbatch": 2}), ("llama", {**DP, "microbatch": 2}), ("gpt", {**Z3, "microbatch": 2}),
             ("qwen-moe", {**Z3, "ep": 2}), ("llama", {"shard": 2, "zero": 1, "microbatch": 2}), LOCAL,
             ("mixtral", {"shard": 2, "zero": 1, "ep": 2, "microbatch": 2}),
             ("gpt", {**DP, "reduce": "microbatch", "overlap": ("tp",)}), ("llama", {**DP, "compression": "powersgd"}),
             ("gemma", {**Z3, "wrap": 3, "compression": "int8"}), LOSSY,
             ("qwen-moe", {"replicate": 2, "tp": 2, "compression": "int8"})],
    "apply": [("drops", {"pp": 2, "microbatch": 2}), ("qwen", {"pp": 2}), ("one-kv", {"tp": 2, "microbatch": 2}), ("five", ZBV),
              ("gpt", {"cp": 2}), ("mlp", {"pp": 2}), ("deepseek", {"replicate": 2, "ep": 2, "offload": "states"}),
              ("llama", {"shard": 2, "zero": 1, "microbatch": 2}), LOCAL,
              LOSSY],
    "pieces": [("qwen", {"pp": 2}), ("gpt", SP), ("one-kv", {"tp": 2}), ("llama", Z3), ("qwen-moe", {"replicate": 2, "ep": 2}), LOCAL,
               ("qwen-moe", {"replicate": 2, **Z3}), ("few", {"shard": 4, "zero": 3})],
    "pipeline": [("qwen", {"pp": 2}), ("five", ZBV), ("drops", {"pp": 2, "microbatch": 2}), ("mixtral", {**Z3, "pp": 2, "ep": 2}),
                 ("gpt", {"replicate": 2, **ZB, "reduce": "microbatch"})],
    "expert": [("qwen-moe", {"replicate": 2, "ep": 2, "overlap": ("ep",)}), ("qwen-moe", {"tp": 2}),
               ("mixtral", {**SP, "expert_tp": 1, "ep": 2}), ("deepseek", {"replicate": 2, "ep": 2, "offload": "states"})],
    "context": [("gemma", {"cp": 2}), ("gpt", {"cp": 2, "cp_kind": "all-gather"}), ("one-kv", {"cp": 2, "cp_kind": "ulysses"})],
    "ring": [("drops", {}), ("drops", {"cp": 2}), ("llama", {"cp": 2}), ("gemma", {"cp": 2, "cp_kind": "all-gather"}), ("llama", {"cp": 4})],
    "blocks": [("drops", {}), ("drops", {"cp": 2}), ("llama", {"cp": 2}),
               ("gemma", {"cp": 2, "cp_kind": "all-gather"}), ("bert", {"cp": 2}), ("gemma", {"cp": 4})],
    "ulysses": [("llama", {"cp": 2, "cp_kind": "ulysses"}), ("one-kv", {"cp": 2, "cp_kind": "ulysses"})],
    "recompute": [("gemma", {"recompute": "selective"}), ("gpt", {**SP, "recompute": "full"}),
                  ("llama", {"cp": 2, "recompute": "selective"}), ("mixtral", {"replicate": 2, "ep": 2, "recompute": "full"})],
    "mesh": [("llama", {"zero": 3}), ("qwen", {"pp": 2}), ("llama", {"shard": 2, "zero": 1}), ("gpt", {"cp": 2}), ("qwen", {"tp": 4}),
             ("qwen-moe", {"replicate": 2, "ep": 2}), ("llama", {"replicate": 2, "cp": 2, "zero": 3}), ("qwen-moe", {"replicate": 2, **Z3})],
    "order": [],
    "compress": [("llama", {**DP, "compression": "int8"}), ("gemma", {**Z3, "compression": "int4", "microbatch": 2}),
                 ("gpt", {**DP, "comm_dtype": "fp8"}), ("llama", {**DP, "compression": "fp16"}), ("llama", {**Z3, "compression": "bf16"}),
                 ("gpt", {**DP, "compression": "random-k", **KEPT}), ("llama", {**DP, "compression": "powersgd", "compression_rank": 2})],
    "sparse": [(model, {**axes, "compression": name, **KEPT}) for model, axes in (("llama", DP), ("qwen", Z3))
               for name in ("top-k", "threshold", "random-k")],
    "powersgd": [("llama", {**DP, "compression": "powersgd", "compression_rank": 2}),
                 ("gpt", {"replicate": 2, "compression": "powersgd", "compression_rank": 4, "microbatch": 2})],
    "scatter": [("gemma", {**Z3, "compression": "int4", "microbatch": 2}), ("gpt", {**Z3, **SP, "compression": "int8"}),
                ("llama", {"shard": 2, "zero": 2, **SP, "compression": "threshold", "recompute": "full"}),
                ("gpt", {**Z3, "compression": "random-k", **KEPT})],
    "emulation": [("llama", {**DP, "compression": "int8"}), ("gemma", {**Z3, "compression": "int4", "microbatch": 2}),
                  ("gpt", {**DP, "compression": "fp16", "reduce": "microbatch"}), ("llama", {**Z3, "compression": "bf16"}),
                  ("llama", {"replicate": 2, "tp": 2, "compression": "powersgd", "compression_rank": 2}),
                  ("llama", {"replicate": 2, **Z3, "compression": "int8"}), ("qwen", {**Z3, "pp": 2, "compression": "top-k", **KEPT}),
                  ("gpt", {**Z3, "compression": "random-k", **KEPT}), ("llama", {"shard": 2, "zero": 1, "compression": "int4", "microbatch": 2}),
                  ("llama", {"cp": 2, "compression": "int8"}), ("qwen-moe", {"replicate": 2, **SP, "ep": 2, "compression": "int8"}),
                  ("llama", {"replicate": 4, "compression": "int8"}), ("qwen-moe", {"tp": 2, "expert_tp": 1, "compression": "int8"})],
    "apart": [("gpt", {**DP, "compression": "int8", "microbatch": 2}), ("qwen-moe", {**Z3, "ep": 2, "compression": "int8"}),
              ("llama", {"shard": 2, "zero": 1, "cp": 2, "compression": "int4"})],
    "cuts": [("gpt", SP), ("llama", {"tp": 2}), ("one-kv", {"tp": 2})],
    "fp8_grouped": [],
    "precision": [("gpt", {"offload": "states"}), ("llama", {**Z3, "offload": "states"})],
    "fp8": [],
    "localsgd": [LOCAL, ("gpt", {"replicate": 2, "average_every": 1, "offload": "states"}),
                 ("qwen", {"replicate": 2, **SP, "average_every": 1}), ("gpt", {"replicate": 2, "pp": 2, "average_every": 2})],
    "offload": OFF,
    "gathering": [("gemma", {**Z3, "wrap": 3, "prefetch": False, "microbatch": 2}), ("qwen-moe", {**Z3, "ep": 2})],
    "tables": [("llama", {"tp": 2}), ("deepseek", {"tp": 2}), ("mlp", {"tp": 2})],
    "supported": [],
}  # fmt: skip
# With options of the router, whose statistics are the whole batch's, or of the precision.
ROUTED: dict[str, list[tuple[str, dict[str, Any], dict[str, Any]]]] = {
    "apply": [("mixtral", {"tp": 2, "microbatch": 2}, {"precision": "fp8"})],
    "expert": [("mixtral", {"replicate": 2, "ep": 2, "microbatch": 2}, {"aux": 0.1, "z": 0.01}),
               ("qwen-moe", {"tp": 4}, {})],
    "order": [("mixtral", {**Z3, "ep": 2, "microbatch": 4}, {"choice": "expert"}),
              ("qwen-moe", {"cp": 2, "ep": 2, "microbatch": 8}, {"choice": "expert"}),
              ("qwen-moe", {**SP, "microbatch": 8}, {"aux": 0.1, "capacity": 1.0}),
              ("mixtral", {"replicate": 2, **Z3, "microbatch": 2}, {"choice": "expert"})],
    "fp8": [(model, said, {"precision": "fp8"}) for model, said in (
        ("gpt", {"microbatch": 2}), ("llama", {"tp": 2, "microbatch": 2}), ("qwen", {**SP, "recompute": "full"}))],
    "apart": [("llama", {**said, "microbatch": 2, "compression": "int8"}, {"precision": "fp8"}) for said in (DP, {"cp": 2})]
    + [("one-kv", {"tp": 2, "cp": 2, "compression": "int8"}, {"precision": "fp8"})],
    "emulation": [("llama", {"cp": 2, "compression": "int8"}, {"precision": "fp8"})],
    "fp8_grouped": [("mixtral", {**said, "microbatch": 2}, {"precision": "fp8"}) for said in (
        {}, {"tp": 2}, {"replicate": 2, "ep": 2}, {**SP, "expert_tp": 1, "ep": 2})],
}  # fmt: skip
KILLERS = {
    module: [*((model, said, {}) for model, said in own), *ROUTED.get(module, [])] for module, own in OWN.items()
}
# What no layout of the jury asks for.
NOT_BEFORE_THE_JURY = (
    "compress",
    "sparse",
    "powersgd",
    "scatter",
    "emulation",
    "fp8",
    "localsgd",
    "offload",
    "supported",
)
JURY: list[list[tuple[str, dict[str, Any], dict[str, Any]]]] = [
    [("gemma", {**Z3, "cp": 2, "microbatch": 2}, {}), ("qwen", {**SP, "pp": 2}, {}),
     ("five", {"replicate": 2, **ZB, "bucket": 2000}, {}), ("qwen-moe", {"shard": 4, "zero": 3, "ep": 2}, {}),
     ("mixtral", {"replicate": 2, "tp": 2, "ep": 2, "microbatch": 4}, {"capacity": 0.75, "aux": 0.1})],
    [("gpt", {**SP, "cp": 2, "cp_kind": "all-gather"}, {}), ("llama", {"cp": 2, "pp": 2}, {}),
     ("qwen", {"replicate": 2, **Z3, "microbatch": 2}, {}),
     ("qwen", {"replicate": 2, "tp": 2, "order": ("dp", "pp", "cp", "tp")}, {}),
     ("qwen-moe", {"cp": 2, **Z3, "ep": 2, "microbatch": 4}, {"choice": "expert"}),
     ("one-kv", {"cp": 4, "cp_kind": "ulysses"}, {})],
    [("llama", {**Z3, **ZBV, "recompute": "full"}, {}), ("mixtral", {"replicate": 4, "ep": 2}, {}),
     ("mixtral", {"replicate": 2, **Z3, "ep": 2, "recompute": "full"}, {}), ("qwen-moe", {"tp": 2, **ZB}, {}),
     ("mlp", {"tp": 2, **ZBV, "recompute": "full"}, {})],
]  # fmt: skip
