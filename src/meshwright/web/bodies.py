"""The body of a request: JSON of bounded size and depth, with the keys that its route has.

Values of a plan file are validated by the classes of `describe`, as those of a TOML file are. Names are those of the catalog:
`Config.from_document` reads no file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

from meshwright.describe.base import SECTIONS
from meshwright.describe.files import check_depth
from meshwright.errors import MeshwrightError, kind_of, shown, unknown

MOST_BYTES = 64 * 1024
MOST_ITEMS = 5_000  # values in one body
MOST_LETTERS = 2_000  # of one text
QUESTION = ("fix", "most", "least", "without", "allow", "headroom", "top", "mtbf", "checkpoint", "restart")
MOST_LEADERS = 100


def parse(content: bytes) -> dict[str, Any]:
    """The JSON object in a body; anything else is refused."""
    try:
        document = json.loads(content, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        if isinstance(error, MeshwrightError):
            raise
        why = "It is nested too deep" if isinstance(error, RecursionError) else str(error)[:200]
        raise MeshwrightError("MW-WEB-004", "the body is not JSON", why=why) from None
    if not isinstance(document, dict):
        raise MeshwrightError("MW-WEB-004", f"the body is {kind_of(document)}", why="An object is needed")
    check_depth(document, "the body")
    check_values(document)
    return document


def _refuse_constant(name: str) -> float:
    raise MeshwrightError("MW-WEB-004", f"the body contains {name}", why="A number must be finite")


def check_values(document: Any) -> None:
    """Raise if the body has too many values, a text that is too long, or a number that is not finite."""
    left, count = [document], 0
    while left:
        value = left.pop()
        count += 1
        if count > MOST_ITEMS:
            raise MeshwrightError("MW-WEB-004", f"the body has more than {MOST_ITEMS:,} values")
        if isinstance(value, dict):
            left += [*value, *value.values()]
        elif isinstance(value, list):
            left += value
        elif isinstance(value, str):
            check_text(value)
        elif isinstance(value, float) and not math.isfinite(value):
            raise MeshwrightError("MW-WEB-004", "the body has a number that is too large")


def check_text(text: str) -> None:
    if len(text) > MOST_LETTERS:
        raise MeshwrightError(
            "MW-WEB-004", f"the body has a text of {len(text):,} letters", why=f"At most {MOST_LETTERS:,}"
        )
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise MeshwrightError(
            "MW-WEB-004", "the body has a text that is not Unicode", why="A surrogate stands alone"
        ) from None


def check_keys(body: dict[str, Any], valid: Iterable[str]) -> dict[str, Any]:
    """The body, if it has no key besides the valid ones."""
    valid = list(valid)
    for key in body:
        if key not in valid:
            raise unknown("MW-WEB-005", "key", key, valid)
    return body


def read_plan_file(body: Any) -> dict[str, Any]:
    """A plan file as JSON: its sections, each a name or a table."""
    if not isinstance(body, dict):
        raise MeshwrightError(
            "MW-WEB-005", f"the plan file is {kind_of(body)}", why="A table of sections is needed", valid=SECTIONS
        )
    return body


def read_question(given: Any) -> dict[str, Any]:
    """The constraints of a search, as `planner.plan` takes them."""
    if not isinstance(given, dict):
        raise MeshwrightError("MW-WEB-005", f"question is {kind_of(given)}", why="A table is needed", valid=QUESTION)
    out = {name: value for name, value in check_keys(given, QUESTION).items() if value is not None}
    for name in ("fix", "most", "least", "allow"):
        if name in out:
            out[name] = _constraints(name, out[name])
    if "without" in out:
        out["without"] = [_word("without", item) for item in _listed("without", out["without"])]
    for name in ("headroom", "mtbf", "checkpoint", "restart"):
        if name in out and (isinstance(out[name], bool) or not isinstance(out[name], str | int | float)):
            raise MeshwrightError("MW-WEB-005", f"question.{name} = {shown(out[name])} is not a number or a text")
    top = out.get("top", 1)
    if isinstance(top, bool) or not isinstance(top, int) or not 1 <= top <= MOST_LEADERS:
        raise MeshwrightError(
            "MW-WEB-005", f"question.top = {shown(top)} is not valid", why=f"It must be from 1 to {MOST_LEADERS}"
        )
    return out


def _constraints(name: str, value: Any) -> dict[str, Any] | list[str]:
    """`{"tp": 8}` or `["tp=8"]`."""
    if isinstance(value, dict):
        for field, item in value.items():
            for one in item if isinstance(item, list) else [item]:
                if not isinstance(one, str | int | float | bool):
                    raise MeshwrightError(
                        "MW-WEB-005", f"question.{name}.{field[:60]} = {shown(item)} is not a value of a plan"
                    )
        return value
    return [_word(name, item) for item in _listed(name, value)]


def _listed(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise MeshwrightError("MW-WEB-005", f"question.{name} = {shown(value)} is not a list")
    return value


def _word(name: str, item: Any) -> str:
    if not isinstance(item, str):
        raise MeshwrightError("MW-WEB-005", f"question.{name} contains {shown(item)}", why="A text is needed")
    return item
