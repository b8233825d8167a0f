"""`meshwright plan`: the page, the JSON, files that other commands read, and exit codes."""

import json
import re

import pytest

from meshwright.cli import main
from meshwright.cli.plan import UserPlan
from meshwright.view import plan as view

SMALL = ["plan", "gpt3-2.7b", "--cluster", "dgx-a100", "--nodes", "2", "--batch", "64", "--seq", "1024"]
NARROW = [*SMALL, "--without", "pp,cp"]  # a third of the time, where any search will do


def run(capsys, *arguments: str, code: int = 0) -> str:
    with pytest.raises(SystemExit) as leaving:
        main([*arguments])
    captured = capsys.readouterr()
    assert leaving.value.code == code, captured.err
    return captured.out if not code else captured.out + captured.err


@pytest.fixture(scope="module")
def answer(tmp_path_factory):
    """One search with all of its outputs."""
    folder = tmp_path_factory.mktemp("plan")
    from contextlib import redirect_stdout
    from io import StringIO

    out = StringIO()
    with redirect_stdout(out), pytest.raises(SystemExit) as leaving:
        main(
            [
                *SMALL,
                "--tokens",
                "10B",
                "--json",
                "--out",
                str(folder / "plan.toml"),
                "--html",
                str(folder / "plan.html"),
            ]
        )
    assert leaving.value.code == 0
    return json.loads(out.getvalue()), folder


def test_json_has_the_agreed_keys(answer):
    data, _ = answer
    assert {"searched", "seconds", "plans", "strategies"} <= set(data)
    assert data["searched"] > 10_000 > 0 < data["costed"] < data["searched"]
    first = data["plans"][0]
    keys = {
        "plan",
        "step_time_s",
        "step_time_low_s",
        "step_time_high_s",
        "exposed_s",
        "memory_gib",
        "memory_by_stage",
        "traffic_bytes",
        "mfu",
        "hfu",
        "bound_by",
        "assumed",
    }
    assert keys <= set(first)
    assert all(p["fits"] for p in data["plans"])
    assert {"DDP", "FSDP", "TP+DP", "3D"} <= set(data["strategies"])
    assert data["explanation"]["training"]["days"] > 0


def test_the_plan_file_is_read_by_other_commands(capsys, answer):
    data, folder = answer
    seen = json.loads(run(capsys, "estimate", str(folder / "plan.toml"), "--json"))
    first = data["plans"][0]
    assert seen["plan"] == first["plan"]
    assert seen["step_time_s"] == pytest.approx(first["closed_form_s"], rel=0.02)
    assert seen["memory_gib"] == pytest.approx(first["memory_gib"], rel=1e-9)
    assert "plan" in run(capsys, "config", "show", str(folder / "plan.toml"))


def test_the_html_page_is_self_contained(answer):
    page = (answer[1] / "plan.html").read_text("utf-8")
    assert page.startswith("<!doctype html>")
    assert "src=" not in page
    found = json.loads(re.search(r'id="meshwright-data">(.*?)</script>', page, re.S)[1])
    assert found["state"]["plan"] == answer[0]["plans"][0]["plan"]
    assert not [name for name, view in found["views"].items() if view["error"]]


def test_the_page_fits_the_terminal(capsys, answer):
    out = run(capsys, *SMALL, "--fix", "tp=2", "--max", "pp=2", "--top", "3", "--compare", str(answer[1] / "plan.toml"))
    assert max(map(len, out.splitlines())) <= 120
    assert "versus the winner" in out
    assert "tp 2" in out
    whole = run(capsys, *SMALL, "--fix", "pp=1", "--top", "3", "--memory-headroom", "20%")
    assert max(map(len, whole.splitlines())) <= 120
    for title in ("Leaders", "Why", "Where the step goes", "Memory", "What to change first", "assumed"):
        assert title in whole


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--fix", "tp=7"], 2, "MW-PLANNER-004"),
        (["--fix", "tp=8", "--max", "tp=4"], 2, "MW-PLANNER-003"),
        (["--without", "zer3"], 2, "MW-PLANNER-002"),
        (["--memory-headroom", "200%"], 2, "MW-PLANNER-006"),
        (["--batch", "7", "--fix", "dp=16"], 2, "MW-PLANNER-004"),
        (["--set", "cluster.accelerator.memory=2GiB", "--without", "pp,cp"], 3, "MW-PLANNER-005"),
    ],
)
def test_bad_input_gives_a_clear_error(capsys, arguments, code, words):
    out = run(capsys, *SMALL, *arguments, code=code)
    assert words in out
    assert "Fix: " in out
    assert "Traceback" not in out


def test_comparison_with_an_illegal_plan(capsys, answer, tmp_path):
    mine = tmp_path / "mine.toml"
    mine.write_text('model = "gpt3-2.7b"\n[cluster]\nextends = "dgx-a100"\ngpus = 8\n[plan]\nreplicate = 8\n')
    out = run(capsys, *SMALL, "--fix", "pp=1", "--compare", str(mine))
    assert "not legal here" in out
    assert "MW-PLAN-005" in out


def test_a_case_study_and_the_guides_are_compared_with_the_winner(capsys):
    assert dispatched("plan", "--case", "mixtral", capsys=capsys)[0] == 0
    code, out = dispatched(
        "plan", "llama3-8b", "--cluster", "dgx-h100", "--batch", "64", "--seq", "2048", capsys=capsys
    )
    assert code == 0
    assert "Recommendations of guides" in out
    assert "lint" in out
    assert dispatched("plan", "--case", "nope", capsys=capsys)[0] == 2


