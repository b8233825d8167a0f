"""The entries of the catalog as they are written in its TOML files, one file per kind, each entry with its source.

Objects are made of them in `describe.catalog` (by name) and in `describe.cluster` (the parts of a cluster).
"""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from typing import Any

from meshwright.errors import MeshwrightError, unknown

KINDS = ("models", "clusters", "accelerators", "links", "stacks")


@cache
def tables(kind: str) -> dict[str, dict[str, Any]]:
    """All entries of a kind by name, with `extends` inside the file resolved."""
    if kind not in KINDS:
        raise unknown("MW-CAT-001", "catalog", kind, KINDS)
    raw = _written(kind)
    found = {name: _resolved(name, raw) for name in raw}
    if kind == "stacks":
        found = {name: {**entry, **fitted()["stacks"].get(name, {})} for name, entry in found.items()}
    return found


@cache
def fitted() -> dict[str, Any]:
    """The numbers of stacks and the bands of predictions that `meshwright calibrate --runs` fitted to published runs."""
    text = files("meshwright.describe").joinpath("catalog", "fit.toml").read_text("utf-8")
    return {"stacks": {}, "bands": {}} | tomllib.loads(text)


@cache
def _written(kind: str) -> dict[str, dict[str, Any]]:
    return tomllib.loads(files("meshwright.describe").joinpath("catalog", f"{kind}.toml").read_text("utf-8"))


def base_of(kind: str, name: str) -> str:
    """Follow `extends` to its root; an entry that extends nothing is its own base."""
    extended = _written(kind)[name].get("extends")
    return base_of(kind, extended) if extended else name


def _resolved(name: str, raw: dict[str, dict[str, Any]]) -> dict[str, Any]:
    entry = dict(raw[name])
    base = entry.pop("extends", None)
    return {**_resolved(base, raw), **entry} if base else entry


def names(kind: str) -> list[str]:
    return list(tables(kind))


def entry(kind: str, name: str) -> dict[str, Any]:
    """One entry, with its name."""
    known = tables(kind)
    if not isinstance(name, str) or name not in known:
        hint = "The catalog holds names; the commands also read files" if "/" in str(name) else ""
        error = unknown("MW-CAT-002", kind[:-1], str(name), known)
        raise MeshwrightError(error.code, error.what, why=hint, valid=error.valid, fix=error.fix)
    return {"name": name, **known[name]}
