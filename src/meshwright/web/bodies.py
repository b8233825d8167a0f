"""The body of a request: JSON of bounded size and depth, with the keys that its route has. The classes below are also its schema (`web.schema`).

Values of a plan file are validated by the classes of `describe`, as those of a TOML file are. Names are those of the catalog:
`Config.from_document` reads no file.
"""

from __future__ import annotations

import json
import math
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema

from meshwright.describe.base import MOST_DEVICES, SECTIONS, reason
from meshwright.describe.files import check_depth
from meshwright.errors import MeshwrightError, kind_of, shown, unknown
from meshwright.units import Json
from meshwright.view.page.registry import VIEWS
from meshwright.view.show.topics import OPTIONS

MOST_BYTES = 64 * 1024
MOST_ITEMS = 5_000  # values in one body
MOST_LETTERS = 2_000  # of one text
MOST_LEADERS = 100
MOST_VIEWS = 40
KINDS = {bool: "boolean", int: "integer", str: "string"}


def parse(content: bytes) -> Json:
    """The JSON object in a body; anything else is refused."""
    try:
        document = json.loads(content, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        if isinstance(error, MeshwrightError):
            raise
        why = "It is nested too deep" if isinstance(error, RecursionError) else str(error)[:200]
        raise refused("the body is not JSON", why) from None
    if not isinstance(document, dict):
        raise refused(f"the body is {kind_of(document)}", "An object is needed")
    check_depth(document, "the body")
    check_values(document)
    return document


def _refuse_constant(name: str) -> float:
    raise refused(f"the body contains {name}", "A number must be finite")


def refused(what: str, why: str = "") -> MeshwrightError:
    return MeshwrightError("MW-WEB-004", what, why=why)


def check_values(document: Any) -> None:
    """Raise if the body has too many values, a text that is too long, or a number that is not finite."""
    left, count = [document], 0
    while left:
        value = left.pop()
        count += 1
        if count > MOST_ITEMS:
            raise refused(f"the body has more than {MOST_ITEMS:,} values")
        if isinstance(value, dict):
            left += [*value, *value.values()]
        elif isinstance(value, list):
            left += value
        elif isinstance(value, str):
            check_text(value)
        elif isinstance(value, float) and not math.isfinite(value):
            raise refused("the body has a number that is too large")


def check_text(text: str) -> None:
    if len(text) > MOST_LETTERS:
        raise refused(f"the body has a text of {len(text):,} letters", f"At most {MOST_LETTERS:,}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise refused("the body has a text that is not Unicode", "A surrogate stands alone") from None


class Body(BaseModel):
    """The body of one route. A value of another type is refused, never converted."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @classmethod
    def read(cls, body: Any) -> Self:
        """The body, if each of its values has its type."""
        if not isinstance(body, dict):
            what, why = f"{kind_of(body)} was sent", "A table is needed"
            raise MeshwrightError("MW-WEB-005", what, why=why, valid=cls.model_fields)
        try:
            return cls.model_validate(body)
        except ValidationError as error:
            first = error.errors()[0]
            name = str(first["loc"][0])
            if first["type"] == "extra_forbidden":
                raise unknown("MW-WEB-005", "key", name, cls.model_fields) from None
            what = f"{name} = {shown(body[name])} is not valid" if name in body else f"{name} is missing"
            raise MeshwrightError("MW-WEB-005", what, why=reason(first), valid=cls.model_fields) from None


Value = str | int | float | bool
Constraint = dict[str, Value | list[Value]] | list[str] | None  # {"tp": 8} or ["tp=8"]
Quantity = str | int | float | None
Lines = list[Annotated[str, Field(max_length=MOST_LETTERS)]]
View = Annotated[str, WithJsonSchema({"enum": list(VIEWS)})]


class QuestionBody(Body):
    """Constraints of a search, as the options of `meshwright plan`."""

    fix: Constraint = Field(None, description='fields with a fixed value, such as {"tp": 8}')
    most: Constraint = Field(None, description="upper bounds of fields")
    least: Constraint = Field(None, description="lower bounds of fields")
    allow: Constraint = Field(None, description="values to add to the search")
    without: list[str] | None = Field(None, description="strategies to leave out, such as zero3")
    headroom: Quantity = Field(None, description="share of the memory to leave free, such as 10%")
    top: int | None = Field(None, ge=1, le=MOST_LEADERS, description="number of leaders")
    mtbf: Quantity = Field(None, description="time between failures of the cluster, such as 3h")
    checkpoint: Quantity = Field(None, description="time that a checkpoint blocks training")
    restart: Quantity = Field(None, description="restart time after a failure")


class ViewsBody(Body):
    """The views to compute for a plan file."""

    config: Json
    views: list[View] = Field(max_length=MOST_VIEWS)
    options: dict[View, Json | None] | None = None
    question: QuestionBody | None = None


class FileBody(Body):
    """The lines of a file: a config.json, a plan file, a cluster, or settings of another framework."""

    lines: Lines
    name: str = Field("", max_length=MOST_LETTERS, description="of the file: its ending says its form")
    gpus: int = Field(0, ge=0, le=MOST_DEVICES, description="data parallelism takes what is left of them")


SHOWN: Json = {name: {"type": KINDS[type(value)], "default": value} for name, value in OPTIONS.items()}


class ShowBody(Body):
    """A topic of `meshwright show` and its options, which the topic checks."""

    topic: str = ""
    options: Annotated[
        Json, WithJsonSchema({"type": "object", "properties": SHOWN, "additionalProperties": False})
    ] = {}


def read_question(question: Any) -> Json:
    """The constraints of a search, as `planner.plan` takes them."""
    return QuestionBody.read(question).model_dump(exclude_none=True)


def read_plan_file(body: Any) -> Json:
    """A plan file as JSON: its sections, each a name or a table."""
    if not isinstance(body, dict):
        what, why = f"the plan file is {kind_of(body)}", "A table of sections is needed"
        raise MeshwrightError("MW-WEB-005", what, why=why, valid=SECTIONS)
    return body
