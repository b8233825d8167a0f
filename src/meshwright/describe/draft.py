"""A configuration while it is being merged: the table of each section, and the origin of each value.

A catalog name is replaced by its table at once, so `--set cluster.accelerator.memory=60GiB` changes one number of a catalog
entry and keeps the other fields. Nothing is validated here; the classes of `describe` validate.
"""

import re
import tomllib
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.describe import catalog, hf, plugins
from meshwright.describe.base import SECTIONS
from meshwright.describe.files import DEPTH, parse_toml, read_text
from meshwright.describe.plan import Plan
from meshwright.describe.run import DATA_PATHS, RUN_PATHS, paths_in
from meshwright.describe.workload import Workload
from meshwright.errors import MeshwrightError, nearest, shown, unknown

MOST_EXTENDS = 8
HERE = Path()

# Where a catalog name is allowed, as dotted paths with list positions left out.
NAMED = {
    "model": "models",
    "cluster": "clusters",
    "stack": "stacks",
    "cluster.accelerator": "accelerators",
    "cluster.levels.link": "links",
}
FILE_SECTIONS = {"clusters": "cluster", "stacks": "stack"}  # sections that a file with only that section can give
PATHS = {"data": DATA_PATHS, "run": RUN_PATHS}  # fields that hold paths, by section
POSITION = re.compile(r"\.\d+(?=\.|$)", re.ASCII)


def section_with(key: str) -> str:
    """Name the section that has a key which people often write at the top of a file; "" if none has."""
    return next((name for name, kind in (("plan", Plan), ("workload", Workload)) if key in kind.model_fields), "")


