"""`meshwright show` on one's own numbers and on a plan file: values by hand, the same numbers as the page, own values of a collective."""

import json
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from meshwright import api
from meshwright.cli.show import command
from meshwright.describe.layout import Layout
from meshwright.errors import MeshwrightError
from meshwright.view.page import modeler, ranks, roofline
from meshwright.view.page.subject import Subject
from meshwright.view.show import overlap, zero
from meshwright.view.show.numbers import EXAMPLES, OPTIONS, TOPICS
from meshwright.view.show.topics import data

app = typer.Typer()
app.callback()(lambda: None)
app.command("show")(command)
PLAN = "examples/llama3-70b-64xh100.toml"


def show(*words: str) -> str:
    done = CliRunner().invoke(app, ["show", *words])
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.stdout


def numbers(*words: str) -> Any:
    return json.loads(show(*words, "--json"))


@pytest.fixture(scope="module")
def subject() -> Subject:
    return Subject.of_estimate(api.estimate(plan=PLAN))


def test_crossover() -> None:
    (row,) = numbers("crossover", "--alpha", "1us", "--bandwidth", "450GB/s", "--size", "100kB")["links"]
    assert row["crossover_bytes"] == pytest.approx(450e3)
    assert row["time_s"] == pytest.approx(1e-6 + 1e5 / 450e9)
    assert row["regime"] == "latency-bound"
    assert "450 kB" in show("crossover", "--alpha", "1us", "--bandwidth", "450GB/s")
    assert len(numbers("crossover")["links"]) > 20


def test_roofline_of_own_numbers() -> None:
    words = "roofline", "--peak", "989TFLOP/s", "--bandwidth", "50GB/s", "--batch", "32", "--seq", "2048"
    (row,) = numbers(*words)["levels"]
    assert (row["ccr"], row["ridge"]) == (pytest.approx(3 * 32 * 2048 / 2), pytest.approx(19780))
    assert row["critical_batch"] == pytest.approx(19780 * 2 / 3 / 2048)
    assert "compute-bound" in show(*words)
    assert [level["level"] for level in numbers("roofline", "--cluster", "dgx-h100")["levels"]] == [
        "node",
        "rail",
        "spine",
    ]


def test_zero_of_own_numbers() -> None:
    found = numbers("zero", "--parameters", "7B", "--ranks", "8")
    assert [row["bytes"] / 1e9 for row in found["stages"]] == [112, 38.5, 26.25, 14]
    assert "26.25 GB" in show("zero", "--parameters", "7B", "--ranks", "8")


def test_buckets_of_own_numbers() -> None:
    found = numbers(
        "buckets", "--gradients", "500MB", "--backward", "200ms", "--alpha", "5us", "--bandwidth", "300GB/s"
    )
    assert found["best"] == 18
    assert min(found["counts"], key=lambda row: row["exposed_s"])["buckets"] == 18


def test_numbers_of_a_plan_are_those_of_the_page(subject: Subject) -> None:
    assert numbers("zero", PLAN) == json.loads(json.dumps(zero.data(subject)))
    assert numbers("buckets", PLAN) == json.loads(json.dumps(overlap.data(subject)))
    assert numbers("roofline", PLAN)["ceilings"] == json.loads(json.dumps(roofline.data(subject)["step"]["ceilings"]))
    drawn = {axis["axis"]: axis for axis in ranks.data(subject)["axes"]}
    layout = Layout(subject.plan, tuple(subject.stack.order))
    for one in numbers("ranks", PLAN)["axes"]:
        assert one["ranks"] == layout.groups(one["axis"]).tolist()
        assert {name: drawn[one["axis"]][name] for name in ("size", "groups", "level")} == {
            name: one[name] for name in ("size", "groups", "level")
        }
    for topic in ("zero", "buckets", "roofline", "ranks"):
        assert len(show(topic, PLAN).splitlines()) > 4


def test_the_groups_of_the_guide(tmp_path: Any) -> None:
    """The guide's `initialize_3d_parallelism` with tp 2, pp 2, dp 2: its loops, against the command."""
    plan = tmp_path / "plan.toml"
    plan.write_text(
        'model = "llama2-7b"\ncluster = "dgx-h100"\n[workload]\nbatch = 8\n[plan]\ntp = 2\npp = 2\nreplicate = 2\norder = ["tp", "cp", "pp", "dp"]\n'
    )
    tp = pp = dp = 2
    expected = {
        "tp": [[d * tp * pp + p * tp + t for t in range(tp)] for d in range(dp) for p in range(pp)],
        "pp": [[d * tp * pp + p * tp + t for p in range(pp)] for d in range(dp) for t in range(tp)],
        "dp": [[d * tp * pp + p * tp + t for d in range(dp)] for p in range(pp) for t in range(tp)],
    }
    assert {one["axis"]: one["ranks"] for one in numbers("ranks", str(plan))["axes"]} == expected


