"""The tables of frameworks in TOML: `frameworks/frameworks.toml` describes each one, `frameworks/keys.toml` has its keys.

    {key = ["--nproc-per-node", "--nproc_per_node"], fact = "gpus_per_node", read_only = true}
    {key = "--bf16", fact = "half", words = {true = "bf16", false = "unset"}, default = "fp32"}

A row of keys has the fields of `Key`: `key` is the name, or the name and its older spellings. A value `unset` states nothing, a word `null` is None.
Words, patterns and values that several rows share have a name. A row `include` stands for the rows of another table: without those of some
names or facts, without those that are only read, made `only_read`, or as flags with underscores. The keys are read when one is first asked for:
commands without settings of other frameworks start without them.
"""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from meshwright.interop.keys import Framework, Key, Table, last_part, plain
from meshwright.units import Json

FOLDER = Path(__file__).parent / "frameworks"
UNSET, NULL = "unset", "null"
SHARED = ("words", "match", "unset")  # fields whose values have a name if several rows share them


class KeyTable(Sequence[Key]):
    """The rows of one table of the file."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getitem__(self, place: Any) -> Any:
        return rows_of(self.name)[place]

    def __len__(self) -> int:
        return len(rows_of(self.name))


@cache
def document(name: str = "keys") -> Json:
    return tomllib.loads((FOLDER / f"{name}.toml").read_text("utf-8"))


def framework(name: str, **parts: Any) -> Framework:
    """The framework of this name in both files, with the functions and patterns that its Python file gives as fields of `Table` and `Framework`."""
    described: Json = {
        field: tuple(v) if isinstance(v, list) else v for field, v in document("frameworks")[name].items()
    }
    of_table = {part: parts.pop(part) for part in ("not_modelled", "derive", "restate") if part in parts}
    return Framework(name=name, table=Table(KeyTable(name), **of_table), **described, **parts)


@cache
def rows_of(table: str) -> tuple[Key, ...]:
    rows: list[Json] = document()["keys"][table]
    return tuple(key for row in rows for key in (included(**row) if "include" in row else (key_of(row),)))


def key_of(row: Json) -> Key:
    name, *older = [row["key"]] if isinstance(row["key"], str) else row["key"]
    shared = {field: document()[field][row[field]] for field in SHARED if isinstance(row.get(field), str)}
    fields = {field: value for field, value in (row | shared).items() if field != "key"}
    if "words" in fields:
        fields["words"] = words_of(fields["words"])
    if "match" in fields:
        fields["match"] = tuple((pattern, fact_of(fact)) for pattern, fact in fields["match"])
    return Key(name, was=tuple(older), **fields)


def words_of(words: Mapping[str, Any] | list[Any]) -> dict[Any, Any]:
    """The facts by word. TOML has texts as names only; a word that is a list stands in a pair with its fact."""
    if isinstance(words, list):
        return {tuple(word): fact_of(fact) for word, fact in words}
    return {None if word == NULL else plain(word): fact_of(fact) for word, fact in words.items()}


def fact_of(value: Any) -> Any:
    return None if value == UNSET else value


def included(
    include: str,
    without: Sequence[str] = (),
    without_facts: Sequence[str] = (),
    without_read_only: bool = False,
    only_read: bool = False,
    underscored: bool = False,
) -> Iterator[Key]:
    """The rows of another table, as a row `include` describes them."""
    for key in rows_of(include):
        if key.name in without or key.fact in without_facts or (without_read_only and key.read_only):
            continue
        if underscored:
            key = replace(key, name=last_part(key.name), was=tuple(map(last_part, key.was)))
        yield key.only_read() if only_read else key
