"""A configuration while it is being put together: tables of words as said, and who said each of them last.

Names are opened into tables as soon as something is laid over them, so `--set cluster.accelerator.memory=60GiB` changes
one number of a catalog entry and leaves the rest. Nothing is validated here; that is the described objects' business.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.describe import catalog, hf
from meshwright.describe.base import SECTIONS
from meshwright.describe.files import DEPTH, parse_toml, read_text
from meshwright.errors import MeshwrightError, nearest, unknown

MOST_EXTENDS = 8
HERE = Path()

# Where a catalog name may stand, as dotted paths with list positions left out.
NAMED = {
    "model": "models", "cluster": "clusters", "stack": "stacks",
    "cluster.accelerator": "accelerators", "cluster.levels.link": "links",
}  # fmt: skip
POSITION = re.compile(r"\.\d+(?=\.|$)", re.ASCII)


class Who(NamedTuple):
    """Who speaks: a file with the lines of its keys, the command line, a catalog entry."""

    name: str
    lines: dict[str, int] = {}  # noqa: RUF012

    def at(self, path: str) -> str:
        while path:
            if path in self.lines:
                return f"{self.name}:{self.lines[path]}"
            path = path.rpartition(".")[0]
        return self.name


class Draft:
    """`tables` by section; `origins` by the dotted path of each value in them."""

    def __init__(self) -> None:
        self.tables: dict[str, dict[str, Any]] = {}
        self.origins: dict[str, str] = {}

    # Files and sections

    def lay_file(self, path: Path, above: tuple[Path, ...] = ()) -> None:
        """The file a file extends first, then its own sections."""
        text = read_text(path)
        if path.resolve() in above:
            raise MeshwrightError("MW-CONF-008", f"'{path}' extends itself", why=" → ".join(p.name for p in above))
        if len(above) >= MOST_EXTENDS:
            raise MeshwrightError("MW-CONF-008", f"'{path}': more than {MOST_EXTENDS} files extend each other")
        document = parse_toml(text, str(path))
        base = document.pop("extends", "")
        if not isinstance(base, str):
            raise MeshwrightError("MW-CONF-009", f"extends in {path} is not the path of a file", valid=['"base.toml"'])
        if base:
            self.lay_file(path.parent / base, (*above, path.resolve()))
        lines = key_lines(text)
        for section, said in document.items():
            self.lay(section, said, str(path), path.parent, lines)

    def lay(self, section: str, said: Any, origin: str, folder: Path, lines: dict[str, int] | None = None) -> None:
        """A section as said: a name, or a table that may extend one."""
        if section not in SECTIONS:
            raise unknown("MW-CONF-010", f"in {origin}: section", section, SECTIONS, "[{}]")
        if not isinstance(said, str | dict):
            raise MeshwrightError("MW-CONF-009", f"in {origin}: [{section}] is neither a name nor a table")
        said = {"extends": said} if isinstance(said, str) else dict(said)
        who = Who(origin, lines or {})
        if "extends" in said:
            self.clear(section)
            self.tables[section] = self._opened(section, said.pop("extends"), section, who, folder)
        self._over(self.tables.setdefault(section, {}), said, section, who)

    def clear(self, section: str) -> None:
        """Drop what was said of a section so far."""
        self._forget(self.tables.pop(section, None), section)

    def _opened(self, place: str, name: Any, path: str, who: Who, folder: Path = HERE) -> dict[str, Any]:
        """A catalog entry as a table of its own; for a model also a Hugging Face config.json."""
        kind = NAMED.get(place, "")
        if not kind or not isinstance(name, str):
            raise MeshwrightError(
                "MW-CONF-009",
                f"[{path}] cannot start from {str(name)[:60]!r}",
                why="The catalog has none of its kind" if not kind else "A name is a string",
            )
        if kind == "models" and (name.endswith(".json") or (folder / name / "config.json").is_file()):
            table, source = hf.read(str(folder / name)).as_dict(), str(folder / name)
        else:
            catalog.load(kind, name)
            table, source = {"name": name, **copied(catalog.tables(kind)[name])}, f"{kind}/{name}"
        self._note(table, path, Who(source))
        self.origins[f"{path}.name"] = who.at(path)
        return table

    def _over(self, base: dict[str, Any], said: dict[str, Any], path: str, who: Who) -> None:
        """Lay the words of `said` over `base`, table by table."""
        for key, value in said.items():
            here, old = f"{path}.{key}", base.get(key)
            if isinstance(value, dict) and "extends" not in value:
                if isinstance(old, str) and here in NAMED:
                    base[key] = old = self._opened(here, old, here, Who(self.origins.pop(here)))
                if isinstance(old, dict):
                    self._over(old, value, here, who)
                    continue
            self._forget(old, here)
            base[key] = copied(value)
            self._note(value, here, who)

    def _note(self, value: Any, path: str, who: Who) -> None:
        """Remember who said a value, leaf by leaf."""
        for leaf, _ in flat(value, path):
            self.origins[leaf] = who.at(leaf)

    def _forget(self, value: Any, path: str) -> None:
        for leaf, _ in flat(value, path):
            self.origins.pop(leaf, None)

    # Overrides

    def override(self, word: str) -> None:
        """`a.b=c`: a section and a path inside it; the value is TOML, or a bare word."""
        path, sign, text = word.partition("=")
        keys = path.strip().split(".")
        if not sign or not all(keys) or len(keys) > DEPTH:
            raise MeshwrightError(
                "MW-CONF-011",
                f"'--set {word[:60]}' is not a path, '=' and a value",
                valid=["plan.tp=8", "cluster.gpus=64", "model=llama3-8b"],
            )
        section, value = keys[0], parse_value(text.strip(), path)
        if section not in SECTIONS:
            raise unknown("MW-CONF-010", "section", section, SECTIONS, "--set {}." + ".".join(keys[1:]))
        if len(keys) == 1:
            self.lay(section, value, "--set", HERE)
            return
        self._assign(self.tables.setdefault(section, {}), keys, value)

    def _assign(self, node: Any, keys: list[str], value: Any) -> None:
        """Walk to the last key, opening names on the way."""
        path = keys[0]
        for key in keys[1:-1]:
            inner = self._inside(node, key, path)
            path = f"{path}.{key}"
            place = POSITION.sub("", path)
            if isinstance(inner, str) and place in NAMED:
                inner = self._opened(place, inner, path, Who(self.origins.pop(path, "--set")))
                self._put(node, key, inner, path)
            elif inner is None:
                inner = {}
                self._put(node, key, inner, path)
            node = inner
        last = f"{path}.{keys[-1]}"
        self._forget(self._inside(node, keys[-1], path), last)
        self._put(node, keys[-1], value, path)
        self._note(value, last, Who("--set"))

    def _inside(self, node: Any, key: str, path: str) -> Any:
        if isinstance(node, dict):
            return node.get(key)
        return node[self._position(node, key, path)]

    def _put(self, node: Any, key: str, value: Any, path: str) -> None:
        if isinstance(node, dict):
            node[key] = value
        else:
            node[self._position(node, key, path)] = value

    def _position(self, node: Any, key: str, path: str) -> int:
        if not isinstance(node, list):
            raise MeshwrightError("MW-CONF-011", f"--set {path}.{key[:60]}: {path} is a single value, not a table")
        if not (key.isdecimal() and len(key) < 9 and int(key) < len(node)):
            raise MeshwrightError(
                "MW-CONF-011",
                f"--set {path}.{key[:60]}: {path} is a list",
                valid=[f"{path}.{i}" for i in range(len(node))],
            )
        return int(key)

    # For validation

    def opened(self, section: str) -> dict[str, Any]:
        """The table of a section with every name inside it opened."""
        table = self.tables[section]
        if section == "cluster":
            self._open_inside(table, "accelerator", section)
            levels = table.get("levels")
            for i, level in enumerate(levels if isinstance(levels, list) else []):
                if isinstance(level, dict):
                    self._open_inside(level, "link", f"cluster.levels.{i}")
        return table

    def _open_inside(self, table: dict[str, Any], key: str, path: str) -> None:
        said, here = table.get(key), f"{path}.{key}"
        said = {"extends": said} if isinstance(said, str) else said
        if isinstance(said, dict) and "extends" in said:
            who = Who(self.origins.pop(here, "") or self.origins.pop(f"{here}.extends", ""))
            rest = {inner: value for inner, value in said.items() if inner != "extends"}
            said_by = {leaf: self.origins.get(leaf, who.name) for leaf, _ in flat(rest, here) if rest}
            table[key] = self._opened(POSITION.sub("", here), said["extends"], here, who)
            self._over(table[key], rest, here, who)
            self.origins.update(said_by)


def flat(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The leaves of nested tables by dotted path; a list of plain values is one leaf."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from flat(inner, f"{path}.{key}")
    elif isinstance(value, list | tuple) and value and isinstance(value[0], dict):
        for i, inner in enumerate(value):
            yield from flat(inner, f"{path}.{i}")
    else:
        yield path, value


def copied(value: Any) -> Any:
    """A copy whose tables and lists may be changed."""
    if isinstance(value, dict):
        return {key: copied(inner) for key, inner in value.items()}
    return [copied(inner) for inner in value] if isinstance(value, list | tuple) else value


def parse_value(text: str, path: str) -> Any:
    """A TOML value, or a bare word (a name, a quantity such as 80GiB) as a string."""
    if len(text) > 10_000 or "\n" in text:
        raise MeshwrightError("MW-CONF-011", f"the value of --set {path[:60]} is too long", why="Put it into a file")
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        if re.fullmatch(r"[\w./+µ -]+", text):
            return text
    near = nearest(text, ["true", "false"])
    raise MeshwrightError(
        "MW-CONF-011",
        f"--set {path[:60]}: {text[:60]!r} is no value",
        fix=near,
        valid=["8", "true", "bf16", '"a string"', '["tp", "dp"]'],
    )


def key_lines(text: str) -> dict[str, int]:
    """The line of each key by its dotted path, as far as line by line reading tells."""
    lines: dict[str, int] = {}
    prefix = ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[([\w.-]{1,200})\]", line):
            prefix = header[1] + "."
        elif key := re.match(r"\s*([\w.-]{1,200})\s*=", line):
            lines.setdefault(prefix + key[1], number)
    return lines
