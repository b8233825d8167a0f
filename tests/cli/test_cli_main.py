"""The command line: exit codes, one format of errors, behaviour in a pipe."""

import contextlib
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest
import typer

from meshwright import __version__
from meshwright.cli import COMMANDS, LEADING, main, overview
from meshwright.errors import MeshwrightError


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as leaving:
        main(arguments)
    printed = capsys.readouterr()
    return leaving.value.code, printed.out, printed.err


@pytest.fixture
def raising(monkeypatch):
    """A command `boom` that raises what it is given."""

    def install(error: BaseException) -> None:
        def command(as_json: bool = False) -> None:
            raise error

        module = types.ModuleType("meshwright.cli.boom")
        module.command = command  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "meshwright.cli.boom", module)
        monkeypatch.setitem(COMMANDS, "boom", "raises")

    return install


def test_help_lists_every_command(capsys) -> None:
    code, out, _ = run(capsys, "--help")
    assert code == 0
    assert all(f" {name} " in out for name in COMMANDS)


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_exists_and_explains_itself(capsys, name) -> None:
    code, out, _ = run(capsys, name, "--help")
    assert code == 0
    assert f"meshwright {name}" in out


def parameters(command, path):
    for name, subcommand in getattr(command, "commands", {}).items():
        yield from parameters(subcommand, f"{path} {name}")
    for parameter in command.params:
        yield path, parameter


def test_every_option_has_a_help_text() -> None:
    for name in COMMANDS:
        command = importlib.import_module(f"meshwright.cli.{name}").command
        if not isinstance(command, typer.Typer):
            app = typer.Typer()
            app.command(name)(command)
            command = app
        for path, parameter in parameters(typer.main.get_command(command), name):
            assert parameter.help, (path, parameter.name)


@pytest.mark.parametrize(
    ("name", "sections"),
    [("train", ("[data]", "[run]", "[checkpoint]")), ("plan", ("[cluster]",)), ("data", ("[data]",))],
)
def test_sections_of_files_are_printed_in_help(capsys, name, sections) -> None:
    """rich takes a word in brackets for a style and leaves it out, unless it is escaped."""
    _, out, _ = run(capsys, name, "--help")
    assert [section for section in sections if section not in out] == []


def test_the_main_commands_come_first_in_order() -> None:
    listed = re.findall(r"^  (\w+) ", overview(), re.MULTILINE)
    assert listed[: len(LEADING)] == list(LEADING)
    assert sorted(listed) == sorted(COMMANDS)


def test_only_the_named_command_is_imported() -> None:
    code = "import sys; from meshwright.cli import build; build('config')\n"
    code += "print('meshwright.cli.config' in sys.modules, 'meshwright.cli.catalog' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=True)
    assert done.stdout.split() == ["True", "False"]


def test_version(capsys) -> None:
    code, out, err = run(capsys, "--version")
    assert (code, out.splitlines()[0], err) == (0, f"meshwright {__version__}", "")


def test_no_arguments_show_the_help(capsys) -> None:
    code, out, err = run(capsys)
    assert code == 2
    assert "Usage" in out + err


def test_an_unknown_command_suggests_a_similar_one(capsys) -> None:
    code, out, err = run(capsys, "catalgo")
    assert (code, out) == (2, "")
    assert err.startswith("MW-CLI-002: command 'catalgo' is not known.")
    assert err.endswith("Fix: meshwright catalog\n")


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["catalog", "--nonsense"], "--nonsense"),
        (["verify"], "'PLAN|SCRIPT.py:MAKE'"),
        (["verify", "x", "--ranks", "0"], "'--ranks'"),
        (["config"], "command"),
        (["config", "shwo"], "Fix: meshwright config show"),
        (["plan", "--nodse", "3"], "Fix: meshwright plan --nodes"),
        (["plan", "--nosense", "3"], "Fix: meshwright plan --help"),
    ],
)
def test_a_usage_error_has_the_format_of_every_error(capsys, words, found) -> None:
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, "")
    assert err.startswith("MW-CLI-005: ")
    assert found in err
    assert err.endswith(f"{found}\n" if "Fix" in found else f" Fix: meshwright {words[0]} --help\n")
    _, out, err = run(capsys, *words, "--json")
    assert err == ""
    assert json.loads(out)["error"]["code"] == "MW-CLI-005"


@pytest.mark.parametrize("words", [["catalog", "-h"], ["config", "-h"], ["config", "show", "-h"]])
def test_dash_h_works_for_every_command(capsys, words) -> None:
    assert run(capsys, *words)[0] == 0


def test_a_terminated_command_cleans_up(capsys, monkeypatch) -> None:
    """SIGTERM unwinds like Ctrl-C, so that cleanup code runs."""
    cleaned = []

    def end() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            cleaned.append(True)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("meshwright.cli.dispatch", lambda arguments: end())
    assert run(capsys, "verify")[0] == 143
    assert cleaned
    signal.signal(signal.SIGTERM, before)


def test_errors_go_to_stderr_in_one_line(capsys) -> None:
    code, out, err = run(capsys, "catalog", "models", "llama3-70bb")
    assert (code, out) == (2, "")
    assert err.startswith("MW-CAT-002: model 'llama3-70bb' is not known.")
    assert err.count("\n") == 1


