"""The arguments and options of all commands, each defined once: flags, help and limits are rows of `options.toml`.

A command is a function whose parameters have a type and a default; `described` adds the rest from the row with the parameter's name.
"""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from typing import Annotated, Any, TypeVar

import typer

HELP_NAMES = {"help_option_names": ["-h", "--help"]}
NAMES = {"panel": "rich_help_panel"}  # keys of a row that typer calls otherwise
F = TypeVar("F", bound=Callable[..., Any])


@cache
def rows() -> dict[str, dict[str, dict[str, Any]]]:
    return tomllib.loads(files("meshwright.cli").joinpath("options.toml").read_text("utf-8"))


def described(command: F) -> F:
    """A command whose parameters have their flags, help and limits: from the row "nodes_up_command" or "nodes" of its module, or else
    from that of [all]."""
    own = {**rows()["all"], **rows().get(command.__module__.rpartition(".")[2], {})}
    signature = inspect.signature(command, eval_str=True)
    parameters = []
    for parameter in signature.parameters.values():
        row = own.get(f"{parameter.name}_{command.__name__}") or own.get(parameter.name)
        annotation = Annotated[parameter.annotation, typer_info(row)] if row else parameter.annotation
        parameters.append(parameter.replace(annotation=annotation))
    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def typer_info(row: dict[str, Any]) -> Any:
    options = {NAMES.get(key, key): value for key, value in row.items() if key not in ("flags", "at_least_one")}
    if row.get("at_least_one"):
        options["callback"] = at_least_one
    return typer.Option(*row["flags"].split(), **options) if "flags" in row else typer.Argument(**options)


def at_least_one(context: typer.Context, parameter: typer.CallbackParam, value: int) -> int:
    """Refuse a number of 0 that was typed: 0 stands for an option that was not given."""
    source = context.get_parameter_source(str(parameter.name))
    if value == 0 and source is not None and source.name == "COMMANDLINE":
        raise typer.BadParameter("at least 1 is needed")
    return value


def command_group(help: str | None = None) -> typer.Typer:
    """A command with subcommands."""
    return typer.Typer(add_completion=False, pretty_exceptions_enable=False, context_settings=HELP_NAMES, help=help)
