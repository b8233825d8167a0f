"""The chat template of a tokenizer: found in its folder, and rendered by another process (`render.py`) with limits of time and memory.

`chat_template.jinja` beside the tokenizer.json comes before `chat_template` of tokenizer_config.json, as in Transformers. Of several named templates
`tool_use` renders conversations with tools. The variables are the special tokens (`bos_token`, `eos_token`, …). A template that asks for the date
gets the one of the option, so that the same command gives the same tokens.
"""

import datetime
import hashlib
import json
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from meshwright.describe.files import read_text
from meshwright.errors import MeshwrightError, kind_of
from meshwright.training.data.prepare.chat import ASSISTANT, TEMPLATES, Spans, bad_chat, messages_of, without_answer
from meshwright.training.data.tokenizer import BYTES, Tokenizer, package
from meshwright.units import Json

TOKENIZER = "tokenizer"  # --template tokenizer
FILE, CONFIG, TOKENS = "chat_template.jinja", "tokenizer_config.json", "special_tokens_map.json"
LIMIT = 5_000_000  # bytes of a template, or of a file of settings
SECONDS = 20.0  # for one conversation
TAGS = "put {% generation %} and {% endgeneration %} around the assistant's text in the template, or --learn all"


def is_own(template: str) -> bool:
    """Whether a template is the tokenizer's, or a file, and not one of ours."""
    return template == TOKENIZER or template.endswith(".jinja")


class OwnTemplate:
    """Use as a context manager: it holds the process that renders. `options` is what the header of a token file stores."""

    def __init__(self, template: str, tokenizer: str, opened: Tokenizer, learn: str, date: str = "") -> None:
        package("jinja2", "A chat template")
        folder = None if tokenizer == BYTES else Path(tokenizer).parent
        self.learn, self.name = learn, template
        sources = {"default": read_text(template, LIMIT)} if template != TOKENIZER else sources_of(folder)
        digest = hashlib.sha256(json.dumps(sources, sort_keys=True).encode()).hexdigest()
        self.options: Json = {"template": template, "template_hash": digest, "learn": learn}
        day = checked_date(date) if date else datetime.date.today().isoformat()
        if any("strftime_now" in source for source in sources.values()):
            self.options["date"] = day
        elif date:
            raise MeshwrightError("MW-DATA-018", "--date has no effect", why="The template does not ask for the date")
        self.start: Json = {"sources": sources, "variables": special_tokens(folder), "date": day, "limit_s": SECONDS}
        self.start |= {"special": opened.special, "learn": learn}

    def __enter__(self) -> "OwnTemplate":
        # -P: files beside the program are not imported.
        command = [sys.executable, "-P", str(Path(__file__).with_name("render.py"))]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
        try:
            self._ask(self.start, "the chat template")
        except MeshwrightError:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def text(self, row: Any, where: str) -> tuple[str, Spans]:
        """The text of a row's conversation, and its learned parts."""
        messages = messages_of(row, where)
        for number, message in enumerate(messages, 1):
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise bad_chat(where, f"turn {number} has no role", f"It is {kind_of(message)}")
        if self.learn == ASSISTANT and all(message["role"] != ASSISTANT for message in messages):
            raise without_answer(where)
        found = self._ask({"messages": messages, "tools": tools_of(row, where)}, where)
        spans = tuple((start, end) for start, end in found["spans"])
        if not spans:
            why = "Its {% generation %} blocks write nothing"
            raise bad_chat(where, "the template marks no learned text", why, "--learn all")
        return found["text"], spans

    def _ask(self, request: Json, where: str) -> Json:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            late = self.process.wait() == -signal.SIGALRM
            why = f"It took more than {SECONDS:.0f} s" if late else "Its process ended"
            raise bad_template(where, why)
        found = json.loads(line)
        if fault := found.get("fault"):
            why = found["why"][:300]
            if fault == "template":
                raise bad_template(where, why)
            if fault == "mask":
                raise bad_chat(where, "which part is learned cannot be told from the template", why, TAGS)
            raise bad_chat(where, "the chat template refuses the conversation", why)
        return found


def bad_template(where: str, why: str) -> MeshwrightError:
    fix = "--template chatml, or another of ours"
    return MeshwrightError("MW-DATA-018", f"{where}: the chat template cannot be rendered", why=why, fix=fix)


def sources_of(folder: Path | None) -> dict[str, str]:
    """The templates of a tokenizer's folder, by name. Raises if there is none."""
    if folder is not None and (folder / FILE).is_file():
        return {"default": read_text(folder / FILE, LIMIT)}
    found = None if folder is None else settings_of(folder / CONFIG).get("chat_template")
    if isinstance(found, list):  # [{"name": "default", "template": "…"}, …]
        named = [one for one in found if isinstance(one, dict)]
        found = {one.get("name"): one.get("template") for one in named}
    sources = {"default": found} if isinstance(found, str) else found or {}
    if not isinstance(sources, dict) or not all(isinstance(v, str) for pair in sources.items() for v in pair):
        what, why = (
            f"chat_template in '{folder}/{CONFIG}' is not a template",
            "It is text, or a list of name and template",
        )
        raise MeshwrightError("MW-DATA-018", what, why=why)
    if "default" not in sources:
        raise MeshwrightError(
            "MW-DATA-018",
            "the tokenizer has no chat template",
            why=f"{FILE}, or chat_template in {CONFIG}, stands beside the tokenizer.json",
            valid=[*TEMPLATES, "FILE.jinja"],
            fix="--template chatml, if the model was trained with it",
        )
    return sources


def special_tokens(folder: Path | None) -> dict[str, str]:
    """`bos_token`, `eos_token` and the like, as text."""
    found: dict[str, str] = {}
    for path in () if folder is None else (folder / TOKENS, folder / CONFIG):
        for name, value in settings_of(path).items():
            text = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(text, str):
                found[name] = text
    return found


def settings_of(path: Path) -> Json:
    """A JSON object beside the tokenizer; empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(read_text(path, LIMIT))
    except (ValueError, RecursionError) as error:
        if isinstance(error, MeshwrightError):
            raise
        found = None
    if not isinstance(found, dict):
        raise MeshwrightError("MW-DATA-018", f"'{path}' is not a JSON object")
    return found


def checked_date(text: str) -> str:
    try:
        return datetime.date.fromisoformat(text).isoformat()
    except ValueError:
        today = datetime.date.today().isoformat()
        raise MeshwrightError("MW-DATA-018", f"--date {text[:40]!r} is not a date", fix=f"--date {today}") from None


def tools_of(row: Json, where: str) -> Any:
    """The tools of a row: a list of descriptions, or the same as a text of JSON; None without tools."""
    tools = row.get("tools")
    if isinstance(tools, str) and tools:
        with suppress(ValueError, RecursionError):
            tools = json.loads(tools)
    if tools and not isinstance(tools, list):
        raise bad_chat(where, f"tools is {kind_of(tools)}", "It is a list of tools, or that list as JSON")
    return tools or None
