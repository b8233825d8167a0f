"""The data of the page's views: plain JSON, with the numbers that the commands print."""

import json
from importlib.resources import files

import jsonschema_rs
import numpy as np
import pytest

import meshwright as mw
from meshwright.calibrate.runs.rows import read
from meshwright.calibrate.runs.validate import predict_rows
from meshwright.describe.config import Config
from meshwright.describe.layout import Layout
from meshwright.describe.legality.choices import free_values, word_values
from meshwright.describe.plan import Plan
from meshwright.errors import MeshwrightError
from meshwright.planner.advice.changes import candidates
from meshwright.planner.advice.lint.finding import Finding
from meshwright.predict.estimate import estimate
from meshwright.units import format_seconds
from meshwright.view.json_schema import schema_of
from meshwright.view.page import advice, published
from meshwright.view.page.choices import choices
from meshwright.view.page.opened import PLANNED, opened
from meshwright.view.page.presets import presets
from meshwright.view.page.registry import SEARCH, VIEWS
from meshwright.view.page.shapes import SHAPES
from meshwright.view.page.subject import FIRST_LEADERS, Shared, Subject
from meshwright.view.plan import show
from meshwright.view.show import zero
from ranks import soak

PLANS = {
    "dense": ("llama3-8b", "dgx-h100", 16, ["plan.tp=4", "plan.sp=true", "plan.shard=4", "plan.zero=1"]),
    "moe": ("tiny-moe", "dgx-h100", 8, ["plan.tp=2", "plan.sp=true", "plan.ep=4", "plan.shard=4", "plan.zero=1"]),
    "pipeline": ("gpt3-6.7b", "dgx-a100", 8, ["plan.pp=4", "plan.replicate=2"]),
    "single": ("gpt3-1.3b", "dgx-h100", 1, []),
}


@pytest.fixture(scope="module")
def subjects():
    made = {}
    for name, (model, cluster, gpus, settings) in PLANS.items():
        made[name] = Subject(mw.load(model, cluster=cluster, gpus=gpus, set=["workload.batch=32", *settings]))
    return made


def parts_of(found, kind):
    """The parts of one kind of a view."""
    return [part for part in found["parts"] if part["kind"] == kind]


def numbers(found):
    """The values of the numbers of a view by their names."""
    return {one["name"]: one["value"] for part in parts_of(found, "stats") for one in part["stats"]}


EVERY = [(name, plan) for name in VIEWS for plan in PLANS]
SEARCHED = [(name, plan) for name, plan in EVERY if VIEWS[name].kind == SEARCH and plan in ("moe", "pipeline")]


@pytest.mark.parametrize(("name", "plan"), [*(case for case in EVERY if case not in SEARCHED), *soak(SEARCHED)])
def test_data_is_plain_json_of_the_shape_that_the_script_checks(subjects, plan, name):
    for subject in (subjects[plan].provisional(), subjects[plan]):
        found = VIEWS[name].data(subject)
        assert json.loads(json.dumps(found, allow_nan=False)) == found
        jsonschema_rs.validate(schema_of(SHAPES[name], closed=True), found)


@pytest.mark.parametrize(
    ("model", "recompute", "more"),
    [("llama3-8b", "selective", {}), ("llama3-8b", "auto", {}), ("mixtral-8x7b", "full", {"adapter": {"rank": 8}})],
)
def test_a_size_shows_what_estimate_says(model, recompute, more):
    plan = {"tp": 2, "sp": True, "shard": 4, "zero": 1, "pp": 2, "recompute": recompute}
    cluster, workload = {"extends": "dgx-h100", "gpus": 16}, {"batch": 64, "seq": 4096}
    sections = {"workload": workload, "cluster": cluster, "plan": plan, **more}

    def predicted(changes):
        parts = {name: dict(part) for name, part in sections.items()}
        for path, value in changes.items():
            section, _, field = path.partition(".")
            parts[section][field] = value
        return estimate(Config.from_document({"model": model, **parts})).prediction

    now, priced = predicted({}), set()
    for path, offered in choices({"model": model, **sections})["sizes"].items():
        for choice in offered:
            if "saves_s" in choice:
                other = predicted({path: choice["value"], **choice["changes"]})
                assert choice["saves_s"] == pytest.approx(now.step_time_s - other.step_time_s, rel=1e-6, abs=1e-9)
                assert choice["more_gib"] == pytest.approx(other.memory_gib - now.memory_gib, rel=1e-6, abs=1e-9)
                assert choice["fits"] == other.fits
                priced.add(path)
    special = {"workload.imbalance", "adapter.rank", "adapter.base", "adapter.targets"} if more else set()
    assert priced == {"cluster.gpus", "workload.batch", "workload.seq", "workload.precision"} | special


