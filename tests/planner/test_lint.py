"""Each anti-pattern is found, its cost is the saving of its removal, and its fix is a legal plan."""

import shlex
from dataclasses import replace
from functools import cache

import pytest

from meshwright.describe.config import Config
from meshwright.describe.plan import Plan
from meshwright.errors import MeshwrightError
from meshwright.planner.advice.alternatives import data_parallel, moved, orders, settings, step
from meshwright.planner.advice.changes import first_changes
from meshwright.planner.advice.lint import check as lint
from meshwright.planner.advice.lint.check import padded
from meshwright.planner.advice.lint.faster import surely_slower
from meshwright.predict.estimate import Estimate, estimate


def config(
    model: str, cluster: str, gpus: int, batch: int, seq: int = 4096, stack: str = "default", **plan: object
) -> Config:
    return Config.from_parts(model, {"extends": cluster, "gpus": gpus}, stack, {"batch": batch, "seq": seq}, dict(plan))


def estimated(c: Config) -> Estimate:
    return estimate(c)


def overridden(c: Config, fix: str) -> Config:
    """The configuration after the options of a fix, parsed as the command line parses them."""
    words = [word for word in shlex.split(fix) if word != "--set"]
    return Config.from_parts(c.model, c.cluster, c.stack, c.workload, c.plan, overrides=words)


# One plan for each anti-pattern.
FULL_STATE_DICT = {"extends": "accelerate", "saves": "rank-0", "loads": "every-rank"}
SHOWING = {
    "MW-LINT-001": config("llama3-8b", "ethernet-cluster", 16, 64, tp=16, sp=True),
    "MW-LINT-002": config("llama3.2-1b", "ethernet-cluster", 64, 64, 2048, replicate=64, bucket=1e9),
    "MW-LINT-003": config("llama3-70b", "dgx-h100", 64, 512, tp=8, sp=True, shard=8, zero=1, recompute="full",
                          order=["dp", "tp", "cp", "pp"]),
    "MW-LINT-004": config("gpt3-175b", "dgx-h100", 128, 4, 2048, tp=8, pp=16),
    "MW-LINT-005": config("llama3.2-1b", "dgx-h100", 8, 64, replicate=8),
    "MW-LINT-006": config("llama3-8b", "dgx-h100", 64, 64, 8192, cp=8, shard=8, zero=1, order=["tp", "dp", "cp", "pp"]),
    "MW-LINT-007": config("llama2-13b", "ethernet-cluster", 32, 64, shard=32, zero=3, recompute="full"),
    "MW-LINT-008": config("deepseek-v3", "meta-h100", 8192, 8192, pp=16, shard=512, zero=1, ep=256, recompute="full"),
    "MW-LINT-009": config("mixtral-8x7b", "dgx-h100", 64, 512, tp=8, sp=True, shard=8, zero=1, ep=8, expert_tp=8),
    "MW-LINT-010": config("llama-7b", "meta-rsc", 1024, 2048, 2048, stack="megatron-core", shard=1024, zero=1),
    "MW-LINT-011": config("llama-33b", "dgx-h100", 64, 512, 2048, tp=8, shard=8, zero=1),
    "MW-LINT-012": config("llama3-8b", "dgx-h100", 128, 64, shard=128, zero=1),
    "MW-LINT-013": config("llama3-8b", "dgx-h100", 16, 128, replicate=16),
    "MW-LINT-014": config("llama3-8b", "dgx-h100", 16, 128, shard=16, zero=3, recompute="full"),
    "MW-LINT-015": config("llama3-70b", "azure-nd-a100-v4", 256, 256, 2048, stack=FULL_STATE_DICT, shard=256, zero=3, recompute="full"),
    "MW-LINT-016": config("llama3-70b", "dgx-h100", 64, 512, stack="megatron-core", tp=8, sp=True, shard=8, zero=1, recompute="full", overlap=[]),
}  # fmt: skip
CLEAN = config("llama3-8b", "dgx-h100", 16, 128, stack="torchtitan", shard=16, zero=3, microbatch=2, bucket=4e8)


