"""Conversations: the text of one, written by a named template, and the parts of it that are learned.

    messages                     a list of {"role": …, "content": …} (Hugging Face, OpenAI)
    prompt, completion           a user's turn and an assistant's, as text or as messages
    instruction, input, output   a user's turn (with `input` after an empty line) and an assistant's

A template writes each turn as header + content + end + gap. The content and the end of assistant turns are learned: at inference the header
is given, and the model must write the end itself. The text is tokenized as a whole, as Transformers does, and a token is learned if it has a
character of a learned part: tokenized turn by turn, a tokenizer that merges across a boundary would give other tokens.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshwright.errors import MeshwrightError, kind_of, unknown
from meshwright.training.data.tokenizer import Tokenizer

SYSTEM, USER, ASSISTANT = "system", "user", "assistant"
ROLES = (SYSTEM, USER, ASSISTANT)
FORMS = (("messages",), ("prompt", "completion"), ("instruction", "output"))
OPTIONAL = ("input", "tools")  # beside `instruction`; beside `messages`
PARTS = ("assistant", "all")  # what is learned
Spans = tuple[tuple[int, int], ...]  # first character and the one after the last
Turn = tuple[str, str, str]  # header, end, gap


@dataclass(frozen=True)
class Template:
    """`special` are the texts that must be one token each. Without a turn for `system`, its content begins the first user's turn."""

    special: tuple[str, ...]
    turns: dict[str, Turn]
    begin: str = ""
    strips: bool = False  # white space around a content is dropped


def same_turns(header: str, end: str, gap: str = "", names: Sequence[str] = ROLES) -> dict[str, Turn]:
    return {role: (header.format(name), end, gap) for role, name in zip(ROLES, names, strict=True)}


TEMPLATES = {
    "chatml": Template(("<|im_start|>", "<|im_end|>"), same_turns("<|im_start|>{}\n", "<|im_end|>", "\n")),
    "llama3": Template(
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        same_turns("<|start_header_id|>{}<|end_header_id|>\n\n", "<|eot_id|>"),
        "<|begin_of_text|>",
        strips=True,
    ),
    "mistral": Template(("<s>", "</s>"), {USER: ("[INST] ", "[/INST]", ""), ASSISTANT: (" ", "</s>", "")}, "<s>"),
    "gemma": Template(
        ("<bos>", "<start_of_turn>", "<end_of_turn>"),
        {role: (f"<start_of_turn>{name}\n", "<end_of_turn>", "\n") for role, name in ((USER, USER), (ASSISTANT, "model"))},
        "<bos>",
        strips=True,
    ),
    "zephyr": Template(("</s>",), same_turns("<|{}|>\n", "</s>", "\n")),
    "plain": Template((), same_turns("{}: ", "\n", names=("System", "User", "Assistant"))),
}  # fmt: skip


def check_learn(learn: str) -> None:
    if learn not in PARTS:
        raise unknown("MW-DATA-018", "--learn", learn, PARTS, "--learn {}")


def check_template(name: str, tokenizer: Tokenizer) -> None:
    """Raise if there is no such template of ours, or if the tokenizer lacks its special tokens."""
    if name not in TEMPLATES:
        raise unknown("MW-DATA-018", "the template", name, [*TEMPLATES, "tokenizer", "FILE.jinja"], "--template {}")
    if lacking := lacking_tokens(name, tokenizer):
        fitting = [other for other in TEMPLATES if not lacking_tokens(other, tokenizer)]
        raise MeshwrightError(
            "MW-DATA-018",
            f"the tokenizer '{tokenizer.name}' has no token {' and no '.join(lacking)}",
            why=f"The template {name} marks turns with {'it' if len(lacking) == 1 else 'them'}, one token each",
            valid=fitting,
            fix=f"--template {fitting[0]}",
        )


def lacking_tokens(name: str, tokenizer: Tokenizer) -> list[str]:
    special = TEMPLATES[name].special
    return [text for text, tokens in zip(special, tokenizer.encode(special), strict=True) if len(tokens) != 1]


def form_of(names: Iterable[str]) -> tuple[str, ...]:
    """The fields of a row that contain its conversation; none if it has none."""
    names = set(names)
    return next(((*form, *(n for n in OPTIONAL if n in names)) for form in FORMS if names.issuperset(form)), ())


