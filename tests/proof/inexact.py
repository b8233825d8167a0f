"""Lossy layouts, each combined with every strategy: compressed gradients, 16-bit arithmetic, fp8 products.

For each compression `combined` builds a few layouts that together cover every strategy; options without ranks (recompute, offload,
accumulation) are added to them. For each precision `PLAIN` does the same. The other layouts are triples and special code paths.
"""

from typing import Any

Fields = dict[str, Any]
DENSE, SPARSE = ("qwen", "gpt", "gemma", "llama"), ("mixtral", "qwen-moe", "deepseek")
DP, Z3, SP = {"replicate": 2, "bucket": 2000}, {"shard": 2, "zero": 3}, {"tp": 2, "sp": True}
PP, ZBV = {"pp": 2}, {"pp": 2, "schedule": "zbv", "virtual": 2}
CP = [{"cp": 2, "cp_kind": kind} for kind in ("ring", "all-gather", "ulysses")]

KINDS: dict[str, Fields] = {
    name: {"compression": name} for name in ("fp16", "bf16", "int8", "int4", "fp8", "top-k", "random-k", "threshold")
}
KINDS["top-k"] |= {"compression_ratio": 0.1}
KINDS["random-k"] |= {"compression_ratio": 0.1}
KINDS["powersgd"] = {"compression": "powersgd", "compression_rank": 2}
KINDS["absolute-threshold"] = {"compression": "absolute-threshold", "compression_threshold": 2e-4}


def combined(i: int, kind: Fields) -> list[tuple[str, Fields]]:
    """The i-th compression with every strategy; models and variants of strategies alternate."""
    dense = [DENSE[(i + j) % len(DENSE)] for j in range(7)]
    plans: list[Fields] = [
        CP[i % 3],
        {**DP, **SP, "recompute": "selective", "microbatch": 2},
        {**DP, **(ZBV if i % 2 else PP)},
        {"shard": 2, "zero": 1, "offload": "states"},
        {**Z3, "recompute": "full", "microbatch": 2},
        {"replicate": 2, **Z3},
        {**DP, "reduce": "microbatch", "offload": "activations", "microbatch": 2},
    ]
    experts = {"shard": 2, "zero": 2, "tp": 2, "ep": 2, "expert_tp": 1}
    return [
        (model, {**fields, **kind}) for model, fields in zip([*dense, SPARSE[i % 3]], [*plans, experts], strict=True)
    ]


# Compressors of one class: one of each class is enough for the daily run.
SAME_CLASS = (
    ("fp16", "bf16"),
    ("int8", "int4", "fp8"),
    ("top-k",),
    ("random-k",),
    ("threshold", "absolute-threshold"),
    ("powersgd",),
)
COMPRESSED = [layout for i, kind in enumerate(KINDS.values()) for layout in combined(i, kind)]
COMPRESSED += [
    ("gpt", {**DP, "tp": 2, "comm_dtype": "fp8", "microbatch": 2}),
    ("one-kv", {**Z3, **ZBV, **KINDS["int8"]}),
    ("mixtral", {"replicate": 4, "ep": 2, **KINDS["top-k"]}),
    ("qwen-moe", {**DP, **SP, **KINDS["powersgd"]}),  # an expert's bias is a partial sum
    ("qwen-moe", {"tp": 2, "expert_tp": 1, **KINDS["int8"]}),  # data parallelism of the experts only
    ("few", {"shard": 4, "zero": 3, "ep": 2, **KINDS["int4"]}),  # an expert on two ranks
    ("deepseek", {**CP[0], **DP, "ep": 2, **KINDS["random-k"]}),
    ("gemma", {**CP[0], **Z3, **KINDS["fp8"], "microbatch": 2}),
    ("five", {**CP[1], **DP, "reduce": "microbatch", **KINDS["threshold"]}),
    ("drops", {**CP[0], **DP, **KINDS["int8"]}),
    ("gpt-oss", {**CP[2], **SP, **KINDS["int8"]}),  # the gradient of a sink is that of all queries of its head
    ("gpt-oss", {**CP[1], **DP, **KINDS["int8"]}),  # that of this rank's queries
    ("mlp", {**Z3, "pp": 2, **KINDS["powersgd"]}),
    ("five", {**DP, "pp": 2, "schedule": "looped-bfs", "virtual": 2, "reduce": "microbatch", **KINDS["int8"]}),
]
# Routers that count the tokens of all ranks.
COUNTED: list[tuple[str, Fields, Fields]] = [
    ("mixtral", {"replicate": 2, "tp": 2, "ep": 2, "expert_tp": 1, "microbatch": 2, **KINDS["int8"]}, {"aux": 0.1, "z": 0.01}),
    ("qwen-moe", {**Z3, "ep": 2, "microbatch": 2, **KINDS["top-k"]}, {"choice": "expert"}),
    ("qwen-moe", {**CP[0], "microbatch": 4, **KINDS["int4"]}, {"capacity": 1.0}),
]  # fmt: skip