def test_the_load_of_experts_changes_what_estimate_says(subjects):
    """With a capacity the busiest rank has no more than it, and copies are dropped; measured loads are drawn as they are."""
    config = subjects["moe"].config
    skewed = config.but(
        workload=config.workload.but(imbalance=2.0),
        model=config.model.but(router=config.model.router.but(capacity=1.25)),
    )
    found = VIEWS["experts"].data(Subject(skewed))
    (table,) = parts_of(found, "table")
    for row in table["rows"]:
        imbalance, seconds, gib, _ = row["cells"]
        assert row["use"] == {"workload.imbalance": imbalance, "workload.loads": None}
        alone = estimate(skewed.but(workload=skewed.workload.but(imbalance=imbalance))).prediction
        assert (seconds, gib) == (pytest.approx(alone.step_time_s, rel=1e-9), pytest.approx(alone.memory_gib, rel=1e-9))
    ((imbalance, _, _, dropped),) = [row["cells"] for row in table["rows"] if row["chosen"]]
    assert imbalance == 2.0
    assert 0 < dropped < 0.5
    assert f"drops {dropped:.1%} of the token copies" in " ".join(estimate(skewed).prediction.assumed)
    loads, ranks = drawn_loads(found), config.plan.ep
    assert skewed.model.router.but(capacity=0.0).busiest(1.0, loads, ranks) == pytest.approx(2.0)
    measured = [*range(1, len(loads) + 1)]
    loads = drawn_loads(VIEWS["experts"].data(Subject(config.but(workload=config.workload.but(loads=tuple(measured))))))
    assert loads == pytest.approx([load / np.mean(measured) for load in reversed(measured)])


def drawn_loads(found):
    """The loads of the staircase, whose last step is drawn to the edge."""
    (curves,) = parts_of(found, "curves")
    return [load for _, load in curves["series"][0]["points"]][:-1]


def test_timeline_is_what_simulate_prints(subjects):
    subject = subjects["pipeline"]
    found, printed = VIEWS["timeline"].data(subject), mw.simulate(subject.config).as_dict()
    own = found["panels"][0]
    assert own["step_time_s"] == printed["step_time_s"]
    assert own["bubble_fraction"] == printed["bubble_fraction"]
    assert own["in_flight"] == printed["in_flight"]
    assert [p["schedule"] for p in found["panels"]] == ["1f1b", "gpipe", "interleaved", "zb-h1"]
    walk, lane = subject.walked.walk, own["lanes"][1]
    first = int(walk.program.first[1])
    starts = np.array(lane["start"]) / found["ticks"] * walk.makespan
    assert np.allclose(starts, walk.start[first : first + len(starts)], atol=walk.makespan / found["ticks"])
    assert sum(stage["layers"] for stage in found["stages"]) == subject.model.layers
    assert found["stages"][0]["ends"] == ["embedding"]


def test_one_plan_has_one_simulated_step_beside_its_closed_form(subjects):
    subject = subjects["pipeline"].provisional()
    simulated = mw.simulate(subject.config).as_dict()["step_time_s"]
    assert VIEWS["pareto"].data(subject)["mine"]["step_time_s"] == simulated
    (numbers_of,) = parts_of(VIEWS["leaders"].data(subject), "stats")
    assert numbers_of["stats"][-1]["name"] == "Present plan"
    assert numbers_of["stats"][-1]["detail"].startswith(format_seconds(simulated))
    formula = VIEWS["verdict"].data(subject)["formulas"]["step"]
    assert f"simulated, as the timeline and the best plans show it: {format_seconds(simulated)}" in formula
    assert "simulated" not in VIEWS["verdict"].data(subjects["single"])["formulas"]["step"]


def test_timeline_has_the_chosen_schedules(subjects):
    found = VIEWS["timeline"].data(subjects["pipeline"].with_options({"schedules": ["zbv", "naive", "no such"]}))
    assert [p["schedule"] for p in found["panels"]] == ["1f1b", "zbv", "naive"]


