"""The catalog: models, accelerators, links, clusters and stacks, by name."""

from __future__ import annotations

from functools import cache
from typing import Any

from meshwright.describe.cluster import Accelerator, Cluster, Link
from meshwright.describe.entries import KINDS, entry, names, tables
from meshwright.describe.model import Model
from meshwright.describe.stack import Stack

__all__ = ["KINDS", "load", "names", "tables"]

CLASSES: dict[str, Any] = {
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
