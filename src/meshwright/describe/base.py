"""The base class of all described objects: frozen, typed, validated, printable, written to and read from TOML.

pydantic validates; this file turns its errors into the one shape of `meshwright.errors`. The error for an unknown key names the
nearest valid key, and the error for a bad value names its field.
"""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema

from meshwright.errors import MeshwrightError, closest_first, nearest, shown
from meshwright.units import parse_bytes, parse_count, parse_flops, parse_rate, parse_seconds


def quantity(*examples: str) -> WithJsonSchema:
    """A JSON schema that allows a number or a string with a unit."""
    return WithJsonSchema({"type": ["number", "string"], "examples": list(examples)}, mode="validation")


Bytes = Annotated[float, BeforeValidator(parse_bytes), quantity("80GiB", "25MB")]
Rate = Annotated[float, BeforeValidator(parse_rate), quantity("400Gb/s", "900GB/s")]
Seconds = Annotated[float, BeforeValidator(parse_seconds), quantity("1.5us", "20ms")]
Flops = Annotated[float, BeforeValidator(parse_flops), quantity("989TFLOP/s")]
Count = Annotated[float, BeforeValidator(parse_count), quantity("15T", "175B")]

SECTIONS = ("model", "cluster", "stack", "workload", "plan", "data", "optimizer", "checkpoint", "run")
MOST_DEVICES = 10**9
MOST = 2**40  # upper limit of dimensions, degrees and batch: arithmetic stays exact, and hostile input stays bounded


def number(value: Any) -> Any:
    """Refuse a boolean where a number is needed, because Python treats true as 1."""
    if isinstance(value, bool):
        raise MeshwrightError("MW-CONF-003", f"{str(value).lower()} is not a number")
    return value


Size = Annotated[int, Field(ge=1, le=MOST), BeforeValidator(number)]
Whole = Annotated[int, Field(ge=0, le=MOST), BeforeValidator(number)]
# A narrower limit needs its own type: where a type and a field have limits, pydantic applies the type's.
Length = Annotated[int, Field(ge=1, le=2**32), BeforeValidator(number)]
Devices = Annotated[int, Field(ge=0, le=MOST_DEVICES), BeforeValidator(number)]
Norms = Annotated[int, Field(ge=0, le=4), BeforeValidator(number)]


class Described(BaseModel):
    """Base of the sections of a run file (Model, Cluster, …, Run) and of their parts."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise translate(error, type(self)) from None

    def but(self, **changes: Any) -> Self:
        """A copy with some fields changed, validated again."""
        return type(self)(**{**self.as_dict(), **changes})

    def as_dict(self) -> dict[str, Any]:
        """The fields that differ from their default, ready for TOML."""
        return self.model_dump(exclude_defaults=True, exclude_none=True)


def _placed(what: str, path: str, cls: type[BaseModel], place: str) -> str:
    """The text of an error in a nested table such as [model.router], with the path of that table."""
    table = cls.model_fields[place].annotation if place in cls.model_fields else None
    name = getattr(table, "__name__", "").lower()
    if what.startswith(f"{name}."):
        return path + what.removeprefix(name)
    return what.replace(f"[{name}]", f"[{path}]") if f"[{name}]" in what else f"{path}: {what}"


REASONS = {
    "model_type": "A table is needed",
    "model_attributes_type": "A table is needed",
    "dict_type": "A table is needed",
    "tuple_type": "A list is needed",
    "list_type": "A list is needed",
    "string_type": "Text is needed",
    "bool_type": "true or false is needed",
    "bool_parsing": "true or false is needed",
    "int_type": "A whole number is needed",
    "int_parsing": "A whole number is needed",
    "int_from_float": "A whole number is needed",
    "float_type": "A number is needed",
    "float_parsing": "A number is needed",
    "literal_error": "It must be one of the valid values",
}


def _reason(error: Any) -> str:
    """Why pydantic refused a value, in the terms of a plan file instead of Python types."""
    return REASONS.get(error["type"]) or str(error["msg"]).replace("Input should be", "It must be")


def translate(error: ValidationError, cls: type[BaseModel]) -> MeshwrightError:
    """Convert the first error that pydantic found into a MeshwrightError."""
    first = error.errors()[0]
    inner = first.get("ctx", {}).get("error")
    place = ".".join(str(p) for p in first["loc"])
    section = cls.__name__.lower()
    if isinstance(inner, MeshwrightError):
        if place and not inner.what.startswith(f"{section}."):
            inner = MeshwrightError(
                inner.code,
                _placed(inner.what, f"{section}.{place}", cls, place),
                why=inner.why,
                valid=inner.valid,
                fix=inner.fix,
                exit_code=inner.exit_code,
            )
        return inner
    if first["type"] == "extra_forbidden":
        key = str(first["loc"][-1])
        known = closest_first(key, sorted(cls.model_fields))
        near = nearest(key, known)
        return MeshwrightError("MW-CONF-001", f"unknown key '{key[:60]}' in [{section}]", valid=known, fix=near)
    if first["type"] == "missing":
        return MeshwrightError("MW-CONF-002", f"[{section}] lacks '{place}'", why="It has no default")
    given = shown(first.get("input"))
    valid = first.get("ctx", {}).get("expected", "")
    options = [v.strip(" '") for v in str(valid).replace(" or ", ",").split(",")] if valid else []
    near = nearest(str(first.get("input")), options) if options else ""
    fix = f"--set {section}.{place}={near}" if near and section in SECTIONS else near
    return MeshwrightError(
        "MW-CONF-003", f"{section}.{place} = {given} is not valid", why=_reason(first), valid=options, fix=fix
    )
