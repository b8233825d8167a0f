"""What a shell script would start: its commands with all variables replaced, found without running anything.

The script is evaluated as bash would run it without arguments and in an empty environment. Assignments, arrays, `${X:-default}`, `$((…))`,
`if`, `case`, loops and functions are followed. Programs are never started: a command that a value or a condition needs leaves it open.

- An open value stays in the words as it is written: `--seq-length $SEQ`. The caller says so; it is never an empty value or a flag without one.
- An open condition counts as false, and the commands that depend on it are named in `skipped`.
"""

import ast
import fnmatch
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from meshwright.interop import shell_syntax as syntax
from meshwright.interop.shell_syntax import end_of_part, end_of_quote

OPEN, CLOSE = "\x01", "\x02"  # around the source of an open value
OPEN_VALUE = re.compile(f"{OPEN}[^{CLOSE}]*{CLOSE}")
MOST_COMMANDS, MOST_TURNS, DEEPEST, LONGEST = 5_000, 200, 25, 100_000
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^\]]*\])?(\+)?=")
PARAMETER = re.compile(r"(#|!)?([A-Za-z_]\w*|\d+|[@*#?$!-])(\[([^\]]*)\])?(.*)", re.DOTALL)
DECLARATIONS = ("export", "declare", "local", "readonly", "typeset")
SUCCEED = (
    "echo",
    "printf",
    "true",
    ":",
    "cd",
    "set",
    "shift",
    "exit",
    "return",
    "trap",
    "wait",
    "sleep",
    "mkdir",
    "ulimit",
    "module",
    "source",
    ".",
)
SHELLS = ("bash", "sh", "zsh")
FLAG = re.compile(r"--[A-Za-z]")
Value = str | dict[str, str]
ARITHMETIC: dict[type[ast.AST], Callable[..., int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.LShift: lambda a, b: a << min(b, 64), ast.RShift: operator.rshift,
    ast.BitAnd: operator.and_, ast.BitOr: operator.or_, ast.Div: lambda a, b: int(a / b) if abs(a) < 2**50 else a // b,
    ast.Mod: lambda a, b: a - b * int(a / b), ast.Pow: lambda a, b: a ** min(b, 64), ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt,
    ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge, ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Not: operator.not_,
}  # fmt: skip
COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq, "-ne": operator.ne, "-lt": operator.lt, "-le": operator.le, "-gt": operator.gt, "-ge": operator.ge,
}  # fmt: skip


@dataclass(frozen=True)
class Started:
    """One command that a script starts."""

    words: list[str]
    line: int