def test_roofline_is_what_estimate_prints(subjects):
    for subject in subjects.values():
        found, printed = VIEWS["roofline"].data(subject), subject.estimate.as_dict()["roofline"]
        ours = [{key: value for key, value in one.items() if key != "formula"} for one in found["step"]["ceilings"]]
        assert ours == printed["ceilings"]
        busy: dict[str, float] = {}
        for point in found["points"]:
            busy[point["axis"]] = busy.get(point["axis"], 0.0) + point["step_seconds"]
        streams = subject.estimate.prediction.busy_s
        if subject.plan.tp > 1:  # `sum-partial` runs once per step and is not among the streams of the layers
            assert busy["tp"] == pytest.approx(streams["comm:tp"], rel=2e-3)
        assert all(0 < point["share"] <= 1 for point in found["points"])


def test_roofline_draws_the_points_of_a_calibration(subjects):
    config = subjects["dense"].config
    call = {"operation": "all-reduce", "ranks": 8, "bytes": 1e6, "seconds": 1e-5}
    changed = mw.load(config, set=[f"cluster.measured={[call]}".replace("'", '"').replace('": ', '" = ')])
    (point,) = VIEWS["roofline"].data(Subject(changed))["measured"]
    assert point["sent_bytes"] == 2 * 7 / 8 * 1e6
    assert point["rate"] == point["sent_bytes"] / 1e-5
    assert point["level"] == 0


def test_search_views_show_what_plan_prints(subjects):
    subject = subjects["dense"]
    printed = subject.result.as_dict()
    found = VIEWS["heatmap"].data(subject)
    times = {(cell["tp"], cell["pp"]): cell["step_time_s"] for cell in found["cells"] if cell["fits"]}
    assert min(times.values()) == printed["fastest"]["step_time_s"]
    assert (found["best"]["tp"], found["best"]["pp"]) == min(times, key=lambda pair: times[pair])
    pareto = VIEWS["pareto"].data(subject)
    fit = [(p["step_time_s"], p["gib"]) for p in [*pareto["points"], pareto["mine"]] if p["fits"]]
    front = [(p["step_time_s"], p["gib"]) for p in pareto["front"]]
    assert front == sorted({p for p in fit if not any(q != p and q[0] <= p[0] and q[1] <= p[1] for q in fit)})[::-1]
    for p in printed["front"]:  # each of the command's front is there, or something better is
        assert any(time <= p["step_time_s"] and memory <= p["memory_gib"] for time, memory in front)
    assert sum(point["best"] for point in pareto["points"]) == 1


def test_fields_that_differ_are_shown_as_the_command_shows_them(subjects):
    found = VIEWS["leaders"].data(subjects["dense"].provisional())
    (fields,) = [part for part in parts_of(found, "table") if ["yours", "plain"] in part["columns"]]
    assert ["sp", "yes", "no"] in [row["cells"] for row in fields["rows"]]
    assert show(25e6, "bucket") == "25 MB"


def test_only_the_complete_leaders_are_explained(subjects):
    """The first answer has the plans alone, and few of them, so that it comes sooner."""
    first, complete = (VIEWS["leaders"].data(s) for s in (subjects["dense"].provisional(), subjects["dense"]))
    few, many = (parts_of(found, "table")[0]["rows"] for found in (first, complete))
    assert 1 <= len(few) <= FIRST_LEADERS < len(many)
    assert numbers(first)["Present plan"] != "not legal"
    explained = {"Why the winner leads", "Why not another strategy"}
    assert not explained & {part["title"] for part in parts_of(first, "panel")}
    assert explained <= {part["title"] for part in parts_of(complete, "panel")}
    assert many[0]["use"] == {"plan": complete["plan"]}


@pytest.mark.parametrize("name", [name for name, view in VIEWS.items() if view.kind == SEARCH])
def test_a_first_answer_does_not_wait_for_the_search(name, monkeypatch):
    """The provisional data of a searched view need a search of the common plans at most."""
    searched = []
    monkeypatch.setattr(Shared, "result", property(lambda shared: searched.append(shared)))
    config = mw.load("gpt3-1.3b", cluster="dgx-h100", gpus=8, set=["plan.replicate=8"])
    VIEWS[name].data(Subject(config).provisional())
    assert not searched


