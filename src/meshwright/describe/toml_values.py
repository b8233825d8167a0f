"""Parts of a configuration as TOML has them: the name of an equal catalog entry, its changes, or a table of fields."""

from typing import Any

from meshwright.describe import catalog
from meshwright.describe.accelerator import Accelerator
from meshwright.describe.base import Described
from meshwright.describe.cluster import Cluster, Link
from meshwright.describe.model import Model
from meshwright.describe.stack import Stack

PLURALS = {cls.__name__: f"{cls.__name__.lower()}s" for cls in (Model, Cluster, Stack, Accelerator, Link)}


def to_toml_value(part: Described) -> str | dict[str, Any]:
    """The name of an equal catalog entry, else a table: the changes to the entry of that name, or all fields."""
    kind = PLURALS.get(type(part).__name__)
    name = getattr(part, "name", "")
    if not kind or name not in catalog.tables(kind):
        return table(part)
    base = catalog.load(kind, name)
    changed = {key for key in type(part).model_fields if getattr(part, key) != getattr(base, key)}
    if not changed:
        return name
    full = part.model_dump(exclude_none=True)
    return {"extends": name, **{key: value for key, value in {**full, **table(part)}.items() if key in changed}}


def table(part: Described) -> dict[str, Any]:
    """The fields of a part that differ from their defaults, its parts by name where they are catalog entries."""
    fields = part.as_dict()
    if isinstance(part, Cluster):
        fields["accelerator"] = to_toml_value(part.accelerator)
        fields["levels"] = [{**level.as_dict(), "link": to_toml_value(level.link)} for level in part.levels]
    return fields
