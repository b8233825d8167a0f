"""The shapes that `benchmarks/gpu` trains."""

from typing import Any

VOCAB = 128256
SHAPES: dict[str, dict[str, Any]] = {
    "1.5b": {"layers": 16, "hidden": 2048, "heads": 32, "kv_heads": 8, "ffn": 8192, "vocab": VOCAB, "batch": 4, "seq": 4096},
    "3.6b": {"layers": 28, "hidden": 3072, "heads": 24, "kv_heads": 8, "ffn": 8192, "vocab": VOCAB, "batch": 2, "seq": 4096},
}  # fmt: skip
LONG = SHAPES["1.5b"]
# Twelve layers whose kernels are as short as the host takes to launch them.
HOST_BOUND: dict[str, Any] = {
    "layers": 12, "hidden": 1024, "heads": 16, "kv_heads": 8, "ffn": 1408, "vocab": 32000, "experts": 16, "top_k": 2, "batch": 8, "seq": 2048,
}  # fmt: skip
SMALL = {"layers": 12, "hidden": 768, "heads": 12, "kv_heads": 12, "ffn": 3072, "vocab": 32768, "batch": 8, "seq": 512}

# A model with experts, and the dense model that a token of it sees: as many layers, the width of the experts it visits.
MIXTRAL = {"layers": 12, "hidden": 2048, "heads": 16, "kv_heads": 8, "vocab": 32000, "batch": 8, "seq": 4096}
DEEPSEEK = {"layers": 6, "hidden": 2048, "heads": 16, "kv_heads": 16, "vocab": 32000, "batch": 16, "seq": 4096}
EXPERTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Mixtral-shaped": (MIXTRAL | {"ffn": 7168, "experts": 8, "top_k": 2}, MIXTRAL | {"ffn": 14336}),
    "DeepSeek-shaped": (
        DEEPSEEK | {"ffn": 1408, "experts": 64, "top_k": 6, "shared_experts": 2},
        DEEPSEEK | {"ffn": 1408 * 8},
    ),
}
