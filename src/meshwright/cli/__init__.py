"""The command line: one module per command, which parses arguments, calls the library and prints the result.

`meshwright --help` must print at once, so its page is built from the `COMMANDS` table alone; the module of a command is
imported only when that command runs. A module exposes `command`: a function with typer annotations, or a `typer.Typer`
where the command has subcommands.

Exit codes
    0    success; also when the reader of a pipe closes it early (`meshwright plan ... | head -1`)
    1    a check failed: a proof, a lint finding, a training whose loss became NaN or infinite
    2    bad input or usage, or a file or stream that cannot be written
    3    nothing fits: no plan fits the cluster, or the run does not fit this machine
    70   an internal error of Meshwright
    74   a disk that is full or cannot be read
    130  interrupted (Ctrl-C)
    143  terminated (SIGTERM)

Errors are printed to stderr in one format; with `--json` they are printed to stdout as {"error": {...}}, so that a
program reads one stream.
"""

from __future__ import annotations

import codecs
import errno
import importlib
import os
import re
import shutil
import signal
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from meshwright.errors import MeshwrightError, cannot_write, nearest, unknown
from meshwright.version import EXTRAS, missing_package, require_torch, version_report

if TYPE_CHECKING:
    import typer

TRACEBACK = "MESHWRIGHT_TRACEBACK"  # set to 1: an internal error prints its traceback
USAGE, INTERNAL_ERROR, INTERRUPTED = 2, 70, 130
NEED_TORCH = ("verify", "train", "measure", "bench")
# One character for one, so that columns stay aligned where a terminal's encoding lacks the original.
REPLACEMENTS = {"x": "×✕✗", "+": "✓┼", ".": "·…•", ">": "→≥", "<": "←≤", "!": "≠", "~": "≈", "-": "−–—─━", "|": "│┃▏▎", "u": "µμ",
                "a": "α", "#": "█▉▊▋▌▇▐▓", "=": "▆▅▍▒", "_": "▄▃▂▁", ":": "░", "^": "↑", "v": "↓"}  # fmt: skip
ASCII = str.maketrans({character: plain for plain, group in REPLACEMENTS.items() for character in group})


# The help page: each command in one line, those of `LEADING` first. The module of a command is `meshwright.cli.<name>`.
LEADING = ("plan", "estimate", "verify", "train")
COMMANDS = {
    "plan": "Find the fastest parallel plan that fits in memory, and explain the choice.",
    "estimate": "Predict step time, memory and traffic of one plan.",
    "simulate": "Show the step of a plan as a timeline per rank; write Perfetto traces.",
    "show": "Draw and count a collective algorithm, a pipeline schedule or a lesson.",
    "lint": "Find anti-patterns in a plan, each with its cost in seconds and a fix.",
    "migrate": "Write settings of one framework as settings of another; list what is lost.",
    "validate": "Compare predictions with published training runs.",
    "verify": "Prove on local processes that a plan trains the same model as one device.",
    "train": "Train a plan on local processes and compare the run with its prediction.",
    "check": "Compare anybody's training code with one device: record a few steps of both, name the first difference.",
    "measure": "Run one rank of a large plan on one device: its compute and memory beside the prediction.",
    "tune": "Measure a few plans, the most promising one each time, until none is expected to be faster.",
    "explain": "Read profiler traces of anybody's training: where its steps went, beside the prediction.",
    "launch": "Write the file that starts a plan under Slurm, Kubernetes, SkyPilot, torchrun or Ray.",
    "data": "Make token files from text, JSON lines, Parquet or a dataset folder; show what is in them.",
    "checkpoint": "List, verify, convert and delete the checkpoints of runs.",
    "bench": "Measure collectives, links and the device; alone, under torchrun or Slurm.",
    "emulate": "Emulate a cluster on this Linux machine: nodes with links of a chosen rate and delay.",
    "calibrate": "Fit a cluster file to results of `bench` or nccl-tests, and say whether the network is normal.",
    "web": "Serve a page in the browser: plans, predictions, timelines and runs, live.",
    "runs": "List the training runs of a folder, compare some of them, or watch one that runs.",
    "report": "Write one HTML page about training runs: curves, proof, predicted and measured values.",
    "catalog": "List the models, clusters, accelerators, links and stacks in the catalog, with sources.",
    "config": "Show a resolved configuration and the origin of each value; print its schema; compare two files.",
    "doctor": "Check versions, devices, interfaces and rights: what works here, and how to fix what does not.",
    "completion": "Print a script that completes commands and options in bash, zsh or fish.",
}


