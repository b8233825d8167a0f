"""Settings with any values are read, refused or listed as unknown: never an exception of another kind."""

import random

import pytest

from meshwright.interop.frameworks import READABLE
from meshwright.interop.recipes import check
from meshwright.interop.stages import layout_stages

VALUES = (
    None, True, False, 0, 1, 2, 3, 4, 8, 64, -1, 1.5, 1e30, 10**18, float("nan"), float("inf"), "", "auto", "none", "full", "x", "8", [], [1], {},
    "Interleaved1F1B", "bf16", "LoRA", [["decoder"], ["decoder"]], "Et*3|(tt|)*6L", "((((", "t*9999|" * 9, "70B",
)  # fmt: skip
NAMES = ("num_layers", "hidden_size", "num_attention_heads", "vocab_size", "num_experts", "top_k")


@pytest.mark.parametrize("name", sorted(READABLE))
def test_any_value_is_read_or_refused(name: str) -> None:
    rng, keys = random.Random(name), sorted(READABLE[name].table.names)
    for _ in range(25):
        settings = {key: rng.choice(VALUES) for key in rng.sample(keys, min(len(keys), rng.randint(0, 14)))}
        shape = {key: rng.choice(VALUES) for key in NAMES}
        gpus, model = rng.choice((None, 0, 8, 64, -3, True)), rng.choice((None, "llama3-8b", "Qwen/Qwen3.5-4B", "x"))
        check({"id": "x", "framework": name, "settings": settings, "gpus": gpus, "model": model, "shape": shape})


@pytest.mark.parametrize(
    ("layout", "layers"),
    [
        ("Et*3|(tt|)*6L", [3, 2, 2, 2, 2, 2, 2, 0]),
        ("Et|(tt|)*2mL", [1, 2, 2, 0]),
        ([["embedding", "decoder", "decoder"], ["decoder", "mtp", "loss"]], [2, 1]),
        ("t*99999999", None),
        ("(" * 50, None),
    ],
)
def test_layouts(layout: object, layers: list[int] | None) -> None:
    assert layout_stages(layout) == layers
