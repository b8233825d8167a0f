"""The syntax of a shell script: its text as nested commands, without running anything.

    if [ $FP8 = 1 ]; then ARGS+=(--fp8-format hybrid); fi      →  If((condition, commands), …)

The part of bash that training scripts use: simple commands, `&&`, `||` and pipes, `if`, `case`, `for`, `while`, functions, groups, arrays and
here-documents. Words stay as they are written, with their quotes: `expansion` expands them. What is not of this syntax is skipped, because a file of
flags with an unquoted parenthesis should still be read.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from meshwright.interop.shell.tokens import ENDS, REDIRECTIONS, Token, tokens

CASE_ENDS = (";;", ";&", ";;&")
RESERVED = frozenset(("then", "elif", "else", "fi", "do", "done", "esac", "}"))


@dataclass
class Simple:
    """A command as it is written: assignments, the program and its arguments. `document`: its here-document or here-string. `output`: the file
    that it writes."""

    words: list[str]
    line: int
    document: str | None = None
    output: str = ""


@dataclass
class Test:
    """`[[ … ]]` or `(( … ))`: the words, or the arithmetic expression."""

    words: list[str]
    line: int
    arithmetic: bool = False


@dataclass
class Pipe:
    commands: list["Node"]
    negated: bool = False


@dataclass
class Chain:
    """Commands joined by && and ||."""

    first: "Node"
    then: list[tuple[str, "Node"]] = field(default_factory=list)


@dataclass
class If:
    branches: list[tuple[list["Node"], list["Node"]]]
    otherwise: list["Node"]
    line: int


@dataclass
class CaseOf:
    word: str
    branches: list[tuple[list[str], list["Node"]]]
    line: int


@dataclass
class For:
    name: str
    words: list[str] | None  # None: the arguments of the script
    body: list["Node"]
    line: int


@dataclass
class While:
    condition: list["Node"]
    body: list["Node"]
    until: bool
    line: int


@dataclass
class CommandGroup:
    body: list["Node"]
    subshell: bool


@dataclass
class Function:
    name: str
    body: "Node"


Node = Simple | Test | Pipe | Chain | If | CaseOf | For | While | CommandGroup | Function


def parse(text: str) -> list[Node]:
    """The commands of a script."""
    return Parser(tokens(text.removeprefix("\ufeff").replace("\r\n", "\n"))).script()


class Parser:
    """Recursive descent over tokens; a token that cannot stand where it does is skipped."""

    def __init__(self, words: Sequence[Token]) -> None:
        self.tokens, self.place = words, 0

    @property
    def token(self) -> Token:
        return self.tokens[self.place] if self.place < len(self.tokens) else Token("", 0, operator=True)

    def at(self, *texts: str, operator: bool = False) -> bool:
        return self.token.operator == operator and self.token.text in texts

    def take(self) -> Token:
        token = self.token
        self.place += 1
        return token

    def accept(self, *texts: str, operator: bool = False) -> bool:
        found = self.at(*texts, operator=operator)
        self.place += found
        return found

    def script(self) -> list[Node]:
        out: list[Node] = []
        while self.place < len(self.tokens):
            out += self.commands()
            self.place += 1  # a word that closes nothing
        return out

    def commands(self, in_case: bool = False) -> list[Node]:
        """Commands up to a word that ends them, or to the `;;` of a case."""
        out: list[Node] = []
        while self.place < len(self.tokens) and not self.at(*RESERVED) and not self.at(")", operator=True):
            if in_case and self.at(*CASE_ENDS, operator=True):
                break
            before = self.place
            if not self.accept(*ENDS, operator=True):
                out.append(self.chain())
                self.place += self.place == before
        return out

    def chain(self) -> Node:
        out = Chain(self.pipe())
        while self.at("&&", "||", operator=True):
            sign = self.take().text
            self.skip("\n")
            out.then.append((sign, self.pipe()))
        return out if out.then else out.first

    def pipe(self) -> Node:
        negated = self.accept("!")
        out = Pipe([self.command()], negated)
        while self.accept("|", "|&", operator=True):
            self.skip("\n")
            out.commands.append(self.command())
        return out if negated or len(out.commands) > 1 else out.commands[0]

    def command(self) -> Node:
        token = self.token
        if self.at("(", operator=True) or self.at("{"):
            self.place += 1
            body = self.commands()
            self.accept(")" if token.operator else "}", operator=token.operator)
            self.redirections()
            return CommandGroup(body, token.operator)
        if token.operator or not token.text:
            self.place += 1
            return Simple([], token.line)
        if token.text.startswith("((") and token.text.endswith("))"):
            self.place += 1
            return Test([token.text[2:-2]], token.line, arithmetic=True)
        compound = {
            "if": self.condition, "case": self.case, "for": self.loop, "select": self.loop, "while": self.repeat,
            "until": self.repeat, "[[": self.test, "function": self.function,
        }.get(token.text)  # fmt: skip
        if compound:
            self.place += 1
            node = compound(token)
            self.redirections()
            return node
        return self.simple()

    def skip(self, *operators: str) -> None:
        while self.accept(*operators, operator=True):
            pass

    def redirections(self, command: Simple | None = None) -> None:
        """Skip redirections; a command keeps its here-document or here-string and the file that it writes."""
        while self.at(*REDIRECTIONS, operator=True):
            operator = self.take().text
            if not self.token.operator:
                word = self.take().text
                if command and operator in ("<<", "<<-", "<<<"):
                    command.document = word
                elif command and operator in (">", ">>", ">|") and not word.startswith("/dev/"):
                    command.output = word

    def simple(self) -> Node:
        out = Simple([], self.token.line)
        while True:
            self.redirections(out)
            if self.at("(", operator=True):
                if len(out.words) == 1 and [token.text for token in self.tokens[self.place + 1 : self.place + 2]] == [
                    ")"
                ]:
                    self.place += 2
                    return self.body_of(out.words[0])
                out.words.append(self.parenthesis())
            elif self.token.operator:
                return out
            else:
                out.words.append(self.take().text)

    def parenthesis(self) -> str:
        """The text of an unquoted parenthesis, as in a list of flags: no command can start there."""
        depth, text = 0, ""
        while self.place < len(self.tokens):
            token = self.take()
            text += token.text
            depth += {"(": 1, ")": -1}.get(token.text, 0) if token.operator else 0
            if depth == 0:
                break
        return text

    def body_of(self, name: str) -> Function:
        self.skip("\n")
        return Function(name, self.command())

    def function(self, token: Token) -> Node:
        name = self.take().text
        if self.accept("(", operator=True):
            self.accept(")", operator=True)
        return self.body_of(name)

    def condition(self, token: Token) -> Node:
        out = If([], [], token.line)
        while True:
            test = self.commands()
            self.accept("then")
            out.branches.append((test, self.commands()))
            if self.accept("elif"):
                continue
            if self.accept("else"):
                out.otherwise = self.commands()
            self.accept("fi")
            return out

    def case(self, token: Token) -> Node:
        out = CaseOf(self.take().text, [], token.line)
        while self.accept("\n", operator=True) or self.accept("in"):
            pass
        while self.place < len(self.tokens) and not self.at("esac"):
            self.accept("(", operator=True)
            patterns: list[str] = []
            while self.place < len(self.tokens) and not self.accept(")", operator=True):
                word = self.take()
                patterns += [] if word.operator else [word.text]
            out.branches.append((patterns, self.commands(in_case=True)))
            self.skip(*ENDS)
        self.accept("esac")
        return out

    def loop(self, token: Token) -> Node:
        name = self.take().text
        words: list[str] | None = None
        self.skip("\n")
        if self.accept("in"):
            words = []
            while not self.token.operator:
                words.append(self.take().text)
        return For(name, words, self.body(), token.line)

    def repeat(self, token: Token) -> Node:
        return While(self.commands(), self.body(), token.text == "until", token.line)

    def body(self) -> list[Node]:
        self.skip(*ENDS)
        self.accept("do")
        body = self.commands()
        self.accept("done")
        return body

    def test(self, token: Token) -> Node:
        words: list[str] = []
        while self.place < len(self.tokens) and not self.accept("]]"):
            words.append(self.take().text)
        return Test([word for word in words if word != "\n"], token.line)
