"""The base class of all described objects: frozen, typed, validated, printable, written to and read from TOML.

pydantic validates; this file turns its errors into the one shape of `meshwright.errors`. The error for an unknown key names the
nearest valid key, and the error for a bad value names its field. The text below a field says what it is: `config schema` and the page show it.
"""

import ast
import inspect
import re
from functools import cache
from itertools import pairwise
from typing import Annotated, Any, Self, cast, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationError,
    WithJsonSchema,
)

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

SECTIONS = ("model", "cluster", "stack", "workload", "plan", "adapter", "data", "optimizer", "checkpoint", "run")
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
        for name in list_fields(type(self)).intersection(data):
            if isinstance(data[name], str):
                data[name] = split_list(data[name])
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise translate(error, type(self), data) from None

    def but(self, **changes: Any) -> Self:
        """A copy with some fields changed, validated again."""
        return type(self)(**{**self.as_dict(), **changes})

    def as_dict(self) -> dict[str, Any]:
        """The fields that differ from their default, ready for TOML."""
        return self.model_dump(exclude_defaults=True, exclude_none=True)

    @classmethod
    def __get_pydantic_json_schema__(cls, core: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """The schema, with the text below a field in its class as the description of the field."""
        schema = handler(core)
        properties = handler.resolve_ref_schema(schema)["properties"]
        for name, text in descriptions(cls).items():
            properties[name]["description"] = text
        return schema


@cache
def descriptions(cls: type[Described]) -> dict[str, str]:
    """The text below each field of a class, read from the source when it is asked for: pydantic would read it in every start."""
    out: dict[str, str] = {}
    for part in reversed(cls.__mro__[: cls.__mro__.index(Described)]):
        body = cast(ast.ClassDef, ast.parse(inspect.getsource(part)).body[0]).body
        for field, below in pairwise(body):
            match field, below:
                case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                    out[name] = " ".join(text.split())
    return out


@cache
def list_fields(cls: type[BaseModel]) -> frozenset[str]:
    """Fields of a section that hold a list of plain values, except those that parse text themselves, such as paths."""
    names = []
    for name, field in cls.model_fields.items():
        kinds = [kind for kind in (field.annotation, *get_args(field.annotation)) if get_origin(kind) in (tuple, list)]
        items = [item for kind in kinds for item in get_args(kind) if isinstance(item, type)]
        tables = any(issubclass(item, BaseModel) for item in items)
        if kinds and not tables and not any(isinstance(m, BeforeValidator) for m in field.metadata):
            names.append(name)
    return frozenset(names)


def split_list(text: str) -> list[Any]:
    """Split a list written as one word (`dp,tp` or `dp+tp`); an empty text is an empty list."""
    joined = text.replace("+", ",") if re.fullmatch(r"[a-z]+(\+[a-z]+)+", text) else text
    words = [word.strip() for word in joined.split(",") if word.strip()]
    return [int(word) if word.isdecimal() else word for word in words]


def _placed(what: str, path: str, cls: type[BaseModel], place: str) -> str:
    """Add the path of a nested table such as [model.router] to the text of an error."""
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


def reason(error: Any) -> str:
    """Say why pydantic refused a value, in terms of a plan file instead of Python types."""
    return REASONS.get(error["type"]) or str(error["msg"]).replace("Input should be", "It must be")


def translate(error: ValidationError, cls: type[BaseModel], data: dict[str, Any]) -> MeshwrightError:
    """Convert the first error that pydantic found in the values of a section into a MeshwrightError."""
    first = error.errors()[0]
    inner = first.get("ctx", {}).get("error")
    place = ".".join(str(p) for p in first["loc"])
    section = cls.__name__.lower()
    if isinstance(inner, MeshwrightError):
        if place and not inner.what.startswith(f"{section}."):
            return inner.but(what=_placed(inner.what, f"{section}.{place}", cls, place))
        return inner
    if first["type"] == "extra_forbidden":
        key = str(first["loc"][-1])
        known = closest_first(key, sorted(cls.model_fields))
        near = nearest(key, known)
        return MeshwrightError("MW-CONF-001", f"unknown key '{key[:60]}' in [{section}]", valid=known, fix=near)
    if first["type"] == "missing":
        return MeshwrightError("MW-CONF-002", f"[{section}] lacks '{place}'", why="It has no default")
    shown_value = shown(first.get("input"))
    valid = first.get("ctx", {}).get("expected", "")
    options = [v.strip(" '") for v in str(valid).replace(" or ", ",").split(",")] if valid else []
    near = nearest(str(first.get("input")), options) if options else ""
    field, *rest = first["loc"] or ("",)
    if near and len(rest) == 1 and isinstance(rest[0], int):  # an item: the fix sets the whole list
        values = [near if i == rest[0] else str(value) for i, value in enumerate(data[str(field)])]
        fix = f"--set {section}.{field}={','.join(values)}"
    else:
        fix = f"--set {section}.{place}={near}" if near and section in SECTIONS else near
    return MeshwrightError(
        "MW-CONF-003", f"{section}.{place} = {shown_value} is not valid", why=reason(first), valid=options, fix=fix
    )
