"""The command line: one file a command; parse, call, show.

`meshwright --help` must answer at once: its page is made of the table below alone, and a command's module is imported
only when its name is the first word typed. A module exposes `command`: a function with typer's annotations, or a
`typer.Typer` where a command has commands of its own.

Exit codes: 0 done · 1 a check did not hold · 2 bad input or usage · 3 nothing fits · 70 our fault · 130 interrupted.
Errors go to stderr in one shape; with `--json` to stdout as {"error": {...}}, so that a program reads one stream.
"""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

from meshwright import __version__
from meshwright.errors import MeshwrightError, unknown

TRACEBACK = "MESHWRIGHT_TRACEBACK"  # set to 1: a fault shows its traceback
USAGE, FAULT = 2, 70


LEAD, CLOSER = "The four questions", "Look closer"


class Command(NamedTuple):
    """A line of the help. The module is `meshwright.cli.<name>`; the panel groups it."""

    help: str
    panel: str = CLOSER


COMMANDS: dict[str, Command] = {
    "plan": Command("Which plan is best? The fastest that fits, of every legal plan, with the reason.", LEAD),
    "estimate": Command("What will training cost? Step time, memory and traffic of one plan.", LEAD),
    "simulate": Command("The step of a plan as a timeline, rank by rank; writes Perfetto traces."),
    "show": Command("A collective, a pipeline schedule or a lesson, drawn and counted."),
    "lint": Command("What is wrong with a plan? Anti-patterns, each with its cost in seconds and a fix."),
    "validate": Command("Were the predictions true? Hold them to published runs."),
    "verify": Command("Does the plan train what one device would? Proved on local processes.", LEAD),
    "train": Command("Train a plan on local processes, and compare with its prediction.", LEAD),
    "report": Command("Runs as one page: the proof, the loss, predicted against measured."),
    "catalog": Command("List and show known models, clusters, accelerators, links and stacks, with sources."),
    "config": Command("Show a resolved configuration and where each value came from; its schema; a difference."),
}


def build(name: str) -> Callable[..., object]:
    """The application of one command, imported only now."""
    import typer

    command = importlib.import_module(f"meshwright.cli.{name}").command
    if isinstance(command, typer.Typer):
        return command
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(context_settings={"help_option_names": ["-h", "--help"]})(command)
    return app


def overview() -> str:
    """The page of `meshwright --help`: the table above, by panel."""
    bold, plain = ("\033[1m", "\033[0m") if sys.stdout.isatty() else ("", "")
    width = max(map(len, COMMANDS)) + 2
    indent = " " * (width + 2)
    columns = min(shutil.get_terminal_size((100, 24)).columns, 110)
    lines = ["Usage: meshwright COMMAND [ARGUMENTS]", "", "Plan, prove, run and check distributed training."]
    for panel in sorted({line.panel for line in COMMANDS.values()}, key=[LEAD, CLOSER].index):
        lines += ["", f"{bold}{panel}{plain}"]
        for name, line in COMMANDS.items():
            if line.panel == panel:
                text = textwrap.fill(line.help, columns, initial_indent=indent, subsequent_indent=indent)
                lines.append(f"  {bold}{name}{plain}{' ' * (width - len(name))}{text.strip()}")
    return "\n".join([*lines, "", "`meshwright COMMAND --help` tells the rest; `meshwright --version` the version."])


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    signal.signal(signal.SIGTERM, leave)
    sys.exit(guarded(lambda: dispatch(arguments), "--json" in arguments))


def leave(number: int, frame: object) -> NoReturn:
    """Ended from outside: as after Ctrl-C, ranks are ended and folders removed on the way out."""
    raise SystemExit(128 + number)


def dispatch(arguments: Sequence[str]) -> None:
    """The first word says what to do; the rest is the command's own."""
    first = arguments[0] if arguments else ""
    if first in ("", "-h", "--help"):
        print(overview())
        raise SystemExit(0 if first else USAGE)
    if first == "--version":
        print(f"meshwright {__version__}")
        return
    if first not in COMMANDS:
        raise unknown("MW-CLI-002", "command", first, COMMANDS, "meshwright {}")
    raise SystemExit(obey(first, list(arguments[1:])))


def obey(name: str, arguments: list[str]) -> int:
    """The exit code of one command; what is wrong with its words is an error in the one shape too."""
    import typer

    misuse: Any = typer.BadParameter.__base__  # of all that a parser may find; typer names only this one of them
    try:
        code = build(name)(args=arguments, prog_name=f"meshwright {name}", standalone_mode=False)
    except misuse as found:
        path = found.ctx.command_path if found.ctx else f"meshwright {name}"
        raise MeshwrightError("MW-CLI-005", found.format_message().rstrip("?"), fix=f"{path} --help") from None
    return code if isinstance(code, int) else 0


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
        told = MeshwrightError(
            "MW-CLI-001",
            f"a fault in meshwright: {type(fault).__name__}: {fault}"[:500],
            why="This is not your input's fault",
            fix=f"{TRACEBACK}=1 shows the traceback",
            exit_code=FAULT,
        )
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
