"""Any command line with any files: no traceback, no hang, an exit code that the documentation lists. `make soak` draws 5,000."""

import contextlib
import io
import signal
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

import pytest

from fuzzing import DOCUMENTED, cases, readable, stop_before_work, write_files
from meshwright.cli import main
from meshwright.cli.completion import vocabulary

LIMIT_S = 60
BATCH = 250  # command lines with the same files


class Hanging(BaseException):
    """The command did not end in time."""


def hang(number: int, frame: Any) -> NoReturn:
    raise Hanging


def outcome(line: list[str]) -> tuple[int, str]:
    """The exit code of a command, and what it printed to stderr."""
    out, err = io.StringIO(), io.StringIO()
    before = signal.signal(signal.SIGALRM, hang), signal.getsignal(signal.SIGTERM)
    signal.alarm(LIMIT_S)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main(line)
    except SystemExit as leaving:
        return int(leaving.code or 0), err.getvalue() + out.getvalue()[-2000:]
    except Hanging:
        return -1, f"ran longer than {LIMIT_S} s"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before[0])
        signal.signal(signal.SIGTERM, before[1])
    return -2, "did not exit"


def offences(folder: Path, count: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    import random

    stop_before_work(monkeypatch)
    monkeypatch.chdir(folder)
    files, words, found = write_files(folder, random.Random(seed)), vocabulary(), []
    for line in islice(cases(seed, files, words), count):
        code, printed = outcome(line)
        if code not in DOCUMENTED or "Traceback" in printed:
            found.append(f"{code} {readable(line)}: {printed[:300]}")
    return found


def test_drawn_commands_end_with_a_documented_code(tmp_path, monkeypatch) -> None:
    assert offences(tmp_path, 30, 1, monkeypatch) == []


def test_paths_and_tables_that_a_fuzz_found_are_bad_input(tmp_path, monkeypatch) -> None:
    stop_before_work(monkeypatch)
    for line in (
        ["runs", "--json", "a" * 3000],
        ["plan", "a" * 3000, "--cluster", "laptop"],
        ["show", "all-reduce", "--html", "\x00"],
        ["validate", "--markdown", str(tmp_path / "page.md")],  # without rows
    ):
        code, printed = outcome(line)
        assert code == 2
        assert "MW-" in printed
        assert "MW-CLI-001" not in printed


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(2, 2 + 5000 // BATCH))
def test_many_drawn_commands_end_with_a_documented_code(seed, tmp_path, monkeypatch) -> None:
    assert offences(tmp_path, BATCH, seed, monkeypatch) == []
