"""Every row of docs/texts.md is run: the Python call gives the number, the command prints it, and the numbers of the texts hold or have a reason."""

import os
import shlex

import pytest

from blocks import ROOT, printed
from docs.test_blocks import parse_words
from figures.page import TEXTS
from meshwright.view.page.registry import VIEWS
from texts import PAGE, Row, call, markdown, texts, value_of

ROWS = [row for listed in texts().values() for row in listed]
RUN = sorted({row.cmd for row in ROWS if not row.does})
SEARCHES = [command for command in RUN if command.split()[1] in ("plan", "lint")]


def test_the_page_equals_the_generated_one() -> None:
    """After a change: make pages"""
    assert PAGE.read_text("utf-8") == markdown()


def test_all_five_texts_have_rows() -> None:
    assert set(texts()) == set(TEXTS)
    assert len(ROWS) > 200
    assert len({(row.at, row.thing) for row in ROWS}) > len(ROWS) - 10


def test_every_python_call_runs_and_every_difference_has_a_reason() -> None:
    for row in ROWS:
        assert not row.py or value_of(row.py) is not None, row
        assert row.holds != bool(row.why), f"{row.at} {row.thing}: {value_of(row.py)} against {row.says}, {row.why!r}"


def test_python_calls_name_public_functions() -> None:
    assert call("f.ridge(1, 1) / f.ridge(2, 1)") == "mw.formulas.ridge(1, 1) / mw.formulas.ridge(2, 1)"
    assert not [row.py for row in ROWS if "f._" in row.py or "import" in row.py]


def test_views_exist() -> None:
    assert {row.view for row in ROWS} - {""} <= set(VIEWS)


def output(command: str) -> str:
    os.chdir(ROOT)
    text = "\n".join(printed(command))
    assert text, command
    assert "MW-" not in text.split("\n")[0], text
    return text


@pytest.mark.parametrize("command", [command for command in RUN if command not in SEARCHES])
def test_commands_print_what_the_rows_say(command: str) -> None:
    text = " ".join(output(command).split())
    for row in ROWS:
        if row.cmd == command:
            assert row.prints in text, f"{row.at} {row.thing}: {row.prints!r} is not in the output of {command}"


@pytest.mark.slow
@pytest.mark.parametrize("command", SEARCHES)
def test_searches_and_advice_run(command: str) -> None:
    output(command)


def test_commands_that_train_or_measure_are_legal() -> None:
    for row in ROWS:
        if row.does:
            parse_words(shlex.split(row.cmd)[1:])


def test_a_row_that_no_longer_holds_is_found() -> None:
    assert Row("1", "a", "f.ridge(4, 2)", 2.0).holds
    assert not Row("1", "a", "f.ridge(4, 2)", 2.1).holds
    assert Row("1", "a", "f.ridge(4, 2)", 2.1, within=0.1).holds
