"""The shapes that `benchmarks/gpu` trains."""

SHAPES = {
    "1.5b": {"layers": 16, "hidden": 2048, "heads": 32, "kv_heads": 8, "ffn": 8192, "vocab": 128256, "batch": 4, "seq": 4096},
    "3.6b": {"layers": 28, "hidden": 3072, "heads": 24, "kv_heads": 8, "ffn": 8192, "vocab": 128256, "batch": 2, "seq": 4096},
}  # fmt: skip
