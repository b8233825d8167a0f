"""Conditions of the shell: `[ … ]` and `[[ … ]]`."""

import fnmatch
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from meshwright.interop.shell.arithmetic import arithmetic
from meshwright.interop.shell.expansion import Expansion
from meshwright.interop.shell.open_values import OPEN, closed

COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq, "-ne": operator.ne, "-lt": operator.lt, "-le": operator.le, "-gt": operator.gt, "-ge": operator.ge,
}  # fmt: skip


@dataclass
class Condition:
    """A test of `[ … ]` or `[[ … ]]`, by recursive descent: True, False, or None where a file or a program decides.

    A variable that is not set is empty, as in bash; `rests_on_open` says that the result rests on it."""

    shell: Expansion
    raw: Sequence[str]
    split: bool
    place: int = 0
    rests_on_open: bool = False

    def at(self, *words: str) -> bool:
        if self.place < len(self.raw) and self.raw[self.place] in words:
            self.place += 1
            return True
        return False

    def any(self) -> bool | None:
        return self.joined(("||", "-o"), True, self.all)

    def all(self) -> bool | None:
        return self.joined(("&&", "-a"), False, self.one)

    def joined(self, signs: Sequence[str], decides: bool, part: Callable[[], bool | None]) -> bool | None:
        """The value of parts between these signs, of which one with the value `decides` is enough."""
        result = part()
        while self.at(*signs):
            both = (result, part())
            result = decides if decides in both else None if None in both else not decides
        return result

    def one(self) -> bool | None:
        if self.at("!"):
            inner = self.one()
            return None if inner is None else not inner
        if self.at("("):
            inner = self.any()
            self.at(")")
            return inner
        if self.place >= len(self.raw):
            return False
        first = self.raw[self.place]
        if (
            re.fullmatch(r"-[a-zA-Z]", first)
            and self.place + 1 < len(self.raw)
            and self.raw[self.place + 1] not in ("]", "&&", "||", "=", "==")
        ):
            self.place += 2
            text = self.shell.text(self.raw[self.place - 1])
            if first in ("-z", "-n"):
                return (closed(text) == "") == (first == "-z")
            return self.raw[self.place - 1] in self.shell.variables if first == "-v" else None
        self.place += 1
        left = self.shell.text(first)
        if self.place + 1 >= len(self.raw) or self.raw[self.place] in ("&&", "||", "-a", "-o", ")"):
            return closed(left) != ""
        sign, right = self.raw[self.place], self.shell.text(self.raw[self.place + 1])
        self.place += 2
        if OPEN in left + right:
            self.rests_on_open = True
            if self.split and not closed(left) and '"' not in first:
                return None  # without a word on its left, `[` fails
        left, right = closed(left), closed(right)
        if sign in COMPARISONS:
            numbers = arithmetic(left, self.shell), arithmetic(right, self.shell)
            return None if None in numbers else COMPARISONS[sign](*numbers)  # type: ignore[arg-type]
        if sign in ("=", "==", "!="):
            equal = left == right if self.split else fnmatch.fnmatchcase(left, right)
            return equal == (sign != "!=")
        if sign == "=~":
            try:
                return re.search(right, left) is not None
            except re.error:
                return None
        return {"<": left < right, ">": left > right}.get(sign)