def test_the_modeler_prints_what_the_page_computes(subject: Subject) -> None:
    assert numbers("modeler") == json.loads(json.dumps(modeler.data(subject)))
    own = (
        "--hidden",
        "12288",
        "--tp",
        "8",
        "--precision",
        "fp8",
        "--bandwidth",
        "200Gb/s",
        "--gradients",
        "1GB",
        "--rate",
        "100GB/s",
    )
    options = {
        "hidden": 12288,
        "tp": 8,
        "precision": "fp8",
        "link_gbps": 200.0,
        "chunk_mb": 1000.0,
        "chunk_gbps": 800.0,
    }
    found, page = numbers("modeler", *own), modeler.data(subject.with_options(options))
    assert found["rows"] == json.loads(json.dumps(page["rows"]))
    assert found["chunks"]["best"] == page["chunks"]["best"] == 63  # √(2·10⁹ / 10¹¹ / 5e-6) = 63.2
    rows = {row["name"]: row["ours"] for row in found["rows"]}
    assert found["message_bytes"] == 4096 * 12288
    assert rows["Tensor-parallel traffic of a layer"] == 4 * 2 * 7 / 8 * 4096 * 12288
    assert rows["Transfers of a micro-batch"] == pytest.approx(2 * 4096 * 12288 / 25e9)
    assert "12,288" in show("modeler", *own)


def test_own_values() -> None:
    assert "10 14 18 22" in show("all-reduce", "--values", "1,2,3,4")
    assert show("--values", "1,2,3,4", "all-reduce") == show("all-reduce", "--values", "1,2,3,4")
    assert "9 12.5" in show("all-reduce", "--values", "1,2/3,4/5,6.5")  # three ranks
    assert "result   1 2 3" in show("all-gather", "--values", "1/2/3")
    assert "result   1 2 3 4" in show("all-gather", "--values", "1,2,3,4")
    assert "result   5 6" in show("reduce", "--values", "2,3/3,3", "--ranks", "2")
    assert show("all-reduce", "--values", "0,1,2,3") == show("all-reduce", "--values")


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("all-reduce", "--values", "1,2/3,4", "--ranks", "4"), "MW-PROG-009", "2 lists"),
        (("all-reduce", "--values", "1,2/3"), "MW-PROG-009", "have 2 values each"),
        (("all-reduce", "--values", "1,2,3", "--elements", "4"), "MW-PROG-009", "3 values do not fit"),
        (("all-gather", "--values", "1,2/3", "--ranks", "2", "--elements", "4"), "MW-PROG-009", "have 2 values each"),
        (("all-reduce", "--values", "1,two"), "MW-PROG-009", "are not values"),
        (("all-reduce", "--values", "1,"), "MW-PROG-009", "are not values"),
        (("all-reduce", "--values", "1,1e300"), "MW-PROG-009", "finite"),
        (("all-reduce", "--values", "1,nan"), "MW-PROG-009", "finite"),
        (("crossover", "--alpha", "1us"), "MW-SHOW-004", "--bandwidth"),
        (("crossover", "--alpha", "0us", "--bandwidth", "1GB/s"), "MW-FORM-001", "latency"),
        (("crossover", "--stages", "4"), "MW-SHOW-003", "--stages has no effect"),
        (("zero",), "MW-SHOW-004", "--parameters or a plan file"),
        (("zero", "--parameters", "0"), "MW-FORM-001", "--parameters"),
        (("zero", "--parameters", "7B", "--ranks", "0"), "MW-FORM-001", "--ranks"),
        (("zero", PLAN, "--ranks", "8"), "MW-SHOW-003", "--ranks has no effect"),
        (("roofline", "--peak", "1TFLOP/s", "--bandwidth", "1GB/s", "--precision", "bf17"), "MW-SHOW-004", "bf17"),
        (("roofline", "--peak", "1TFLOP/s", "--bandwidth", "1GB/s", "--batch", "0"), "MW-FORM-001", "--batch"),
        (("roofline", "--cluster", "dgx-h100", "--peak", "1TFLOP/s"), "MW-SHOW-003", "--peak"),
        (("ranks",), "MW-SHOW-004", "a plan file"),
        (("buckets", "--gradients", "1GB"), "MW-SHOW-004", "--backward"),
        (("modeler", "--hidden", "0"), "MW-SHOW-003", "hidden = 0"),
        (("modeler", "--stages", "100"), "MW-SHOW-003", "stages = 100"),
        (("modeler", "--schedule", "zbv"), "MW-SHOW-003", "schedule"),
    ],
)
def test_wrong_numbers_are_refused(words: tuple[str, ...], code: str, says: str) -> None:
    with pytest.raises(MeshwrightError, match=code) as found:
        show(*words)
    assert says in str(found.value)


def test_every_calculator_has_an_example_and_is_listed() -> None:
    assert set(TOPICS) == set(OPTIONS) == set(EXAMPLES)
    listed = show()
    assert all(topic in listed for topic in TOPICS)


def test_a_request_names_no_file() -> None:
    """/api/show answers own numbers only: the plans of the page are those of its views."""
    assert data("zero", {"parameters": "7B"})["stages"][0]["bytes"] == 112e9
    with pytest.raises(MeshwrightError, match="MW-SHOW-003"):
        data("zero", {"names": PLAN})
    with pytest.raises(MeshwrightError, match="MW-SHOW-004"):
        data("ranks", {})
