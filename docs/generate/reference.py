"""Reference pages from the code: the commands and their options, the keys of a plan file, the Python functions and their results.

`make docs` writes docs/reference/.
"""

import inspect
import re
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "reference"
NOTE = "<!-- Written by `make docs` from the code: changes here are lost. -->"


def commands() -> str:
    """Every command with its arguments and options, in the words of `--help`."""
    import typer

    from meshwright.cli import COMMANDS, build

    lines = ["# Commands", NOTE, "", "`meshwright COMMAND --help` prints the same. Exit codes:", "", exit_codes(), ""]
    for name in COMMANDS:
        made: Any = typer.main.get_command(build(name))
        lines += [f"## {name}", ""]
        inner = getattr(made, "commands", {})
        lines += [plain(made.help or COMMANDS[name]), ""]
        for title, command in inner.items() or [("", made)]:
            if title:
                lines += [f"### {name} {title}", "", plain(command.help or ""), ""]
            lines += [*options(command), ""]
    return "\n".join(lines).rstrip() + "\n"


def exit_codes() -> str:
    import meshwright.cli

    section = (meshwright.cli.__doc__ or "").partition("Exit codes\n")[2].partition("\n\n")[0]
    rows = [line.split(None, 1) for line in section.splitlines() if line.strip()]
    return "\n".join(("| code | meaning |", "| --- | --- |", *(f"| {code} | {cell(text)} |" for code, text in rows)))


def options(command: Any) -> Iterator[str]:
    """Rows of a table: the spelling, the default, what it does."""
    rows = [p for p in command.params if "--help" not in p.opts]
    if not rows:
        return
    yield "| option | default | |"
    yield "| --- | --- | --- |"
    for p in rows:
        if p.param_type_name == "argument":
            spelled = f"`{p.name.upper()}`"
        else:
            spelled = ", ".join(f"`{word}`" for word in (*p.opts, *p.secondary_opts))
        value = p.default() if callable(p.default) else p.default
        shown = "" if value in (None, "", False, (), [], 0) or p.required else f"`{value}`"
        yield f"| {spelled} | {'required' if p.required else shown} | {cell(getattr(p, 'help', '') or '')} |"


def plain(text: str) -> str:
    """A docstring as paragraphs."""
    return "\n\n".join(" ".join(part.split()) for part in inspect.cleandoc(text).split("\n\n"))


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def keys() -> str:
    """Every key of a plan file by section: its type, its default and its meaning."""
    from meshwright.describe.config import CLASSES

    lines = ["# Keys of a plan file", NOTE, ""]
    lines += [
        "`meshwright config schema` prints the same as a JSON Schema, for editors. Sections may be names of catalog entries.",
        "",
    ]
    done: set[type] = set()
    for section, cls in CLASSES.items():
        lines += [f"## [{section}]", "", first_paragraph(cls.__doc__), "", *key_table(cls, done), ""]
    return "\n".join(lines).rstrip() + "\n"


def key_table(cls: Any, done: set[type]) -> Iterator[str]:
    """The keys of one class, then those of the tables inside it that were not listed before."""
    done.add(cls)
    inner = []
    yield "| key | type | default | |"
    yield "| --- | --- | --- | --- |"
    for name, field in cls.model_fields.items():
        found = list(tables_in(field.annotation))
        inner += [part for part in found if part not in done and part not in inner]
        default = "required" if field.is_required() else shown_default(field.get_default(call_default_factory=True))
        yield f"| `{name}` | {type_name(field.annotation)} | {default} | {cell(field.description or '')} |"
    for part in inner:
        if part not in done:
            yield ""
            yield f"### {part.__name__}"
            yield ""
            yield first_paragraph(part.__doc__)
            yield ""
            yield from key_table(part, done)


def first_paragraph(text: str | None) -> str:
    return plain(text or "").partition("\n\n")[0]


def tables_in(annotation: Any) -> Iterator[Any]:
    """The classes of ours inside an annotation."""
    from meshwright.describe.base import Described

    if isinstance(annotation, type) and not typing.get_args(annotation) and issubclass(annotation, Described):
        yield annotation
    for part in typing.get_args(annotation):
        yield from tables_in(part)


def type_name(annotation: Any) -> str:
    """A type, as a reader of a plan file would name it: number, text, list, table, or the allowed values."""
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return ", ".join(f"`{part}`" for part in parts)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(type_name(part) for part in parts if part is not type(None)))
    if origin is typing.Annotated:
        return type_name(parts[0])
    if origin in (tuple, list):
        return f"list of {type_name(parts[0])}"
    if origin is dict:
        return "table"
    simple = {bool: "true or false", int: "whole number", float: "number", str: "text"}
    return simple.get(annotation, "table" if isinstance(annotation, type) else "text")