def of_rules(c: Config, now: Estimate | None = None) -> list[lint.Finding]:
    """The findings of all rules but MW-LINT-020, for which every single change is priced: it has a test of its own."""
    return lint.check(c, now, changes=())


@cache
def checked(code: str) -> list[lint.Finding]:
    return of_rules(SHOWING[code])


def found(code: str) -> lint.Finding:
    return next(f for f in checked(code) if f.code == code)


def test_every_rule_has_a_plan_that_shows_it() -> None:
    from meshwright.planner.advice.lint.rules import BY_CODE

    assert set(SHOWING) == set(BY_CODE) | {"MW-LINT-011", "MW-LINT-012"}


@pytest.mark.parametrize("code", SHOWING)
def test_a_pattern_is_found_with_its_cost(code: str) -> None:
    f = found(code)
    assert f.weighs
    if code not in ("MW-LINT-013", "MW-LINT-015"):
        assert f.cost_s is not None
        assert f.cost_s > 0
        assert 0 < (f.share or 0) <= 1


def test_a_heavy_save_names_the_key_of_the_framework() -> None:
    assert "In accelerate: fsdp_config.fsdp_state_dict_type: SHARDED_STATE_DICT" in found("MW-LINT-015").what


@pytest.mark.parametrize("code", SHOWING)
def test_a_fix_is_a_legal_plan_that_fits_and_saves_what_it_says(code: str) -> None:
    f, now = found(code), SHOWING[code]
    if not f.fix:
        assert code == "MW-LINT-008", "only a pattern of the fabric alone may have no fix"
        return
    after = overridden(now, f.fix)
    assert f.fixed is None or after.plan == f.fixed
    result = estimated(after.check())
    assert result.prediction.fits
    if f.severity == "warning" and f.fixed is not None:
        saved = estimated(now).prediction.step_time_s - result.prediction.step_time_s
        assert saved == pytest.approx(f.saves_s)
        assert 0 < saved <= (f.cost_s or 0) * (1 + 1e-9)


# A fix of these takes the pattern out whole; the others may only lessen it.
@pytest.mark.parametrize("code", [f"MW-LINT-{n:03}" for n in (1, 3, 5, 9, 10, 11, 12, 13, 14, 15, 16)])
def test_after_the_fix_the_pattern_is_gone(code: str) -> None:
    after = overridden(SHOWING[code], found(code).fix)
    assert code not in {f.code for f in of_rules(after) if f.weighs}


def test_a_clean_plan_is_clean() -> None:
    assert [f for f in lint.check(CLEAN) if f.weighs] == []


def test_patterns_need_their_axis() -> None:
    codes = {f.code for f in of_rules(CLEAN)}
    assert not codes & {"MW-LINT-001", "MW-LINT-004", "MW-LINT-006", "MW-LINT-008", "MW-LINT-009"}


def test_tensor_parallelism_inside_a_node_is_not_an_anti_pattern() -> None:
    inside = config("llama3-8b", "ethernet-cluster", 16, 64, tp=8, sp=True, shard=2, zero=1)
    assert "MW-LINT-001" not in {f.code for f in of_rules(inside)}


def test_the_fix_of_tensor_parallelism_stays_inside_a_node() -> None:
    wide = config("llama3-70b", "dgx-h100", 64, 512, tp=64, sp=True)
    (f,) = (f for f in of_rules(wide) if f.code == "MW-LINT-001")
    assert f.fixed is not None
    assert f.fixed.tp <= 8


def test_few_microbatches_cost_the_bubble() -> None:
    f, now = found("MW-LINT-004"), estimated(SHOWING["MW-LINT-004"])
    assert (f.cost_s or 0) >= now.prediction.exposed_s["bubble"]
    # P = 16, M = 4: (P−1)/(M+P−1) = 79% idle, less the operations that run once per step.
    assert (f.share or 0) > 0.7
    enough = config("gpt3-175b", "dgx-h100", 128, 64, 2048, tp=8, pp=16)
    assert "MW-LINT-004" not in {f.code for f in of_rules(enough)}


def test_half_a_sequence_per_rank_wastes_half() -> None:
    f = found("MW-LINT-012")
    assert f.share == pytest.approx(0.5)
    assert "50%" in f.what