def test_errors_as_json_go_to_stdout(capsys) -> None:
    code, out, err = run(capsys, "catalog", "models", "llama3-70bb", "--json")
    assert (code, err) == (2, "")
    error = json.loads(out)["error"]
    assert error["code"] == "MW-CAT-002"
    assert error["fix"] == "llama3-70b"


def test_an_error_decides_its_exit_code(capsys, raising) -> None:
    raising(MeshwrightError("MW-CLI-001", "nothing fits", exit_code=3))
    assert run(capsys, "boom")[0] == 3


def test_interruption(capsys, raising) -> None:
    raising(KeyboardInterrupt())
    assert run(capsys, "boom")[0] == 130


def test_an_internal_error_says_so_and_how_to_print_the_traceback(capsys, raising, monkeypatch) -> None:
    monkeypatch.delenv("MESHWRIGHT_TRACEBACK", raising=False)
    raising(ZeroDivisionError("division by zero"))
    code, out, err = run(capsys, "boom")
    assert (code, out) == (70, "")
    assert "ZeroDivisionError: division by zero" in err
    assert "MESHWRIGHT_TRACEBACK=1" in err
    monkeypatch.setenv("MESHWRIGHT_TRACEBACK", "1")
    with pytest.raises(ZeroDivisionError):
        main(["boom"])


ROOT = Path(__file__).parents[2]
PLAN = ["plan", "llama3-8b", "--cluster", "dgx-h100", "--nodes", "1"]


def run_with(command: list[str], stdout: str = "", **environment: str) -> subprocess.CompletedProcess[bytes]:
    """Run `meshwright COMMAND` in a shell-free subprocess; `stdout` is a path to write to."""
    with open(stdout, "wb") if stdout else contextlib.nullcontext(subprocess.PIPE) as out:
        return subprocess.run(
            [sys.executable, "-m", "meshwright", *command],
            stdout=out,
            stderr=subprocess.PIPE,
            env={**os.environ, **environment},
            cwd=ROOT,
            timeout=200,
            check=False,
        )


@pytest.mark.parametrize("command", [["catalog", "--json"], PLAN, ["--help"]])
def test_a_closed_pipe_ends_silently_with_zero(command) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as out:
        done = subprocess.run(
            [sys.executable, "-m", "meshwright", *command], stdout=out, stderr=subprocess.PIPE, timeout=200, check=False
        )
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("as_json", [[], ["--json"]])
def test_a_full_disk_is_bad_input_with_the_path(as_json, capsys) -> None:
    done = run_with(["catalog", *as_json], stdout="/dev/full")
    assert done.returncode == 2
    assert done.stderr.decode() == "MW-CLI-004: cannot write 'standard output'. No space left on device.\n"
    given = ["estimate", "--plan", "examples/llama3-70b-64xh100.toml"]
    code, out, err = run(capsys, *given, "--html", "/dev/full", *as_json)
    assert code == 2
    assert "MW-CLI-004" in (out if as_json else err)
    assert "cannot write '/dev/full'" in (out if as_json else err)


def test_an_encoding_without_our_characters_prints_replacements() -> None:
    ascii_only = {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "LC_ALL": "C"}
    done = run_with(["estimate", "--plan", "examples/llama3-70b-64xh100.toml"], **ascii_only)
    assert done.returncode == 0, done.stderr
    assert "dp 4 (ZeRO-1) . tp 8+sp . pp 2 (1f1b)" in done.stdout.decode("ascii")
    assert "64 x h100-sxm" in done.stdout.decode("ascii")
    done = run_with(["config", "show", "examples/llama3-70b-64xh100.toml", "--set", "cluster.gpus=48"], **ascii_only)
    assert done.returncode == 2
    assert "shard x tp x pp = 4 x 8 x 2 = 64 ! 48 GPUs" in done.stderr.decode("ascii")


def test_exit_codes_are_documented() -> None:
    import meshwright.cli

    for text in (overview(), meshwright.cli.__doc__ or "", (ROOT / "docs" / "errors.md").read_text("utf-8")):
        for code in ("70", "74", "130", "143"):
            assert code in text


@pytest.mark.parametrize(
    "words",
    [
        ["estimate", "llama3-8b", "--cluster", "dgx-h100", "--batch", "0"],
        ["estimate", "llama3-8b", "--cluster", "dgx-h100", "--nodes", "0"],
        ["plan", "llama3-8b", "--cluster", "dgx-h100", "--seq", "0"],
        ["plan", "llama3-8b", "--cluster", "dgx-h100", "--sites", "0"],
        ["launch", "plan.toml", "--slurm", "--per-node", "0"],
        ["bench", "--ranks", "0"],
    ],
    ids=lambda words: f"{words[0]} {words[-2]}",
)
def test_a_zero_that_was_typed_is_not_taken_for_the_default(words, capsys) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(words)
    assert leaving.value.code == 2
    assert f"'{words[-2]}': at least 1 is needed" in capsys.readouterr().err
