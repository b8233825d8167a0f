"""The catalog: known models, accelerators, links, clusters and stacks, one TOML file a kind, each entry with its source."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from typing import Any

from meshwright.errors import MeshwrightError, unknown

KINDS = ("models", "clusters", "accelerators", "links", "stacks")


@cache
def tables(kind: str) -> dict[str, dict[str, Any]]:
    """Every entry of a kind as written, `extends` within the file resolved."""
    if kind not in KINDS:
        raise unknown("MW-CAT-001", "catalog", kind, KINDS)
    raw = tomllib.loads(files(__name__).joinpath(f"{kind}.toml").read_text("utf-8"))
    return {name: _resolved(name, raw) for name in raw}


def _resolved(name: str, raw: dict[str, dict[str, Any]]) -> dict[str, Any]:
    entry = dict(raw[name])
    base = entry.pop("extends", None)
    return {**_resolved(base, raw), **entry} if base else entry


def names(kind: str) -> list[str]:
    return list(tables(kind))


@cache
def load(kind: str, name: str) -> Any:
    """The described object behind a catalog name."""
    from meshwright.describe import cluster, model, stack

    classes = {
        "models": model.Model,
        "clusters": cluster.Cluster,
        "accelerators": cluster.Accelerator,
        "links": cluster.Link,
        "stacks": stack.Stack,
    }
    known = tables(kind)
    if not isinstance(name, str) or name not in known:
        hint = "A path to a file is read by the commands, not by the catalog" if "/" in str(name) else ""
        error = unknown("MW-CAT-002", kind[:-1], str(name), known)
        raise MeshwrightError(error.code, error.what, why=hint, valid=error.valid, fix=error.fix)
    return classes[kind](**{"name": name, **known[name]})
