"""The catalog: models, accelerators, links, clusters and stacks, by name."""

import re
from functools import cache
from typing import Any

from meshwright.describe.accelerator import Accelerator
from meshwright.describe.cluster import Cluster, Link
from meshwright.describe.files import KINDS, entry, names, tables
from meshwright.describe.model import Model
from meshwright.describe.stack import Stack
from meshwright.units import Json

__all__ = ["KINDS", "load", "names", "tables"]

CLASSES: Json = {
    "models": Model,
    "clusters": Cluster,
    "accelerators": Accelerator,
    "links": Link,
    "stacks": Stack,
}


@cache
def load(kind: str, name: str) -> Any:
    """The object behind a catalog name."""
    table = entry(kind, name)
    return CLASSES[kind](**table)


# --- The catalog's accelerator for a card as people write it: "NVIDIA A100-SXM4-80GB", "H100 SXM5 80GB", "GB200 NVL72", "MI300X OAM".
#
# The text before a parenthesis or a semicolon decides; only if it names no card, the whole text is searched.

# A word of the text → the accelerator; the first pattern that matches decides. `_` and `-` separate words.
CARDS = (
    (r"gb300", "gb300"),
    (r"gb200", "gb200"),
    (r"b300", "b300"),
    (r"b200", "b200"),
    (r"h800", "h800"),
    (r"h200", "h200"),
    (r"h100", "h100-sxm"),
    (r"a100|ampere", "a100-80gb"),
    (r"v100", "v100-sxm2-16gb"),
    (r"mi300x?", "mi300x"),
    (r"mi355x?", "mi355x"),
    (r"(rtx)? ?4090", "rtx-4090"),
    (r"(rtx)? ?3090", "rtx-3090"),
    (r"l40s", "l40s"),
    (r"t4", "t4"),
)
# Card, a pattern in the same text, and the variant of the card.
VARIANTS = (
    ("h100-sxm", r"pcie", "h100-pcie"),
    ("h100-sxm", r"\b9[46] ?g|hbm2e", "h100-sxm-96gb"),
    ("a100-80gb", r"pcie.*\b40 ?g|\b40 ?g.*pcie", "a100-40gb-pcie"),
    ("a100-80gb", r"pcie", "a100-80gb-pcie"),
    ("a100-80gb", r"\b40 ?g", "a100-40gb"),
    ("v100-sxm2-16gb", r"\b32 ?g", "v100-sxm2-32gb"),
)


def accelerator_of(text: str) -> str | None:
    """The name of the catalog's accelerator, or None if the text names no card that the catalog has."""
    words = re.sub(r"[_/\-]+", " ", text.lower())
    for part in (re.split(r"[(;]", words)[0], words):
        for pattern, name in CARDS:
            if re.search(rf"(?<![a-z0-9]){pattern}(?![0-9])", part):
                variants = (variant for card, also, variant in VARIANTS if card == name and re.search(also, part))
                return next(variants, name)
    return None


# A word of a framework's name as people write it → its stack; the first pattern that matches decides. XLA compiles what JAX's frameworks write.
FRAMEWORKS = (
    (r"torch ?titan", "torchtitan"),
    (r"auto ?model", "automodel"),
    (r"\bfms\b|foundation model stack", "fms-fsdp"),
    (r"intern ?evo", "internevo"),
    (r"pax(ml)?\b|rosetta", "paxml"),
    (r"levanter|\bmarin\b", "levanter"),
    (r"ax ?learn", "axlearn"),
    (r"max ?text|\bjax\b|\bxla\b|easylm|\bt5x\b", "maxtext"),
    (r"megascale", "megascale"),
    (r"megatron.*deepspeed", "megatron-deepspeed"),
    (r"megatron.*(core|bridge)|transformer engine", "megatron-core"),
    (r"nemo", "nemo-megatron"),
    (r"composer|llm ?foundry", "composer-fsdp"),
    (r"nanotron", "nanotron"),
    (r"hugging ?face|\btransformers\b", "huggingface"),
    (r"deepspeed", "deepspeed"),
    (r"(?<!megatron )\bfsdp2?\b", "fsdp"),
)


def stack_of(text: str) -> str | None:
    """The name of the catalog's stack for a framework as people write it: "NeMo Automodel", "JAX (MaxText)". None if the catalog has none."""
    if text in names("stacks"):
        return text
    words = re.sub(r"[^a-z0-9]+", " ", text.lower())
    return next((name for pattern, name in FRAMEWORKS if re.search(pattern, words)), None)
