"""Decision guides: each recommendation is legal, and the output shows its cost against the winner."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from meshwright.describe import catalog
from meshwright.describe.config import Config
from meshwright.describe.plan import Plan
from meshwright.planner.advice.guides import axes, general, textbook
from meshwright.planner.advice.guides.problem import GuideProblem
from meshwright.predict.estimate import Estimate, estimate
from meshwright.view import textbook as view

NAMES = {
    "size vs memory",
    "topology",
    "batch (training)",
    "architecture",
    "typical configuration",
    "ZeRO stage",
    "tensor guide",
    "pipeline guide",
    "3D",
    "ZeRO-3's network",
    "practical tree",
    "start simple",
    "inference",
}


def config(model: str, cluster: str, gpus: int, batch: int, seq: int = 4096, tokens: str = "0") -> Config:
    return Config.from_parts(
        model, {"extends": cluster, "gpus": gpus}, "default", {"batch": batch, "seq": seq, "tokens": tokens}
    )


def problem(model: str, cluster: str, gpus: int, batch: int, seq: int = 4096) -> GuideProblem:
    c = config(model, cluster, gpus, batch, seq)
    return GuideProblem(c)


def estimated(c: Config, plan: Plan) -> Estimate:
    return estimate(c.but(plan=plan))


# Each guide


def test_size_and_memory_by_16_bytes_per_parameter() -> None:
    small = general.size_against_memory(problem("llama3.2-1b", "dgx-h100", 8, 64))
    assert small.plan is not None
    assert (small.plan.zero, small.plan.replicate) == (0, 8)
    # The text recommends DDP for 7B on 80 GB; its state alone is 112 GB.
    seven = general.size_against_memory(problem("llama-7b", "dgx-h100", 8, 64, 2048))
    assert seven.plan is not None
    assert seven.plan.zero == 3
    assert "112 GB" in seven.correction
    assert "108 GB of state is above" in seven.reason  # 6.74B


def test_topology_of_one_node_of_many_and_of_ethernet() -> None:
    node = general.topology(problem("llama3-8b", "dgx-h100", 8, 64)).plan
    assert node is not None
    assert node.tp in (2, 4, 8)
    assert node.pp == 1
    many = general.topology(problem("llama3-70b", "dgx-h100", 512, 1024)).plan
    assert many is not None
    assert many.tp == 8
    cloud = general.topology(problem("llama2-13b", "ethernet-cluster", 64, 512)).plan
    assert cloud is not None
    assert cloud.tp == 1
    assert cloud.pp > 1 or cloud.zero == 3


def test_batch_guide_shows_the_walked_bubble_of_the_estimate() -> None:
    c = config("gpt3-175b", "dgx-a100", 1024, 1536, 2048)
    r = general.batch_size(GuideProblem(c))
    assert r.plan is not None
    assert r.plan.microbatch == 1
    assert f"bubble fraction {estimated(c, r.plan).bubble_fraction:.0%}" in r.reason
    assert "too much" in general.batch_size(problem("gpt3-175b", "dgx-a100", 1024, 32, 2048)).reason


def test_architecture_by_kind() -> None:
    experts = general.architecture(problem("mixtral-8x7b", "dgx-h100", 128, 1024)).plan
    assert experts is not None
    assert experts.ep == 8
    long = general.architecture(problem("llama3.1-8b", "dgx-h100", 64, 32, 131_072)).plan
    assert long is not None
    assert long.cp > 1
    dense = general.architecture(problem("llama3-70b", "dgx-h100", 64, 512)).plan
    assert dense is not None
    assert (dense.tp, dense.cp, dense.ep) == (8, 1, 1)


@pytest.mark.parametrize(
    ("model", "seq", "gpus", "batch", "holds"),
    [
        ("llama3.2-1b", 4096, 16, 128, lambda p: p.zero == 0 and p.dp == 16),
        ("llama3-8b", 4096, 16, 128, lambda p: p.zero == 3 and p.tp == 1),
        ("llama3-70b", 4096, 512, 1024, lambda p: p.zero == 3 or p.tp == 8),
        ("gpt3-175b", 2048, 1024, 1536, lambda p: p.tp == 8 and p.pp in (8, 16)),
        ("deepseek-v3", 4096, 2048, 15360, lambda p: p.tp == 4 and p.ep == 64),
        ("llama3.1-8b", 131_072, 64, 32, lambda p: p.tp == 8 and p.cp == 4),
    ],
)
def test_typical_configurations(model: str, seq: int, gpus: int, batch: int, holds) -> None:
    plan = general.typical_configuration(problem(model, "dgx-h100", gpus, batch, seq)).plan
    assert plan is not None
    assert holds(plan), plan.title()


def test_zero_stages_climb_with_the_model() -> None:
    stages = [
        axes.zero_stage(problem(m, "dgx-h100", 16, 128)).plan for m in ("llama3.2-1b", "llama3.2-3b", "qwen2.5-14b")
    ]
    chosen = [plan.zero if plan else -1 for plan in stages]
    assert chosen == sorted(chosen)
    assert chosen[0] == 0
    assert chosen[-1] == 3


def test_hybrid_sharding_where_the_network_is_narrow() -> None:
    r = axes.zero_stage(problem("llama2-13b", "gcp-a3-high", 64, 512))
    assert r.plan is not None
    assert r.plan.zero == 3
    assert (r.plan.shard, r.plan.replicate) == (8, 8)
    assert r.reason.startswith("HSDP")


def test_states_of_7b_at_eight() -> None:
    """112, 38.5, 26.25 and 14 GB hold for 16-bit gradients and a stack that accumulates into them."""
    s = problem("llama-7b", "dgx-h100", 8, 64, 2048)
    plans = {stage: s.shaped(zero=stage).but(grad_dtype="bf16") for stage in range(4)}
    per = 7e9 / s.model.total / 1e9
    states = {k: v * per for k, v in axes.stage_states(s, plans).items()}
    assert states == pytest.approx({"DDP": 112, "ZeRO-1": 38.5, "ZeRO-2": 26.25, "ZeRO-3": 14}, rel=1e-3)


def test_the_zero_guide_agrees_with_the_memory_table() -> None:
    s = problem("llama-7b", "dgx-h100", 8, 64, 2048)
    plans = {stage: s.shaped(zero=stage) for stage in range(4)}
    for (name, size), plan in zip(axes.stage_states(s, plans).items(), plans.values(), strict=True):
        table = estimate(s.config.but(plan=plan)).prediction.memory_by_stage
        states = max(stage["parameters"] + stage["gradients"] + stage["optimizer"] for stage in table)
        assert size / 2**30 == pytest.approx(states), name


def test_the_tensor_guide_avoids_small_models_and_slow_links() -> None:
    assert axes.tensor(problem("llama3.2-1b", "dgx-h100", 16, 128)).plan is None
    slow = axes.tensor(problem("llama2-13b", "ethernet-cluster", 64, 512))
    assert slow.plan is None
    assert "✗ a fast link" in slow.reason
    large = axes.tensor(problem("llama3-70b", "dgx-h100", 64, 512)).plan
    assert large is not None
    assert large.tp == 8
    assert large.sp


def test_the_pipeline_guide_keeps_four_micro_batches_per_stage() -> None:
    s = problem("gpt3-175b", "dgx-a100", 1024, 1536, 2048)
    plan = axes.pipeline(s).plan
    assert plan is not None
    assert plan.tp == 8
    assert plan.pp > 1
    assert plan.microbatches(s.workload) >= 4 * plan.pp
    assert axes.pipeline(problem("llama3-8b", "dgx-h100", 8, 64)).plan is None  # one node
    assert axes.pipeline(problem("llama3-8b", "dgx-h100", 64, 8)).plan is None  # no batch to fill it


def test_three_dimensions_of_the_example() -> None:
    plan = axes.three_dimensions(problem("llama3-70b", "dgx-h100", 512, 1024)).plan
    assert plan is not None
    assert (plan.tp, plan.pp, plan.dp) == (8, 8, 8)


def test_zero3_and_its_network() -> None:
    assert axes.zero3_network(problem("llama2-13b", "ethernet-cluster", 64, 512)).plan is None
    assert axes.zero3_network(problem("llama2-13b", "dgx-h100", 64, 512)).plan is not None


@pytest.mark.parametrize(
    ("model", "gpus", "batch", "seq", "holds"),
    [
        ("llama3.2-1b", 8, 64, 4096, lambda p: p.zero == 0),
        ("qwen2.5-32b", 64, 512, 4096, lambda p: p.tp in (2, 4, 8) and p.pp == 1 and p.zero == 3),
        ("llama3-70b", 64, 512, 4096, lambda p: p.tp == 8 and p.pp in (2, 4)),
        ("gpt3-175b", 1024, 1536, 2048, lambda p: p.tp == 8 and p.pp in (8, 16)),
        ("deepseek-v3", 2048, 15360, 4096, lambda p: p.tp == 8 and p.pp in (8, 16) and p.ep > 1),
    ],
)
def test_the_practical_tree(model: str, gpus: int, batch: int, seq: int, holds) -> None:
    plan = general.practical_tree(problem(model, "dgx-h100", gpus, batch, seq)).plan
    assert plan is not None
    assert holds(plan), plan.title()


def test_start_simple_and_models_outside_the_guide() -> None:
    r = general.start_simple(problem("llama3.2-1b", "dgx-h100", 8, 64))
    assert r.plan is not None
    assert r.plan.zero == 0
    assert general.start_simple(problem("llama3-8b", "dgx-h100", 17, 128)).plan is None


def test_inference_prefers_tensor_parallelism() -> None:
    r = axes.inference(problem("llama3-70b", "dgx-h100", 8, 64))
    assert r.plan is None
    assert r.reason.startswith("tp 8: 6.7")
    assert "16 devices" in axes.inference(problem("deepseek-v3", "dgx-h800", 16, 64)).reason


# All together


@pytest.fixture(scope="module")
def case() -> tuple[Config, Estimate]:
    c = config("llama3-70b", "dgx-h100", 64, 512, 8192, "1T")
    plan = Plan(tp=4, sp=True, pp=2, shard=8, zero=1, recompute="full", bucket=4e8)
    return c, estimated(c, plan)


TEXTS = (
    "A Guide to Distributed Training",
    "Distributed Training Basics",
    "Distributed Training at Scale",
    "Lecture on Parallelism",
    "Bandwidth and Efficiency Modeler",
)


def test_every_guide_gives_a_recommendation_and_its_source(case: tuple[Config, Estimate]) -> None:
    c, _ = case
    recommendations = textbook.recommend(c)
    assert {r.guide for r in recommendations} == NAMES
    assert len(recommendations) == len(textbook.GUIDES)
    assert all(r.reason and r.source.partition(",")[0] in TEXTS for r in recommendations)


def test_comparison_is_the_estimate_of_each_plan(case: tuple[Config, Estimate]) -> None:
    c, winner = case
    recommendations = textbook.recommend(c)
    steps = 1e12 / (512 * 8192)
    for one in textbook.compare(recommendations, winner):
        if one.recommendation.plan is None:
            assert one.estimate is None
            continue
        mine = estimated(c, one.recommendation.plan).prediction
        assert one.ratio == pytest.approx(mine.step_time_s / winner.prediction.step_time_s)
        assert one.costs_days == pytest.approx((mine.step_time_s - winner.prediction.step_time_s) * steps / 86400)
        assert one.fits == mine.fits


def test_the_winner_is_recognised(case: tuple[Config, Estimate]) -> None:
    _, winner = case
    (same,) = textbook.compare([textbook.Recommendation("x", winner.plan, "", "seed")], winner)
    assert same.same
    assert same.ratio == 1
    assert textbook.differences(winner.plan, winner.plan) == "the same plan"
    assert textbook.differences(Plan(tp=8), Plan(tp=4, sp=True)) == "tp 8 → 4, sp off → on"


def test_the_table_groups_guides_that_agree(case: tuple[Config, Estimate]) -> None:
    c, winner = case
    compared = textbook.compare(textbook.recommend(c), winner)
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    made = view.table(compared, winner)
    console.print(made, view.reasons(compared, sources=True))
    text = console.export_text()
    plans = {repr(x.recommendation.plan) for x in compared if x.estimate}
    assert made.row_count == len(plans)
    for name in NAMES - {"inference", "tensor guide", "pipeline guide"}:
        assert name in text
    assert "corrected: " in text


@settings(max_examples=8)
@given(
    st.sampled_from(
        [
            "llama3-8b",
            "gpt3-13b",
            "mixtral-8x7b",
            "qwen2.5-0.5b",
            "deepseek-v2-lite",
            "lecture-mlp",
            "resnet-50",
            "bert-large",
        ]
    ),
    st.sampled_from(sorted(catalog.names("clusters"))),
    st.integers(1, 96),
    st.integers(1, 300),
    st.sampled_from([128, 1000, 4096, 65_536]),
)
def test_recommended_plans_are_legal(model: str, cluster: str, gpus: int, batch: int, seq: int) -> None:
    c = config(model, cluster, gpus, batch, seq)
    for r in textbook.recommend(c):
        if r.plan is not None:
            r.plan.check(c.model, c.workload, c.cluster)
