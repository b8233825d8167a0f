"""Explanations are consistent: every figure comes from the parts of the step, and impossible problems give clear errors."""

from dataclasses import replace

import pytest

import meshwright as mw
from meshwright import planner
from meshwright.cost.band import band
from meshwright.describe import catalog
from meshwright.describe.config import Config
from meshwright.describe.plan import Plan
from meshwright.errors import MeshwrightError
from meshwright.planner.advice import explain as why
from meshwright.planner.advice.infeasible import fits, other
from meshwright.planner.advice.reasons import reasons
from meshwright.planner.advice.sensitivity import changed, links, resized
from meshwright.planner.api import run
from meshwright.planner.question import Question, read, read_share, split_settings, words
from meshwright.predict.estimate import estimate
from planner.spaces import DENSE, MOE, cluster, space


@pytest.fixture(scope="module")
def result():
    """A small problem on which pipelines, sharding and recompute all matter."""
    where = space(
        DENSE.but(hidden=2048, heads=16, kv_heads=8, ffn=8192, layers=8, vocab=32000),
        16,
        32,
        seq=2048,
        memory="7GB",
        without=["ulysses,all-gather,gpipe,looped-bfs,zb-h2,reorder"],
    )
    cluster, workload = where.cluster.but(price=2.0), where.workload.but(tokens="1B")
    config = where.config.but(cluster=cluster, workload=workload, assumed=("nothing",))
    return run(Question(config, where.base, where.choices, 0.05))


def test_parts_sum_to_the_walked_step(result):
    for candidate, p in result.leaders:
        assert sum(p.exposed_s.values()) == pytest.approx(p.step_time_s, rel=1e-12)
        assert p.step_time_s == pytest.approx(candidate.time, rel=2e-3)
        assert p.step_time_low_s < p.step_time_s < p.step_time_high_s
        assert p.fits
        assert p.memory_gib <= 0.95 * p.memory_limit_gib


def test_the_parts_of_a_slower_strategy_sum_to_the_difference(result):
    lost = [c for name, c in result.ranking.strategies.items() if name != result.ranking.best.strategy]
    assert lost
    for c in lost:
        theirs = why.walked_estimate(result.space, c.plan, c.time).prediction
        parts = why.difference(theirs, result.prediction)
        assert sum(s for _, s in parts) == pytest.approx(
            theirs.step_time_s - result.prediction.step_time_s, rel=1e-9, abs=1e-12
        )
    assert [w.slower for w in result.why_not] == sorted(w.slower for w in result.why_not)
    misfits = [w for w in result.why_not if not w.fits]
    assert misfits
    assert all("does not fit" in w.words for w in misfits)


def test_batch_arithmetic_and_training(result):
    x, plan, workload = result.explanation, result.plan, result.space.workload
    assert plan.microbatch * plan.microbatches(workload) * plan.dp == workload.batch
    assert f"{workload.batch:,} sequences" in x.batch
    t = x.training
    assert t.days * 86400 * result.prediction.tokens_per_s == pytest.approx(1e9)
    assert t.gpu_hours == pytest.approx(t.days * 24 * plan.world)
    assert t.dollars == pytest.approx(2.0 * t.gpu_hours)
    assert t.days_low < t.days < t.days_high


def test_every_field_in_use_has_a_reason(result):
    used = set(result.plan.as_dict()) & {"tp", "cp", "pp", "recompute", "order", "ep"}
    assert used <= set(result.explanation.reasons)


def test_unusual_choices_are_compared_with_the_usual_one():
    config = Config.from_parts(
        "llama3-70b",
        catalog.load("clusters", "dgx-h100").with_gpus(64),
        overrides=["workload.batch=512", "workload.seq=4096"],
    )
    plan = Plan(shard=2, zero=1, tp=2, cp=2, pp=8, virtual=10, schedule="interleaved", bucket=25e6)
    e = estimate(config.but(plan=plan))
    texts = reasons(e)
    with_sp = estimate(config.but(plan=plan.but(sp=True))).prediction
    longer = with_sp.step_time_s / e.prediction.step_time_s - 1
    assert f"a step takes {100 * longer:+.1f}%" in texts["sp"]
    assert "in its place dp 4 does not fit, tp 4 takes +" in texts["cp"]
    assert "pp 16 does not fit" in texts["cp"]
    assert "same bytes forward" in reasons(estimate(config.but(plan=plan.but(sp=True))))["sp"]
    long = config.workload.but(seq=65536, batch=32)
    assert "in its place" not in reasons(estimate(config.but(plan=plan.but(recompute="full"), workload=long)))["cp"]


