"""A batch of plans lowers to the same as separate plans, and its groups are those of the layout."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lower.cases import ALL, MODELS, WORK, one, plans, stack
from meshwright.describe.layout import Layout
from meshwright.describe.plan import Plan
from meshwright.lower import sync
from meshwright.lower.batch import Batch
from meshwright.lower.stages import average_blocks, rank_blocks, stages_of_rank
from meshwright.lower.step import step_program

FIELDS = ("count", "flops", "bytes", "message_bytes", "launches")


def numbers(program, i):
    """All numbers of a lowered program for plan i of its batch, by name, without operations that do not run."""
    n = program.batch.n
    out: dict[tuple, float] = {}

    def at(value):
        return float(np.broadcast_to(value, n)[i])

    def add(key, ops):
        for op in ops:
            if at(op.count):
                for field in FIELDS:
                    name = (*key, op.name, op.collective, op.axis, field)
                    out[name] = out.get(name, 0.0) + at(op.count) * (1 if field == "count" else at(getattr(op, field)))
                for k, side in enumerate(op.shape):
                    out[(*key, op.name, "shape", k)] = at(side)

    for (block, phase), ops in program.blocks.items():
        add((block, phase), ops)
    for name, ops in program.sync.items():
        add((name,), ops)
    for what in ("saved", "parameters"):
        for block, parts in getattr(program, what).items():
            out |= {(what, block, part): at(size) for part, size in parts.items()}
    out |= {("gathered", block): at(size) for block, size in program.gathered.items()}
    for h in program.ranks[:1]:
        out |= {("elements", group): at(count) for group, count in h.elements.items()}
        add(("step",), sync.step_ops(program, h, zero_3=True))
    return {key: value for key, value in out.items() if value}


@settings(max_examples=20, deadline=None)
@given(st.data(), st.sampled_from(sorted(ALL)), st.sampled_from(["default", "plain", "graphs"]))
def test_a_batch_lowers_to_the_same_as_separate_plans(data, name, which):
    model = ALL[name]
    several = data.draw(st.lists(plans(model), min_size=2, max_size=4))
    together = step_program(model, several, WORK, stack(which))
    for i, plan in enumerate(several):
        alone = step_program(model, plan, WORK, stack(which))
        assert numbers(together, i) == pytest.approx(numbers(alone, 0), rel=1e-12)


@settings(max_examples=25, deadline=None)
@given(
    st.data(),
    st.sampled_from(sorted(MODELS)),
    st.sampled_from([("tp", "cp", "pp", "dp"), ("tp", "dp", "pp", "cp"), ("pp", "tp", "dp", "cp")]),
)
def test_groups_have_the_node_members_of_the_layout(data, name, order):
    plan = data.draw(plans(MODELS[name])).but(order=order)
    batch = Batch.of([plan], MODELS[name], WORK, stack("default"))
    layout = Layout(plan)
    for axis in ("tp", "cp", "pp", "shard", "replicate", "dp", "dp_cp", "expert_tp", "ep", "expert_dp", "world"):
        assert one(batch.size(axis)) == layout.size(axis)
        for unit in (2, 8, 32):
            assert one(batch.members(axis, unit)) == layout.per_unit(axis, unit), (axis, unit)


def test_a_program_of_one_plan_lists_only_its_operations():
    program = step_program(ALL["gqa"], Plan(), WORK)
    assert all(one(op.count) > 0 for ops in program.blocks.values() for op in ops)


def test_recomputed_layers_are_those_of_the_stages_of_a_rank():
    """Layer by layer: of plans that recompute some of their layers, with looped, V-shaped and unequal stages, one of them twice."""
    model = ALL["hybrid"]
    base = {"recompute": "full", "microbatch": 1}
    some = [
        Plan(**base, pp=2, recompute_every=2),
        Plan(**base, pp=2, virtual=2, schedule="zbv", recompute_layers=1),
        Plan(**base, pp=2, layers_per_stage=(1, model.layers - 1), recompute_layers=1),
        Plan(**base, pp=1, recompute_every=3),
    ]
    every = [*some, Plan(**base, pp=2), some[0]]
    batch = Batch.of(every, model, WORK, stack("default"))
    mean = average_blocks(batch)
    for i, plan in enumerate(every):
        edges = np.cumsum([0, *plan.stage_layers(model.layers)])
        chosen = [plan.recomputed_layers(range(a, b)) for a, b in pairwise(edges)]
        for kind in model.kinds:
            count = [sum(model.layer_kinds[layer] == kind for layer in layers) for layers in chosen]
            for rank in range(plan.pp):
                held = rank_blocks(batch, np.minimum(float(rank), batch.pp - 1))
                assert held.times(kind, "R")[i] == sum(count[s] for s in stages_of_rank(plan, rank))
            assert mean.times(kind, "R")[i] == pytest.approx(sum(count) / plan.pp)
