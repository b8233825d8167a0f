"""The words and operators of a shell script, and where quotes and expansions end. Words keep their quotes."""

import re
from dataclasses import dataclass

REDIRECTIONS = ("<<<", "<<-", "&>>", "<<", ">>", "&>", ">&", "<&", ">|", "<", ">")
ENDS = (";;&", ";;", ";&", "\n", ";", "&")
CONTROL = ("&&", "||", "|&", "|", "(", ")")
OPERATORS = sorted((*REDIRECTIONS, *ENDS, *CONTROL), key=len, reverse=True)
BEFORE_COMMAND = ("if", "while", "for", "then", "do")
ARRAY = re.compile(r"[A-Za-z_]\w*(\[[^]\s]*\])?\+?=\(")
CLOSING = {"(": ")", "{": "}", "[": "]"}

# A document whose text starts on the next line: its token, its delimiter, and whether tabs are removed.
Waiting = tuple[int, str, bool]


@dataclass(frozen=True)
class Token:
    text: str
    line: int
    operator: bool = False


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
    waiting: list[Waiting] = []
    place = line = 0
    while place < len(text):
        char = text[place]
        if char in " \t" or text.startswith("\\\n", place):
            line += char == "\\"
            place += 1 + (char == "\\")
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


def _documents(text: str, place: int, waiting: list[Waiting], out: list[Token]) -> int:
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
        mark = "\n'" if quoted else '\n"'  # no word starts with a line feed
        out[index] = Token(mark + "\n".join(body), out[index].line)
    waiting.clear()
    return min(place, len(text))
