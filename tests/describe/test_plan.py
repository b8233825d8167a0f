"""Plans check themselves: errors show the arithmetic, the legal values and a fix."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.describe import catalog
from meshwright.describe.plan import Plan, divisors
from meshwright.describe.workload import Workload
from meshwright.errors import MeshwrightError


def model(name: str = "llama3-70b"):
    return catalog.load("models", name)


def cluster(gpus: int):
    return catalog.load("clusters", "dgx-h100").with_gpus(gpus)


def refusal(plan: dict, gpus: int = 0, name: str = "llama3-70b", **workload) -> MeshwrightError:
    def attempt() -> None:
        made = Plan(**plan)
        made.check(model(name), Workload(**{"batch": 768, "seq": 4096, **workload}), cluster(gpus or made.world))

    with pytest.raises(MeshwrightError) as caught:
        attempt()
    assert caught.value.exit_code == 2
    return caught.value


def test_a_good_plan_passes() -> None:
    plan = Plan(tp=8, pp=2, shard=4, zero=1, sp=True)
    assert plan.check(model(), Workload(batch=512, seq=8192), cluster(64)) is plan
    assert plan.world == 64
    assert plan.microbatches(Workload(batch=512)) == 128
    assert plan.title() == "dp 4 (ZeRO-1) · tp 8+sp · pp 2 (1f1b) · micro-batch 1"
    few, many = Plan(pp=4, layers_per_stage=(5, 6, 6, 1)), Plan(pp=16, layers_per_stage=(1, *[2] * 14, 1))
    assert few.title() == "pp 4 (1f1b, layers 5/6/6/1) · micro-batch 1"
    assert many.title() == "pp 16 (1f1b, layers 1/2×14/1) · micro-batch 1"
    lossy = Plan(replicate=2, compression="int8", offload="both")
    assert lossy.title() == "dp 2 · micro-batch 1 · int8 gradients · offload states and activations"


def test_the_product_is_shown_with_its_arithmetic() -> None:
    error = refusal({"tp": 8, "pp": 2, "replicate": 4}, gpus=48)
    assert error.code == "MW-PLAN-005"
    assert "replicate × tp × pp = 4 × 8 × 2 = 64 ≠ 48 GPUs" in str(error)
    assert error.fix == "--set plan.replicate=3"


def test_tensor_parallel_divides_heads() -> None:
    error = refusal({"tp": 6}, gpus=48, seq=4096)
    assert error.code == "MW-PLAN-005"
    error = refusal({"tp": 6, "replicate": 8}, gpus=48)
    assert str(error).startswith(
        "MW-PLAN-004: tp=6 does not divide 64 attention heads of llama3-70b. Valid: 1, 2, 4, 8"
    )
    assert error.fix == "--set plan.tp=8 --set plan.replicate=6"


@pytest.mark.parametrize(
    ("plan", "code", "words"),
    [
        ({"shard": 4}, "MW-PLAN-001", "shard=4 with zero=0"),
        ({"order": ("tp", "tp", "pp", "dp")}, "MW-PLAN-002", "each axis once"),
        ({"virtual": 2, "pp": 2}, "MW-PLAN-003", "1f1b takes virtual=1"),
        ({"virtual": 4, "pp": 2, "schedule": "zbv"}, "MW-PLAN-003", "zbv takes virtual=2"),
        ({"pp": 128}, "MW-PLAN-006", "128 × 1 = 128 stages for 80 layers"),
        ({"pp": 2, "layers_per_stage": (40,)}, "MW-PLAN-007", "2 × 1 = 2 stages"),
        ({"pp": 2, "layers_per_stage": (40, 39)}, "MW-PLAN-007", "sums to 79"),
        ({"cp": 3}, "MW-PLAN-008", "4096 does not split into 6 pieces"),
        ({"cp": 16, "tp": 8, "cp_kind": "ulysses"}, "MW-PLAN-008", "8 local attention heads"),
        ({"ep": 2, "replicate": 2}, "MW-PLAN-010", "has no experts"),
        ({"microbatch": 5}, "MW-PLAN-011", "5 × 1 = 5"),
        ({"pp": 2, "schedule": "interleaved"}, "MW-PLAN-003", "interleaved takes virtual=2 to 1024"),
        ({"pp": 2, "virtual": 2, "schedule": "dualpipev", "microbatch": 256}, "MW-PLAN-016", "needs 4 micro-batches"),
    ],
)
def test_errors_name_the_problem(plan, code, words) -> None:
    error = refusal(plan)
    assert error.code == code
    assert words in str(error)


def test_sequence_parallel_divides_the_sequence() -> None:
    assert refusal({"tp": 8, "sp": True}, seq=4100).code == "MW-PLAN-008"


def test_count_only_models_allow_only_data_parallelism() -> None:
    assert refusal({"tp": 2}, name="resnet-50").code == "MW-PLAN-009"
    Plan(replicate=8).check(model("resnet-50"), Workload(batch=256), cluster(8))


def test_an_mlp_has_no_sequence_and_no_experts() -> None:
    assert refusal({"cp": 2}, name="lecture-mlp").code == "MW-PLAN-009"
    assert refusal({"tp": 3}, name="lecture-mlp").code == "MW-PLAN-004"


def test_expert_parallelism_adds_no_devices() -> None:
    moe = model("mixtral-8x7b")
    plan = Plan(tp=2, replicate=8, ep=8, expert_tp=1)
    assert plan.world == 16
    plan.check(moe, Workload(batch=64, seq=4096), cluster(16))
    assert refusal({"ep": 3, "replicate": 3}, name="mixtral-8x7b").code == "MW-PLAN-010"
    assert refusal({"ep": 8, "replicate": 4}, name="mixtral-8x7b").code == "MW-PLAN-010"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tp", 0),
        ("tp", -8),
        ("tp", 2.5),
        ("tp", 10**30),
        ("zero", 4),
        ("schedule", "1f1c"),
        ("bucket", "-1MB"),
        ("bucket", float("nan")),
        ("recompute", True),
        ("compression_ratio", 0),
    ],
)
def test_bad_values_are_refused(field, value) -> None:
    with pytest.raises(MeshwrightError) as caught:
        Plan(**{field: value})
    assert f"plan.{field}" in str(caught.value)


def test_a_misspelt_value_gets_a_suggestion() -> None:
    with pytest.raises(MeshwrightError) as caught:
        Plan(schedule="interleave")
    assert caught.value.fix == "--set plan.schedule=interleaved"
    with pytest.raises(MeshwrightError) as caught:
        Plan(micro_batch=4)
    assert caught.value.code == "MW-CONF-001"
    assert caught.value.fix == "microbatch"


@given(layers=st.integers(1, 200), pp=st.integers(1, 16), virtual=st.integers(1, 4))
def test_stages_are_even_and_cover_all_layers(layers, pp, virtual) -> None:
    plan = Plan(pp=pp, virtual=virtual, schedule="looped-bfs")
    counts = plan.stage_layers(layers)
    assert sum(counts) == layers
    assert len(counts) == plan.stages
    assert max(counts) - min(counts) <= 1


@given(st.integers(1, 10**6))
def test_divisors(n) -> None:
    found = divisors(n)
    assert found == sorted(set(found))
    assert all(n % d == 0 for d in found)
    assert {1, n} <= set(found)
    if n < 2000:
        assert found == [d for d in range(1, n + 1) if n % d == 0]


@given(
    st.fixed_dictionaries(
        {
            axis: st.integers(1, 12)
            for axis in ("replicate", "shard", "tp", "cp", "pp", "virtual", "ep", "microbatch", "zero", "expert_tp")
        }
        | {"schedule": st.sampled_from(["1f1b", "interleaved", "zbv", "gpipe"]), "sp": st.booleans()}
    ),
    st.sampled_from(["llama3-8b", "mixtral-8x7b", "lecture-mlp", "resnet-50", "deepseek-v3"]),
    st.integers(1, 4096),
    st.integers(1, 300),
)
def test_any_plan_is_accepted_or_gives_a_clear_error(fields, name, batch, gpus) -> None:
    try:
        plan = Plan(**fields)
        plan.check(model(name), Workload(batch=batch, seq=4096), cluster(gpus))
    except MeshwrightError:
        return
    assert plan.world == gpus
    assert batch == plan.microbatch * plan.dp * plan.microbatches(Workload(batch=batch))


def test_an_empty_bucket_is_refused() -> None:
    with pytest.raises(MeshwrightError, match=r"plan\.bucket.*greater than 0"):
        Plan(bucket=0)


def test_a_sequence_has_a_separate_limit() -> None:
    with pytest.raises(MeshwrightError, match=r"workload\.seq = 4294967297 is not valid"):
        Workload(seq=2**32 + 1)


# Fields that a title leaves out: `bucket` follows from the group; the others have an effect only together with another field.
UNTITLED = ("bucket", "compression_ratio", "compression_rank", "compression_threshold")
OTHER_VALUES = {
    "replicate": 2, "shard": 4, "tp": 4, "sp": False, "tp_form": "all-gather", "cp": 4, "cp_kind": "ulysses", "pp": 4, "virtual": 4,
    "schedule": "looped-bfs", "layers_per_stage": (3, 1, 2, 2), "ep": 4, "expert_tp": 1, "microbatch": 2, "zero": 2, "reshard": False,
    "prefetch": False, "wrap": 0, "reduce": "step", "average_every": 2, "recompute": "selective", "recompute_every": 2,
    "recompute_layers": 1, "recompute_budget": 1e9, "param_dtype": "fp16", "grad_dtype": "bf16", "state_dtype": "bf16", "master": False,
    "comm_dtype": "bf16", "overlap": ("dp",), "compression": "int8", "offload": "states", "offload_layers": 1, "order": ("tp", "cp", "dp", "pp"),
    "gather_dtype": "fp8",
}  # fmt: skip


def test_a_title_shows_every_field_that_changes_the_cost() -> None:
    """A regression: two plans of 5.72 s and 12.6 s, which differ in `reshard` and `reduce`, had the same title "dp 32 (ZeRO-3)"."""
    bases = {
        "pipeline": {
            "tp": 2,
            "cp": 2,
            "pp": 2,
            "virtual": 2,
            "schedule": "interleaved",
            "ep": 2,
            "shard": 2,
            "zero": 3,
        },
        "data": {"tp": 2, "sp": True, "cp": 2, "shard": 2, "zero": 3, "recompute": "full"},
        "replicas": {"replicate": 4},
        "auto": {"recompute": "auto"},
        "offload": {"offload": "both"},
    }
    titles = set()
    for fields in bases.values():
        base = Plan(**fields)
        for name, value in OTHER_VALUES.items():
            try:
                other = Plan(**{**fields, name: value})
            except MeshwrightError:
                continue
            if other.title() != base.title():
                titles.add(name)
    assert set(Plan.model_fields) - titles == set(UNTITLED)
    slow = Plan(shard=32, zero=3)
    assert len({slow.title(), slow.but(reshard=False).title(), slow.but(reduce="step").title()}) == 3
    assert Plan(tp=2, replicate=2, compression="top-k", compression_ratio=0.05).title().endswith("0.05 of them sent")
