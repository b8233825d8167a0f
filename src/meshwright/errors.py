"""Errors in one shape: a stable code, what is wrong, why, the valid values, and the fix.

    MW-PLAN-004: tp=6 does not divide 64 attention heads of llama3-70b. Valid: 1, 2, 4, 8. Fix: --set plan.tp=8

Every code has a line in `docs/errors.md`; a test checks it. Bad input raises `MeshwrightError`, never a
bare exception: the command line prints it and exits with its `exit_code` (2 for bad input, 3 for "nothing fits").
"""

import difflib
from collections.abc import Iterable, Sequence
from typing import Any

SHOWN = 24  # values in a message
IO_ERROR = 74  # exit code: the disk is full, or a file on it cannot be read


class MeshwrightError(ValueError):
    """One clear error. `code` is `MW-AREA-NNN`; the other fields are sentences or values for the user.

    It is a `ValueError`, so that a pydantic validator may raise it and `describe.base` can pass it on unchanged. A `quiet` error is
    not printed: another process reports it.
    """

    quiet = False

    def __init__(
        self,
        code: str,
        what: str,
        *,
        why: str = "",
        valid: Iterable[object] = (),
        fix: str = "",
        exit_code: int = 2,
    ) -> None:
        self.code, self.what, self.why = code, printable(what.rstrip(".")), printable(why.rstrip("."))
        self.fix, self.valid = printable(fix), [printable(str(v)) for v in valid]
        self.exit_code = exit_code
        super().__init__(str(self))

    def __str__(self) -> str:
        text = f"{self.code}: {self.what}."
        if self.why:
            text += f" {self.why}."
        if self.valid:
            text += f" Valid: {listed(self.valid)}."
        if self.fix:
            text += f" Fix: {self.fix}"
        return text

    def as_dict(self) -> dict[str, object]:
        return {"code": self.code, "what": self.what, "why": self.why, "valid": self.valid, "fix": self.fix}

    def but(self, **changes: Any) -> "MeshwrightError":
        """The same error with some of its parts changed."""
        return MeshwrightError(**{**self.as_dict(), "exit_code": self.exit_code, **changes})


def printable(text: str) -> str:
    """Text without control characters, which could change colours, move the cursor or ring the bell of a terminal: they are escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\u00a0\u202f" else c.encode("unicode_escape").decode() for c in text)


def shown(value: object, limit: int = 60) -> str:
    """A value as it is written in TOML, not in Python, truncated if it is long."""
    text = _shown(value, depth=3)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _shown(value: object, depth: int) -> str:
    match value:
        case None:
            return "nothing"
        case bool():
            return str(value).lower()
        case str():
            return f"'{printable(value[:200])}'"
        case dict() if depth:
            return "{" + ", ".join(f"{k} = {_shown(v, depth - 1)}" for k, v in list(value.items())[:20]) + "}"
        case list() | tuple() if depth:
            return "[" + ", ".join(_shown(v, depth - 1) for v in value[:20]) + "]"
        case int() | float():
            return str(value) if not isinstance(value, int) or abs(value) < 10**60 else "a very large number"
    if hasattr(value, "isoformat"):  # dates and times of TOML
        return str(value.isoformat())
    return "..." if isinstance(value, dict | list | tuple) else printable(str(value)[:200])


def kind_of(value: object) -> str:
    """Name the kind of a value: "a table", "a list", "a number", …"""
    match value:
        case None:
            return "nothing"
        case bool():
            return "true or false"
        case dict():
            return "a table"
        case list() | tuple():
            return "a list"
        case str():
            return "text"
        case int() | float():
            return "a number"
    return "a date or time" if hasattr(value, "isoformat") else "an object"


def listed(values: Sequence[str], limit: int = SHOWN) -> str:
    """Values joined for a message; a long list is cut and ends with its length."""
    if len(values) <= limit:
        return ", ".join(values)
    return ", ".join(values[:limit]) + f", … ({len(values)} in all)"


def nearest(word: str, choices: Iterable[str]) -> str:
    """The choice of which `word` is a misspelling, or "": one typing error in a short word, three in a long one, and the same digits.

    This is the one rule for every suggestion. A wrong suggestion is worse than none: `moe` is not a misspelling of `rope`, and a model of another
    size or generation is another model."""
    typed = folded(str(word)[:100])
    allowed = 0 if len(typed) <= 2 else 1 if len(typed) <= 5 else 2 if len(typed) <= 8 else 3
    near = [
        (errors, choice)
        for choice in choices
        if (digits_of(choice) == digits_of(typed) or folded(choice).startswith(typed))
        and (errors := typing_errors(typed, folded(choice), allowed)) <= allowed
    ]
    return min(near, key=lambda pair: pair[0])[1] if near else ""


def folded(word: str) -> str:
    return word.lower().replace("_", "-")


def digits_of(word: str) -> str:
    return "".join(c for c in word if c.isdigit())


def typing_errors(a: str, b: str, most: int) -> int:
    """Letters to insert, drop or replace, and neighbours to swap, until one word is the other; above `most` some larger number."""
    if abs(len(a) - len(b)) > most:
        return most + 1
    before, row = [0] * (len(b) + 1), list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        last, before, row = before, row, [i]
        for j, y in enumerate(b, 1):
            best = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (x != y))
            if i > 1 and j > 1 and x == b[j - 2] and a[i - 2] == y:
                best = min(best, last[j - 2] + 1)
            row.append(best)
    return row[-1]


def closest_first(word: str, choices: list[str]) -> list[str]:
    """Choices in their order; of a list that is too long to show, those that contain `word` or are similar to it come first."""
    if len(choices) <= SHOWN:
        return choices
    typed = folded(word[:100])
    first = [choice for choice in choices if typed and typed in folded(choice)]
    first += difflib.get_close_matches(typed, choices, n=SHOWN, cutoff=0.6)
    return list(dict.fromkeys([*first, *choices]))


def unknown(code: str, what: str, word: str, choices: Iterable[str], fix: str = "{}") -> MeshwrightError:
    """An error for a name that is not in `choices`; `fix` is a template for the closest choice."""
    choices = closest_first(str(word), list(choices))
    near = nearest(word, choices)
    cut = str(word) if len(str(word)) <= 60 else str(word)[:57] + "..."
    return MeshwrightError(code, f"{what} '{cut}' is not known", valid=choices, fix=fix.format(near) if near else "")


def nearest_number(value: float, choices: Iterable[int]) -> int:
    """The legal number closest to `value`; a tie goes to the larger."""
    return min(choices, key=lambda c: (abs(c - value), -c))


def cannot_write(path: object, error: OSError) -> MeshwrightError:
    """An error for a file or stream that cannot be written: a full disk, a missing folder, no permission."""
    return MeshwrightError("MW-CLI-004", f"cannot write '{path}'", why=error.strerror or str(error))
