"""The schema of a plan file, for editors and other programs: JSON Schema, draft 2020-12.

Each section is a name or a table; a table may start from a name with `extends`; a quantity is a number or a text with a unit.
"""

from meshwright.describe.config import CLASSES
from meshwright.describe.draft import NAMED
from meshwright.units import Json


def schema(section: str = "") -> Json:
    """Return the JSON Schema of a plan file, or of one section."""
    if section:
        return section_schema(section)
    sections = {name: section_schema(name) for name in CLASSES}
    definitions: Json = {}
    for entry in sections.values():
        definitions |= entry.pop("$defs", {})
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Meshwright plan file",
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "extends": {"type": "string", "description": "a TOML file, relative to this one, that this one lies over"},
            "plugins": {
                "type": "array",
                "items": {"type": "string"},
                "description": "Python files, relative to this one, or modules that register variants",
            },
            **sections,
        },
        "$defs": definitions,
    }


def section_schema(name: str) -> Json:
    made = CLASSES[name].model_json_schema()
    definitions = {key: nameable(inner, key.lower()) for key, inner in made.pop("$defs", {}).items()}
    out = nameable(made, name) if name in NAMED else made
    return {**out, "$defs": definitions} if definitions else out


def nameable(table: Json, kind: str) -> Json:
    """A table that may also be a catalog name, or extend one."""
    if kind not in ("model", "cluster", "stack", "accelerator", "link"):
        return table
    table = {key: inner for key, inner in table.items() if key not in ("required", "title")}
    start = {"type": "string", "description": f"the name of a catalog {kind} to start from"}
    table["properties"] = {"extends": start, **table["properties"]}
    return {"anyOf": [{"type": "string", "description": f"a catalog {kind}"}, table]}