def test_an_unmeasured_chip_has_median_efficiency_and_a_wider_band():
    names = {name: catalog.load("accelerators", name) for name in catalog.names("accelerators")}
    measured = [names[name].efficiency for name in ("h100-sxm", "b200", "mi355x")]
    guessed = {name for name, a in names.items() if not a.efficiency.measured}
    assert "mi300x" in guessed
    assert not guessed & {"a100-80gb", "h100-sxm", "b200", "mi355x", "cpu"}
    for share in ("gemm", "flash", "fused", "memory"):
        assert getattr(names["mi300x"].efficiency, share) <= sorted(getattr(e, share) for e in measured)[1]
    question = {"gpus": 16, "batch": 128, "seq": 4096, "fix": {"cp": 1, "pp": 1}}
    amd, nvidia = (planner.plan("llama3-8b", cluster, **question) for cluster in ("mi300x-8", "dgx-h100"))
    assert amd.prediction.mfu <= nvidia.prediction.mfu
    width = [r.prediction.step_time_high_s / r.prediction.step_time_low_s for r in (amd, nvidia)]
    assert width[0] > 1.3 * width[1]
    x, p = amd.explanation, amd.prediction
    assert x.calibrated.startswith("uncalibrated")
    assert p.step_time_high_s / p.step_time_s == pytest.approx(
        band(amd.estimate.stack, p.exposed_s, p.hidden_s, amd.plan, amd.estimate.cluster)[1]
    )
    assert "never measured" in str(amd).split("Leaders")[0]
    assert "never measured" not in str(nvidia).split("Leaders")[0]


def test_sensitivities_have_the_right_signs(result):
    rows = {s.what: s for s in result.explanation.sensitivities}
    assert rows["GPU rate"].less < 0 < rows["GPU rate"].more
    for name in ("bandwidth in the node", "bandwidth between nodes", "memory bandwidth"):
        assert rows[name].less <= 1e-12
        assert rows[name].more >= -1e-12
    assert rows["latency of links"].less >= -1e-12 >= rows["latency of links"].more - 2e-12
    swings = [s.swing for s in result.explanation.sensitivities]
    assert swings == sorted(swings, reverse=True)


def test_a_changed_cluster_keeps_its_fields_and_no_cached_values():
    where = space(DENSE, 8)
    _ = where.cluster.spans
    c, _, _ = changed(where, "bandwidth between nodes", 0.5)
    assert c.device_bandwidth(1) == pytest.approx(0.5 * where.cluster.device_bandwidth(1))
    assert c.device_bandwidth(0) == where.cluster.device_bandwidth(0)
    assert links(where.cluster, lambda _, n: n) == where.cluster


def test_scaling_counts_the_fewest_devices(result):
    s = result.explanation.scaling
    assert result.plan.world % s.fewest == 0
    assert s.weak is None or 0.3 < s.weak <= 1.05
    assert resized(Plan(replicate=2, shard=4, zero=3), 4) == Plan(shard=4, zero=3)
    assert resized(Plan(shard=8, zero=1), 1) == Plan()


def test_comparing_the_winner_with_itself_finds_no_difference(result):
    c = result.compare(result.plan)
    assert c.slower == pytest.approx(0.0, abs=2e-3)
    assert not c.fields
    assert result.compare(Plan(tp=3)).refused.startswith("MW-PLAN")
    slow = result.compare(Plan(replicate=2, tp=8, recompute="full"))
    assert slow.slower > 0
    assert sum(s for _, s in slow.parts) == pytest.approx(
        slow.user.prediction.step_time_s - slow.best.prediction.step_time_s
    )


def test_the_plan_file_reads_back_with_its_reasons(result, tmp_path):
    from meshwright.describe.config import load

    text = result.to_toml()
    file = tmp_path / "plan.toml"
    file.write_text(text)
    config = load(file).check()
    assert config.plan == result.plan
    assert config.model == result.space.model
    assert config.cluster == result.space.cluster
    assert "# " in text.split("[plan]")[1]


def test_the_result_has_text_and_html_representations(result):
    assert result.plan.title() in str(result)
    page = result._repr_html_()
    assert "Why not" in page
    assert "<script" not in page
    assert "http" not in page


# No answer


def asked(*args, **kwargs):
    with pytest.raises(MeshwrightError) as refused:
        planner.plan(*args, **kwargs)
    return refused.value