# Strategies with which each precision is tried.
PLAIN: list[tuple[str, Fields]] = [
    ("llama", DP), ("gpt", {"shard": 2, "zero": 1, "offload": "states"}), ("qwen", {"shard": 2, "zero": 2, "recompute": "selective"}),
    ("gemma", {**Z3, "recompute": "full"}), ("llama", {"replicate": 2, **Z3}), ("qwen", {"tp": 2, "offload": "activations"}),
    ("gpt", SP), ("gemma", CP[0]), ("llama", CP[1]), ("qwen", CP[2]), ("gpt", PP), ("qwen", ZBV),
    ("mixtral", {"replicate": 2, "ep": 2}), ("llama", {**DP, "average_every": 2}),
]  # fmt: skip
# Products in fp8: one device runs the same micro-batches, and ranks with parts of a tensor use its scale.
# ZeRO-3 gathers the weights of fp8 products in fp8.
FP8_GATHERED: list[tuple[str, Fields]] = [
    ("llama", {"microbatch": 2, "recompute": "full"}), ("five", {"pp": 2, "offload": "states"}), ("qwen", {"tp": 2, "reshard": False}),
    ("gpt", {**CP[0], "offload": "activations"}), ("mlp", {"replicate": 2, "wrap": 0}), ("deepseek", {"ep": 2}),
    ("llama", {**SP, "recompute": "selective"}),
    # Experts: whole ones on each rank, with ep, halves of each on two ranks and on four, and split over tp.
    ("mixtral", {}), ("qwen-moe", {"shard": 4, "ep": 2}), ("few", {"shard": 4, "recompute": "full"}), ("few", {"shard": 4, "ep": 2}),
    ("deepseek", {"tp": 2, "microbatch": 2}), ("mixtral", {**CP[0], "ep": 2, "reshard": False}), ("mixtral", {"replicate": 2, "ep": 2}),
]  # fmt: skip
FP8: list[tuple[str, Fields]] = [
    *((model, {"microbatch": 2, **fields}) for model, fields in PLAIN),
    ("llama", {"microbatch": 2}), ("mlp", {"replicate": 2}), ("gpt", {"recompute": "full", "offload": "activations"}),
    ("five", {**Z3, "pp": 2, "recompute": "full"}), ("one-kv", {**SP, "pp": 2, "recompute": "full"}),
    ("mixtral", {**Z3, "tp": 2, "ep": 2}), *((model, {**Z3, **fields, "gather_dtype": "fp8"}) for model, fields in FP8_GATHERED),
]  # fmt: skip
FP8_COUNTED: list[tuple[str, Fields, Fields]] = [
    ("qwen-moe", {"replicate": 2, "ep": 2, "microbatch": 2}, {"aux": 0.1, "capacity": 1.0}),
    ("qwen-moe", {**CP[0], "replicate": 2, "ep": 2, "microbatch": 2}, {"choice": "expert"}),
]
FP8_COMPRESSED = [
    ("one-kv", {**CP[0], "tp": 2, "microbatch": 2, **KINDS["int8"]}), ("qwen-moe", {**Z3, **KINDS["bf16"]}),
    ("gpt", {**CP[0], **DP, **KINDS["int8"], "order": ("tp", "pp", "dp", "cp")}), ("gemma", {**CP[2], **Z3, **KINDS["int8"]}),
]  # fmt: skip

# Arithmetic in 16 bits, compared with the error of one device in 16 bits.
NARROW: list[tuple[str, Fields, str]] = [
    *((model, fields, "bf16") for model, fields in PLAIN),
    *((model.replace("gemma", "llama"), fields, "fp16") for model, fields in PLAIN),  # gemma's first fp16 step overflows
    ("llama", {**DP, **KINDS["int8"]}, "bf16"), ("gpt", {**Z3, **KINDS["int8"]}, "fp16"),
    ("llama", {**Z3, "pp": 2}, "bf16"), ("qwen", {**Z3, "grad_dtype": "bf16"}, "bf16"), ("llama", {"replicate": 2, "master": False}, "bf16"),
    ("llama", {"shard": 2, "zero": 1, "master": False, "grad_dtype": "bf16"}, "bf16"),
]  # fmt: skip
