"""Layouts: a 3D example, and properties of every layout."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.describe import catalog
from meshwright.describe.axes import BASE, DERIVED, axis_size, members_in_unit, strides
from meshwright.describe.cluster import uniform
from meshwright.describe.layout import Layout
from meshwright.describe.plan import Plan
from meshwright.describe.schedules import layers_of_stages, stage_bounds
from meshwright.errors import MeshwrightError

DEGREES = st.sampled_from([1, 2, 3, 4])
EXACT = ("tp", "cp", "pp", "shard", "replicate", "dp", "dp_cp", "shard_cp", "stage", "world")
ORDERS = st.sampled_from(list(itertools.permutations(("tp", "cp", "pp", "dp"))))


@st.composite
def layouts(draw) -> Layout:
    shard = draw(DEGREES)
    plan = Plan(
        tp=draw(DEGREES),
        cp=draw(DEGREES),
        pp=draw(DEGREES),
        replicate=draw(DEGREES),
        shard=shard,
        zero=3 if shard > 1 else 0,
        order=draw(ORDERS),
    )
    room = plan.tp * plan.cp * plan.dp
    etp = draw(st.sampled_from([d for d in range(1, plan.tp + 1) if plan.tp % d == 0]))
    ep = draw(st.sampled_from([d for d in range(1, room // etp + 1) if room // etp % d == 0]))
    return Layout(plan.but(expert_tp=etp, ep=ep))


def expected_groups(tp: int, pp: int, dp: int) -> dict[str, list[list[int]]]:
    """The groups of rank = tp + TP · (pp + PP · dp)."""

    def rank(t: int, p: int, d: int) -> int:
        return d * tp * pp + p * tp + t

    return {
        "tp": [[rank(t, p, d) for t in range(tp)] for d in range(dp) for p in range(pp)],
        "pp": [[rank(t, p, d) for p in range(pp)] for d in range(dp) for t in range(tp)],
        "dp": [[rank(t, p, d) for d in range(dp)] for p in range(pp) for t in range(tp)],
    }


@pytest.mark.parametrize(("tp", "pp", "dp"), [(2, 2, 2), (8, 4, 4)])
def test_a_3d_example(tp, pp, dp) -> None:
    layout = Layout(Plan(tp=tp, pp=pp, replicate=dp))
    assert layout.plan.world == tp * pp * dp
    for axis, groups in expected_groups(tp, pp, dp).items():
        assert layout.groups(axis).tolist() == groups


def test_eight_gpus_by_hand() -> None:
    layout = Layout(Plan(tp=2, pp=2, replicate=2))
    assert layout.groups("tp").tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert layout.groups("pp").tolist() == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert layout.groups("dp").tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert layout.coordinates(6) == {"tp": 0, "cp": 0, "pp": 1, "shard": 0, "replicate": 1}


def test_levels_of_the_128_gpu_example() -> None:
    cluster = catalog.load("clusters", "dgx-h100").with_gpus(128)
    layout = Layout(Plan(tp=8, pp=4, replicate=4))
    assert [layout.level(axis, cluster) for axis in ("tp", "pp", "dp")] == [0, 1, 1]
    assert layout.per_unit("tp", cluster.node_size) == 8
    assert layout.per_unit("dp", cluster.node_size) == 1
    assert layout.flows("tp", cluster) == 0
    assert layout.flows("dp", cluster) == 8  # one group for each GPU of a node crosses its boundary


def test_data_parallel_inside_pipeline() -> None:
    layout = Layout(Plan(tp=2, pp=2, replicate=2, order=("tp", "cp", "dp", "pp")))
    assert layout.groups("dp").tolist() == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert layout.groups("pp").tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_experts_refactorise_the_ranks_of_a_stage() -> None:
    layout = Layout(Plan(tp=2, replicate=4, ep=4, expert_tp=1))
    assert layout.groups("ep").tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert layout.groups("expert_dp").tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert layout.groups("expert_tp").tolist() == [[r] for r in range(8)]


@given(layouts())
def test_groups_of_every_axis_partition_the_world(layout) -> None:
    for axis in (*BASE, *DERIVED):
        groups = layout.groups(axis)
        assert groups.shape == (layout.plan.world // layout.size(axis), layout.size(axis))
        assert sorted(groups.ravel().tolist()) == list(range(layout.plan.world))
        assert np.all(np.diff(groups[:, 0]) > 0)


@given(layouts())
def test_coordinates_invert(layout) -> None:
    for rank in range(layout.plan.world):
        at = layout.coordinates(rank)
        assert sum(at[axis] * layout.stride(axis) for axis in BASE) == rank
        for axis in BASE:
            group = layout.group_of(axis, rank)
            assert group[at[axis]] == rank
            assert all(b - a == layout.stride(axis) for a, b in itertools.pairwise(group))


@given(layouts())
def test_two_ranks_share_a_group_iff_they_differ_only_on_that_axis(layout) -> None:
    for axis in BASE:
        for group in layout.groups(axis)[:8]:
            rest = {tuple(v for a, v in layout.coordinates(int(r)).items() if a != axis) for r in group}
            assert len(rest) == 1


@given(layouts())
def test_expert_groups_stay_in_one_stage_and_tile_it(layout) -> None:
    for axis in ("ep", "expert_tp", "expert_dp"):
        for group in layout.groups(axis):
            assert len({layout.coordinates(int(rank))["pp"] for rank in group}) == 1
    assert layout.size("expert_tp") * layout.size("ep") * layout.size("expert_dp") * layout.plan.pp == layout.plan.world


def test_the_error_for_an_unknown_axis_lists_the_axes() -> None:
    with pytest.raises(MeshwrightError) as caught:
        Layout(Plan()).groups("tpp")
    assert caught.value.code == "MW-PLAN-020"
    assert caught.value.fix == "tp"


def test_a_layout_of_too_many_ranks_is_refused_before_allocation() -> None:
    with pytest.raises(MeshwrightError) as caught:
        Layout(Plan(replicate=10**9)).groups("dp")
    assert caught.value.code == "MW-PLAN-021"


def test_one_level_contains_all_groups() -> None:
    assert Layout(Plan(tp=4, replicate=2)).level("dp", uniform(8, 1e-6, 1e9)) == 0


@given(layouts(), st.sampled_from([1, 2, 4, 8, 16]))
def test_members_are_counted_without_listing_ranks(layout, unit) -> None:
    """The closed form of `axes.members_in_unit` compared with the listed groups: exact if strides and units divide each other, else at
    most the number in the fullest unit."""
    plan = layout.plan
    stride = strides(plan, plan.order)
    exact = all(s % unit == 0 or unit % s == 0 for s in stride.values()) and all(
        unit % (stride[a] * getattr(plan, a)) == 0 or stride[a] * getattr(plan, a) % unit == 0 for a in BASE
    )
    for axis in (*BASE, *DERIVED):
        assert axis_size(plan, axis) == layout.groups(axis).shape[1]
        counted, closed = layout.per_unit(axis, unit), int(members_in_unit(plan, stride, axis, unit))
        assert closed == counted if exact and axis in EXACT else 1 <= closed <= layout.size(axis), axis


@given(st.lists(layouts(), min_size=2, max_size=4), st.sampled_from([2, 8]))
def test_arrays_and_integers_agree(several, unit) -> None:
    """Sizes, strides and members are the same for one plan and for a batch."""
    order = ("tp", "cp", "pp", "dp")
    names = ("replicate", "shard", "tp", "cp", "pp", "ep", "etp")
    batch = SimpleNamespace(**{name: np.array([getattr(one.plan, name) for one in several]) for name in names})
    for axis in (*BASE, *DERIVED):
        for i, one in enumerate(several):
            assert np.broadcast_to(axis_size(batch, axis), len(several))[i] == axis_size(one.plan, axis)
            together = members_in_unit(batch, strides(batch, order), axis, unit)
            alone = members_in_unit(one.plan, strides(one.plan, order), axis, unit)
            assert np.broadcast_to(together, len(several))[i] == alone


@given(st.integers(1, 200), st.integers(1, 40))
def test_bounds_of_stages_are_their_layers(layers, stages) -> None:
    counts = layers_of_stages(layers, stages)
    start, stop = stage_bounds(layers, np.full(stages, stages), np.arange(stages))
    assert (stop - start).tolist() == list(counts)
    assert start[0] == 0
    assert stop[-1] == layers
