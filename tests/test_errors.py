"""One shape, and every code has its line in docs/errors.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from meshwright.errors import MeshwrightError, listed, nearest, nearest_number, unknown

ROOT = Path(__file__).parent.parent
CODE = re.compile(r"\bMW-[A-Z0-9]+-\d{3}\b")


def codes_in_source() -> set[str]:
    return {code for path in (ROOT / "src").rglob("*.py") for code in CODE.findall(path.read_text("utf-8"))}


def documented() -> list[str]:
    lines = (ROOT / "docs" / "errors.md").read_text("utf-8").splitlines()
    return [row[1] for line in lines if (row := re.match(r"\| (MW-[A-Z0-9]+-\d{3}) \| \S.* \|$", line))]


def test_codes_and_their_documentation_agree() -> None:
    assert codes_in_source() - set(documented()) == set(), "raised, but not in docs/errors.md"
    assert set(documented()) - codes_in_source() == set(), "in docs/errors.md, but raised nowhere"


def test_each_code_is_documented_once() -> None:
    assert len(documented()) == len(set(documented()))


def test_the_shape() -> None:
    error = MeshwrightError("MW-PLAN-004", "tp=6 does not divide 64 heads", valid=[1, 2, 4, 8], fix="--set plan.tp=8")
    assert str(error) == "MW-PLAN-004: tp=6 does not divide 64 heads. Valid: 1, 2, 4, 8. Fix: --set plan.tp=8"
    assert error.exit_code == 2
    assert error.as_dict() == {
        "code": "MW-PLAN-004",
        "what": "tp=6 does not divide 64 heads",
        "why": "",
        "valid": ["1", "2", "4", "8"],
        "fix": "--set plan.tp=8",
    }


def test_a_long_list_is_cut_and_counted() -> None:
    assert listed([str(i) for i in range(100)]).endswith("22, 23, … (100 in all)")


@pytest.mark.parametrize(("word", "meant"), [("LLaMA3_70B", "llama3-70b"), ("dgxh100", "dgx-h100"), ("zzzz", "")])
def test_nearest(word: str, meant: str) -> None:
    assert nearest(word, ["llama3-70b", "dgx-h100", "gpt2-xl"]) == meant


def test_unknown_cuts_a_long_word() -> None:
    error = unknown("MW-CAT-002", "model", "x" * 10_000, ["a"])
    assert len(str(error)) < 200


def test_nearest_number_prefers_the_larger() -> None:
    assert nearest_number(6, [4, 8]) == 8
