"""Reading small text files: bounded in size, time and memory, with a clear error for every failure.

A configuration is a page of text. A file above one megabyte is refused by its size, before it is read. A folder, a pipe or a
device is refused too, since reading it may never end.
"""

import os
import stat
import tomllib
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from meshwright.errors import MeshwrightError, cannot_write, nearest, unknown

BYTE_ORDER_MARK = "\ufeff"  # at the start of files that editors on Windows write
LIMIT = 1_000_000  # bytes
DEPTH = 20  # levels of tables and lists
DOTS = 100  # per line: a dotted key costs the parser its length squared


def read_text(path: str | Path, limit: int = LIMIT) -> str:
    """The text of a regular file of at most `limit` bytes."""
    shown = str(path) if len(str(path)) <= 200 else str(path)[:197] + "..."
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise MeshwrightError("MW-CONF-004", f"'{shown}' is not a file", why="It is a folder, a pipe or a device")
        if status.st_size > limit:
            what = "A configuration" if limit == LIMIT else "Such a file"
            raise MeshwrightError(
                "MW-CONF-005", f"'{shown}' has {status.st_size:,} bytes", why=f"{what} has at most {limit:,}"
            )
        with open(path, "rb") as file:
            return file.read(limit).decode("utf-8").removeprefix(BYTE_ORDER_MARK)
    except UnicodeDecodeError as error:
        raise MeshwrightError("MW-CONF-006", f"'{shown}' is not text", why=f"Byte {error.start} is not UTF-8") from None
    except (OSError, ValueError) as error:
        if isinstance(error, MeshwrightError):
            raise
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise MeshwrightError("MW-CONF-004", f"cannot read '{shown}'", why=why, fix=_similar_file(path)) from None


def write_text(path: str | Path, text: str) -> Path:
    """Write a text file in UTF-8 and return its path; a full disk or a missing folder is an error with the path."""
    try:
        Path(path).write_text(text, "utf-8")
    except OSError as error:
        raise cannot_write(path, error) from error
    return Path(path)


def _similar_file(path: str | Path) -> str:
    """Path of a file in the same folder with a name similar to the missing one; empty if there is none."""
    try:
        folder = Path(path).parent
        names = [entry.name for entry, _ in zip(os.scandir(folder), range(1000), strict=False)]
        near = nearest(Path(path).name, names)
        return str(folder / near) if near else ""
    except (OSError, ValueError):
        return ""


def parse_toml(text: str, name: str) -> dict[str, Any]:
    """Parse a TOML document; raises if it is malformed or nested deeper than `DEPTH` levels."""
    if name.endswith((".json", ".yaml", ".yml")):
        raise MeshwrightError(
            "MW-CONF-006",
            f"{name} is neither a plan file nor settings of a framework that are known",
            why="A plan file is TOML, and settings have at least two keys of one framework",
            fix="meshwright config schema shows the keys of a plan file",
        )
    for number, line in enumerate(text.splitlines(), 1):
        if line.count(".") > DOTS:
            what = f"{name}:{number} has a line with {line.count('.')} dots"
            raise MeshwrightError("MW-CONF-007", what, why="No key is nested that deep")
    try:
        return check_depth(tomllib.loads(text), name)
    except RecursionError:
        raise MeshwrightError("MW-CONF-007", f"{name} is nested too deep", why=f"At most {DEPTH} levels") from None
    except ValueError as error:
        if isinstance(error, MeshwrightError):
            raise
        raise MeshwrightError("MW-CONF-006", f"{name} is not TOML", why=str(error)[:300]) from None


def check_depth(document: Any, name: str) -> Any:
    """Return `document` if it is at most `DEPTH` levels deep, else raise. The check does not recurse."""
    level = [document]
    for _ in range(DEPTH):
        level = [child for node in level for child in _children(node)]
        if not level:
            return document
    raise MeshwrightError("MW-CONF-007", f"{name} is nested too deep", why=f"At most {DEPTH} levels")


def _children(node: Any) -> list[Any]:
    if isinstance(node, dict):
        return list(node.values())
    return node if isinstance(node, list) else []


# --- The entries of the catalog as they are written in its TOML files, one file per kind, each entry with its source.
#
# Objects are made of them in `describe.catalog` (by name) and in `describe.cluster` (the parts of a cluster).

KINDS = ("models", "clusters", "accelerators", "links", "stacks")


@cache
def tables(kind: str) -> dict[str, dict[str, Any]]:
    """All entries of a kind by name, with `extends` inside the file resolved."""
    if kind not in KINDS:
        raise unknown("MW-CAT-001", "catalog", kind, KINDS)
    raw = _written(kind)
    resolved = {name: _resolved(name, raw) for name in raw}
    if kind == "stacks":
        resolved = {name: {**entry, **fitted()["stacks"].get(name, {})} for name, entry in resolved.items()}
    return resolved


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
        raise unknown("MW-CAT-002", kind[:-1], str(name), known).but(why=hint)
    return {"name": name, **known[name]}