@dataclass
class Shell:
    """The state of a script: variables, functions, and the commands that were started so far."""

    variables: dict[str, Value] = field(default_factory=dict)
    arguments: list[str] = field(default_factory=list)
    functions: dict[str, syntax.Node] = field(default_factory=dict)
    started: list[Started] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    sourced: dict[str, None] = field(default_factory=dict)  # files that are not read, in order
    files: dict[str, str] = field(default_factory=dict)  # that the script writes itself, as in `cat <<EOF > FILE`
    printed: list[str] | None = None  # by commands, where a $(…) collects it; None: nothing collects
    is_open: bool = False  # a program prints too, or a condition is open
    count: list[int] = field(default_factory=lambda: [0])
    depth: int = 0

    # --- Commands. Each returns True, False, or None where only running it would tell.

    def run(self, nodes: Sequence[syntax.Node]) -> bool | None:
        status: bool | None = True
        for node in nodes:
            self.count[0] += 1
            if self.count[0] > MOST_COMMANDS:
                return None
            status = self.execute(node)
        return status

    def execute(self, node: syntax.Node) -> bool | None:
        match node:
            case syntax.Simple():
                return self.simple(node)
            case syntax.Test():
                if node.arithmetic:
                    value = self.arithmetic(node.words[0])
                    return None if value is None else bool(value)
                return Condition(self, node.words, split=False).value()
            case syntax.Pipe():
                return self.pipe(node)
            case syntax.Chain():
                return self.chain(node)
            case syntax.If():
                return self.branch(node)
            case syntax.CaseOf():
                return self.choose(node)
            case syntax.For():
                words = self.arguments if node.words is None else [w for raw in node.words for w in self.expand(raw)]
                for word in words[:MOST_TURNS]:
                    self.variables[node.name] = word
                    self.run(node.body)
                return True
            case syntax.While():
                for _ in range(MOST_TURNS):
                    if self.run(node.condition) is not (not node.until):
                        break
                    self.run(node.body)
                return True
            case syntax.CommandGroup():
                inside = self.copy() if node.subshell else self
                return inside.run(node.body)
            case syntax.Function():
                self.functions[node.name] = node.body
                return True

    def copy(self) -> "Shell":
        """A subshell: what it assigns is gone afterwards."""
        return replace(self, variables=dict(self.variables))

    def pipe(self, node: syntax.Pipe) -> bool | None:
        if len(node.commands) > 1:
            self.is_open = True  # what the last program prints
        status = [self.execute(each) for each in node.commands][-1]
        return status if status is None or not node.negated else not status

    def chain(self, node: syntax.Chain) -> bool | None:
        """a && b || c. A program whose success is open counts as successful here, so `cd DIR || exit` goes on."""
        status = self.execute(node.first)
        for sign, each in node.then:
            if (sign == "&&") == (status is not False):
                status = self.execute(each)
        return status

    def branch(self, node: syntax.If) -> bool | None:
        for condition, body in node.branches:
            outer, self.is_open = self.is_open, False
            status = self.run(condition)
            undecided, self.is_open = status is None or self.is_open, outer
            if status:
                return self.run(body)
            if undecided:
                self.skip(node.line, body)
        return self.run(node.otherwise)

    def skip(self, line: int, body: Sequence[syntax.Node]) -> None:
        """Note commands that an open condition leaves out, if they give flags or variables."""
        words = [word for word in simple_words(body) if ASSIGNMENT.match(word)]
        if words:
            self.skipped.append(
                f"line {line + 1}: {', '.join(shown(word) for word in words[:3])}{' …' * (len(words) > 3)}"
            )

    def choose(self, node: syntax.CaseOf) -> bool | None:
        word = closed(self.text(node.word))
        for patterns, body in node.branches:
            if any(fnmatch.fnmatchcase(word, closed(self.text(pattern))) for pattern in patterns):
                return self.run(body)
        return True

    def simple(self, node: syntax.Simple) -> bool | None:
        words = list(node.words)
        assigned: list[str] = []
        while words and ASSIGNMENT.match(words[0]):
            assigned.append(words.pop(0))
        if not words:
            for word in assigned:
                self.assign(word)
            return True
        if words[0] in DECLARATIONS:
            for word in words[1:]:
                if ASSIGNMENT.match(word):
                    self.assign(word)
            return True
        if words[0] in ("[", "test"):
            return Condition(self, [w for w in words[1:] if w != "]"], split=True).value()
        expanded = [each for word in words for each in self.expand(word)]
        return self.start(expanded, node, assigned) if expanded else True

    def start(self, words: list[str], node: syntax.Simple, assigned: Sequence[str] = ()) -> bool | None:
        name = words[0].rpartition("/")[2]
        document = self.document(node)
        if words[0] in self.functions and self.depth < DEEPEST:
            inside = replace(self, arguments=words[1:], depth=self.depth + 1)
            status = inside.execute(self.functions[words[0]])
            self.is_open = self.is_open or inside.is_open
            return status
        if name == "eval":
            return self.nested(" ".join(words[1:]))
        if name == "shift":
            self.arguments = self.arguments[int(words[1]) if words[1:] and words[1].isdigit() else 1 :]
        elif name == "set" and "--" in words:
            self.arguments = words[words.index("--") + 1 :]
        elif name == "read" and document is not None:
            self.variables[words[-1]] = document
        elif name == "unset":
            for word in words[1:]:
                self.variables.pop(word, None)
        elif document is not None and ((name == "cat" and node.output) or (name == "tee" and words[1:])):
            self.files[self.text(node.output) if name == "cat" else words[-1]] = document
        elif name in ("source", ".") and words[1:] and words[1].rpartition("/")[2] != "activate":
            self.sourced[as_written(words[1])] = None
        elif name in ("echo", "printf") and self.printed is not None:
            self.printed.append(" ".join(word for word in words[1:] if word not in ("-n", "-e")))
        elif name == "cat" and len(words) == 1 and document is not None and self.printed is not None:
            self.printed.append(document)
        elif name not in SUCCEED:
            self.is_open = True
            inside = self.copy()
            for word in assigned:
                inside.assign(word)
            for place, word in enumerate(words[:-2]):
                if word.rpartition("/")[2] in SHELLS and re.fullmatch(r"-\w*c", words[place + 1]):
                    self.launch(words[:place], inside, words[place + 2])
                    break
            else:
                self.started.append(Started([*words], node.line))
            if name in SHELLS and document is not None:
                inside.nested(document)
            return None
        return True

    def launch(self, prefix: list[str], inside: "Shell", text: str) -> None:
        """Run the commands of `srun … bash -c "…"`, each behind the words of the launcher."""
        first = len(self.started)
        inside.nested(text)
        self.started[first:] = [replace(each, words=[*prefix, *each.words]) for each in self.started[first:]]

    def nested(self, text: str) -> bool | None:
        if self.depth >= DEEPEST:
            return None
        self.depth += 1
        try:
            return self.run(syntax.parse(as_written(text)))
        finally:
            self.depth -= 1

    def document(self, node: syntax.Simple) -> str | None:
        """The text of a here-document or a here-string."""
        raw = node.document
        if raw is None:
            return None
        heredoc = raw[:1] in "'\"" and (len(raw) < 2 or raw[-1] != raw[0])
        if not heredoc:
            return self.text(raw)
        return raw[1:] if raw[0] == "'" else "".join(value for value, _ in self.parts(raw[1:], quoted=True))

    # --- Variables.

    def assign(self, word: str) -> None:
        found = ASSIGNMENT.match(word)
        assert found
        name, index, added, raw = found[1], found[2], found[3], word[found.end() :]
        old = self.variables.get(name)
        if raw.startswith("(") and not index:
            items = [self.item(token.text) for token in syntax.tokens(raw[1:-1]) if not token.operator]
            flat = [pair for group in items for pair in group]
            start = len(old) if added and isinstance(old, dict) else 1 if added and old else 0
            held = (
                dict(old) if added and isinstance(old, dict) else {"0": old} if added and isinstance(old, str) else {}
            )
            held |= {key or str(start + i): value for i, (key, value) in enumerate(flat)}
            self.variables[name] = held
            return
        value = self.text(raw)
        if index:
            key = self.text(index[1:-1])
            held = dict(old) if isinstance(old, dict) else {}
            held[key] = held.get(key, "") + value if added else value
            self.variables[name] = held
        elif added:
            self.variables[name] = (old.get("0", "") if isinstance(old, dict) else old or "") + value
        else:
            self.variables[name] = value

    def item(self, raw: str) -> list[tuple[str, str]]:
        """The keys and values that one word of an array gives; without a key, the next number is meant."""
        keyed = re.match(r"\[([^\]]+)\]=", raw)
        if keyed:
            return [(self.text(keyed[1]), self.text(raw[keyed.end() :]))]
        return [("", word) for word in self.expand(raw)]

    # --- Words.

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

    def parts(self, raw: str, quoted: bool = False) -> Iterator[tuple[str, str]]:
        """The pieces of a word and what they are: "" as written, "quoted", "split" (an expansion without quotes), "next" (starts another word)."""
        place = 0
        kind = "quoted" if quoted else "split"
        while place < len(raw):
            char = raw[place]
            end = end_of_part(raw, place)
            if char == "\\":
                keep = quoted and raw[place + 1 : end] not in ("$", "`", '"', "\\", "\n")
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
                value = self.arithmetic(inner[1:-1])
                return (open_value(source) if value is None else str(int(value))), end
            return (self.output(inner, source) if following == "(" else self.parameter(inner, source)), end
        found = re.compile(r"[A-Za-z_]\w*|[\d@*#?$!-]").match(raw, place + 1)
        if not found:
            return "$", place + 1
        return self.parameter(found[0], raw[place : found.end()]), found.end()

    def output(self, text: str, source: str) -> str:
        """What a $(…) prints, if it only prints; open otherwise."""
        if self.depth >= DEEPEST:
            return open_value(source)
        inside = replace(self.copy(), printed=[], is_open=False, depth=self.depth + 1, started=[])
        inside.run(syntax.parse(text))
        assert inside.printed is not None
        return open_value(source) if inside.is_open else "\n".join(inside.printed).rstrip("\n")

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
        if rest[:1] == ":" and rest[1:2] in "-=+?" and len(rest) > 1:
            return self.alternative(
                name, rest[1], rest[2:], values if values is not None and any(map(closed, values)) else None, source
            )
        if rest[:1] in ("-", "=", "+", "?"):
            return self.alternative(name, rest[0], rest[1:], values, source)
        if values is None:
            return [] if name in "@*" or index in ("@", "*") else self.unset(name, source)
        changed = [self.changed(value, rest) for value in values] if rest else values
        if any(value is None for value in changed):
            return open_value(source)
        known = [value or "" for value in changed]
        return known if name == "@" or index == "@" else " ".join(known)

    def unset(self, name: str, source: str) -> str:
        """A number or word that the script's caller gives is open; `$?`, `$$` and such are too."""
        return "0" if name == "#" else open_value(source)

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
            number = self.arithmetic(index)
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
            start, size = self.arithmetic(first), self.arithmetic(length) if length else len(value)
            if start is None or size is None:
                return None
            return value[start:][:size] if size >= 0 else value[start:size]
        return None

    def arithmetic(self, text: str) -> int | None:
        """The value of an arithmetic expression; None if it is open or not understood."""
        change = re.fullmatch(r"\s*([A-Za-z_]\w*)\s*(?:(\+\+|--)|([-+*/%]?)=(?!=)(.*))", text, re.DOTALL)
        if change:
            name, step, sign, rest = change.groups()
            value = self.arithmetic(f"{name} {step[0]} 1" if step else f"{name} {sign} ({rest})" if sign else rest)
            if value is not None:
                self.variables[name] = str(value)
            return value
        plain = self.text(text.replace('"', "")).strip()
        if OPEN in plain or len(plain) > 500:
            return None
        choice = re.fullmatch(r"([^?]+)\?([^:]+):(.+)", plain, re.DOTALL)
        if choice:
            test = self.arithmetic(choice[1])
            return None if test is None else self.arithmetic(choice[2] if test else choice[3])
        plain = re.sub(r"!(?!=)", " not ", plain.replace("&&", " and ").replace("||", " or "))
        try:
            plain = re.sub(r"(?<![\w.])0(\d+)", lambda found: str(int(found[1], 8)), plain)
            return self.evaluate(ast.parse(plain or "0", mode="eval").body)
        except (SyntaxError, ValueError, ZeroDivisionError, OverflowError, RecursionError, MemoryError):
            return None

    def evaluate(self, node: ast.AST) -> int:
        match node:
            case ast.Constant(value=int(number)) if abs(number) < 2**63:
                return int(number)
            case ast.Name(id=name):
                value = self.as_text(name)
                known = 0 if value == "" and name not in self.variables else self.arithmetic(value)
                if known is None or name not in self.variables:
                    raise ValueError(name)
                return known
            case ast.BinOp(left=left, op=sign, right=right) | ast.Compare(left=left, ops=[sign], comparators=[right]):
                number = int(ARITHMETIC[type(sign)](self.evaluate(left), self.evaluate(right)))
                if abs(number) >= 2**63:
                    raise OverflowError
                return number
            case ast.UnaryOp(op=sign, operand=operand):
                return int(ARITHMETIC[type(sign)](self.evaluate(operand)))
            case ast.BoolOp(op=sign, values=values):
                found = [bool(self.evaluate(each)) for each in values]
                return int(all(found) if isinstance(sign, ast.And) else any(found))
        raise ValueError(ast.dump(node))


