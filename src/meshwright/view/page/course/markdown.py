"""A chapter's Markdown as plain data that the page draws; the documentation site shows the same file.

    kind       from                                          content
    text       a paragraph                                   inline
    list       lines that begin with "- "                    items, each inline
    table      lines that begin with "|"                     head and rows of inline cells
    heading    "## …"                                        inline
    figure     ![words](../pictures/course/NAME.svg)         the name, and words below the figure
    question   the section "Check yourself"                  what is asked, options with a reason each; the right one begins with "Right"
    more       <details> elsewhere                           a question and its answer
    number     the section "The same number"                 text, commands and Python; `number` is what both give

Other code blocks are outputs of commands, as drawn for the site: the page has a figure that moves in their place. Inline text is a list of
strings and [kind, text, target] with the kinds bold, italic, code and link.
"""

import re
from collections.abc import Iterator
from typing import Any

from meshwright.units import Json

Inline = list[Any]
INLINE = re.compile(
    r"\*\*(?P<bold>.+?)\*\*|`(?P<code>[^`]+)`|\[(?P<link>[^\]]+)\]\((?P<target>[^)]+)\)|(?<![\w\\])\*(?P<italic>[^*\s][^*]*)\*"
)
FIGURE = re.compile(r"!\[(?P<words>[^\]]*)\]\(\.\./pictures/course/(?P<name>[\w-]+)\.svg\)")
DETAILS = re.compile(r"<details><summary>(?P<ask>.*?)</summary>(?P<answer>.*)</details>", re.DOTALL)
NUMBER = re.compile(r"<!-- number (?P<path>\S+) (?P<value>\S+) -->")
QUESTION, SAME = "Check yourself", "The same number"
ESCAPED = "\0"  # stands for an escaped asterisk while marks are read


def inline(text: str) -> Inline:
    """Text with its marks, such as ["a ring of ", ["bold", "P", ""], " ranks"]."""
    out: Inline = []
    text, end = " ".join(text.split()).replace("\\*", ESCAPED), 0
    for m in INLINE.finditer(text):
        kind = str(m.lastgroup) if m.lastgroup != "target" else "link"
        out += [text[end : m.start()], [kind, m[kind].strip("`").replace(ESCAPED, "*"), m["target"] or ""]]
        end = m.end()
    out.append(text[end:])
    return [part.replace(ESCAPED, "*") if isinstance(part, str) else part for part in out if part]


def pieces(text: str) -> Iterator[tuple[str, str]]:
    """The blocks of a page with their kind: heading, figure, details, comment, table, list, text, or the language of a code block."""
    lines = iter(
        re.sub(r"<details>.*?</details>", lambda m: m[0].replace("\n", " "), text, flags=re.DOTALL).splitlines()
    )
    kind, gathered = "", list[str]()
    starts = {"#": "heading", "!": "figure", "<d": "details", "<!": "comment", "|": "table", "- ": "list"}
    for line in lines:
        if line.startswith("```"):
            if gathered:
                yield kind, "\n".join(gathered)
            language, body = line[3:], list[str]()
            for row in lines:
                if row.startswith("```"):
                    break
                body.append(row)
            yield f"code {language}", "\n".join(body)
            gathered = []
            continue
        found = next(
            (name for start, name in starts.items() if line.startswith(start)), "" if line.strip() else "blank"
        )
        if gathered and (
            found in ("blank", "heading", "figure", "details", "comment") or kind in ("heading", "details", "comment")
        ):
            yield kind, "\n".join(gathered)
            gathered = []
        if found != "blank":
            kind = kind if gathered and not found else found or "text"
            gathered.append(line)
    if gathered:
        yield kind, "\n".join(gathered)


def chapter(text: str) -> Json:
    """The title of a page and its blocks."""
    title, blocks, section = "", list[Json](), ""
    for kind, body in pieces(text):
        if kind == "heading":
            words = body.lstrip("# ")
            if not title:
                title = words
                continue
            section = words
            if section == QUESTION:
                blocks.append({"kind": "question", "ask": [], "options": []})
            elif section == SAME:
                blocks.append({"kind": "number", "text": [], "commands": [], "python": "", "path": "", "number": 0.0})
            else:
                blocks.append({"kind": "heading", "text": inline(words)})
        elif section in (QUESTION, SAME):
            add(blocks[-1], kind, body)
        elif kind == "figure" and (m := FIGURE.match(body)):
            blocks.append({"kind": "figure", "name": m["name"], "words": inline(m["words"])})
        elif kind == "details" and (m := DETAILS.match(body)):
            answer = re.sub(r"</?code>", "`", m["answer"])
            blocks.append({"kind": "more", "ask": inline(m["ask"]), "answer": inline(answer)})
        elif kind == "list":
            blocks.append({"kind": "list", "items": [inline(item) for item in re.split(r"^- ", body, flags=re.M)[1:]]})
        elif kind == "table":
            head, _, *rows = [
                [inline(cell.strip()) for cell in row.strip().removeprefix("|").removesuffix("|").split("|")]
                for row in body.splitlines()
            ]
            blocks.append({"kind": "table", "head": head, "rows": rows})
        elif kind == "text":
            blocks.append({"kind": "text", "text": inline(body)})
    return {"title": title, "blocks": blocks}


def add(block: Json, kind: str, body: str) -> None:
    """Add a piece to a question, or to the section of the number."""
    if block["kind"] == "question":
        if kind == "text":
            block["ask"] = inline(body)
        elif m := DETAILS.match(body):
            why = m["answer"].strip()
            block["options"].append({"text": inline(m["ask"]), "why": inline(why), "right": why.startswith("Right")})
    elif kind == "text":
        block["text"] = [*block["text"], inline(body)]
    elif kind == "code console":
        block["commands"] += [
            part.partition("\n")[0].partition(" | ")[0] for part in re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]
        ]
    elif kind == "code python":
        block["python"] = body
    elif m := NUMBER.match(body):
        block |= {"path": m["path"], "number": float(m["value"])}
