"""`meshwright show`: every topic is printed with correct values, figures are self-contained, and wrong names get a suggestion."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from lower.cases import GPT, WORK, lowered
from meshwright import api
from meshwright.cli import main
from meshwright.cli.show import command
from meshwright.cost.collective import CollectiveTimes
from meshwright.describe import catalog
from meshwright.errors import MeshwrightError
from meshwright.lower.program import Op, scalar
from meshwright.programs.collectives import ALGORITHMS, OPERATIONS
from meshwright.programs.pipelines import SCHEDULES
from meshwright.units import format_seconds
from meshwright.view.show.formats import FORMATS
from meshwright.view.show.matrices import column_parallel, row_parallel
from meshwright.view.show.topics import LESSONS

app = typer.Typer()
app.callback()(lambda: None)
app.command("show")(command)


def show(*words: str, fails: bool = False) -> str:
    done = CliRunner().invoke(app, ["show", *words])
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert (done.exit_code != 0) == fails, done.output
    return done.stdout


def test_without_a_topic_it_lists_all_topics():
    listed = show()
    for name in [*OPERATIONS, *SCHEDULES, *LESSONS, *(a for named in ALGORITHMS.values() for a in named)]:
        assert name in listed
    assert set(json.loads(show("--json"))["collectives"]["all-reduce"]["algorithms"]) == set(ALGORITHMS["all-reduce"])


@pytest.mark.parametrize("topic", [*OPERATIONS, *LESSONS])
def test_every_topic_is_shown_as_text_and_as_json(topic):
    assert len(show(topic).splitlines()) > 4
    assert json.loads(show(topic, "--json"))


@pytest.mark.parametrize(("operation", "algorithm"), [(o, a) for o, named in ALGORITHMS.items() for a in named])
def test_every_algorithm_is_drawn(operation, algorithm):
    assert "proved" in show(operation, "--algorithm", algorithm, "--ranks", "5")
    assert "result" in show(operation, "--algorithm", algorithm, "--ranks", "3", "--values")


def test_the_steps_of_a_ring():
    text = show("all-reduce", "--algorithm", "ring", "--ranks", "4")
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "0 → 1 3 → 2 0 → 3 1 → 0 2" in lines
    assert "← 3 + 2 ← 0 + 3 ← 1 + 0 ← 2 + 1" in lines
    assert "2(P−1)α + 2(P−1)/P·nβ + (P−1)/P·nγ" in text
    assert "6 elements = 1.5·n" in text


def test_the_values_of_an_all_reduce():
    lines = [" ".join(line.split()) for line in show("all-reduce", "--ranks", "4", "--values").splitlines()]
    assert "before 0 1 2 3 1 2 3 4 2 3 4 5 3 4 5 6" in lines
    assert "result 6 10 14 18 6 10 14 18 6 10 14 18 6 10 14 18" in lines
    assert "step 2 6 8 7 3 1 10 10 7 3 3 14 12 6 7 5 18" in lines  # each rank holds its own chunk in full
    scattered = [" ".join(line.split()) for line in show("reduce-scatter", "--values").splitlines()]
    assert any(re.fullmatch(r"result 6 · · · · 10 · · · · 14 · · · · 18", line) for line in scattered)
    gathered = [" ".join(line.split()) for line in show("all-gather", "--values").splitlines()]
    assert "before 6 · · · · 10 · · · · 14 · · · · 18" in gathered


def test_times_and_traffic_as_json():
    words = ["all-reduce", "--ranks", "8", "--size", "64MiB", "--cluster", "dgx-h100", "--json"]
    data = json.loads(show(*words, "--algorithm", "ring"))
    assert data["walk"]["time_s"] > 0
    assert data["walk"]["sent_bytes"] == [2 * 7 / 8 * 2**26] * 8
    assert len(data["moves"]) == 2 * 7 * 8
    assert data["walk"]["step_end_s"][-1] == data["walk"]["time_s"]


def test_the_shown_time_equals_that_of_the_cost_model():
    """`show` on a cluster uses the library's choice and prints the time that a training step is charged for it."""
    plan = lowered(GPT, WORK, replicate=16)
    network = CollectiveTimes(catalog.load("clusters", "dgx-h100").with_gpus(16), plan.batch)
    op = Op("x", "x", "collective", collective="all_reduce", axis="dp", message_bytes=np.array([2.0**26]))
    charged = float(network.time(op)[0])
    text = show("all-reduce", "--cluster", "dgx-h100", "--ranks", "16")
    assert f"{format_seconds(charged)} for 64 MiB on dgx-h100" in text
    data = json.loads(show("all-reduce", "--cluster", "dgx-h100", "--ranks", "16", "--json"))
    assert data["time_s"] == pytest.approx(charged, rel=1e-12)
    assert data["algorithm"] == network.algorithm(op) == "nvls"
    assert data["walk"]["time_s"] < charged


