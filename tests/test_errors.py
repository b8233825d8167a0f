"""Errors have one format, and every code has a line in docs/errors.md."""

import re
from datetime import date
from pathlib import Path

import pytest

from meshwright.describe.config import Config
from meshwright.errors import MeshwrightError, kind_of, listed, nearest, nearest_number, printable, shown, unknown

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


def test_a_long_list_is_truncated_and_counted() -> None:
    assert listed([str(i) for i in range(100)]).endswith("22, 23, … (100 in all)")


@pytest.mark.parametrize(("word", "meant"), [("LLaMA3_70B", "llama3-70b"), ("dgxh100", "dgx-h100"), ("zzzz", "")])
def test_nearest(word: str, meant: str) -> None:
    assert nearest(word, ["llama3-70b", "dgx-h100", "gpt2-xl"]) == meant


@pytest.mark.parametrize(
    ("word", "choices"),
    [
        ("moe", ["rope", "norm", "moe_every"]),
        ("dp", ["tp", "cp", "pp", "ep"]),
        ("opt", ["gpt2"]),
        ("glm4", ["glm4_moe", "glm"]),
        ("llama3-7b", ["llama3-8b", "llama3-70b"]),
        ("fp6", ["fp8", "fp32"]),
        ("h200", ["h100", "a100"]),
        ("offload", ["overlap", "zero"]),
    ],
)
def test_no_word_is_suggested_that_is_not_near(word: str, choices: list[str]) -> None:
    assert nearest(word, choices) == ""


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("recompte", "recompute"),
        ("mircobatch", "microbatch"),
        ("shrad", "shard"),
        ("tokens_", "tokens"),
        ("GPipe", "gpipe"),
    ],
)
def test_a_misspelling_is_mended(word: str, meant: str) -> None:
    assert nearest(word, ["reduce", "share", "token", "recompute", "microbatch", "shard", "tokens", "gpipe"]) == meant


def test_unknown_truncates_a_long_name() -> None:
    error = unknown("MW-CAT-002", "model", "x" * 10_000, ["a"])
    assert len(str(error)) < 200


def test_nearest_number_prefers_the_larger() -> None:
    assert nearest_number(6, [4, 8]) == 8


def test_control_characters_are_escaped() -> None:
    error = MeshwrightError("MW-X-001", "'\x1b[31mred\x07' is wrong", why="\x9b", valid=["\x00"], fix="\u202eabc")
    assert str(error) == r"MW-X-001: '\x1b[31mred\x07' is wrong. \x9b. Valid: \x00. Fix: \u202eabc"
    assert printable("8 × 2 ≠ 48 µs") == "8 × 2 ≠ 48 µs"
    assert "\x1b" not in str(unknown("MW-X-001", "model", "\x1b[2J", ["a"]))


@pytest.mark.parametrize(
    ("value", "text", "kind"),
    [
        (None, "nothing", "nothing"),
        (True, "true", "true or false"),
        (date(2026, 1, 2), "2026-01-02", "a date or time"),
        ("a\x1bb", r"'a\x1bb'", "text"),
        ({"a": [1, None]}, "{a = [1, nothing]}", "a table"),
        ((1.5, "x"), "[1.5, 'x']", "a list"),
        (7, "7", "a number"),
    ],
)
def test_values_are_shown_as_in_a_plan_file(value, text, kind) -> None:
    assert shown(value) == text
    assert kind_of(value) == kind


def test_long_and_deep_values_are_truncated() -> None:
    deep: list = []
    for _ in range(1000):
        deep = [deep]
    assert len(shown("x" * 10_000)) == len(shown(list(range(10_000)))) == 60
    assert shown(deep) == "[[[...]]]"


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("plan", "tp", None),
        ("plan", "tp", date(2026, 1, 2)),
        ("plan", "bucket", date(2026, 1, 2)),
        ("plan", "layers_per_stage", {"a": 1}),
        ("plan", "sp", [None]),
        ("workload", "precision", 3.5),
        ("cluster", "levels", "x"),
        ("cluster", "accelerator", 3),
        ("model", "router", [1]),
        ("model", "name", {"x": date(2026, 1, 2)}),
    ],
)
def test_errors_contain_no_python_terms(section, key, value) -> None:
    parts = {"model": {"extends": "llama3-8b"}, "cluster": {"extends": "dgx-h100"}, "workload": {}, "plan": {}}
    parts[section][key] = value
    with pytest.raises(MeshwrightError) as refused:
        Config.from_parts(**parts)
    words = ("NoneType", "datetime", "None", "dict", "tuple", "instance", "Input", "bool", "int ", "str ")
    assert not [word for word in words if word in str(refused.value)], str(refused.value)
