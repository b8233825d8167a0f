"""The command line: one file a command; parse, call, show.

`meshwright --help` must answer at once, so a command's module is imported only when its name is the first word typed;
all others stand in the help with one line from the table below. A module exposes `command`: a function with typer's
annotations, or a `typer.Typer` where a command has commands of its own.

Exit codes: 0 done · 1 a check did not hold · 2 bad input or usage · 3 nothing fits · 70 our fault · 130 interrupted.
Errors go to stderr in one shape; with `--json` to stdout as {"error": {...}}, so that a program reads one stream.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

import typer

from meshwright import __version__
from meshwright.errors import MeshwrightError, unknown

TRACEBACK = "MESHWRIGHT_TRACEBACK"  # set to 1: a fault shows its traceback
FAULT = 70


class Command(NamedTuple):
    """A line of the help. The module is `meshwright.cli.<name>`; the panel groups it."""

    help: str
    panel: str = "Look closer"


LEAD = "The four questions"
COMMANDS: dict[str, Command] = {
    "estimate": Command("What will training cost? Step time, memory and traffic of one plan.", LEAD),
    "simulate": Command("The step of a plan as a timeline, rank by rank; writes Perfetto traces."),
    "lint": Command("What is wrong with a plan? Anti-patterns, each with its cost in seconds and a fix."),
    "validate": Command("Were the predictions true? Hold them to published runs."),
    "verify": Command("Does the plan train what one device would? Proved on local processes.", LEAD),
    "train": Command("Train a plan on local processes, and compare with its prediction.", LEAD),
    "catalog": Command("List and show known models, clusters, accelerators, links and stacks, with sources."),
    "config": Command("Show a resolved configuration and where each value came from; its schema; a difference."),
}


def build(arguments: Sequence[str]) -> typer.Typer:
    """The application, with only the command that `arguments` name imported."""
    app = typer.Typer(
        name="meshwright",
        help="Plan, prove, run and check distributed training.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(top)
    wanted = next((word for word in arguments if not word.startswith("-")), "")
    if wanted and wanted not in COMMANDS:
        raise unknown("MW-CLI-002", "command", wanted, COMMANDS, "meshwright {}")
    for name, line in COMMANDS.items():
        if name != wanted:
            app.command(name, help=line.help, rich_help_panel=line.panel)(absent)
            continue
        command = importlib.import_module(f"meshwright.cli.{name}").command
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name, help=line.help, rich_help_panel=line.panel)
        else:
            app.command(name, rich_help_panel=line.panel)(command)
    return app


def absent() -> None:
    """Stands in the help for a command that was not asked for."""


def print_version(asked: bool) -> None:
    if asked:
        print(f"meshwright {__version__}")
        raise typer.Exit()


def top(
    version: bool = typer.Option(
        False, "--version", help="Print the version and stop.", is_eager=True, callback=print_version
    ),
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    sys.exit(guarded(lambda: build(arguments)(args=arguments, prog_name="meshwright"), "--json" in arguments))


def guarded(run: Callable[[], object], as_json: bool) -> int:
    """The exit code of `run`; whatever it raises is told in one shape."""
    try:
        run()
        sys.stdout.flush()
    except MeshwrightError as error:
        tell(error, as_json)
        return error.exit_code
    except SystemExit as leaving:
        return flushed(leaving)
    except BrokenPipeError:
        return flushed(SystemExit(0))
    except KeyboardInterrupt:
        return 130
    except Exception as fault:
        if os.environ.get(TRACEBACK) == "1":
            raise
        told = MeshwrightError("MW-CLI-001", f"a fault in meshwright: {type(fault).__name__}: {fault}"[:500],
                               why="This is not your input's fault", fix=f"{TRACEBACK}=1 shows the traceback",
                               exit_code=FAULT)  # fmt: skip
        tell(told, as_json)
        return FAULT
    return 0


def flushed(leaving: SystemExit) -> int:
    """The code of a leaving program; a reader that went away early (`| head`) is no error."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if leaving.code is None or isinstance(leaving.code, int):
        return leaving.code or 0
    print(leaving.code, file=sys.stderr)
    return 1


def tell(error: MeshwrightError, as_json: bool) -> None:
    """An error for a program on stdout, or for a person in red on stderr."""
    if as_json:
        import json

        print(json.dumps({"error": error.as_dict()}, ensure_ascii=False))
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, highlight=False)
    console.print(Text(error.code, "bold red") + Text(str(error)[len(error.code) :], "red"), soft_wrap=True)
