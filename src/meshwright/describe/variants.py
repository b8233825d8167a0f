"""Variants by name: pipeline schedules, and every other choice of which a user may add one.

A variant is one frozen object: what it is called, what it accepts, and its *parts*, functions that build it, count it or run it. A registry
holds the variants of one kind. A room above `describe` provides the parts that only it can compute, under the same name:

    SCHEDULES.register(Schedule("mine", about="…", build=mine, paths=…, in_flight=…))    # a plug-in: one object
    SCHEDULES.provide("1f1b", build=one_forward_one_backward)                            # ours: joined from `programs`

A reader asks for a part. One that is missing raises MW-VARI-001 with the names of the variant and of the part, where it is first needed:
there is no default that means "the usual one".

Batches of plans hold a variant as its position in `names`, a list that grows when a variant is registered.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
from pydantic_core import PydanticCustomError, core_schema

from meshwright.errors import MeshwrightError

V = TypeVar("V", bound=Any)  # a frozen dataclass with a `name`


class Registry(Mapping[str, V]):
    """The variants of one kind, in the order in which they were registered."""

    def __init__(self, kind: str, *variants: V) -> None:
        self.kind = kind
        self.names: list[str] = []
        self._variants: dict[str, V] = {}
        self._columns: dict[str, np.ndarray] = {}
        for variant in variants:
            self.register(variant)

    def register(self, variant: V) -> V:
        """Add a variant; its name must be new."""
        if variant.name in self._variants:
            raise MeshwrightError(
                "MW-VARI-002", f"the {self.kind} '{variant.name}' exists already", fix="Choose another name"
            )
        self.names.append(variant.name)
        self._variants[variant.name] = variant
        self._columns.clear()
        return variant

    def provide(self, name: str, **parts: Any) -> None:
        """Add parts to a registered variant."""
        self._variants[name] = replace(self[name], **parts)
        self._columns.clear()

    def remove(self, name: str) -> None:
        """Take out the variant that was registered last."""
        assert self.names[-1] == name, "positions of later variants would change"
        self.names.pop()
        del self._variants[name]
        self._columns.clear()

    def part(self, name: str, part: str) -> Any:
        """A part of a variant; raise if it lacks it."""
        value = getattr(self[name], part)
        if value is None:
            raise MeshwrightError(
                "MW-VARI-001",
                f"the {self.kind} '{name}' has no part '{part}'",
                why="It was registered without it, and this command needs it",
                fix=f"register '{name}' with {part}=…; see docs/extending.md",
            )
        return value

    def having(self, *parts: str) -> tuple[str, ...]:
        """The names of the variants that have all these parts."""
        return tuple(n for n, v in self.items() if all(getattr(v, part) is not None for part in parts))

    def column(self, field: str) -> np.ndarray:
        """One field of all variants, indexed by their positions."""
        if field not in self._columns:
            self._columns[field] = np.array([getattr(variant, field) for variant in self.values()])
        return self._columns[field]

    def __getitem__(self, name: str) -> V:
        return self._variants[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


class NameIn:
    """The type annotation of a field that holds the name of a variant: `Annotated[str, NameIn(SCHEDULES)]`."""

    def __init__(self, registry: Registry[Any]) -> None:
        self.registry = registry

    def check(self, name: str) -> str:
        if name not in self.registry:
            expected = ", ".join(f"'{known}'" for known in self.registry)
            raise PydanticCustomError("literal_error", "Input should be {expected}", {"expected": expected})
        return name

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        return {"type": "string", "enum": list(self.registry)}


__all__ = ["NameIn", "Registry"]
