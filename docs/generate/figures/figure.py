"""One figure: what a text claims, what we compute, and the rule by which it holds.

A figure **holds** when ours lies within half a unit of the last digit it is printed with: "8.6" means 8.55 to 8.65. Whole
numbers are taken to two digits at least, and trailing zeros beyond those are taken as rounding: "42" means 41.5 to 42.5, "400"
means 395 to 405, "8000" means 7950 to 8050. A range "50–200" is widened likewise at both ends; "2,000+" has no upper end;
"<1" is a claim of less ("smaller", "improves"). A claim that is a formula is evaluated at the case told beside it and must agree
within half a percent.

The verdict is written down by hand (`holds(...)` or `wrong(...)` in the tables) and a test asserts that it follows by the rule. What
is right is then `ours`; the remark says why, or under which reading the claim would stand.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

FORMULA = 0.005  # relative, for claims that are formulas
_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e-?\d+)?")


@dataclass(frozen=True)
class Figure:
    seed: str
    place: str
    claim: str  # as written, or nearly
    claimed: str | float  # as printed; a number where the claim is a formula
    ours: float
    unit: str
    verdict: Literal["holds", "wrong"]
    remark: str = ""
    half: float | None = None  # told where the printed digits are not the rounding: absolute

    @property
    def bounds(self) -> tuple[float, float]:
        """Where ours must lie for the claim to hold."""
        if not isinstance(self.claimed, str):
            return self.claimed * (1 - FORMULA), self.claimed * (1 + FORMULA)
        ends = _NUMBER.findall(self.claimed)
        if self.claimed.startswith("<"):
            return -math.inf, float(ends[0]) * (1 - 1e-6)
        low, high = (float(end.replace(",", "")) for end in (ends[0], ends[-1]))
        below, above = (half_unit(end) if self.half is None else self.half for end in (ends[0], ends[-1]))
        return low - below, math.inf if self.claimed.endswith("+") else high + above

    @property
    def follows(self) -> bool:
        """Whether the verdict is what the rule says; a hair of the bound is left to binary fractions."""
        low, high = self.bounds
        hair = 1e-9 * abs(self.ours)
        return (low - hair <= self.ours <= high + hair) == (self.verdict == "holds")

    @property
    def error(self) -> float:
        """The claim over ours, less one: 0 inside a range, by its nearer end outside."""
        if isinstance(self.claimed, str):
            ends = [float(end.replace(",", "")) for end in _NUMBER.findall(self.claimed)]
            bottom = -math.inf if self.claimed.startswith("<") else ends[0]
            top = math.inf if self.claimed.endswith("+") else ends[-1]
            nearest = min(max(self.ours, bottom), top)
        else:
            nearest = self.claimed
        if self.ours == 0:
            return 0.0 if nearest == 0 else math.inf
        return nearest / self.ours - 1


def half_unit(printed: str) -> float:
    """Half a unit of the last digit that counts."""
    mantissa, _, exponent = printed.replace(",", "").partition("e")
    scale = 10.0 ** int(exponent or 0)
    if "." in mantissa:
        return 0.5 * scale * 10.0 ** -len(mantissa.partition(".")[2])
    significant = max(len(mantissa.rstrip("0")), min(2, len(mantissa)))
    return 0.5 * scale * 10.0 ** (len(mantissa) - significant)


Row = Callable[..., Figure]


def rows(seed: str) -> tuple[Row, Row]:
    """The two ways to enter a figure of a text: (place, claim, claimed, ours, unit, remark)."""

    def enter(verdict: Literal["holds", "wrong"]) -> Row:
        def row(
            place: str,
            claim: str,
            claimed: str | float,
            ours: float,
            unit: str,
            remark: str = "",
            half: float | None = None,
        ) -> Figure:
            return Figure(seed, place, claim, claimed, float(ours), unit, verdict, remark, half)

        return row

    return enter("holds"), enter("wrong")


def number(value: float) -> str:
    """Four digits, with separators: 9,139 and 0.2083 and 3.15e+23."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if abs(value) >= 1e9 or abs(value) < 1e-3:
        return f"{value:.3g}"
    decimals = max(0, 3 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
