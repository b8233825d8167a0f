"""The arguments and options of all commands, each defined once: flags, help and limits are rows of `options.toml`.

A command is a function whose parameters have a type and a default; `described` adds the rest from the row with the parameter's name.
Parameters that several commands share are a `TypedDict`, which `**asked` stands for.
"""

import inspect
import tomllib
from collections.abc import Callable, Iterable
from functools import cache
from importlib.resources import files
from typing import Annotated, Any, TypedDict, TypeVar, get_args, get_origin, get_type_hints

import typer

from meshwright.units import Json

HELP_NAMES = {"help_option_names": ["-h", "--help"]}
NAMES = {"panel": "rich_help_panel"}  # keys of a row that typer calls otherwise
F = TypeVar("F", bound=Callable[..., Any])


class Overrides(TypedDict):
    """Options that change a plan file."""

    cluster: str
    nodes: int
    gpus: int
    set: list[str]


class TrainingOptions(TypedDict):
    """Options that describe a training."""

    nodes: int
    gpus: int
    stack: str
    batch: int
    seq: int
    tokens: str
    set: list[str]


class SearchOptions(TrainingOptions):
    """Options that limit the search of plans for a training."""

    fix: list[str]
    most: list[str]
    least: list[str]
    without: list[str]
    allow: list[str]


@cache
def rows() -> dict[str, dict[str, Json]]:
    return tomllib.loads(files("meshwright.cli").joinpath("options.toml").read_text("utf-8"))


def described(command: F) -> F:
    """A command whose parameters have their flags, help and limits: from the row "nodes_up_command" or "nodes" of its module, or else
    from that of [all]."""
    own = {**rows()["all"], **rows().get(command.__module__.rpartition(".")[2], {})}
    signature = inspect.signature(command, eval_str=True)
    parameters = []
    for parameter in expanded(signature.parameters.values()):
        row = own.get(f"{parameter.name}_{command.__name__}") or own.get(parameter.name)
        annotation = Annotated[parameter.annotation, typer_info(row)] if row else parameter.annotation
        parameters.append(parameter.replace(annotation=annotation))
    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def expanded(parameters: Iterable[inspect.Parameter]) -> list[inspect.Parameter]:
    """The parameters with one for each key of a `TypedDict` in the place of `**asked`; the default is the empty value of its type.
    In the help they stand behind --cluster, or before --json if the cluster is one of them."""
    *own, last = parameters
    if last.kind is not inspect.Parameter.VAR_KEYWORD:
        return [*own, last]
    shared = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=kind, default=(get_origin(kind) or kind)())
        for name, kind in get_type_hints(get_args(last.annotation)[0]).items()
    ]
    names = [parameter.name.removeprefix("as_") for parameter in own]
    at = names.index("cluster") + 1 if "cluster" in names else names.index("json") if "json" in names else len(own)
    keyword_only = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
    return [*keyword_only[:at], *shared, *keyword_only[at:]]


def typer_info(row: Json) -> Any:
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