@dataclass
class Condition:
    """A test of `[ … ]` or `[[ … ]]`, by recursive descent: True, False, or None where a file or a program decides.

    A variable that is not set is empty, as in bash; the shell notes that the result rests on it."""

    shell: Shell
    raw: Sequence[str]
    split: bool
    place: int = 0

    def value(self) -> bool | None:
        return self.any()

    def at(self, *words: str) -> bool:
        if self.place < len(self.raw) and self.raw[self.place] in words:
            self.place += 1
            return True
        return False

    def any(self) -> bool | None:
        result = self.all()
        while self.at("||", "-o"):
            other = self.all()
            result = True if result or other else None if result is None or other is None else False
        return result

    def all(self) -> bool | None:
        result = self.one()
        while self.at("&&", "-a"):
            other = self.one()
            result = False if result is False or other is False else None if result is None or other is None else True
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
            self.shell.is_open = True
            if self.split and not closed(left) and '"' not in first:
                return None  # without a word on its left, `[` fails
        left, right = closed(left), closed(right)
        if sign in COMPARISONS:
            numbers = self.shell.arithmetic(left), self.shell.arithmetic(right)
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


def open_value(source: str) -> str:
    """A value that only running the script would give, as it is written."""
    return f"{OPEN}{source.replace(OPEN, '').replace(CLOSE, '')}{CLOSE}"


