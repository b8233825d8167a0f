"""The words of a command with their variables, arrays and quotes replaced, as bash expands them.

An open value stays in the words as it is written: `--seq-length $SEQ`. It is never an empty value or a flag without one.
"""

import fnmatch
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field

from meshwright.interop.shell.arithmetic import arithmetic
from meshwright.interop.shell.open_values import OPEN, closed, open_value, split_open
from meshwright.interop.shell.tokens import end_of_part, end_of_quote, tokens

LONGEST = 100_000  # letters of a word
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^\]]*\])?(\+)?=")
PARAMETER = re.compile(r"(#|!)?([A-Za-z_]\w*|\d+|[@*#?$!-])(\[([^\]]*)\])?(.*)", re.DOTALL)
NAME = re.compile(r"[A-Za-z_]\w*|[\d@*#?$!-]")
Value = str | dict[str, str]


@dataclass
class Expansion(ABC):
    """Variables and arguments of a script, and the words that they make."""

    variables: dict[str, Value] = field(default_factory=dict)
    arguments: list[str] = field(default_factory=list)

    def assign(self, word: str) -> None:
        found = ASSIGNMENT.match(word)
        assert found
        name, index, added, raw = found[1], found[2], found[3], word[found.end() :]
        old = self.variables.get(name)
        held = dict(old) if isinstance(old, dict) else {"0": old} if old is not None else {}
        if raw.startswith("(") and not index:
            pairs = [pair for token in tokens(raw[1:-1]) if not token.operator for pair in self.item(token.text)]
            held = held if added else {}
            start = len(held)
            self.variables[name] = held | {key or str(start + i): value for i, (key, value) in enumerate(pairs)}
            return
        key = self.text(index[1:-1]) if index else "0"
        value = (held.get(key, "") if added else "") + self.text(raw)
        self.variables[name] = {**held, key: value} if index else value

    def item(self, raw: str) -> list[tuple[str, str]]:
        """The keys and values that one word of an array gives; without a key, the next number is meant."""
        keyed = re.match(r"\[([^\]]+)\]=", raw)
        if keyed:
            return [(self.text(keyed[1]), self.text(raw[keyed.end() :]))]
        return [("", word) for word in self.expand(raw)]

    def text(self, raw: str) -> str:
        """A word as one text, as an assignment takes it. A text that grows without end is open."""
        text = "".join(f" {value}" if kind == "next" else value for value, kind in self.parts(raw))
        return text if len(text) <= LONGEST else open_value(raw[:60])

    def expand(self, raw: str) -> list[str]:
        """The words that a word becomes: expansions without quotes are split at spaces."""
        out: list[str] = []
        current: str | None = None
        for value, kind in self.parts(raw):
            if kind == "next":
                out.append(current or "")
                current = value
            elif kind == "split":
                pieces = split_open(value)
                if value[:1].isspace() and current is not None:
                    out.append(current)
                    current = None
                if pieces:
                    out += [(current or "") + pieces[0], *pieces[1:]][:-1]
                    current = ((current or "") + pieces[0]) if len(pieces) == 1 else pieces[-1]
                    if value[-1:].isspace():
                        out.append(current)
                        current = None
            else:
                current = (current or "") + value if value or kind == "quoted" else current
        return out if current is None else [*out, current]

    def parts(self, raw: str, quoted: bool = False, escaped: str = '$`"\\\n') -> Iterator[tuple[str, str]]:
        """The pieces of a word and what they are: "" as written, "quoted", "split" (an expansion without quotes), "next" (starts another word).
        `escaped`: the characters before which a backslash inside quotes is removed; a here-document keeps it before quotes."""
        place = 0
        kind = "quoted" if quoted else "split"
        while place < len(raw):
            char = raw[place]
            end = end_of_part(raw, place)
            if char == "\\":
                keep = quoted and raw[place + 1 : end] not in tuple(escaped)
                yield (
                    (raw[place:end] if keep else "" if raw[place + 1 : end] == "\n" else raw[place + 1 : end]),
                    "quoted" * quoted,
                )
            elif char == "'" and not quoted:
                yield raw[place + 1 : end - 1], "quoted"
            elif char == '"' and not quoted:
                pieces = list(self.parts(raw[place + 1 : end - 1], quoted=True))
                yield "", "quoted" if pieces != [] or end - place <= 2 else ""
                yield from pieces
            elif char in "'\"":  # in a here-document; a single one inside double quotes
                end = place + 1
                yield char, "quoted"
            elif char == "$" and not quoted and raw[end : end + 1] in ("'", '"'):
                pass  # $'…'
            elif char == "`":
                yield self.output(raw[place + 1 : end - 1], raw[place:end]), kind
            elif char == "$":
                values, end = self.expansion(raw, place)
                if isinstance(values, str):
                    yield values, kind
                elif quoted:
                    for i, value in enumerate(values):
                        yield value, "next" if i else "quoted"
                else:
                    for value in values:
                        yield f" {value} ", "split"
            else:
                yield char, "quoted" * quoted
            place = end

    def expansion(self, raw: str, place: int) -> tuple[str | list[str], int]:
        """The value of the `$…` at a place, a list for all elements of an array; and the place after it."""
        following = raw[place + 1 : place + 2]
        if following in ("(", "{"):
            end = end_of_quote(raw, place + 1)
            inner, source = raw[place + 2 : end - 1], raw[place:end]
            if raw.startswith("$((", place) and inner.endswith(")"):
                value = arithmetic(inner[1:-1], self)
                return (open_value(source) if value is None else str(int(value))), end
            return (self.output(inner, source) if following == "(" else self.parameter(inner, source)), end
        found = NAME.match(raw, place + 1)
        if not found:
            return "$", place + 1
        return self.parameter(found[0], raw[place : found.end()]), found.end()

    @abstractmethod
    def output(self, text: str, source: str) -> str:
        """What a $(…) prints, if it only prints; open otherwise."""

    def parameter(self, inner: str, source: str) -> str | list[str]:
        """The value of `${…}`."""
        found = PARAMETER.fullmatch(inner)
        if not found:
            return open_value(source)
        sign, name, subscript, index, rest = found.groups()
        if sign == "!" and not rest:
            pointed = closed(self.as_text(name))
            return (
                self.parameter(pointed, source)
                if re.fullmatch(r"[A-Za-z_]\w*", pointed) and pointed != name
                else open_value(source)
            )
        values = self.values(name, index, subscript)
        if sign == "#":
            return str(len(values) if index in ("@", "*") else len(values[0])) if values is not None else "0"
        if chosen := re.match("(:?)([-=+?])", rest):
            empty = chosen[1] and not any(map(closed, values or ()))
            return self.alternative(name, chosen[2], rest[chosen.end() :], None if empty else values, source)
        if values is None:  # what the script's caller gives is open; `$?`, `$$` and such are too
            return [] if name in "@*" or index in ("@", "*") else open_value(source)
        changed = [self.changed(value, rest) for value in values] if rest else values
        if any(value is None for value in changed):
            return open_value(source)
        known = [value or "" for value in changed]
        return known if name == "@" or index == "@" else " ".join(known)

    def values(self, name: str, index: str | None, subscript: str | None) -> list[str] | None:
        """The values of a variable or an element; None if it is not set."""
        if name in ("@", "*"):
            return list(self.arguments) or None
        if name == "#":
            return [str(len(self.arguments))]
        if name.isdigit():
            return [self.arguments[int(name) - 1]] if 0 < int(name) <= len(self.arguments) else None
        value = self.variables.get(name)
        if value is None:
            return None
        if isinstance(value, str):
            return [value] if index in (None, "@", "*", "0") else None
        if index in ("@", "*"):
            return list(value.values())
        key = self.text(index) if index is not None else "0"
        if key not in value and index is not None:
            number = arithmetic(index, self)
            key = str(number if number is None or number >= 0 else len(value) + number)
        return [value[key]] if key in value else None

    def as_text(self, name: str) -> str:
        return " ".join(self.values(name, None, None) or [])

    def alternative(self, name: str, sign: str, raw: str, values: list[str] | None, source: str) -> str | list[str]:
        """${X:-default}, ${X:=default}, ${X:+alternative} and ${X:?message}."""
        if sign == "+":
            return "" if values is None else self.text(raw)
        if values is not None:
            return " ".join(values)
        if sign == "?":
            return open_value(source)
        value = self.text(raw)
        if sign == "=":
            self.variables[name] = value
        return value

    def changed(self, value: str, rest: str) -> str | None:
        """${X%suffix}, ${X##prefix}, ${X/old/new}, ${X:2:3}, ${X,,}; None if the operator is another one."""
        sign = rest[:2] if rest[:2] in ("%%", "##", "//", ",,", "^^") else rest[:1]
        pattern = self.text(rest[len(sign) :])
        if OPEN in pattern:
            return None
        if sign in (",,", ",", "^^", "^"):
            return value.lower() if sign[0] == "," else value.upper()
        if sign in ("%", "%%"):
            starts = range(len(value), -1, -1) if sign == "%" else range(len(value) + 1)
            return next((value[:i] for i in starts if fnmatch.fnmatchcase(value[i:], pattern)), value)
        if sign in ("#", "##"):
            ends = range(len(value) + 1) if sign == "#" else range(len(value), -1, -1)
            return next((value[i:] for i in ends if fnmatch.fnmatchcase(value[:i], pattern)), value)
        if sign in ("/", "//"):
            old, _, new = pattern.partition("/")
            found = re.compile(fnmatch.translate(old).removesuffix(r"\Z").removesuffix(r"\z"))
            return found.sub(lambda _: new, value, count=0 if sign == "//" else 1) if old else value
        if sign == ":":
            first, _, length = pattern.partition(":")
            start, size = arithmetic(first, self), arithmetic(length, self) if length else len(value)
            if start is None or size is None:
                return None
            return value[start:][:size] if size >= 0 else value[start:size]
        return None
