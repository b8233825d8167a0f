"""`meshwright lint`: exit codes, one JSON document, errors in one shape."""

import json
from pathlib import Path

import pytest

from meshwright.cli import dispatch, exit_code_of

PLAN = """
model = "llama3-8b"
stack = "torchtitan"
[cluster]
extends = "dgx-h100"
gpus = 16
[workload]
batch = 128
seq = 4096
[plan]
shard = 16
zero = 3
microbatch = 2
bucket = "400MB"
"""


@pytest.fixture
def plan(tmp_path: Path) -> str:
    path = tmp_path / "plan.toml"
    path.write_text(PLAN, "utf-8")
    return str(path)


def run(*arguments: str) -> int:
    words = ["lint", *arguments]
    return exit_code_of(lambda: dispatch(words), "--json" in words)


def test_a_clean_plan_exits_0(plan: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(plan) == 0
    assert "clean" in capsys.readouterr().out


def test_a_costly_pattern_exits_1_and_shows_cost_and_fix(plan: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(plan, "--set", "plan.recompute=full") == 1
    out = capsys.readouterr().out
    assert "MW-LINT-014" in out
    assert "of the step" in out
    assert "--set plan.recompute=none" in out


def test_json_is_one_document_with_costs(plan: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(plan, "--json", "--set", "plan.recompute=full") == 1
    data = json.loads(capsys.readouterr().out)
    assert data["step_time_s"] > 0
    worst = data["findings"][0]
    assert set(worst) == {"code", "name", "severity", "what", "cost_s", "share", "fix", "saves_s", "still_best"}
    assert worst["cost_s"] / data["step_time_s"] == pytest.approx(worst["share"])


def test_an_illegal_pattern_is_a_finding(plan: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(plan, "--json", "--set", "workload.batch=100") == 1
    data = json.loads(capsys.readouterr().out)
    assert data["step_time_s"] is None
    assert [f["code"] for f in data["findings"]] == ["MW-LINT-012"]


def test_bad_input_exits_2_in_one_shape(plan: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(plan, "--json", "--set", "plan.shard=3") == 2
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "MW-PLAN-005"
    assert run("no-such-file.toml") == 2