@pytest.mark.parametrize(
    "words",
    [
        ["1f1b", "--ranks", "8"],
        ["all-reduce", "--trace", "x"],
        ["all-reduce", "--stages", "4"],
        ["strategies", "--html", "x.html"],
        ["formats", "ring"],
        ["all-reduce", "--algorithm", "ring", "--node", "4"],
        ["all-reduce", "--compare", "--values"],
    ],
)
def test_options_without_effect_are_refused(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MeshwrightError) as refused:
        show(*words)
    assert refused.value.code == "MW-SHOW-003"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("words", [("crossover", "--help"), ("-h", "crossover")])
def test_the_help_of_a_topic_has_its_options(words, capsys):
    with pytest.raises(SystemExit):
        main(["show", *words])
    assert set(re.findall(r"--[a-z]+", capsys.readouterr().out)) == {
        "--alpha",
        "--bandwidth",
        "--size",
        "--json",
        "--help",
    }


def test_the_comparison_names_the_fastest_for_every_size():
    data = json.loads(show("all-reduce", "--compare", "--ranks", "16", "--cluster", "dgx-h100", "--json"))
    assert set(data["time_s"]) == set(ALGORITHMS["all-reduce"]) - {"sharp"}  # its fabric does not reduce
    for k, best in enumerate(data["best"]):
        assert data["time_s"][best][k] == min(times[k] for times in data["time_s"].values())
    sizes = [c["size_bytes"] for c in data["crossovers"]]
    assert sizes == sorted(sizes)
    text = show("all-reduce", "--compare", "ring,tree", "--ranks", "16")
    assert "up to" in text
    assert "naive" not in text


@pytest.mark.parametrize("width", [80, 200])
@pytest.mark.parametrize(
    ("words", "first", "names"),
    [
        (["all-reduce", "--compare", "--ranks", "16", "--cluster", "dgx-h100"], "size", ALGORITHMS["all-reduce"]),
        (
            ["1f1b", "--compare"],
            "schedule",
            ["bubble fraction", "bubble overhead", "no barrier", "in flight", "messages"],
        ),
    ],
)
def test_a_comparison_is_readable_in_a_narrow_terminal(words, first, names, width, monkeypatch):
    """Where not all columns fit, they continue in a table below, which repeats the first column: no name and no number is cut."""
    monkeypatch.setattr("meshwright.view.tables.PIPED_WIDTH", width)
    text = show(*words)
    headers = [line.split("  ") for line in text.splitlines() if line.strip().startswith(first + " ")]
    columns = [name.strip() for line in headers for name in line if name.strip() not in ("", first)]
    assert set(names) - set(columns) <= {"sharp"}
    assert len(columns) == len(set(columns))
    assert "…" not in text
    assert (len(headers) > 1) == (width < (200 if first == "size" else 100))
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width


def data_in(page: str) -> dict:
    """The data of the explorer in a written page."""
    found = re.search(r'id="meshwright-data">(.*?)</script>', page, re.S)
    return json.loads(found[1])["views"]["collectives"]["data"]


def test_figures_are_self_contained(tmp_path):
    figure, chart = tmp_path / "ring.html", tmp_path / "compare.html"
    show("all-reduce", "--algorithm", "ring", "--ranks", "4", "--html", str(figure), "--size", "1MiB")
    show("all-reduce", "--compare", "ring,tree", "--html", str(chart))
    for path in (figure, chart):
        page = path.read_text("utf-8")
        assert "default-src 'none'" in page
        assert not re.search(r"https?://", page)  # modules are base64
        assert not re.search(r"<(img|iframe)|<link(?![^>]*data:)|@import|src=", page)
    data = data_in(figure.read_text("utf-8"))
    assert data["time_s"] > 0
    assert [m["step"] for m in data["program"]["moves"]] == sorted(m["step"] for m in data["program"]["moves"])
    assert len(data["program"]["moves"]) == 24
    assert set(data_in(chart.read_text("utf-8"))["comparison"]["time_s"]) == {"ring", "tree"}


def test_text_in_a_figure_cannot_end_its_script():
    from meshwright.view.page.bundle import written_view

    page = written_view(
        "collectives", "</title><script>alert(1)</script>", {"operation": "</script><script>alert(1)</script>"}
    )
    assert "<script>alert" not in page
    assert data_in(page) == {"operation": "</script><script>alert(1)</script>"}


