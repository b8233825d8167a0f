"""The syntax of a shell script: its text as nested commands, without running anything.

    if [ $FP8 = 1 ]; then ARGS+=(--fp8-format hybrid); fi      →  If((condition, commands), …)

The part of bash that training scripts use: simple commands, `&&`, `||` and pipes, `if`, `case`, `for`, `while`, functions, groups, arrays and
here-documents. Words stay as they are written, with their quotes: `shell` expands them. What is not of this syntax is skipped, because a file of
flags with an unquoted parenthesis should still be read.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

REDIRECTIONS = ("<<<", "<<-", "&>>", "<<", ">>", "&>", ">&", "<&", ">|", "<", ">")
ENDS = (";;&", ";;", ";&", "\n", ";", "&")
CONTROL = ("&&", "||", "|&", "|", "(", ")")
OPERATORS = sorted((*REDIRECTIONS, *ENDS, *CONTROL), key=len, reverse=True)
BEFORE_COMMAND = ("if", "while", "for", "then", "do")
ARRAY = re.compile(r"[A-Za-z_]\w*(\[[^]\s]*\])?\+?=\(")
RESERVED = frozenset(("then", "elif", "else", "fi", "do", "done", "esac", "}"))
CLOSING = {"(": ")", "{": "}", "[": "]"}


@dataclass(frozen=True)
class Token:
    text: str
    line: int
    operator: bool = False


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


def end_of_quote(text: str, start: int) -> int:
    """The place after the quote, the `$(…)`, `${…}` or backtick that starts here; the end of the text if it is never closed."""
    opening = text[start]
    if opening == "'":
        return (text.find("'", start + 1) + 1) or len(text)
    if opening in '"`':
        place = start + 1
        while place < len(text) and text[place] != opening:
            place = end_of_part(text, place) if text[place] != "'" else place + 1
        return min(place + 1, len(text))
    depth, place = 0, start
    closing = CLOSING[opening]
    while place < len(text):
        if text[place] in (opening, closing):
            depth += 1 if text[place] == opening else -1
            place += 1
            if depth == 0:
                return place
        elif text[place] == "#" and opening == "(" and text[place - 1] in " \t\n":
            place = end_of_line(text, place)
        else:
            place = end_of_part(text, place)
    return place


def end_of_line(text: str, place: int) -> int:
    """The place of the next line feed, or of the end of the text."""
    end = text.find("\n", place)
    return end if end >= 0 else len(text)


def end_of_part(text: str, place: int) -> int:
    """The place after one character of a word, or after the quote or expansion that starts there."""
    if text[place] == "\\":
        return min(place + 2, len(text))
    if text[place] in "'\"`":
        return end_of_quote(text, place)
    if text[place] == "$" and text[place + 1 : place + 2] in ("(", "{"):
        return end_of_quote(text, place + 1)
    return place + 1


def tokens(text: str) -> list[Token]:
    """Words and operators, each with its line. A here-document is the word after its operator."""
    out: list[Token] = []
    waiting: list[
        tuple[int, str, bool]
    ] = []  # documents whose text starts on the next line: token, delimiter, tabs removed
    place = line = 0
    while place < len(text):
        char = text[place]
        if char in " \t" or text.startswith("\\\n", place):
            step = 2 if char == "\\" else 1
            line += step - 1
            place += step
            continue
        if char == "#":
            place = end_of_line(text, place)
            continue
        operator = next((each for each in OPERATORS if text.startswith(each, place)), "")
        starts_command = not out or out[-1].operator or out[-1].text in BEFORE_COMMAND
        if operator == "(" and starts_command and text.startswith("((", place):
            end = end_of_quote(text, place)
            out.append(Token(text[place:end], line))
        elif operator:
            end = place + len(operator)
            out.append(Token(operator, line, operator=True))
            if operator == "\n" and waiting:
                end = _documents(text, end, waiting, out)
        else:
            end = _end_of_word(text, place)
            word = text[place:end]
            if out and out[-1].operator and out[-1].text in ("<<", "<<-"):
                waiting.append((len(out), re.sub(r"[\"'\\]", "", word), out[-1].text == "<<-"))
            elif word.isdigit() and text[end : end + 1] in ("<", ">"):  # 2>&1
                word = ""
            if word:
                out.append(Token(word, line))
        line += text.count("\n", place, end)
        place = end
    return out


def _end_of_word(text: str, place: int) -> int:
    start = place
    array = ARRAY.match(text, place)
    if array:
        place = end_of_quote(text, array.end() - 1)
    while place < len(text) and text[place] not in " \t\n;&|()<>":
        place = end_of_part(text, place)
        if text[place : place + 1] == "(" and text[place - 1] in "@!?+*":  # a pattern such as @(a|b)
            place = end_of_quote(text, place)
    return max(place, start + 1)


def _documents(text: str, place: int, waiting: list[tuple[int, str, bool]], out: list[Token]) -> int:
    """Read the here-documents that start on this line; their words become their text."""
    for index, delimiter, tabs in waiting:
        body: list[str] = []
        while place < len(text):
            end = end_of_line(text, place)
            row = text[place:end]
            row = row.lstrip("\t") if tabs else row
            place = end + 1
            if row.strip() == delimiter:
                break
            body.append(row)
        quoted = out[index].text[0] in "'\"\\"
        out[index] = Token(("'" if quoted else '"') + "\n".join(body), out[index].line)
    waiting.clear()
    return min(place, len(text))


class Parser:
    """Recursive descent over tokens; a token that cannot stand where it does is skipped."""

    def __init__(self, words: Sequence[Token]) -> None:
        self.tokens, self.place = words, 0

    @property
    def token(self) -> Token:
        return self.tokens[self.place] if self.place < len(self.tokens) else Token("", 0, operator=True)

    def at(self, *texts: str, operator: bool = False) -> bool:
        return self.place < len(self.tokens) and self.token.operator == operator and self.token.text in texts

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

    def commands(self, *ends: str, operator_ends: Sequence[str] = ()) -> list[Node]:
        """Commands up to one of the words that end them."""
        out: list[Node] = []
        while self.place < len(self.tokens):
            if self.at(*ends) or self.at(*operator_ends, operator=True):
                break
            if self.at(*ENDS, operator=True):
                self.place += 1
                continue
            if self.at(*RESERVED) or self.at(")", operator=True):
                break
            before = self.place
            out.append(self.chain())
            self.place += self.place == before
        return out

    def chain(self) -> Node:
        out = Chain(self.pipe())
        while self.at("&&", "||", operator=True):
            sign = self.take().text
            while self.accept("\n", operator=True):
                pass
            out.then.append((sign, self.pipe()))
        return out if out.then else out.first

    def pipe(self) -> Node:
        negated = self.accept("!")
        out = Pipe([self.command()], negated)
        while self.at("|", "|&", operator=True):
            self.place += 1
            while self.accept("\n", operator=True):
                pass
            out.commands.append(self.command())
        return out if negated or len(out.commands) > 1 else out.commands[0]

    def command(self) -> Node:
        token = self.token
        if self.at("(", operator=True) or self.at("{"):
            self.place += 1
            end = ")" if token.operator else "}"
            body = self.commands(*(() if token.operator else "}"), operator_ends=(")",) if token.operator else ())
            self.accept(end, operator=token.operator)
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

    def redirections(self, command: Simple | None = None) -> None:
        """Skip redirections; a command keeps its here-document or here-string and the file that it writes."""
        while self.at(*REDIRECTIONS, operator=True):
            operator = self.take().text
            if self.place < len(self.tokens) and not self.token.operator:
                word = self.take().text
                if command and operator in ("<<", "<<-", "<<<"):
                    command.document = word
                elif command and operator in (">", ">>", ">|") and not word.startswith("/dev/"):
                    command.output = word

    def simple(self) -> Node:
        out = Simple([], self.token.line)
        while self.place < len(self.tokens):
            self.redirections(out)
            if self.at("(", operator=True):
                if len(out.words) == 1 and self.tokens[self.place + 1 : self.place + 2] and self.tokens[self.place + 1].text == ")":  # fmt: skip
                    self.place += 2
                    return self.body_of(out.words[0])
                out.words.append(self.parenthesis())
            elif self.token.operator or self.place >= len(self.tokens):
                break
            else:
                out.words.append(self.take().text)
        return out

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
        while self.accept("\n", operator=True):
            pass
        return Function(name, self.command())

    def function(self, token: Token) -> Node:
        name = self.take().text
        if self.accept("(", operator=True):
            self.accept(")", operator=True)
        return self.body_of(name)

    def condition(self, token: Token) -> Node:
        out = If([], [], token.line)
        while True:
            test = self.commands("then")
            self.accept("then")
            out.branches.append((test, self.commands("elif", "else", "fi")))
            if self.accept("elif"):
                continue
            if self.accept("else"):
                out.otherwise = self.commands("fi")
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
            out.branches.append((patterns, self.commands("esac", operator_ends=(";;", ";&", ";;&"))))
            while self.accept(*ENDS, operator=True):
                pass
        self.accept("esac")
        return out

    def loop(self, token: Token) -> Node:
        name = self.take().text
        words: list[str] | None = None
        while self.accept("\n", operator=True):
            pass
        if self.accept("in"):
            words = []
            while self.place < len(self.tokens) and not self.token.operator:
                words.append(self.take().text)
        return For(name, words, self.body(), token.line)

    def repeat(self, token: Token) -> Node:
        condition = self.commands("do")
        return While(condition, self.body(), token.text == "until", token.line)

    def body(self) -> list[Node]:
        while self.accept(*ENDS, operator=True):
            pass
        self.accept("do")
        body = self.commands("done")
        self.accept("done")
        return body

    def test(self, token: Token) -> Node:
        words: list[str] = []
        while self.place < len(self.tokens) and not self.accept("]]"):
            words.append(self.take().text)
        return Test([word for word in words if word != "\n"], token.line)