def as_written(word: str) -> str:
    """A word with its open values as the script writes them."""
    return OPEN_VALUE.sub(lambda found: found[0][1:-1], word)


def closed(text: str) -> str:
    """A text without its open values, which are empty in an empty environment."""
    return OPEN_VALUE.sub("", text)


def split_open(text: str) -> list[str]:
    """The words of a text; the spaces inside an open value split nothing."""
    return re.findall(f"(?:{OPEN}[^{CLOSE}]*{CLOSE}|[^\\s])+", text)


def shown(raw: str) -> str:
    """A word for a message."""
    text = " ".join(raw.replace("\\\n", " ").split())
    return text if len(text) <= 60 else f"{text[:59]}…"


def simple_words(nodes: Sequence[syntax.Node]) -> Iterator[str]:
    """All words of the simple commands in nodes."""
    for node in nodes:
        match node:
            case syntax.Simple():
                yield from node.words
            case syntax.Pipe():
                yield from simple_words(node.commands)
            case syntax.Chain():
                yield from simple_words([node.first, *(each for _, each in node.then)])
            case syntax.If():
                yield from (w for _, body in node.branches for w in simple_words(body))
                yield from simple_words(node.otherwise)
            case syntax.CaseOf():
                yield from (w for _, body in node.branches for w in simple_words(body))
            case syntax.For() | syntax.While() | syntax.CommandGroup():
                yield from simple_words(node.body)