@pytest.mark.parametrize(
    ("words", "code", "near"),
    [
        (["all-reduc"], "MW-SHOW-001", "meshwright show all-reduce"),
        (["1f1c"], "MW-SHOW-001", "meshwright show 1f1b"),
        (["colum-parallel"], "MW-SHOW-001", "meshwright show column-parallel"),
        (["all-reduce", "--algorithm", "rign"], "MW-PROG-005", "ring"),
        (["all-reduce", "--compare", "ring,treee"], "MW-PROG-005", "tree"),
        (["all-reduce", "--ranks", "-3"], "MW-PROG-006", ""),
        (["all-reduce", "--ranks", "0"], "MW-SHOW-003", "--ranks 4"),
        (["zbv", "--virtual", "0"], "MW-SHOW-003", "--virtual 2"),
        (["all-reduce", "--root", "1"], "MW-PROG-004", ""),
        (["all-reduce", "--size", "64Mebi"], "MW-UNIT-002", ""),
        (["all-reduce", "--cluster", "dgx-h10"], "MW-CAT-002", "dgx-h100"),
        (["all-reduce", "--ranks", "40", "--html", "x.html"], "MW-SHOW-002", "--ranks 8"),
        (["all-reduce", "--html", "no/such/folder/x.html"], "MW-CLI-004", "x.html"),
        (["all-reduce", "--values", "--elements", "5000"], "MW-PROG-006", "--elements 256"),
    ],
)
def test_wrong_names_get_a_suggestion(words, code, near, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MeshwrightError) as refused:
        show(*words)
    assert refused.value.code == code
    assert refused.value.fix == near


def test_a_cluster_may_be_a_file(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('[cluster]\nextends = "dgx-h100"\nname = "mine"\n', "utf-8")
    assert "on mine" in show("all-gather", "--cluster", str(path))


def test_pipelines_are_shown():
    assert "gpipe" in show("1f1b", "--stages", "4", "--microbatches", "8", "--compare", "gpipe,zbv")


def test_split_products_equal_the_full_product():
    for values in (column_parallel(), row_parallel()):
        np.testing.assert_array_equal(values["whole Y"], values["X·W"])
        np.testing.assert_array_equal(values["whole dX"], values["dY·Wᵀ"])
        assert len({part.shape for part in values["W"]}) == 1
        assert values["W"][0].size == 16


def test_formats_are_those_of_the_libraries():
    torch = pytest.importorskip("torch")
    names = {
        "fp64": torch.float64,
        "fp32": torch.float32,
        "fp16": torch.float16,
        "bf16": torch.bfloat16,
        "fp8 e4m3": torch.float8_e4m3fn,
        "fp8 e5m2": torch.float8_e5m2,
    }
    known = {f.name: f for f in FORMATS}
    for name, dtype in names.items():
        info = torch.finfo(dtype)
        assert known[name].largest == info.max
        assert known[name].smallest_normal == info.tiny
        assert known[name].step == info.eps
        assert known[name].bits == info.bits
        assert float(torch.tensor(known[name].smallest, dtype=dtype)) == known[name].smallest  # a number of the format
        assert float(torch.tensor(known[name].smallest / 4, dtype=dtype)) == 0  # and none is smaller
    assert known["fp4 e2m1"].largest == 6
    assert known["tf32"].digits == known["fp16"].digits


PLAN = str(Path(__file__).parents[2] / "examples" / "demo-dp2-tp2.toml")


def test_the_step_of_a_plan_is_shown_as_tables_and_as_data():
    """The data has every number that the cost model reads, for one plan; operations that the plan does not run are left out."""
    text, data = show("step", PLAN), json.loads(show("step", PLAN, "--json"))["step"]
    e = api.estimate(plan=PLAN)
    assert {op["name"] for op in data["blocks"]["dense F"]} == {op.name for op in e.program.blocks["dense", "F"]}
    assert {op["name"] for op in data["closing"]} == {op.name for op in e.program.closing if scalar(op.count)}
    assert data["groups"]["tp"] == 2
    assert data["microbatches"] == e.plan.microbatches(e.workload)
    assert [rank["elements"] for rank in data["ranks"]] == [
        {group: scalar(size) for group, size in rank.elements.items()} for rank in e.program.ranks
    ]
    (reduced,) = (op for op in data["closing"] if op["name"] == "reduce-gradients")
    assert reduced["count"] * reduced["message_bytes"] == 4 * sum(data["ranks"][0]["elements"].values())  # in fp32
    assert all(name in text for name in ("attention-out", "update", "Pipeline ranks", "2 tp"))
    with pytest.raises(MeshwrightError, match="MW-SHOW-003"):
        show("step")
    with pytest.raises(MeshwrightError, match="--ranks has no effect"):
        show("step", PLAN, "--ranks", "4")
