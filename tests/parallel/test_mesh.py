"""The groups of the mesh equal those of the layout, on every axis and in every order."""

import pytest

import ranks
from meshwright.describe.layout import Layout
from meshwright.describe.plan import Plan
from meshwright.errors import MeshwrightError

PLANS = [
    Plan(tp=2, pp=2),
    Plan(replicate=2, tp=2),
    Plan(shard=2, zero=3, replicate=2),
    Plan(shard=2, zero=3, pp=2, order=("dp", "pp", "tp", "cp")),
    Plan(pp=4),
    Plan(replicate=4),
]
AXES = ("tp", "pp", "shard", "replicate", "dp", "world")


def groups(context, plans):
    from torch import distributed

    from meshwright.parallel.mesh import Mesh

    out = []
    for plan in plans:
        mesh = Mesh(Layout(plan), context.rank)
        found = {axis: mesh.group(axis) for axis in AXES}
        members = {
            a: (mesh.index(a) if a != "world" else context.rank, g and distributed.get_process_group_ranks(g))
            for a, g in found.items()
        }
        ends = mesh.ends
        members["ends"] = (0, ends and distributed.get_process_group_ranks(ends))
        members["sharding"] = mesh.sharding().mesh_dim_names if plan.shard > 1 else ()
        out.append(members)
    return out


def refuse(context):
    from meshwright.parallel.mesh import Mesh

    Mesh(Layout(Plan(tp=4)), context.rank)


@pytest.mark.parametrize("plan", PLANS, ids=lambda p: p.title())
def test_groups_equal_those_of_the_layout(plan):
    """New ranks for each plan: gloo may stall if one process creates dozens of groups."""
    by_rank = ranks.run(4, groups, [plan])
    for layout in [Layout(plan)]:
        for rank, reported in enumerate(row[0] for row in by_rank):
            for axis in AXES:
                members = layout.group_of(axis, rank)
                index, found = reported[axis]
                assert found == (members if len(members) > 1 else None), (plan.title(), axis, rank)
                assert index == members.index(rank)
            pipeline = layout.group_of("pp", rank)
            if plan.pp > 1 and rank in (pipeline[0], pipeline[-1]):
                assert reported["ends"][1] == [pipeline[0], pipeline[-1]]
            else:
                assert reported["ends"][1] is None
            expected = {(1, 1): (), (1, 2): ("shard",), (2, 2): ("replicate", "shard")}
            assert tuple(reported["sharding"]) == expected.get((plan.replicate, plan.shard), ())


def test_a_wrong_number_of_ranks_is_refused_with_the_arithmetic():
    with pytest.raises(MeshwrightError, match="MW-MESH-001: the plan needs 4 ranks and 2 were started"):
        ranks.run(2, refuse)
