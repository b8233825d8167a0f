"""A configuration in the terminal: each value with its unit and its origin."""

from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BeforeValidator
from rich.console import Group, RenderableType
from rich.text import Text

from meshwright.describe.base import Described
from meshwright.describe.config import Config
from meshwright.units import (
    Json,
    format_bytes,
    format_count,
    format_flops,
    format_rate,
    format_seconds,
    parse_bytes,
    parse_count,
    parse_flops,
    parse_rate,
    parse_seconds,
)
from meshwright.view.tables import filled, heading, table

FORMATS = {
    parse_bytes: format_bytes,
    parse_rate: format_rate,
    parse_seconds: format_seconds,
    parse_flops: format_flops,
    parse_count: format_count,
}


def values(part: Described, path: str) -> Iterator[tuple[str, str]]:
    """Every value of a section by its dotted path, formatted with its unit."""
    for name, field in type(part).model_fields.items():
        value, inner_path = getattr(part, name), f"{path}.{name}"
        if isinstance(value, Described):
            yield from values(value, inner_path)
        elif isinstance(value, tuple) and value and isinstance(value[0], Described):
            for i, inner in enumerate(value):
                yield from values(inner, f"{inner_path}.{i}")
        elif isinstance(value, dict) and value:
            metadata = getattr(get_args(field.annotation)[1], "__metadata__", ())
            yield from ((f"{inner_path}.{key}", format_field(inner, metadata)) for key, inner in value.items())
        else:
            yield inner_path, format_field(value, field.metadata)


def format_field(value: Any, metadata: Any) -> str:
    for note in metadata:
        if isinstance(note, BeforeValidator) and note.func in FORMATS and value:
            return FORMATS[note.func](value, 4)
    if isinstance(value, tuple):
        return ", ".join(str(v) for v in value) or "—"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "—" if value in ("", None) else str(value)


def page(config: Config, everything: bool = False) -> RenderableType:
    """All sections. Sources, and defaults outside workload and plan, are shown only with `everything`."""
    out = table("value", "", "~from")
    hidden = 0
    for section, part in config.parts().items():
        out.add_row(heading(f"[{section}]"))
        for path, text in values(part, section):
            origin = config.origin(path)
            aside = path.endswith(".source") or (origin == "default" and section not in ("workload", "plan"))
            if aside and not everything:
                hidden += 1
                continue
            style = "dim" if origin == "default" else ""
            out.add_row(Text("  " + path.partition(".")[2], style), Text(text, style), Text(origin))
    more = [Text(f"{hidden} sources and defaults are not shown; --all shows them", "dim")] if hidden else []
    return Group(out, *more)


def as_json(config: Config) -> Json:
    """Every value by section, and the origins of explicit values."""
    sections = {name: part.model_dump(mode="json") for name, part in config.parts().items()}
    return {**sections, "origins": config.origins}


def difference(changed: dict[str, tuple[Any, Any]], names: tuple[str, str]) -> RenderableType:
    """The values in which two configurations differ."""
    if not changed:
        return Text("no difference")
    rows = [(path, *("—" if side in ("", None, ()) else str(side) for side in pair)) for path, pair in changed.items()]
    return filled(("value", *names), rows)