def dispatched(*words, capsys):
    from meshwright.cli import dispatch, exit_code_of

    code = exit_code_of(lambda: dispatch(list(words)), False)
    return code, capsys.readouterr().out


def test_an_estimate_without_a_plan_uses_the_best_common_plan_and_reports_it(capsys):
    data = json.loads(run(capsys, "estimate", "mixtral-8x7b", *SMALL[2:], "--json"))
    assert any("the best of" in item and "common plans" in item for item in data["assumed"])
    assert data["plan"]["ep"] > 1  # the ladder that was taken before starts without expert parallelism
    large = json.loads(run(capsys, "estimate", "llama3.1-405b", "--cluster", "dgx-h100", "--json"))
    assert any("no common plan fits" in item for item in large["assumed"])
    assert not large["fits"]


def test_gpus_for_a_number_of_days(capsys):
    few = [*SMALL[:4], *SMALL[6:], "--tokens", "100B", "--days", "12", "--without", "pp,cp,tp"]
    shown = run(capsys, *few)
    assert "are the fewest within 12 days for 100B tokens" in shown
    assert "Days and cost over GPU counts" in shown
    data = json.loads(run(capsys, *few, "--json"))
    assert f"{data['sizing']['gpus']:,} GPUs" in shown
    assert "no price" not in data["sizing"]["answer"]


@pytest.mark.parametrize("option", ["--out", "--html", "--compare", "--tokens", "--days", "--case"])
def test_an_empty_option_is_refused(capsys, option):
    output = run(capsys, *SMALL, option, "", code=2)
    assert "MW-CLI-003" in output
    assert f"{option} is empty" in output


def test_a_case_takes_no_other_option(capsys):
    output = run(capsys, "plan", "--case", "gpt3", "--nodes", "3", "--out", "x.toml", code=2)
    assert "--nodes, --out cannot be combined with --case" in output
    assert json.loads(run(capsys, "plan", "--case", "gpt3", "--json"))["case"] == "gpt3"


def test_guides_are_in_json_and_in_a_comparison_if_requested(capsys, answer):
    data = json.loads(run(capsys, *NARROW, "--guides", "--json"))
    assert {g["guide"] for g in data["guides"]} >= {"topology", "start simple"}
    shown = run(capsys, *NARROW, "--compare", str(answer[1] / "plan.toml"), "--guides")
    assert "Recommendations of guides" in shown


def test_failures_and_sites_are_shown_with_the_days(capsys):
    output = run(
        capsys,
        *NARROW,
        "--tokens",
        "10B",
        "--mtbf",
        "3h",
        "--checkpoint",
        "60s",
        "--restart",
        "5min",
        "--sites",
        "2",
        "--line",
        "100Gb/s",
        "--json",
    )
    data = json.loads(output)
    left = data["goodput"]
    assert left["save_every_s"] == pytest.approx(1098.6, rel=1e-3)
    assert 0.8 < left["goodput"] < 0.9
    assert left["days"] == pytest.approx(data["explanation"]["training"]["days"] / left["goodput"])
    assert left["mfu"] == pytest.approx(data["plans"][0]["mfu"] * left["goodput"])
    assert left["assumed"] == []
    assert data["sites"]["slowdown"] > 1
    shown = run(capsys, *SMALL, "--mtbf", "3h")
    assert "goodput" in shown
    assert "a save blocks for 10 s" in shown


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--mtbf", "3x"], "MW-UNIT-002"),
        (["--sites", "2"], "MW-GOOD-002"),
        (["--checkpoint", "0s"], "MW-GOOD-001"),
        (["--out", "no/such/folder/plan.toml"], "MW-CLI-004"),
        (["--html", "."], "MW-CLI-004"),
    ],
)
def test_impossible_options_are_refused_before_the_search(capsys, words, code):
    assert code in run(capsys, *SMALL, *words, code=2)


def test_a_compared_file_needs_only_a_plan_section(capsys, tmp_path):
    mine, empty = tmp_path / "mine.toml", tmp_path / "empty.toml"
    mine.write_text('[plan]\nshard = 16\nzero = 1\nrecompute = "full"\n')
    empty.write_text('model = "gpt3-2.7b"\n')
    assert "yours is" in run(capsys, *SMALL, "--compare", str(mine))
    assert "MW-CONF-002" in run(capsys, *SMALL, "--compare", str(empty), code=2)


def test_another_batch_is_suggested_if_a_constraint_leaves_no_plan(capsys):
    output = run(capsys, *SMALL[:-4], "--batch", "7", "--seq", "1024", "--without", "pp,cp,tp", code=2)
    assert "--batch 16" in output


def test_a_case_study_as_json_is_one_document(capsys):
    data = json.loads(run(capsys, "plan", "--case", "mixtral", "--json"))
    assert data["case"] == "mixtral"
    assert data["step_time_s"] > 0


def test_a_compared_file_is_read_for_the_gpus_of_the_question():
    user_plan = UserPlan("examples/settings/torchtitan-llama3-70b.toml")
    assert user_plan.for_gpus(128).world == user_plan.reading.gpus == 128
    assert not [line for line in user_plan.reading.assembled.assumed if line.startswith("GPUs")]
    assert view.show(25e6, "bucket") == "25 MB"


def test_more_costed_plans_than_legal_ones_are_explained(capsys):
    words = ["plan", "nano", "--gpus", "2", "--cluster", "laptop", "--batch", "8", "--seq", "64"]
    shown = re.sub(r"[│\s]+", " ", run(capsys, *words))
    legal, costed = (int(re.search(rf"(\d+) {word}", shown)[1]) for word in ("legal plans", "costed"))
    assert costed > legal
    assert f"{costed} costed, some of them with offload, compression or unequal stages" in shown