def test_padded_heads() -> None:
    model = padded(SHOWING["MW-LINT-011"].model, 8)
    assert (model.heads, model.kv_heads, model.head_dim, model.ffn) == (56, 56, 128, 17920)
    grouped = padded(CLEAN.model, 6)
    assert grouped.heads % 6 == 0
    assert grouped.kv_groups % 6 == 0


def test_out_of_memory_is_an_error_and_thin_is_a_note() -> None:
    assert found("MW-LINT-013").severity == "error"
    thin = config("llama3-8b", "dgx-h100", 16, 128, shard=16, zero=1)
    memory = estimated(thin).prediction.memory_gib or 0.0
    limit = f"cluster.accelerator.memory={memory * 1.02}GiB"
    tight = Config.from_parts(thin.model, thin.cluster, thin.stack, thin.workload, thin.plan, overrides=[limit])
    assert [f.severity for f in of_rules(tight) if f.code == "MW-LINT-013"] == ["note"]


def test_an_illegal_plan_without_a_pattern_raises() -> None:
    with pytest.raises(MeshwrightError) as error:
        of_rules(config("llama3-8b", "dgx-h100", 16, 64, replicate=3))
    assert error.value.code == "MW-PLAN-005"


def test_findings_come_errors_first_then_by_cost() -> None:
    for code in SHOWING:
        order = [({"error": 0, "warning": 1, "note": 2}[f.severity], -(f.cost_s or 0)) for f in checked(code)]
        assert order == sorted(order)


def test_a_given_estimate_is_used() -> None:
    now = estimated(SHOWING["MW-LINT-014"])
    slow = replace(now, prediction=replace(now.prediction, step_time_s=2 * now.prediction.step_time_s))
    (f,) = (f for f in of_rules(SHOWING["MW-LINT-014"], slow) if f.code == "MW-LINT-014")
    assert (f.cost_s or 0) == pytest.approx((found("MW-LINT-014").cost_s or 0) + now.prediction.step_time_s)


# Justification


def test_the_cost_of_a_slower_fix_is_reported() -> None:
    c = SHOWING["MW-LINT-014"]
    f, now = found("MW-LINT-014"), estimated(c)
    winner = estimated(overridden(c, f.fix))
    (findings,) = lint.justify([replace(f, fixed=c.plan)], winner)
    longer = now.prediction.step_time_s / winner.prediction.step_time_s - 1
    assert f"{longer:.1%} longer" in findings.still_best


def test_a_fix_that_does_not_fit_is_reported() -> None:
    c = SHOWING["MW-LINT-013"]
    winner = estimated(overridden(c, found("MW-LINT-013").fix))
    f = lint.Finding("MW-LINT-007", "x", "note", "x", 1.0, 0.1, "", None, c.plan)
    (findings,) = lint.justify([f], winner)
    assert f"{estimated(c).prediction.memory_gib:.1f} of" in findings.still_best


def test_an_alternative_without_the_pattern_is_reported_if_there_is_no_fix() -> None:
    winner = estimated(CLEAN)
    slower = config("llama3-8b", "dgx-h100", 16, 128, stack="torchtitan", tp=8, sp=True, shard=2, zero=1)
    f = lint.Finding("MW-LINT-004", "x", "note", "x", 1.0, 0.1)
    (findings,) = lint.justify([f], winner, [estimated(slower)])
    assert "1 plans without it" in findings.still_best


def test_errors_and_findings_with_a_faster_fix_are_never_still_best() -> None:
    (findings,) = lint.justify([found("MW-LINT-014")], estimated(SHOWING["MW-LINT-014"]))
    assert findings.still_best == ""
    (findings,) = lint.justify([found("MW-LINT-013")], estimated(SHOWING["MW-LINT-013"]))
    assert findings.still_best == ""


# Neighbours


def test_moving_degrees_keeps_the_devices() -> None:
    plan, workload = SHOWING["MW-LINT-003"].plan, SHOWING["MW-LINT-003"].workload
    for source, target in (("tp", "pp"), ("tp", "dp"), ("dp", "pp")):
        other = moved(plan, source, target, 2, workload)
        assert other is not None
        assert other.world == plan.world
        assert getattr(other, source) * 2 == getattr(plan, source)
    assert moved(plan, "tp", "pp", 3, workload) is None