def test_a_first_answer_for_a_model_that_fits_nowhere_is_that_of_the_search():
    config = mw.load("llama3.1-405b", cluster="dgx-h100", gpus=8, set=["plan.tp=8"])
    with pytest.raises(MeshwrightError, match="MW-PLANNER-005"):
        VIEWS["leaders"].data(Subject(config).provisional())
    assert not VIEWS["heatmap"].data(Subject(config).provisional())["best"]


def test_every_cell_of_the_map_has_a_plan_or_a_reason(subjects):
    for subject in subjects.values():
        for cell in VIEWS["heatmap"].data(subject)["cells"]:
            assert cell["fits"] == (not cell["reason"])
            assert cell["fits"] == (not cell["label"])


def test_sensitivity_of_the_winner_is_what_plan_prints(subjects):
    subject = subjects["dense"]
    winner = Subject(subject.result.config)
    (bars,) = parts_of(VIEWS["sensitivity"].data(winner.provisional()), "bars")
    printed = subject.result.as_dict()["explanation"]["sensitivities"]
    assert [row["label"] for row in bars["rows"]] == [name for row in printed for name in (row["what"], "")]
    for bar, value in zip(bars["rows"], [row[way] for row in printed for way in ("less", "more")], strict=True):
        assert (value is None) == (not bar["parts"])
        for piece in bar[
            "parts"
        ]:  # the search simulates long pipelines at two lengths: times differ in the fourth digit
            assert bar["start"] + piece["value"] * (bar["start"] == 0) == pytest.approx(value, abs=2e-3)


def test_scaling_and_batch_contain_the_estimate(subjects):
    for name in ("dense", "pipeline", "moe"):
        subject = subjects[name]
        p = subject.estimate.prediction
        scaling, batch = VIEWS["scaling"].data(subject.provisional()), VIEWS["batch"].data(subject)
        for rows in (scaling["strong"], scaling["weak"]):
            (here,) = [row for row in rows if row["gpus"] == subject.plan.world]
            assert here["step_time_s"] == p.step_time_s
        (curves,) = parts_of(batch, "curves")
        assert (
            [mfu for size, mfu, _ in curves["series"][0]["points"] if size == 32] == [p.mfu] == [numbers(batch)["MFU"]]
        )
        critical = numbers(batch)["Critical batch"]
        assert (None if critical == "none" else critical) == subject.estimate.as_dict()["critical_batch"]


def test_scaling_names_where_the_network_takes_over():
    from meshwright.view.page.scaling import crossing

    rows = [{"gpus": 8 * 2**k, "compute_s": 1.0 / 2**k, "between_s": 0.2} for k in range(5)]
    assert crossing(rows)["gpus"] == pytest.approx(40)
    assert crossing(rows[:2]) is None


def test_goodput_is_what_plan_prints(subjects):
    subject = subjects["single"]
    options = {"mtbf": "3h", "checkpoint": "60s", "restart": "5min"}
    found = VIEWS["goodput"].data(subject.with_options(options))
    result = mw.plan(subject.config, **options)
    printed = result.as_dict()["goodput"]
    assert (numbers(found)["Goodput"], numbers(found)["Save every"]) == (printed["goodput"], printed["save_every_s"])
    (curves,) = parts_of(found, "curves")
    line, _, young = curves["series"]
    assert young["points"][0][:2] == [printed["young_s"], printed["goodput"]]
    assert max(share for _, share in line["points"]) <= printed["goodput"] * (1 + 1e-3)


def test_collectives_are_what_show_prints(subjects, capsys):
    from meshwright.view.show.collectives import CollectiveRequest, show

    subject = subjects["dense"].with_options(
        {"operation": "all-gather", "algorithm": "bruck", "ranks": 6, "size": "1MiB"}
    )
    found = VIEWS["collectives"].data(subject)
    show(CollectiveRequest("all-gather", "bruck", 6, as_json=True))
    assert found["program"] == json.loads(capsys.readouterr().out)
    show(CollectiveRequest("all-gather", "", 6, size="1MiB", cluster="dgx-h100", as_json=True))
    free = VIEWS["collectives"].data(subject.with_options({"operation": "all-gather", "ranks": 6, "size": "1MiB"}))
    assert free["time_s"] == json.loads(capsys.readouterr().out)["time_s"]
    show(CollectiveRequest("all-gather", "", 6, compare=True, cluster="dgx-h100", as_json=True))
    assert found["comparison"] == json.loads(capsys.readouterr().out)


