"""One figure: what a text claims, what Meshwright computes, and the rule that gives the verdict.

| verdict | meaning |
| --- | --- |
| holds | our value lies within the rounding of the printed one |
| bound | the text prints a bound ("over 1.2 TB", "500+ GB", "less than") and our value satisfies it |
| convention | our value lies outside, but the value by another convention lies inside; the entry names the convention |
| wrong | neither; our value is the right one |

Rounding: half a unit of the last printed digit. "8.6" means 8.55 to 8.65. Whole numbers count to at least two digits and further
trailing zeros count as rounding: "42" means 41.5 to 42.5, "400" means 395 to 405, "8000" means 7950 to 8050. A range "50–200" is
widened by the same rule at both ends. A bound is written "2,000+" or "<1". A formula is evaluated at the case named in the entry
and must agree within half a percent.

A convention counts only if the text states it (including its rounded inputs), if the published source that it quotes uses it (a data
sheet, a paper), or if digits are cut off instead of rounded. A text that states one convention and then breaks it is wrong.

Each verdict is chosen by hand in the tables (`holds(...)`, `bound(...)`, `convention(...)`, `wrong(...)`); a test asserts that it
follows from the numbers by these rules. The remark gives the reason.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

FORMULA = 0.005  # relative, for claims that are formulas
_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e-?\d+)?")


Verdict = Literal["holds", "bound", "convention", "wrong"]


@dataclass(frozen=True)
class Figure:
    text: str  # key of the text in `page.TEXTS`
    place: str
    claim: str  # the text's wording, shortened
    claimed: str | float  # as printed; a number where the claim is a formula
    ours: float
    unit: str
    verdict: Verdict
    remark: str = ""
    half: float | None = None  # absolute rounding, where the printed digits do not give it
    convention: str = ""  # the convention by which the claim holds
    by_convention: float | None = None  # our value by that convention

    @property
    def bounds(self) -> tuple[float, float]:
        """The interval of values for which the claim holds."""
        if not isinstance(self.claimed, str):
            return self.claimed * (1 - FORMULA), self.claimed * (1 + FORMULA)
        ends = _NUMBER.findall(self.claimed)
        if self.claimed.startswith("<"):
            return -math.inf, float(ends[0]) * (1 - 1e-6)
        low, high = (float(end.replace(",", "")) for end in (ends[0], ends[-1]))
        below, above = (half_unit(end) if self.half is None else self.half for end in (ends[0], ends[-1]))
        return low - below, math.inf if self.claimed.endswith("+") else high + above

    @property
    def is_bound(self) -> bool:
        return isinstance(self.claimed, str) and (self.claimed.startswith("<") or self.claimed.endswith("+"))

    def within(self, value: float) -> bool:
        """Whether a value lies inside the bounds, with a margin for binary fractions."""
        low, high = self.bounds
        margin = 1e-9 * abs(value)
        return low - margin <= value <= high + margin

    @property
    def expected(self) -> Verdict:
        """The verdict that follows from the numbers."""
        if self.within(self.ours):
            return "bound" if self.is_bound else "holds"
        if self.by_convention is not None and self.within(self.by_convention):
            return "convention"
        return "wrong"

    @property
    def error(self) -> float:
        """Relative error of the claim: 0 inside a range, measured from the nearer end outside it."""
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


def rows(text: str) -> tuple[Row, Row, Row, Row]:
    """Constructors for the figures of one text: holds, bound, convention, wrong.

    All take (place, claim, claimed, ours, unit); `convention` then takes the convention's name and our value by it; a remark is last.
    """

    def enter(verdict: Verdict) -> Row:
        def row(
            place: str,
            claim: str,
            claimed: str | float,
            ours: float,
            unit: str,
            remark: str = "",
            half: float | None = None,
        ) -> Figure:
            return Figure(text, place, claim, claimed, float(ours), unit, verdict, remark, half)

        return row

    def convention(
        place: str,
        claim: str,
        claimed: str | float,
        ours: float,
        unit: str,
        name: str,
        by_convention: float,
        remark: str = "",
    ) -> Figure:
        return Figure(
            text, place, claim, claimed, float(ours), unit, "convention", remark, None, name, float(by_convention)
        )

    return enter("holds"), enter("bound"), convention, enter("wrong")


def number(value: float) -> str:
    """Four digits, with separators: 9,139 and 0.2083 and 3.15e+23."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if abs(value) >= 1e9 or abs(value) < 1e-3:
        return f"{value:.3g}"
    decimals = max(0, 3 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