def test_a_new_data_parallel_degree_keeps_the_kind_of_sharding() -> None:
    assert data_parallel(Plan(replicate=8), 16) == {"replicate": 16, "shard": 1}
    assert data_parallel(Plan(shard=8, zero=1), 16) == {"replicate": 1, "shard": 16}
    assert data_parallel(Plan(replicate=4, shard=8, zero=3), 16) == {"replicate": 2, "shard": 8}


def test_orders_permute_only_axes_in_use() -> None:
    assert len(list(orders(Plan(tp=8, replicate=2)))) == 2
    assert len(list(orders(Plan(tp=2, cp=2, pp=2, replicate=2)))) == 24


def test_settings_list_the_changed_fields() -> None:
    assert settings(Plan(tp=4), Plan(tp=8, sp=True)) == "--set plan.tp=8 --set plan.sp=true"


def test_tensor_parallelism_spread_by_the_axis_order_is_found() -> None:
    """tp=8 fits a node, but an order with dp fastest puts its ranks into eight nodes."""
    spread = config("llama3-8b", "dgx-h100", 64, 64, tp=8, sp=True, replicate=8, order=("dp", "tp", "cp", "pp"))
    (f,) = (f for f in of_rules(spread) if f.code == "MW-LINT-001")
    assert (f.cost_s or 0) > 0
    assert f.fixed is not None
    assert f.fixed.tp == 1 or (f.fixed.tp <= 8 and (f.fixed.order or ("tp",))[0] == "tp")


def test_a_faster_value_is_found_without_a_rule_for_it() -> None:
    """Tensor parallelism without sequence parallelism repeats norms, and holds their outputs on each rank (Korthikanti et al. 2022)."""
    c = config("llama2-13b", "dgx-h100", 8, 128, 2048, "torch-compile", tp=8, sp=False, microbatch=4)
    found = {f.code: f for f in lint.check(c)}
    assert found["MW-LINT-020"].severity == "warning"
    saved = step(estimate(c)) - step(estimate(overridden(c, found["MW-LINT-020"].fix)))
    assert saved == pytest.approx(found["MW-LINT-020"].saves_s)
    assert saved > 0.1 * step(estimate(c))
    assert "MW-LINT-020" not in {f.code for f in of_rules(c)}
    first = first_changes(c)[0].fields[0][0]
    others = [f for f in lint.check(c, without=(first,)) if f.code == "MW-LINT-020"]
    assert all(f.fix != found["MW-LINT-020"].fix for f in others)


def test_host_time_alone_makes_no_value_faster() -> None:
    """Except by a larger micro-batch: other changes may only move the kernels that the host issues."""
    c = config("llama3.2-1b", "dgx-h100", 8, 64, 512, shard=8, zero=1)
    now = estimate(c)
    waiting = now.prediction.exposed_s.get("host", 0.0) + step(now)
    idle = {**now.prediction.exposed_s, "host": waiting}
    slow = replace(now, prediction=replace(now.prediction, exposed_s=idle, step_time_s=2 * step(now)))
    same, larger = (replace(now, config=c.but(plan=c.plan.but(microbatch=m))) for m in (c.plan.microbatch, 2))
    assert not surely_slower(slow, same)
    assert surely_slower(slow, larger)


def test_only_axes_in_use_are_said_to_wait() -> None:
    c = config("llama3-8b", "dgx-a100", 8, 2, 2048, "deepspeed", tp=4, shard=2, zero=2, overlap=[])
    (waits,) = (f for f in of_rules(c) if f.code == "MW-LINT-016")
    assert "communication of dp waits" in waits.what


def test_gathers_inside_a_node_are_on_no_slow_network() -> None:
    c = config("gpt-oss-20b", "dgx-h100", 8, 16, 4096, "axolotl", shard=8, zero=3, recompute="full")
    (gathers,) = (f for f in of_rules(c) if f.code == "MW-LINT-007")
    assert gathers.name == "gathers of ZeRO-3 are exposed"
