"""What every described object shares: frozen, typed, validated, printable, and a round trip through TOML.

Validation is pydantic's; this file turns its errors into the one shape of `meshwright.errors`, so that an unknown key
names the nearest valid one and a bad value names the field it stands in.
"""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema

from meshwright.errors import MeshwrightError, nearest
from meshwright.units import parse_bytes, parse_count, parse_flops, parse_rate, parse_seconds


def quantity(*examples: str) -> WithJsonSchema:
    """A schema that allows a number or a text with its unit."""
    return WithJsonSchema({"type": ["number", "string"], "examples": list(examples)}, mode="validation")


Bytes = Annotated[float, BeforeValidator(parse_bytes), quantity("80GiB", "25MB")]
Rate = Annotated[float, BeforeValidator(parse_rate), quantity("400Gb/s", "900GB/s")]
Seconds = Annotated[float, BeforeValidator(parse_seconds), quantity("1.5us", "20ms")]
Flops = Annotated[float, BeforeValidator(parse_flops), quantity("989TFLOP/s")]
Count = Annotated[float, BeforeValidator(parse_count), quantity("15T", "175B")]

SECTIONS = ("model", "cluster", "stack", "workload", "plan")
MOST = 2**40  # no dimension, degree or batch is larger: keeps arithmetic exact and hostile input bounded


def number(value: Any) -> Any:
    """Python takes True for 1; a person who writes it meant something else."""
    if isinstance(value, bool):
        raise MeshwrightError("MW-CONF-003", f"{str(value).lower()} is not a number")
    return value


Size = Annotated[int, Field(ge=1, le=MOST), BeforeValidator(number)]
Whole = Annotated[int, Field(ge=0, le=MOST), BeforeValidator(number)]
# A narrower limit is a type of its own: of two limits pydantic holds a field to the type's.
Length = Annotated[int, Field(ge=1, le=2**32), BeforeValidator(number)]
Devices = Annotated[int, Field(ge=0, le=10**9), BeforeValidator(number)]
Norms = Annotated[int, Field(ge=0, le=4), BeforeValidator(number)]


class Described(BaseModel):
    """Base of Model, Cluster, Stack, Workload and Plan."""

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
        """What was said and differs from the default, ready for TOML; defaults stay unsaid."""
        return self.model_dump(exclude_defaults=True, exclude_none=True)


def _placed(what: str, path: str, cls: type[BaseModel], place: str) -> str:
    """What is wrong in a table within a section, such as [model.router], under that table's own name."""
    table = cls.model_fields[place].annotation if place in cls.model_fields else None
    name = getattr(table, "__name__", "").lower()
    if what.startswith(f"{name}."):
        return path + what.removeprefix(name)
    return what.replace(f"[{name}]", f"[{path}]") if f"[{name}]" in what else f"{path}: {what}"


def translate(error: ValidationError, cls: type[BaseModel]) -> MeshwrightError:
    """The first thing pydantic found, in our shape."""
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
        known = sorted(cls.model_fields)
        near = nearest(key, known)
        return MeshwrightError("MW-CONF-001", f"unknown key '{key[:60]}' in [{section}]", valid=known, fix=near)
    if first["type"] == "missing":
        return MeshwrightError("MW-CONF-002", f"[{section}] lacks '{place}'", why="It has no default")
    given = repr(first.get("input"))
    given = given if len(given) <= 60 else given[:57] + "..."
    valid = first.get("ctx", {}).get("expected", "")
    options = [v.strip(" '") for v in str(valid).replace(" or ", ",").split(",")] if valid else []
    near = nearest(str(first.get("input")), options) if options else ""
    fix = f"--set {section}.{place}={near}" if near and section in SECTIONS else near
    return MeshwrightError(
        "MW-CONF-003", f"{section}.{place} = {given} is not valid", why=first["msg"], valid=options, fix=fix
    )