def build(name: str) -> typer.Typer:
    """Import one command and return its typer application."""
    import typer

    from meshwright.cli.options import HELP_NAMES

    command = importlib.import_module(f"meshwright.cli.{name}").command
    if isinstance(command, typer.Typer):
        return command
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(context_settings=HELP_NAMES)(command)
    return app


def overview() -> str:
    """The page that `meshwright --help` prints."""
    bold, plain = ("\033[1m", "\033[0m") if sys.stdout.isatty() else ("", "")
    width = max(map(len, COMMANDS)) + 2
    indent = " " * (width + 2)
    columns = min(shutil.get_terminal_size((100, 24)).columns, 110)
    lines = ["Usage: meshwright COMMAND [ARGUMENTS]", "", "Plan, prove, run and check distributed training."]
    for panel, leads in (("Main commands", True), ("More commands", False)):
        lines += ["", f"{bold}{panel}{plain}"]
        for name, about in COMMANDS.items():
            if (name in LEADING) is leads:
                text = textwrap.fill(about, columns, initial_indent=indent, subsequent_indent=indent)
                lines.append(f"  {bold}{name}{plain}{' ' * (width - len(name))}{text.strip()}")
    lines += ["", "See `meshwright COMMAND --help` for the options of a command.", PLUGINS, EXIT_CODES]
    return "\n".join(lines)


PARSER_WORDS = (
    (r"Input should be a valid integer[^.]*", "a whole number is needed"),
    (r"Input should be a valid number[^.]*", "a number is needed"),
    (r"Input should be less than or equal to", "at most"),
    (r"Input should be greater than or equal to", "at least"),
)
PLUGINS = (
    "Every command takes --plugin FILE.py, which adds attention kinds, schedules or optimizers (docs/extending.md)."
)
EXIT_CODES = (
    "Exit codes: 0 success, 1 a check failed, 2 bad input, 3 nothing fits, 70 internal error, 74 the disk is full\n"
    "or cannot be read, 130 interrupted, 143 terminated. `meshwright --version` prints the version."
)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    signal.signal(signal.SIGTERM, exit_on_signal)
    replace_unprintable()
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments  # `emulate run -- COMMAND --json`
    as_json = "--json" in options and arguments[:1] != ["bench"]  # bench --json names a file
    sys.exit(exit_code_of(lambda: dispatch(arguments), as_json))


def exit_on_signal(number: int, frame: object) -> NoReturn:
    """Turn SIGTERM into an exception, so that ranks are ended and temporary folders removed as after Ctrl-C."""
    raise SystemExit(128 + number)


def replace_unprintable() -> None:
    """Print a replacement for each character that the encoding of stdout or stderr lacks, instead of failing."""
    codecs.register_error("meshwright", ascii_replacement)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="meshwright")


def ascii_replacement(error: UnicodeError) -> tuple[str, int]:
    """A codec error handler: "×" becomes "x", "█" becomes "#", a character without a counterpart "?"."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end].translate(ASCII)
    return "".join(c if c.isascii() else "?" for c in text), error.end


def dispatch(arguments: Sequence[str]) -> None:
    """Run the command named by the first argument with the remaining arguments."""
    first = arguments[0] if arguments else ""
    if first in ("", "-h", "--help"):
        print(overview())
        raise SystemExit(0 if first else USAGE)
    if first == "--version":
        print(version_report())
        return
    if first not in COMMANDS:
        raise unknown("MW-CLI-002", "command", first, COMMANDS, "meshwright {}")
    raise SystemExit(run_command(first, load_plugins(arguments[1:])))


def load_plugins(arguments: Sequence[str]) -> list[str]:
    """Load the plug-ins that `--plugin FILE` names, and return the other arguments; those after `--` are of another program."""
    end = list(arguments).index("--") if "--" in arguments else len(arguments)
    words, others = iter(arguments[:end]), list[str]()
    for word in words:
        option, _, name = word.partition("=")
        if option != "--plugin":
            others.append(word)
            continue
        from meshwright.describe import plugins

        plugins.load([name or next(words, "")])
    return [*others, *arguments[end:]]


def keep_brackets(command: Any) -> None:
    """Escape the brackets in the help of a command: rich would take `[run]` for a style and print nothing in its place."""
    from rich.markup import escape

    for described in (command, *command.params):
        if getattr(described, "help", None):
            described.help = escape(described.help)
    for subcommand in getattr(command, "commands", {}).values():
        keep_brackets(subcommand)


def run_command(name: str, arguments: list[str]) -> int:
    """Run one command and return its exit code; a usage error becomes a `MeshwrightError` like every other."""
    import typer

    if name in NEED_TORCH and not {"--help", "-h", "--read"} & set(arguments):
        require_torch(f"`meshwright {name}`")
    usage_error: Any = typer.BadParameter.__base__  # the base class of all parser errors; typer exports only this one
    command: Any = typer.main.get_command(build(name))
    if {"--help", "-h"} & set(arguments):
        keep_brackets(command)
        if name == "show":
            from meshwright.cli.show import hide_unused

            hide_unused(command.params, arguments)
    try:
        code = command(args=arguments, prog_name=f"meshwright {name}", standalone_mode=False)
    except usage_error as found:
        path = found.ctx.command_path if found.ctx else f"meshwright {name}"
        message, near = without_far_words(found.format_message())
        raise MeshwrightError("MW-CLI-005", in_plain_words(message), fix=f"{path} {near or '--help'}") from None
    return code if isinstance(code, int) else 0


def without_far_words(message: str) -> tuple[str, str]:
    """A message about an unknown option or command without the parser's suggestions, and the one of them that is near (`errors.nearest`)."""
    match = re.match(r"No such (?:option|command):? '?(-*)([\w-]+)'?", message)
    if match is None:
        return message, ""
    near = nearest(match[2], re.findall(r"[a-z][\w-]*", message[match.end() :]))
    return match[0], f"{match[1]}{near}" if near else ""


