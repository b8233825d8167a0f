"""The space holds every legal plan once, and nothing else; its arrays cost what its plans cost."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.cost.step import step_cost
from meshwright.describe import catalog
from meshwright.describe.plan import AXES, Plan, divisors
from meshwright.describe.plan_fields import CP_KINDS, ORDERS, PlanArrays
from meshwright.describe.schedules import SCHEDULES
from meshwright.errors import MeshwrightError
from meshwright.lower.batch import RECOMPUTE
from meshwright.lower.step import lower, step_program
from meshwright.planner.search import choices as chosen
from meshwright.planner.search.space import LARGEST_TABLE, codes, crossed, grid, join
from planner.spaces import DENSE, MODELS, MOE, name, placement, space

PROBLEMS = [("dense", 8, 8), ("dense", 12, 12), ("tied", 8, 24), ("moe", 8, 8), ("moe", 6, 12)]


def everything(where) -> PlanArrays:
    return join(list(where.plans()))


@pytest.mark.parametrize(("model", "gpus", "batch"), PROBLEMS)
def test_every_enumerated_plan_is_legal_and_stands_there_once(model, gpus, batch):
    where = space(MODELS[model], gpus, batch, without=["reorder"])
    rows = everything(where)
    assert len(rows) == len(where)
    pick = np.random.default_rng(0).permutation(len(rows))[:1500]
    plans = [where.plan(rows, int(i)) for i in pick]
    for plan in plans:
        plan.check(where.model, where.workload, where.cluster, where.stack)
    assert len({name(where, p) for p in plans}) == len(plans)


WORLDS = {gpus: space(DENSE, gpus, 24) for gpus in (4, 6, 8)} | {-gpus: space(MOE, gpus, 24) for gpus in (4, 8)}


def fixed(plan) -> list[str]:
    """Constraints that leave just this plan, or its twin."""
    shards = plan.shard * plan.cp > 1
    zero = (1 if plan.zero == 2 and not plan.reduces_each else plan.zero) if shards else 0
    replicate, shard = (plan.replicate, plan.shard) if zero else (plan.dp, 1)
    out = [f"{field}={getattr(plan, field)}" for field in ("tp", "cp", "pp", "ep", "microbatch", "recompute")]
    out += [f"expert_tp={plan.etp}", f"zero={zero}", f"replicate={replicate}", f"shard={shard}"]
    out += [f"sp={str(plan.sp).lower()}"] if plan.tp > 1 else []
    out += [f"cp_kind={plan.cp_kind}"] if plan.cp > 1 else []
    out += [f"reshard={str(plan.reshard).lower()}", f"reduce={plan.reduce}"] if zero == 3 else []
    schedule = (
        {"looped-bfs": "gpipe", "interleaved-zb": "zb-h1"}.get(plan.schedule, plan.schedule)
        if plan.virtual == 1
        else plan.schedule
    )
    return out + ([f"schedule={schedule}", f"virtual={plan.virtual}"] if plan.pp > 1 else [])


@st.composite
def plans(draw, where):
    """Any plan of the right size; legal or not."""
    world = where.cluster.world
    tp = draw(st.sampled_from(divisors(world)))
    cp = draw(st.sampled_from(divisors(world // tp)))
    pp = draw(st.sampled_from(divisors(world // tp // cp)))
    dp = world // (tp * cp * pp)
    zero = draw(st.integers(0, 3))
    shard = draw(st.sampled_from(divisors(dp))) if zero else 1
    schedule = draw(st.sampled_from([s for s in SCHEDULES if s != "auto"]))
    least = SCHEDULES[schedule].least_virtual if pp > 1 else 1
    virtual = draw(st.integers(least, max(least, min(3, SCHEDULES[schedule].most_virtual))))
    return Plan(
        replicate=dp // shard,
        shard=shard,
        tp=tp,
        cp=cp,
        pp=pp,
        zero=zero,
        schedule=schedule,
        virtual=virtual,
        sp=draw(st.booleans()),
        cp_kind=draw(st.sampled_from(CP_KINDS)),
        ep=draw(st.sampled_from([1, 1, 2, 4])),
        expert_tp=draw(st.sampled_from([0, 1, 2])) if where.model.experts else 0,
        reshard=draw(st.booleans()),
        order=draw(st.permutations(AXES)),
        reduce=draw(st.sampled_from(["auto", "step"])),
        microbatch=draw(st.sampled_from([1, 1, 2, 3, 5])),
        recompute=draw(st.sampled_from(RECOMPUTE)),
    )


@settings(max_examples=37)
@given(st.data(), st.sampled_from(sorted(WORLDS)), st.sampled_from(["default", "megatron-core"]))
def test_the_space_holds_exactly_what_the_plan_s_check_accepts(data, key, stack):
    where = WORLDS[key]
    stack = catalog.load("stacks", stack)
    try:
        plan = data.draw(plans(where))
    except MeshwrightError:
        return
    legal = plan.is_legal(where.model, where.workload, where.cluster, stack)
    try:
        narrow = space(where.model, where.cluster.world, 24, stack=stack.name, fix=fixed(plan))
        rows = everything(narrow)
    except (MeshwrightError, IndexError):  # the constraints leave nothing
        assert not legal
        return
    found = {name(narrow, narrow.plan(rows, i)) for i in range(len(rows))}
    assert (name(narrow, plan) in found) == legal, plan.title()
    assert not legal or len({n[:-1] for n in found}) == 1  # only the placement is left open


@pytest.mark.parametrize(("model", "gpus", "batch"), PROBLEMS)
def test_arrays_cost_what_plans_cost(model, gpus, batch):
    where = space(MODELS[model], gpus, batch)
    frames = where.frames.take(np.random.default_rng(1).permutation(len(where.frames))[:12])
    rows = where.scheduled(where.sharded(where.placed(where.shaped(frames))))
    rows = rows.take(np.random.default_rng(2).permutation(len(rows))[:300])
    cost = step_cost(lower(where.batch(rows)), where.cluster)
    alone = step_cost(
        step_program(where.model, [where.plan(rows, i) for i in range(len(rows))], where.workload, where.stack),
        where.cluster,
    )
    np.testing.assert_allclose(cost.time, alone.time, rtol=1e-12)
    np.testing.assert_allclose(cost.peak_memory, alone.peak_memory, rtol=1e-12)


@settings(max_examples=30)
@given(st.data())
def test_orders_that_place_groups_alike_cost_the_same(data):
    where = WORLDS[data.draw(st.sampled_from(sorted(WORLDS)))]
    plan = data.draw(plans(where))
    twins = [plan.but(order=o) for o in ORDERS]
    twins = [p for p in twins if placement(where, p) == placement(where, plan)]
    cost = step_cost(step_program(where.model, twins, where.workload, where.stack), where.cluster)
    assert np.ptp(np.broadcast_to(cost.time, len(twins))) <= 1e-12 * cost.time[0]


def test_uneven_stages_are_allowed_at_their_cost():
    rows = everything(space(DENSE, 4, 4, fix=["pp=4"]))
    assert set(rows.pp.tolist()) == {4}  # six layers on four ranks
    with pytest.raises(MeshwrightError) as refused:
        chosen.choices(Plan(), chosen.read(fix=["schedule=1f1b"], without=["1f1b"]), AXES)
    assert refused.value.code == "MW-PLANNER-003"
    assert not len(space(DENSE, 4, 4, fix=["pp=4"], without=["uneven"]))


CONSTRAINED = {
    "fix tp": ({"fix": ["tp=4"]}, lambda r: r.tp == 4),
    "max pp": ({"most": ["pp=2"]}, lambda r: r.pp <= 2),
    "min microbatch": ({"least": ["microbatch=2"]}, lambda r: r.microbatch >= 2),
    "dp": ({"most": ["dp=2"]}, lambda r: r.dp <= 2),
    "without zero3": ({"without": ["zero3"]}, lambda r: r.zero < 3),
    "without hsdp": ({"without": ["hsdp"]}, lambda r: (r.zero == 0) | (r.replicate == 1) | (r.shard == 1)),
    "without interleaved": ({"without": ["interleaved"]}, lambda r: r.schedule != SCHEDULES.names.index("interleaved")),
    "without recompute": ({"without": ["recompute"]}, lambda r: r.recompute == 0),
    "without cp, pp": ({"without": ["cp,pp"]}, lambda r: (r.cp == 1) & (r.pp == 1)),
    "without virtual": ({"without": ["virtual"]}, lambda r: r.virtual == 1),
    "fix schedule": ({"fix": ["schedule=zbv"]}, lambda r: (r.pp == 1) | (r.schedule == SCHEDULES.names.index("zbv"))),
    "fix recompute": ({"fix": ["recompute=full"]}, lambda r: r.recompute == RECOMPUTE.index("full")),
    "max zero": ({"most": ["zero=1"]}, lambda r: r.zero <= 1),
    "without ring": ({"without": ["ring"]}, lambda r: (r.cp == 1) | (r.cp_kind != CP_KINDS.index("ring"))),
}


@pytest.mark.parametrize("which", CONSTRAINED)
def test_a_constraint_leaves_exactly_what_keeps_it(which):
    constraint, keeps = CONSTRAINED[which]
    fixed = ["recompute=none"] if "recompute" not in which else []
    whole = space(DENSE, 8, 8, fix=fixed, without=["reorder"])
    narrow = space(
        DENSE,
        8,
        8,
        fix=[*fixed, *constraint.get("fix", [])],
        most=constraint.get("most", []),
        least=constraint.get("least", []),
        without=["reorder", *constraint.get("without", [])],
    )
    rows = everything(narrow)
    assert keeps(rows).all()
    assert len(rows) == int(keeps(everything(whole)).sum()) > 0


def test_dtypes_and_overlap_are_widened_only_when_allowed():
    where = space(DENSE, 4, 4, allow=["grad_dtype=bf16", "overlap=dp+tp"], fix=["tp=4", "microbatch=1"])
    rows = everything(where)
    found = {(where.plan(rows, i).grad_dtype, where.plan(rows, i).overlap) for i in range(len(rows))}
    assert found == {(g, o) for g in ("fp32", "bf16") for o in (None, ("dp", "tp"))}
    assert len(rows) == 4 * len(space(DENSE, 4, 4, fix=["tp=4", "microbatch=1"]))


@pytest.mark.parametrize(
    ("constraint", "code"),
    [
        ({"fix": ["tp"]}, "MW-PLANNER-001"),
        ({"fix": ["tp=x"]}, "MW-PLANNER-001"),
        ({"fix": ["tpp=8"]}, "MW-PLANNER-002"),
        ({"most": ["schedule=4"]}, "MW-PLANNER-002"),
        ({"without": ["zero9"]}, "MW-PLANNER-002"),
        ({"fix": ["order=tp,xx"]}, "MW-PLANNER-002"),
        ({"fix": ["tp=8"], "most": ["tp=4"]}, "MW-PLANNER-003"),
        ({"least": ["pp=4"], "without": ["pp"]}, "MW-PLANNER-003"),
        ({"fix": ["recompute=lots"]}, "MW-CONF-003"),
        ({"allow": ["grad_dtype=int3"]}, "MW-PLANNER-002"),
    ],
)
def test_what_cannot_be_read_is_refused_in_words(constraint, code):
    with pytest.raises(MeshwrightError) as refused:
        space(DENSE, 8, 8, **constraint)
    assert refused.value.code == code


def test_a_table_crosses_rows_with_their_own_options():
    table = PlanArrays(a=np.array([1, 2, 3]))
    both = crossed(table, (table.a,), lambda a: PlanArrays(b=np.arange(a)))
    assert sorted(zip(both.a.tolist(), both.b.tolist(), strict=True)) == [
        (1, 0),
        (2, 0),
        (2, 1),
        (3, 0),
        (3, 1),
        (3, 2),
    ]
    assert len(grid(x=[1, 2], y=[3, 4, 5])) == 6


@pytest.mark.parametrize("largest", [9, LARGEST_TABLE + 9])
def test_codes_are_equal_exactly_where_all_keys_are(largest):
    keys = [np.array([0, largest, 0, 3, largest, 3]), np.array([True, False, False, True, False, True])]
    code = codes(keys).tolist()
    rows = list(zip(*(key.tolist() for key in keys), strict=True))
    assert [[a == b for a in code] for b in code] == [[a == b for a in rows] for b in rows]