def test_strategies_are_what_show_prints(subjects):
    from meshwright.view.show.strategies import data

    found = VIEWS["strategies"].data(subjects["moe"])
    sent, used = (part["rows"] for part in parts_of(found, "table"))
    shown = [
        [cell.removesuffix(" ✓") for cell in (*a["cells"], *b["cells"][1:])] for a, b in zip(sent, used, strict=True)
    ]
    assert shown == [[*row.values()] for row in data()]
    marked = {row["cells"][0] for row in used if row["chosen"]}
    assert marked == {f"{name} ✓" for name in ("ZeRO-1", "tensor parallel", "+ sequence parallel", "expert parallel")}


def test_groups_of_the_grid_are_those_of_the_layout(subjects):
    for subject in subjects.values():
        layout = Layout(subject.plan, tuple(subject.stack.order))
        for axis in VIEWS["ranks"].data(subject)["axes"]:
            number = axis["group_of"]
            for rank in (0, subject.plan.world - 1):
                assert [r for r, n in enumerate(number) if n == number[rank]] == sorted(
                    layout.group_of(axis["axis"], rank)
                )


def test_zero_corrects_the_figure_of_seven_billion_parameters(subjects):
    found = zero.data(subjects["dense"])
    assert [row["right_gb"] for row in found["seed"]] == [112, 38.5, 26.25, 14]
    now = next(row for row in found["plan"] if row["now"])
    assert now["name"] == "ZeRO-1"
    assert now["bytes"] == subjects["dense"].estimate.prediction.memory_gib * 2**30


def test_published_runs_are_those_of_validate_headline(subjects):
    found = VIEWS["published"].data(subjects["dense"])
    outcomes = predict_rows(read(str(files("meshwright.calibrate.runs").joinpath("headline.csv"))))
    (table,) = parts_of(found, "table")
    cells = [[cell[0] if isinstance(cell, list) else cell for cell in row["cells"]] for row in table["rows"]]
    assert {one[0]: one[7] for one in cells} == pytest.approx({o.case.row_id: o.error for o in outcomes})
    likes, gpu = [one[1] for one in cells], subjects["dense"].cluster.accelerator.name
    assert likes == sorted(likes, key=["model and GPU", "GPU", "model", "–"].index)
    assert all((one[3] == gpu) == ("GPU" in one[1]) for one in cells)
    assert "GPU" in likes
    assert numbers(found)["This plan"].endswith("tokens/s per GPU")


FREE = [
    ({"replicate": 4}, {"bucket"}),
    ({"shard": 4, "zero": 1}, {"wrap"}),
    ({"replicate": 4, "compression": "powersgd"}, {"bucket", "compression_rank"}),
    ({"replicate": 4, "compression": "top-k"}, {"bucket", "compression_ratio"}),
    ({"replicate": 4, "compression": "threshold"}, {"bucket", "compression_threshold"}),
]


@pytest.mark.parametrize(("fields", "special"), FREE)
def test_fields_without_a_rule_are_offered_where_they_have_an_effect(fields, special):
    config = mw.load("llama3-8b", cluster="dgx-h100", gpus=16, set=["workload.batch=32"])
    plan = Plan(tp=4, **fields)
    offered = free_values(plan, config.model.layers)
    changing = {"comm_dtype", "order", *special}
    assert changing == set(offered) - set(word_values())
    assert offered["order"] == [[], ["tp", "dp", "cp", "pp"], ["dp", "tp", "cp", "pp"]]
    for name in changing:
        plans = [plan.but(**{name: value}) for value in offered[name]]
        assert plan in plans, name
        costs = [estimate(config.but(plan=p)) for p in plans]
        assert len({e.prediction.step_time_s for e in costs}) > 1, name


def test_a_plan_without_data_parallelism_has_no_gradient_messages():
    offered = free_values(Plan(tp=4, bucket=3e6), 32)
    assert not {"comm_dtype", "bucket", "wrap", "order"} & set(offered)
    assert 3e6 in free_values(Plan(replicate=2, bucket=3e6), 32)["bucket"]


