"""The command line as a program: exit codes, one shape of error, no surprises in a pipe."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import types

import pytest

from meshwright import __version__
from meshwright.cli import COMMANDS, LEAD, Command, main, overview
from meshwright.errors import MeshwrightError


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as leaving:
        main(arguments)
    said = capsys.readouterr()
    return leaving.value.code, said.out, said.err


@pytest.fixture
def raising(monkeypatch):
    """A command `boom` that raises what it is given."""

    def install(error: BaseException) -> None:
        def command(as_json: bool = False) -> None:
            raise error

        module = types.ModuleType("meshwright.cli.boom")
        module.command = command  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "meshwright.cli.boom", module)
        monkeypatch.setitem(COMMANDS, "boom", Command("raises"))

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


def test_the_four_questions_lead_in_their_order() -> None:
    lead = [name for name in ("plan", "estimate", "verify", "train") if name in COMMANDS]
    assert [name for name in COMMANDS if COMMANDS[name].panel == LEAD] == lead
    listed = re.findall(r"^  (\w+) ", overview(), re.MULTILINE)
    assert listed[: len(lead)] == lead
    assert sorted(listed) == sorted(COMMANDS)


def test_only_the_named_command_is_imported() -> None:
    code = "import sys; from meshwright.cli import build; build('config')\n"
    code += "print('meshwright.cli.config' in sys.modules, 'meshwright.cli.catalog' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["True", "False"]


def test_version(capsys) -> None:
    assert run(capsys, "--version") == (0, f"meshwright {__version__}\n", "")


def test_nothing_asked_shows_the_help(capsys) -> None:
    code, out, err = run(capsys)
    assert code == 2
    assert "Usage" in out + err


def test_an_unknown_command_names_the_nearest(capsys) -> None:
    code, out, err = run(capsys, "catalgo")
    assert (code, out) == (2, "")
    assert err.startswith("MW-CLI-002: command 'catalgo' is not known.")
    assert err.endswith("Fix: meshwright catalog\n")


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["catalog", "--nonsense"], "--nonsense"),
        (["verify"], "'plan'"),
        (["verify", "x", "--ranks", "0"], "'--ranks'"),
        (["config"], "command"),
        (["config", "shwo"], "'show'"),
    ],
)
def test_misuse_is_told_in_the_shape_of_every_error(capsys, words, found) -> None:
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, "")
    assert err.startswith("MW-CLI-005: ")
    assert found in err
    assert err.endswith(f" Fix: meshwright {words[0]} --help\n")
    _, out, err = run(capsys, *words, "--json")
    assert err == ""
    assert json.loads(out)["error"]["code"] == "MW-CLI-005"


@pytest.mark.parametrize("words", [["catalog", "-h"], ["config", "-h"], ["config", "show", "-h"]])
def test_the_short_word_for_help_works_everywhere(capsys, words) -> None:
    assert run(capsys, *words)[0] == 0


def test_a_command_that_is_ended_cleans_up(capsys, monkeypatch) -> None:
    """SIGTERM unwinds like Ctrl-C, so that what was begun is ended on the way out."""
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


def test_a_fault_of_ours_says_so_and_how_to_see_more(capsys, raising, monkeypatch) -> None:
    monkeypatch.delenv("MESHWRIGHT_TRACEBACK", raising=False)
    raising(ZeroDivisionError("division by zero"))
    code, out, err = run(capsys, "boom")
    assert (code, out) == (70, "")
    assert "ZeroDivisionError: division by zero" in err
    assert "MESHWRIGHT_TRACEBACK=1" in err
    monkeypatch.setenv("MESHWRIGHT_TRACEBACK", "1")
    with pytest.raises(ZeroDivisionError):
        main(["boom"])


def test_a_reader_that_leaves_early_is_no_error() -> None:
    command = [sys.executable, "-m", "meshwright", "catalog", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "{\n"
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(timeout=60) in (0, 1)
