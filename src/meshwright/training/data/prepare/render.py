"""The program that renders conversations with a Jinja template, in a process of its own that can be ended at any time.

A template is code of whoever published the tokenizer. It runs in Jinja's sandbox (no private attributes, nothing can be changed), in a process
with a limit on its memory, which ends itself if a row takes too long. Requests and answers are lines of JSON on stdin and stdout. This file
imports nothing of ours, so that the process starts in a tenth of a second.

The learned parts are those that the template puts between `{% generation %}` and `{% endgeneration %}`. A template without these tags is rendered
again for each assistant turn: the turn begins where the conversation before it, with the header of an answer, ends:

    render(turns before, with the header) ┐
    <|im_start|>user⏎Hi<|im_end|>⏎<|im_start|>assistant⏎Hello<|im_end|>⏎
    render(turns before and this one)                                   ┘  less the white space after a special token

Some templates render a turn in another way once others follow it (they drop its reasoning). Then the turn begins where the text differs from
that with another content, and ends with the first special token of those that end a turn.
"""

import json
import re
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from datetime import datetime
from itertools import takewhile
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

MEMORY = 1 << 30  # bytes of address space
LONGEST = 1 << 24  # characters of a rendered conversation
FIRST, LAST = "\ufdd0", "\ufdd1"  # mark learned parts; Unicode reserves both for use inside of a program
ASSISTANT, DEFAULT, WITH_TOOLS = "assistant", "default", "tool_use"
TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
Spans = list[tuple[int, int]]
Render = Callable[..., str]


class NotLocatedError(Exception):
    """The learned part of a turn cannot be told from the rest of the text."""


class TooLongError(Exception):
    """The template writes more than a conversation can be."""


class Generation(Extension):
    """`{% generation %}…{% endgeneration %}`: its text between two marks."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

    def mark(self, caller: Callable[[], str]) -> str:
        return FIRST + caller() + LAST


def refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Jinja's own filter writes < and > as HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def compiled(source: str, date: str) -> jinja2.Template:
    """The template with the functions that chat templates use; the time is midnight of `date`."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals |= {"raise_exception": refuse, "strftime_now": datetime.fromisoformat(date).strftime}
    return environment.from_string(source)


def chat(templates: dict[str, jinja2.Template], start: Any, row: Any) -> tuple[str, Spans]:
    """The text of a conversation and its learned parts."""
    messages, tools = row["messages"], row["tools"]
    name = WITH_TOOLS if tools is not None and WITH_TOOLS in templates else DEFAULT
    values = {**start["variables"], "tools": tools, "documents": None}

    def render(turns: Sequence[Any], header: bool = False) -> str:
        text = templates[name].render(messages=turns, add_generation_prompt=header, **values)
        if len(text) > LONGEST:
            raise TooLongError(f"It writes more than {LONGEST:,} characters")
        return text

    marked = render(messages)
    text = marked.replace(FIRST, "").replace(LAST, "")
    if start["learn"] != ASSISTANT:
        return text, [(0, len(text))]
    if TAG.search(start["sources"][name]):
        return text, marked_spans(marked, json.dumps(row, ensure_ascii=False))
    return text, located_spans(render, text, messages, start["special"])


def marked_spans(text: str, row: str) -> Spans:
    """The parts between two marks, as positions in the text without marks."""
    if FIRST in row or LAST in row:
        raise NotLocatedError("The conversation has U+FDD0 or U+FDD1, which mark the learned parts")
    spans: Spans = []
    length = 0
    for number, part in enumerate(text.split(FIRST)):
        learned, *rest = part.split(LAST)
        if len(rest) != (number > 0):
            raise NotLocatedError("The template nests blocks of {% generation %}, or writes a part of one")
        if rest and learned:
            spans.append((length, length + len(learned)))
        length += len(learned) + len("".join(rest))
    return spans


def located_spans(render: Render, text: str, messages: Sequence[Any], special: Sequence[str]) -> Spans:
    spans: Spans = []
    for index, message in enumerate(messages):
        if message.get("role") == ASSISTANT:
            try:
                start = start_of(render, text, messages, index)
                end = end_of(render, text, messages, index, special, start)
            except (jinja2.TemplateError, TypeError, LookupError, ValueError) as error:
                raise NotLocatedError(f"The turns before turn {index + 1} cannot be rendered alone: {error}") from None
            if not (spans[-1][1] if spans else 0) <= start < end:
                raise NotLocatedError(f"The text of turn {index + 1} is empty, or begins before the end of another")
            spans.append((start, end))
    return spans


def start_of(render: Render, text: str, messages: Sequence[Any], index: int) -> int:
    """Where the text of an assistant turn begins, after its header."""
    asked = render(messages[:index], header=True)
    if text.startswith(asked):
        return len(asked)
    if not text.startswith(render(messages[:index])):
        raise NotLocatedError(f"The template rewrites the turns before turn {index + 1} once it is there")
    message, texts = messages[index], [text, asked]
    content = message.get("content")
    if isinstance(content, str) and content.strip():
        other = {**message, "content": "y" if content.strip()[0] == "x" else "x"}
        texts.append(render([*messages[:index], other, *messages[index + 1 :]]))
    alike = (len(set(characters)) == 1 for characters in zip(*texts, strict=False))
    return sum(takewhile(bool, alike))


def end_of(render: Render, text: str, messages: Sequence[Any], index: int, special: Sequence[str], start: int) -> int:
    """Where an assistant turn ends: after the special token that ends it, or before the next turn."""
    until = render(messages[: index + 1])
    bare = until.rstrip()
    stop = max((token for token in special if bare.endswith(token)), key=len, default="")
    if text.startswith(until):
        return len(bare) if stop else len(until)
    at = text.find(stop, start)
    if not stop or at < 0 or stop in json.dumps(messages[index], ensure_ascii=False):
        raise NotLocatedError(f"The template rewrites turn {index + 1} once others follow it")
    return at + len(stop)


def answer(templates: dict[str, jinja2.Template], start: Any, row: Any) -> dict[str, Any]:
    """A text with its learned parts, or what is at fault that there is none: mask, template or row."""
    try:
        text, spans = chat(templates, start, row)
        return {"text": text, "spans": spans}
    except NotLocatedError as error:
        return {"fault": "mask", "why": str(error)}
    except (jinja2.exceptions.SecurityError, TooLongError, MemoryError, OverflowError, RecursionError) as error:
        return {"fault": "template", "why": str(error) or type(error).__name__}
    except Exception as error:  # a template can raise anything
        return {"fault": "row", "why": str(error) or type(error).__name__}


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the caller; this process ends with its stdin
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    start = json.loads(sys.stdin.readline())
    signal.setitimer(signal.ITIMER_REAL, start["limit_s"])  # its signal ends the process, whatever it computes
    try:  # Jinja computes constants as it compiles
        templates = {name: compiled(source, start["date"]) for name, source in start["sources"].items()}
    except Exception as error:  # of Jinja's parser, or of Python's compiler
        print(json.dumps({"fault": "template", "why": str(error)}))
        return
    signal.setitimer(signal.ITIMER_REAL, 0)
    print("{}", flush=True)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_REAL, start["limit_s"])
        text = json.dumps(answer(templates, start, json.loads(line)))
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(text, flush=True)


if __name__ == "__main__":
    main()