def in_plain_words(message: str) -> str:
    """A message of the parser of options, in the words of our other errors."""
    for pattern, words in PARSER_WORDS:
        message = re.sub(pattern, words, message)
    return message.rstrip("?.")


def exit_code_of(run: Callable[[], object], as_json: bool) -> int:
    """Call `run`, print what it raises in the one error format, and return the exit code."""
    try:
        try:
            run()
            code = 0
        except SystemExit as leaving:
            code = exit_status(leaving)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        discard_stdout()
        return 0
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        failure = error if isinstance(error, MeshwrightError) else described_error(error)
        if failure is None:
            return stdout_failed(error)
        if not failure.quiet:
            print_error(failure, as_json)
        return failure.exit_code


def described_error(error: Exception) -> MeshwrightError | None:
    """What any other exception means: a missing package, a path that cannot be opened, or a bug; None: a full disk or stream."""
    package = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if package in {name.replace("-", "_") for names in EXTRAS.values() for name in names}:
        return missing_package(package, "This command")
    if os.environ.get(TRACEBACK) == "1":
        raise error
    if isinstance(error, OSError) and error.errno in UNWRITABLE:
        return None
    if isinstance(error, OSError) and error.errno in BAD_PATH and error.filename:
        return MeshwrightError("MW-CLI-008", f"cannot open '{str(error.filename)[:200]}'", why=error.strerror or "")
    return MeshwrightError(
        "MW-CLI-001",
        f"internal error in Meshwright: {type(error).__name__}: {error}"[:500],
        why="Your input is not the cause",
        fix=f"set {TRACEBACK}=1 to print the traceback",
        exit_code=INTERNAL_ERROR,
    )


UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
# of a path that the user gave
BAD_PATH = {getattr(errno, name) for name in ("ENAMETOOLONG", "ELOOP", "ENOTDIR", "EISDIR", "EACCES", "EPERM", "EROFS")}


def exit_status(leaving: SystemExit) -> int:
    """The exit code of a `SystemExit`. rich and click exit with 1 when a pipe is closed: that raises again here."""
    if isinstance(leaving.__context__, BrokenPipeError):
        raise leaving.__context__
    if leaving.code is None or isinstance(leaving.code, int):
        return leaving.code or 0
    print(leaving.code, file=sys.stderr)
    return 1


def discard_stdout() -> None:
    """Send the buffered rest of stdout to the null device: Python flushes it again at exit, which would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def stdout_failed(error: Any) -> int:
    """Report that stdout (or the file in `error`) cannot be written. Files that commands write are named by
    `describe.files.write_text`; what arrives here without a name is stdout."""
    discard_stdout()
    failure = cannot_write(error.filename or "standard output", error)
    print_error(failure, as_json=False)  # as JSON it would go to the stream that has just failed
    return failure.exit_code


def print_error(error: MeshwrightError, as_json: bool) -> None:
    """Print an error as JSON on stdout, or in red on stderr."""
    if as_json:
        import json

        try:
            print(json.dumps({"error": error.as_dict()}, ensure_ascii=False), flush=True)
            return
        except BrokenPipeError:
            discard_stdout()
            return
        except OSError:  # standard output is full: the error goes to stderr
            discard_stdout()
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, highlight=False)
    console.print(Text(error.code, "bold red") + Text(str(error)[len(error.code) :], "red"), soft_wrap=True)
