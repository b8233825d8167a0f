"""What a shell script would start: its commands with all variables replaced, found without running anything.

The script is evaluated as bash would run it in its folder, without arguments and in an empty environment. Assignments, arrays, `${X:-default}`,
`$((…))`, `if`, `case`, loops, functions and files that it sources from its folder are followed. Programs are never started: a command that a
value or a condition needs leaves it open.

- An open value stays in the words as it is written: `--seq-length $SEQ`. The caller says so; it is never an empty value or a flag without one.
- An open condition counts as false, and the commands that depend on it are named in `skipped`.
"""

import fnmatch
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from meshwright.interop.shell import syntax
from meshwright.interop.shell.arithmetic import arithmetic
from meshwright.interop.shell.conditions import Condition
from meshwright.interop.shell.expansion import ASSIGNMENT, Expansion
from meshwright.interop.shell.open_values import CLOSE, OPEN, as_written, closed, open_value

MOST_COMMANDS, MOST_TURNS, DEEPEST = 5_000, 200, 25
DECLARATIONS = ("export", "declare", "local", "readonly", "typeset")
SUCCEED = (
    "echo", "printf", "true", ":", "cd", "set", "shift", "exit", "return", "trap", "wait", "sleep", "mkdir", "ulimit", "module", "source", ".",
)  # fmt: skip
SHELLS = ("bash", "sh", "zsh")
BELOW_SCRIPT = re.compile(
    f"{OPEN}[^{CLOSE}]*(?:dirname|BASH_SOURCE)[^{CLOSE}]*{CLOSE}/(.+)"
)  # "$(dirname "$0")/common.sh"


@dataclass(frozen=True)
class Started:
    """One command that a script starts."""

    words: list[str]
    line: int


@dataclass
class Shell(Expansion):
    """The state of a script: variables, functions, and the commands that were started so far."""

    functions: dict[str, syntax.Node] = field(default_factory=dict)
    started: list[Started] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    beside: Callable[[str], str | None] = lambda name: None  # the text of a file in the script's folder
    sourced: dict[str, None] = field(default_factory=dict)  # files that are not read, in order
    included: dict[str, None] = field(default_factory=dict)  # those that are read
    files: dict[str, str] = field(default_factory=dict)  # that the script writes itself, as in `cat <<EOF > FILE`
    printed: list[str] | None = None  # by commands, where a $(…) collects it; None: nothing collects
    is_open: bool = False  # a program prints too, or a condition is open
    count: list[int] = field(default_factory=lambda: [0])
    depth: int = 0

    # Commands return True, False, or None where only running them would tell.

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
                    value = arithmetic(node.words[0], self)
                    return None if value is None else bool(value)
                return self.test(node.words, split=False)
            case syntax.Pipe():
                self.is_open = self.is_open or len(node.commands) > 1  # what the last program prints
                status = [self.execute(each) for each in node.commands][-1]
                return status if status is None or not node.negated else not status
            case syntax.Chain():
                return self.chain(node)
            case syntax.If():
                return self.branch(node)
            case syntax.CaseOf():
                word = closed(self.text(node.word))
                for patterns, body in node.branches:
                    if any(fnmatch.fnmatchcase(word, closed(self.text(pattern))) for pattern in patterns):
                        return self.run(body)
                return True
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

    def test(self, words: Sequence[str], split: bool) -> bool | None:
        condition = Condition(self, words, split)
        value = condition.any()
        self.is_open = self.is_open or condition.rests_on_open
        return value

    def copy(self) -> "Shell":
        """A subshell: what it assigns is gone afterwards."""
        return replace(self, variables=dict(self.variables))

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
            return self.test([w for w in words[1:] if w != "]"], split=True)
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
            self.source(words[1], words[2:])
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

    def source(self, name: str, arguments: list[str]) -> None:
        """Run the commands of a file that lies beside the script; others are named."""
        below = BELOW_SCRIPT.fullmatch(name)
        text = self.beside(below[1] if below else name) if self.depth < DEEPEST else None
        (self.sourced if text is None else self.included)[as_written(name)] = None
        if text is not None:
            inside = replace(self, arguments=arguments or self.arguments, depth=self.depth + 1)
            inside.run(syntax.parse(text))
            self.is_open = self.is_open or inside.is_open

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
        if not raw.startswith("\n"):
            return self.text(raw)
        return raw[2:] if raw[1] == "'" else "".join(value for value, _ in self.parts(raw[2:], True, escaped="$`\\\n"))

    def output(self, text: str, source: str) -> str:
        """What a $(…) prints, if it only prints; open otherwise."""
        if self.depth >= DEEPEST:
            return open_value(source)
        inside = replace(self.copy(), printed=[], is_open=False, depth=self.depth + 1, started=[])
        inside.run(syntax.parse(text))
        assert inside.printed is not None
        return open_value(source) if inside.is_open else "\n".join(inside.printed).rstrip("\n")


def shown(raw: str) -> str:
    """A word for a message."""
    text = " ".join(raw.replace("\\\n", " ").split())
    return text if len(text) <= 60 else f"{text[:59]}…"


def simple_words(part: object) -> Iterator[str]:
    """All words of the simple commands in nodes, without those of conditions and functions."""
    match part:
        case syntax.Simple():
            yield from part.words
        case syntax.If():
            yield from simple_words([[body for _, body in part.branches], part.otherwise])
        case syntax.While() | syntax.For() | syntax.CommandGroup():
            yield from simple_words(part.body)
        case syntax.Pipe() | syntax.Chain() | syntax.CaseOf():
            yield from simple_words(list(vars(part).values()))
        case list() | tuple():
            for each in part:
                yield from simple_words(each)
