"""All-gathers in fp8: where they are legal, the output of `estimate`, and the suggestion of the planner."""

import pytest

from meshwright import api, planner
from meshwright.describe.config import Config
from meshwright.describe.plan import Plan
from meshwright.errors import MeshwrightError
from meshwright.planner.advice.alternatives import PlanTrials
from meshwright.planner.advice.reasons import fp8_gathers, reasons
from meshwright.predict.estimate import Estimate, estimate
from meshwright.view.estimate import fp8_traffic

TENSOR = {"tp": 4, "sp": True}


def config(stack: str = "megatron-core", cluster: str = "dgx-h100", precision: str = "fp8", **plan) -> Config:
    made = Config.from_parts("llama3-8b", cluster, stack, {"batch": 64, "seq": 4096, "precision": precision}, plan)
    return Config(made.model, made.cluster.with_gpus(8), made.plan, made.workload, made.stack)


def estimated(*parts, **plan) -> Estimate:
    c = config(*parts, **plan)
    return estimate(c)


def test_other_precisions_are_refused() -> None:
    for precision in ("bf16", "fp32"):
        with pytest.raises(MeshwrightError, match=r"MW-PLAN-018: plan\.gather_dtype=fp8 with workload") as refused:
            config(precision=precision, tp=8, sp=True, gather_dtype="fp8").check()
        assert refused.value.fix == "--set plan.gather_dtype=same"
    config(tp=8, sp=True, gather_dtype="fp8").check()


def test_a_chip_without_fp8_refuses_it_with_a_legal_fix() -> None:
    with pytest.raises(MeshwrightError, match="MW-CLUS-003") as refused:
        config(cluster="dgx-a100", tp=8, sp=True, gather_dtype="fp8").check()
    assert refused.value.fix == "--set workload.precision=bf16 --set plan.gather_dtype=same"
    config(cluster="dgx-a100", precision="bf16", tp=8, sp=True).check()


@pytest.mark.parametrize("what", [api.verify, api.train])
def test_verify_and_train_report_what_is_only_modelled(what) -> None:
    with pytest.raises(MeshwrightError, match=r"MW-PAR-001: plan\.gather_dtype=fp8 with sp and without ZeRO-3"):
        what(config(tp=8, sp=True, gather_dtype="fp8"))


# Printed text and suggestions


def test_a_title_shows_it_if_it_has_an_effect() -> None:
    assert Plan(**TENSOR, gather_dtype="fp8").title().endswith("· fp8 all-gathers")
    assert Plan(tp=4, gather_dtype="fp8").title() == Plan(tp=4).title()


def test_estimate_reports_which_traffic_is_halved() -> None:
    assert "no traffic is halved; --set plan.gather_dtype=fp8 halves" in fp8_traffic(estimated(tp=8, sp=True))
    text = fp8_traffic(estimated(tp=8, sp=True, gather_dtype="fp8"))
    assert text.startswith("halved: all-gathers")
    assert "not reductions" in text
    assert "pipeline sends" in text
    assert "not known" not in text
    assert "not known" in fp8_traffic(estimated("default", tp=8, sp=True, gather_dtype="fp8"))
    assert fp8_traffic(estimated(replicate=8)).startswith("no traffic is halved: this plan")


def test_reasons_offer_it_with_its_gain() -> None:
    e = estimated(tp=8, sp=True)
    offer = reasons(e)["gather_dtype"]
    faster = estimated(tp=8, sp=True, gather_dtype="fp8")
    gain = 100 * (faster.prediction.step_time_s / e.prediction.step_time_s - 1)
    assert gain < 0
    assert offer.startswith(f"with --set plan.gather_dtype=fp8 a step takes {gain:+.1f}%")
    for other in (
        estimated("default", tp=8, sp=True),
        estimated(precision="bf16", tp=8, sp=True),
        estimated(replicate=8),
        estimated("meshwright", tp=8, sp=True),  # our trainer does not gather activations in fp8
    ):
        assert "gather_dtype" not in reasons(other)
    assert "gather_dtype" in reasons(estimated("meshwright", shard=8, zero=3))
    sharded = fp8_traffic(estimated("meshwright", shard=4, zero=3, tp=2, sp=True, gather_dtype="fp8"))
    assert sharded.startswith("halved: all-gathers of ZeRO-3 weights;")
    assert "activations of sequence parallelism in 16 bits" in fp8_traffic(estimated("meshwright", tp=8, sp=True))
    assert "in 16 bits a step takes +" in fp8_gathers(faster, PlanTrials(e.config))


def test_the_planner_searches_with_it_if_the_given_plan_has_it() -> None:
    found = {
        dtype: planner.plan(
            "llama3-8b",
            "dgx-h100",
            gpus=8,
            batch=64,
            stack="megatron-core",
            fix={"tp": 8, "sp": True},
            set=["workload.precision=fp8", f"plan.gather_dtype={dtype}"],
        )
        for dtype in ("same", "fp8")
    }
    assert found["fp8"].plan.gather_dtype == "fp8"
    assert found["fp8"].prediction.step_time_s < found["same"].prediction.step_time_s
    assert "gather_dtype" in found["same"].explanation.reasons