def shown_default(value: Any) -> str:
    if value in ("", None, (), {}) or (hasattr(value, "model_dump")):
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        return "`[" + ", ".join(f'"{v}"' if isinstance(v, str) else str(v) for v in value) + "]`"
    return f'`"{value}"`' if isinstance(value, str) else f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def python() -> str:
    """The functions of `import meshwright` and the classes that they return."""
    from meshwright import api, check, formulas
    from meshwright.describe.config import Config
    from meshwright.describe.result import Measurement, Prediction
    from meshwright.planner.result import Result
    from meshwright.predict.estimate import Estimate, Simulation

    lines = ["# Python", NOTE, "", "```python", "import meshwright as mw", "```", ""]
    lines += [plain((api.__doc__ or "").partition("\n\n")[2].partition("\n\n")[2]), "", "## Functions", ""]
    for name in ("load", "estimate", "decode", "plan", "simulate", "verify", "train", "parallelize"):
        lines += [*function_entry(f"mw.{name}", getattr(api, name)), ""]
    lines += ["### mw.check", "", plain((check.__doc__ or "").partition("\n\n")[0]), ""]
    for name in ("record", "attach", "watch"):
        lines += [*function_entry(f"mw.check.{name}", getattr(check, name)), ""]
    lines += ["### mw.formulas", "", plain((formulas.__doc__ or "").partition("\n\n")[0]), ""]
    for name in formulas.__all__:
        if inspect.isfunction(getattr(formulas, name)):
            lines += [*function_entry(f"mw.formulas.{name}", getattr(formulas, name)), ""]
    lines += [
        "## Results",
        "",
        "A result shows itself: a page in the terminal (`print(result)`), tables and figures in a notebook.",
        "",
    ]
    for cls in (Config, Estimate, Prediction, Simulation, Result, Measurement):
        lines += [*class_entry(cls), ""]
    lines += [
        "`Proof` (of `verify`), `Training` (of `train`) and `ParallelModule` (of `parallelize`) need torch; they have `as_dict()` too.",
        "",
    ]
    return "\n".join(lines).rstrip() + "\n"


def function_entry(name: str, function: Callable[..., Any]) -> Iterator[str]:
    from meshwright.describe.config import Asked

    signature = inspect.signature(function)
    asked = ", ".join(f"{key}=…" for key in Asked.__annotations__)
    arguments = ", ".join(
        {"KEYWORD_ONLY": f"{p.name}=…", "VAR_KEYWORD": asked if p.name == "asked" else f"**{p.name}"}.get(
            p.kind.name, p.name
        )
        for p in signature.parameters.values()
    )
    value = signature.return_annotation
    returned = value if isinstance(value, str) else re.sub(r"meshwright\.[\w.]+\.", "", inspect.formatannotation(value))
    yield f"### {name}"
    yield ""
    yield f"`{name}({arguments}) → {returned}`"
    yield ""
    yield plain(function.__doc__ or "")


def class_entry(cls: type) -> Iterator[str]:
    """The fields and the public properties and methods of a result."""
    from meshwright.describe.config import Configured

    yield f"### {cls.__name__}"
    yield ""
    yield plain(cls.__doc__ or "")
    yield ""
    yield "| | |"
    yield "| --- | --- |"
    fields = [name for name in getattr(cls, "__dataclass_fields__", {}) if not name.startswith("_")]
    yield f"| fields | {', '.join(f'`{name}`' for name in fields)} |"
    inherited = vars(Configured) if issubclass(cls, Configured) else {}
    for name, member in {**inherited, **vars(cls)}.items():
        if (
            name.startswith("_")
            or name in fields
            or not (callable(member) or isinstance(member, property) or hasattr(member, "func"))
        ):
            continue
        function = getattr(member, "fget", None) or getattr(member, "func", None) or member
        call = "()" if inspect.isfunction(member) else ""
        yield f"| `{name}{call}` | {cell(re.sub(r'`{2,}', '`', first_paragraph(getattr(function, '__doc__', ''))))} |"


PAGES: dict[str, Callable[[], str]] = {"commands.md": commands, "keys.md": keys, "python.md": python}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for file_name, write in PAGES.items():
        (FOLDER / file_name).write_text(write(), "utf-8")
