"""Names of models and of hardware, as people write them, in the catalog.

`meta-llama/Meta-Llama-3.1-8B-Instruct`, `llama31_8b` and `llama3.1-8b` are one shape. A name is compared without its owner, without words
for how it was trained, and without punctuation.
"""

from __future__ import annotations

import re
from functools import cache

from meshwright.describe import catalog

TRAINING = re.compile(
    r"^(meta|nvidia)[-_]|([-_]?(instruct|base|it|pt|hf|chat|thinking|bf16|fp8|mx|nvfp4|bnb|nf4|dequantized|prequantized|\d{4}|v0\.\d|4k|128k|"
    r"pretrain|sft|lora|peft|config|tp\d+|pp\d+|ep\d+|cp\d+))+(?=$|[-_])",
    re.IGNORECASE,
)
# Names of models that have the shape of a catalog entry.
ALIASES = {
    "llama3.3-70b": "llama3.1-70b", "llama3-405b": "llama3.1-405b", "qwen2-72b": "qwen2.5-72b", "qwen2-7b": "qwen2.5-7b",
    "qwen2-1.5b": "qwen2.5-1.5b", "qwen2-0.5b": "qwen2.5-0.5b", "qwq-32b": "qwen2.5-32b", "phi-4": "phi4-14b", "deepseek-v3-671b": "deepseek-v3",
    "deepseek-v3.1": "deepseek-v3", "deepseek-r1": "deepseek-v3", "nemotron4-340b": "nemotron-4-340b", "nemotron4-15b": "nemotron-4-15b",
    "kimi-k2.5": "kimi-k2", "nemotron-3-nano-30b-a3b": "nemotron-3-nano", "nemotron-3-super-120b-a12b": "nemotron-3-super",
    "nemotron-3-ultra-550b-a55b": "nemotron-3-ultra", "ai21-jamba-1.5-large": "jamba-1.5-large", "glm-4.6": "glm-4.5", "glm-4.7": "glm-4.5",
}  # fmt: skip
HARDWARE = (
    (r"gb300", "gb300-nvl72"), (r"gb200", "gb200-nvl72"), (r"b300", "dgx-b300"), (r"b200", "dgx-b200"), (r"h200", "dgx-h200"),
    (r"h800", "dgx-h800"), (r"h100", "dgx-h100"), (r"a100.{0,6}40", "azure-nd-a100-v4"), (r"a100", "dgx-a100"), (r"v100", "dgx-v100"),
    (r"mi355", "mi355x-8"), (r"mi300", "mi300x-8"), (r"a10g", "aws-g5"),
)  # fmt: skip


def canonical(name: str) -> str:
    """A name without owner, training words and punctuation, in lower case."""
    last = name.strip().rstrip("/").rsplit("/", 1)[-1]
    return re.sub(r"[^a-z0-9]", "", TRAINING.sub("", last).lower())


@cache
def _index() -> dict[str, str]:
    entries = {canonical(name): name for name in catalog.names("models")}
    known = {canonical(alias): name for alias, name in ALIASES.items() if name in catalog.names("models")}
    return {**known, **entries}


def catalog_model(name: object) -> str:
    """The catalog's name of a model that people call `name`; "" if it has none."""
    return _index().get(canonical(str(name)), "") if name else ""


def catalog_cluster(hardware: object) -> str:
    """The catalog's cluster of a kind of GPU; "" if it has none."""
    text = str(hardware or "").lower()
    known = catalog.names("clusters")
    return next((name for pattern, name in HARDWARE if re.search(pattern, text) and name in known), "")