def chat_text(row: Any, where: str, name: str, learn: str) -> tuple[str, Spans]:
    """The text of a row's conversation, and its learned parts."""
    template, turns = TEMPLATES[name], turns_of(row, where)
    if learn == ASSISTANT and all(role != ASSISTANT for role, _ in turns):
        raise without_answer(where)
    turns = [(role, content.strip()) if template.strips else (role, content) for role, content in turns]
    if SYSTEM not in template.turns:
        turns = without_system(turns, where, name)
    text, spans = template.begin, []
    for role, content in turns:
        header, end, gap = template.turns[role]
        start = len(text) + len(header)
        text += header + content + end
        spans += [(start, len(text))] * (role == ASSISTANT)
        text += gap
    return text, ((0, len(text)),) if learn == "all" else tuple(spans)


def turns_of(row: Any, where: str) -> list[tuple[str, str]]:
    """Role and content of each turn."""
    return [checked_turn(message, where, number) for number, message in enumerate(messages_of(row, where), 1)]


def messages_of(row: Any, where: str) -> list[Any]:
    """The turns of a row, whatever is in them."""
    names = list(row) if isinstance(row, dict) else []
    form = form_of(names)
    if not form:
        valid = [" and ".join(fields) for fields in FORMS]
        raise bad_chat(
            where, "has no conversation", f"Its fields: {', '.join(map(str, names))[:100] or 'none'}", valid=valid
        )
    if form[0] == "messages":
        messages = row["messages"]
    elif form[0] == "prompt":
        messages = [*as_messages(row["prompt"], USER), *as_messages(row["completion"], ASSISTANT)]
    else:
        request, extra = row["instruction"], row.get("input") or ""
        if extra and isinstance(request, str):
            request = f"{request}\n\n{extra}" if isinstance(extra, str) else extra
        messages = [{"role": USER, "content": request}, {"role": ASSISTANT, "content": row["output"]}]
    if not isinstance(messages, list) or not messages:
        what = "is empty" if messages == [] else f"is {kind_of(messages)}, not a list of turns"
        raise bad_chat(where, f"the conversation {what}", 'A turn is {"role": "user", "content": "…"}')
    return messages


def as_messages(value: Any, role: str) -> list[Any]:
    return value if isinstance(value, list) else [{"role": role, "content": value}]


def checked_turn(message: Any, where: str, number: int) -> tuple[str, str]:
    role, content = (message.get(key) for key in ("role", "content")) if isinstance(message, dict) else (None, None)
    if role not in ROLES:
        fix = f'map "{role}" to one of them' if isinstance(role, str) else ""
        raise bad_chat(
            where, f"turn {number} has the role {role!r:.40}", "A template has no turn of this role", fix, ROLES
        )
    if not isinstance(content, str):
        raise bad_chat(
            where,
            f"the content of turn {number} is {kind_of(content)}, not text",
            "Tool calls and pictures are not read",
            "--template tokenizer, if the tokenizer has a template for them",
        )
    return role, content


def without_system(turns: list[tuple[str, str]], where: str, name: str) -> list[tuple[str, str]]:
    """The turns with the content of a first system turn before that of the user's turn after it."""
    if turns[0][0] == SYSTEM and len(turns) > 1 and turns[1][0] == USER:
        turns = [(USER, f"{turns[0][1]}\n\n{turns[1][1]}"), *turns[2:]]
    if any(role == SYSTEM for role, _ in turns):
        why = f"The template {name} has no system turns: its text begins the first user's turn"
        raise bad_chat(where, "a system turn is not followed by a user's, or not the first", why, "--template plain")
    return turns


def without_answer(where: str) -> MeshwrightError:
    return bad_chat(where, "has no assistant turn", "No token of it would be learned", "remove it, or --learn all")


def bad_chat(where: str, what: str, why: str, fix: str = "", valid: Sequence[str] = ()) -> MeshwrightError:
    return MeshwrightError("MW-DATA-019", f"{where}: {what}", why=why, fix=fix, valid=[*valid])


def learned_tokens(offsets: np.ndarray, spans: Spans) -> np.ndarray:
    """For each token, whether it has a character of a learned part. `offsets` are its first character and the one after its last."""
    start, stop = offsets[:, 0], np.maximum(offsets[:, 1], offsets[:, 0] + 1)  # offsets of white space may be empty
    learned = np.zeros(len(offsets), np.uint8)
    for first, end in spans:
        learned |= (start < end) & (stop > first)
    return learned