def test_the_verdict_names_the_largest_avoidable_part(subjects):
    from meshwright.view.page import verdict

    e = subjects["dense"].estimate
    parts = {name: e.prediction.exposed_s.get(name, 0.0) for name in verdict.AVOIDABLE}
    largest = max(parts.values()) / e.prediction.step_time_s
    words = verdict.sentence(e)
    assert f"({largest:.0%})" in words if largest >= verdict.SMALL else "Bound by compute" in words
    config = subjects["dense"].config
    over = Subject(config.but(workload=config.workload.but(seq=1024 * config.workload.seq))).estimate
    assert not over.prediction.fits
    assert "over the limit on stage 0, where activations take" in verdict.headline(over)
    assert "targets" not in verdict.headline(over) + verdict.sentence(over)


def test_what_to_change_first_names_what_follows(subjects):
    changes = [item for item in advice.data(subjects["dense"])["items"] if " = " in item["head"]]
    assert changes
    for change in changes:
        chosen = change["head"].split(" and ")
        follows = [part for part in change["words"].partition(":")[0].removeprefix(", with ").split(", ") if part]
        assert len(change["set"]) == len(chosen) + len(follows)


def test_a_written_file_has_the_view_at_which_it_opens(subjects):
    from meshwright.view.page.bundle import document

    page = document(subjects["pipeline"], first="timeline")
    assert '"timeline":{"title":"Pipeline timeline","data":{' in page
    assert '"view":"timeline"' in page
    assert '"heatmap":{' not in page  # views that need a search are left out


def test_a_finding_that_needs_a_larger_batch_sets_it():
    larger = Finding("MW-LINT-004", "too few micro-batches", "warning", "", fix="--set workload.batch=64")
    assert advice.inputs_of(Plan(pp=4), larger) == {"workload.batch": 64}
    fewer = Finding("MW-LINT-004", "too few micro-batches", "warning", "", fix="--set plan.pp=2", fixed=Plan(pp=2))
    assert advice.inputs_of(Plan(pp=4), fewer) == {"plan.pp": 2}


def test_a_preset_has_all_sections_so_that_nothing_of_the_page_stays() -> None:
    assert {frozenset(one["state"]) for one in presets()} == {frozenset(PLANNED)}


def test_the_preset_of_a_published_run_is_predicted_as_the_table_of_published_runs() -> None:
    states = {one["title"].rpartition(": ")[2]: one["state"] for one in presets() if one["group"] == "Published runs"}
    table = {o.case.row_id: o.prediction.step_time_s for o in published.all_runs()}
    assert states.keys() == table.keys()
    for name, state in states.items():
        assert estimate(Config.from_document(state)).prediction.step_time_s == pytest.approx(table[name], rel=1e-4), (
            name
        )


def test_choices_that_the_stacks_framework_does_not_run_are_marked() -> None:
    """What to change first leaves them out: a chip that saves more says why."""
    config = Config.from_document({**presets()[0]["state"], "stack": "megatron-core"})
    found = choices(config.to_dict())["fields"]
    runs = {change.fields[0] for change in candidates(config, config.plan) if change.plan}
    for name in ("schedule", "zero", "tp"):
        for choice in found[name]:
            if choice["legal"] and choice["value"] != getattr(config.plan, name):
                assert ("not_run" in choice) == ((name, choice["value"]) not in runs), choice
    assert next(c for c in found["schedule"] if c["value"] == "zb-h1")["not_run"] == "Megatron-Core"


def test_a_launch_script_shows_what_is_open_left_out_and_wrong() -> None:
    flags = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --vocab-size 100 --seq-length 8 --ffn-hidden-size $FFN --sequence-parallel"
    before = "source env.sh\nif [ -f x ]; then MORE=(--recompute-granularity full); fi\n"
    found = opened("train.sh", f"{before}torchrun --nnodes 1 --nproc_per_node 2 pretrain_gpt.py {flags}\n")
    kinds = {entry.rpartition(" (")[2]: entry for entry in found["unread"]}
    assert list(kinds)[:3] == ["left open)", "left out)", "not read)"]  # in the order of the command
    assert kinds["left open)"] == "--ffn-hidden-size = $FFN (left open)"
    assert kinds["not read)"] == "env.sh (not read)"
    assert [problem["code"] for problem in found["problems"]] == ["MW-SET-009"]