class Source(NamedTuple):
    """The origin of values: a file with the line of each key, the command line, or a catalog entry."""

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

    def __init__(self, files: bool = True) -> None:
        self.files = files  # False: names are those of the catalog and never paths, for input of another program
        self.tables: dict[str, dict[str, Any]] = {}
        self.origins: dict[str, str] = {}
        self.reading: tuple[Path, ...] = ()  # files that are being read, from the outermost on

    # Files and sections

    def merge_file(self, path: Path) -> None:
        """Merge a file: first load its plug-ins, then the file that it extends, then its sections."""
        text = read_text(path)
        if path.resolve() in self.reading:
            chain = " → ".join(p.name for p in self.reading)
            raise MeshwrightError("MW-CONF-008", f"'{path}' extends itself", why=chain)
        if len(self.reading) >= MOST_EXTENDS:
            raise MeshwrightError("MW-CONF-008", f"'{path}': more than {MOST_EXTENDS} files extend each other")
        document = parse_toml(text, str(path))
        if not document:
            raise MeshwrightError(
                "MW-CONF-006", f"'{path}' is empty", why="A plan file has sections", valid=[f"[{s}]" for s in SECTIONS]
            )
        base = document.pop("extends", "")
        if not isinstance(base, str):
            raise MeshwrightError("MW-CONF-009", f"extends in {path} is not the path of a file", valid=['"base.toml"'])
        plugins.load(document.pop("plugins", []), path.parent)
        before, self.reading = self.reading, (*self.reading, path.resolve())
        if base:
            self.merge_file(path.parent / base)
        lines = key_lines(text)
        for section, part in document.items():
            self.merge(section, part, str(path), path.parent, lines)
        self.reading = before

    def merge(self, section: str, part: Any, origin: str, folder: Path, lines: dict[str, int] | None = None) -> None:
        """Merge a section: a name, or a table that may extend one."""
        if section not in SECTIONS and (owner := section_with(section)):
            raise MeshwrightError(
                "MW-CONF-010",
                f"in {origin}: '{section}' is not in a section",
                why=f"It is a key of [{owner}]",
                fix=f"[{owner}]\n{section} = {shown(part)}" if isinstance(part, int | float | str) else f"[{owner}]",
            )
        if section not in SECTIONS:
            raise unknown("MW-CONF-010", f"in {origin}: section", section, SECTIONS, "[{}]")
        if not isinstance(part, str | dict):
            raise MeshwrightError("MW-CONF-009", f"in {origin}: [{section}] is neither a name nor a table")
        part = {"extends": part} if isinstance(part, str) else dict(part)
        if section in PATHS:
            part = paths_in(part, folder, PATHS[section])
        source = Source(origin, lines or {})
        if "extends" in part:
            self.clear(section)
            self.tables[section] = self._table_of(section, part.pop("extends"), section, source, folder)
        self._overlay(self.tables.setdefault(section, {}), part, section, source)

    def model_from_start(self) -> None:
        """Take the model of the Transformers folder from which the run starts, if no model is named."""
        start = self.tables.get("run", {}).get("start_from")
        if start and isinstance(start, str) and "model" not in self.tables:
            self.merge("model", str(Path(start) / "config.json"), "run.start_from", HERE)

    def clear(self, section: str) -> None:
        """Drop a section and its origins."""
        self._clear_origins(self.tables.pop(section, None), section)

    def _table_of(self, place: str, name: Any, path: str, source: Source, folder: Path = HERE) -> dict[str, Any]:
        """The table of a catalog name. A model may also be the path of a Hugging Face config.json, a cluster or a stack the
        path of a TOML file with a [cluster] or a [stack], such as `meshwright calibrate` writes."""
        kind = NAMED.get(place, "")
        if not kind or not isinstance(name, str):
            what = f"[{path}] cannot start from {shown(name)}"
            why = "The catalog has no entries for this table" if not kind else "A name is a string"
            raise MeshwrightError("MW-CONF-009", what, why=why)
        if self.files and kind in FILE_SECTIONS and name.endswith(".toml"):
            return self._section_of_file(FILE_SECTIONS[kind], folder / name)
        if self.files and kind == "models" and (name.endswith(".json") or (folder / name / "config.json").is_file()):
            table, origin = hf.read(str(folder / name)).as_dict(), str(folder / name)
        else:
            catalog.load(kind, name)
            table, origin = {"name": name, **catalog.tables(kind)[name]}, f"{kind}/{name}"
        table = self._copied(table, path, Source(origin))
        self.origins[f"{path}.name"] = source.at(path)
        return table

    def _section_of_file(self, section: str, path: Path) -> dict[str, Any]:
        """The table of a section of another file; the origins of its values are lines of that file."""
        other = Draft()
        other.reading = self.reading
        other.merge_file(path)
        if section not in other.tables:
            example = {"cluster": "dgx-h100", "stack": "torchtitan"}[section]
            what = f"'{path}' has no [{section}]"
            why = f"A {section} file is a TOML file with that section"
            raise MeshwrightError("MW-CONF-002", what, why=why, fix=f'[{section}]\nextends = "{example}"')
        self.origins.update({leaf: origin for leaf, origin in other.origins.items() if leaf.startswith(f"{section}.")})
        return other.tables[section]

    def _overlay(self, base: dict[str, Any], changes: dict[str, Any], path: str, source: Source) -> None:
        """Merge the values of `changes` into `base`, table by table."""
        for key, value in changes.items():
            here, old = f"{path}.{key}", base.get(key)
            if isinstance(value, dict) and "extends" not in value and isinstance(old, dict):
                self._overlay(old, value, here, source)
                continue
            self._clear_origins(old, here)
            base[key] = self._copied(value, here, source)

    def _copied(self, value: Any, path: str, source: Source) -> Any:
        """A copy of a value in which tables stand for catalog names; records the origin of each leaf."""
        place = POSITION.sub("", path)
        if place in NAMED and isinstance(value, str):
            return self._table_of(place, value, path, source)
        if place in NAMED and isinstance(value, dict) and "extends" in value:
            table = self._table_of(place, value["extends"], path, Source(source.at(f"{path}.extends")))
            self._overlay(table, {key: inner for key, inner in value.items() if key != "extends"}, path, source)
            return table
        if isinstance(value, dict) and value:
            return {key: self._copied(inner, f"{path}.{key}", source) for key, inner in value.items()}
        if isinstance(value, list | tuple) and value and isinstance(value[0], dict):
            return [self._copied(inner, f"{path}.{i}", source) for i, inner in enumerate(value)]
        self.origins[path] = source.at(path)
        return deepcopy(value)

    def _clear_origins(self, value: Any, path: str) -> None:
        for leaf, _ in leaves(value, path):
            self.origins.pop(leaf, None)

    # Overrides

    def override(self, word: str) -> None:
        """`a.b=c`: a section and a path inside it; the value is TOML, or a bare word."""
        path, sign, text = word.partition("=")
        keys = path.strip().split(".")
        if not sign or not all(keys) or len(keys) > DEPTH:
            what = f"'--set {word[:60]}' is not a path, '=' and a value"
            raise MeshwrightError("MW-CONF-011", what, valid=["plan.tp=8", "cluster.gpus=64", "model=llama3-8b"])
        section, value = keys[0], parse_value(text.strip(), path)
        if section not in SECTIONS and len(keys) == 1 and (owner := section_with(section)):
            fix = f"--set {owner}.{word}"
            raise MeshwrightError(
                "MW-CONF-010", f"'{section}' is not a section", why=f"It is a key of [{owner}]", fix=fix
            )
        if section not in SECTIONS:
            raise unknown("MW-CONF-010", "section", section, SECTIONS, "--set {}." + ".".join(keys[1:]))
        if len(keys) == 1:
            self.merge(section, value, "--set", HERE)
            return
        if isinstance(value, str) and "," in value and keys in (["data", "path"], ["data", "validation_path"]):
            value = [word.strip() for word in value.split(",")]
        self._assign(self.tables.setdefault(section, {}), keys, value)

    def _assign(self, node: Any, keys: list[str], value: Any) -> None:
        """Set the value at a path."""
        path = keys[0]
        for key in keys[1:-1]:
            inner = self._inside(node, key, path)
            path = f"{path}.{key}"
            if inner is None:
                inner = {}
                self._put(node, key, inner, path)
            node = inner
        last = f"{path}.{keys[-1]}"
        self._clear_origins(self._inside(node, keys[-1], path), last)
        self._put(node, keys[-1], self._copied(value, last, Source("--set")), path)

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
            what = f"--set {path}.{key[:60]}: {path} is a list"
            raise MeshwrightError("MW-CONF-011", what, valid=[f"{path}.{i}" for i in range(len(node))])
        return int(key)

    def refuse_bare_names(self) -> None:
        """Raise where a section has the name of a catalog entry and none of its values: it would be called so and have other values."""
        for section in ("model", "cluster", "stack"):
            table = self.tables[section]
            name = table.get("name")
            entry = catalog.tables(NAMED[section]).get(name, {}) if isinstance(name, str) else {}
            if entry and not table.keys() & (entry.keys() - {"name"}):
                raise MeshwrightError(
                    "MW-CONF-002",
                    f"[{section}] has the name '{name}' and no value of that entry of the catalog",
                    why="`name` is only a label in a section: `extends` takes the values of an entry",
                    fix=f'{section} = "{name}", or [{section}] extends = "{name}"',
                )


def leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The leaves of nested tables by dotted path; a list of plain values is one leaf."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from leaves(inner, f"{path}.{key}")
    elif isinstance(value, list | tuple) and value and isinstance(value[0], dict):
        for i, inner in enumerate(value):
            yield from leaves(inner, f"{path}.{i}")
    else:
        yield path, value


def parse_value(text: str, path: str) -> Any:
    """Parse a TOML value; bare words (a name, 80GiB) are strings, words with commas a list, nothing an empty list."""
    if not text:
        return []
    if len(text) > 10_000 or "\n" in text:
        raise MeshwrightError("MW-CONF-011", f"the value of --set {path[:60]} is too long", why="Put it into a file")
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        if re.fullmatch(r"[\w./+*µ, -]+", text):
            return text
    near = nearest(text, ["true", "false"])
    what = f"--set {path[:60]}: {shown(text)} cannot be parsed"
    raise MeshwrightError("MW-CONF-011", what, fix=near, valid=["8", "true", "bf16", '"a string"', "tp,dp"])


def key_lines(text: str) -> dict[str, int]:
    """The line number of each key, by its dotted path."""
    lines: dict[str, int] = {}
    prefix = ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[([\w.-]{1,200})\]", line):
            prefix = header[1] + "."
        elif key := re.match(r"\s*([\w.-]{1,200})\s*=", line):
            lines.setdefault(prefix + key[1], number)
    return lines