def test_a_prime_number_of_devices():
    e = asked("llama3-70b", "dgx-h100", gpus=127, batch=1024)
    assert e.code == "MW-PLANNER-004"
    assert "prime" in e.why
    assert "--batch 1016" in e.fix
    assert "128" in e.fix


def test_a_schedule_that_no_plan_has():
    """Degrees are legal here, and only the schedule is not (it needs four micro-batches): nothing is left to rank."""
    fix = ["microbatch=2", "pp=2", "dp=2", "zero=3", "schedule=dualpipev"]
    e = asked("llama3-8b", "dgx-b200", gpus=4, batch=8, seq=64, stack="torchtitan", fix=fix)
    assert e.code == "MW-PLANNER-004"
    assert e.fix == "drop --fix schedule=dualpipev"


def test_an_impossible_batch():
    e = asked("llama3-70b", "dgx-h100", gpus=489, batch=1000)
    assert e.code == "MW-PLANNER-004"
    assert "--batch 978" in e.fix


@pytest.mark.parametrize(
    ("fields", "fix"),
    [
        ({"fix": {"tp": 6}}, "--fix tp=8"),
        ({"fix": {"microbatch": 3}}, "--fix microbatch=4"),
        ({"least": ["pp=100"]}, "--min pp=64"),
        ({"fix": ["ep=2"]}, "--fix ep=1"),
        ({"fix": ["tp=16", "pp=16"]}, "--fix pp=4"),
    ],
)
def test_an_impossible_constraint_suggests_the_closest_value(fields, fix):
    e = asked("llama3-70b", "dgx-h100", nodes=8, batch=1024, **fields)
    assert e.code == "MW-PLANNER-004"
    assert e.fix.split(" or ")[0] == fix


def test_a_model_larger_than_the_cluster():
    e = asked("llama3.1-405b", "dgx-h100", nodes=2, batch=64, seq=8192)
    assert e.code == "MW-PLANNER-005"
    assert e.exit_code == 3
    gpus = int(e.fix.split("(")[1].split()[0])
    where = read("llama3.1-405b", "dgx-h100", batch=64, seq=8192).space()
    limit = 0.95 * where.cluster.accelerator.memory
    assert fits(other(where, cluster=where.cluster.with_gpus(gpus)), limit)
    assert not fits(other(where, cluster=where.cluster.with_gpus(16)), limit)


def test_suggested_changes_are_tried_first():
    e = asked("llama3-8b", "dgx-h100", nodes=1, batch=8, seq=131072, without=["cp", "tp"])
    assert e.code == "MW-PLANNER-005"
    assert "drop --without cp" in [e.fix, *e.valid]
    assert planner.plan("llama3-8b", "dgx-h100", nodes=1, batch=8, seq=131072, without=["tp"]).plan.cp > 1


def test_context_parallelism_of_unequal_stages_is_explained():
    """The trial with one stage per rank drops the layers that the plan names for every stage."""
    lengths = (5, 6, *(5,) * 13, 4)
    plan = {"cp": 2, "pp": 8, "virtual": 2, "schedule": "dualpipev", "layers_per_stage": lengths}
    e = mw.estimate("llama3-70b", "dgx-h100", gpus=16, batch=32, plan=plan)
    assert "in its place dp 2" in reasons(e)["cp"]


@pytest.mark.parametrize("text", ["110%", "-1%", "much", "1.0"])
def test_headroom_is_parsed(text):
    with pytest.raises(MeshwrightError) as refused:
        read_share(text)
    assert refused.value.code == "MW-PLANNER-006"
    assert read_share("10%") == read_share(0.1) == read_share("0.1") == pytest.approx(0.1)


def test_settings_of_searched_fields_are_constraints():
    assert split_settings(["plan.tp=8", "cluster.price=2", "plan.bucket=50MB"]) == (
        ["cluster.price=2", "plan.bucket=50MB"],
        ["tp=8"],
    )
    assert words({"tp": 8, "sp": True, "order": ("tp", "cp", "pp", "dp")}) == ["tp=8", "sp=true", "order=tp,cp,pp,dp"]
    r = planner.plan(MOE, cluster(4), batch=8, seq=256, set=["plan.tp=2", "plan.bucket=50MB"], top=2)
    assert r.plan.tp == 2
    assert r.plan.bucket == 50e6
    assert len(r.leaders) <= 2
    assert replace(r.config).plan == r.plan
