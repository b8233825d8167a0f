"""The sharding table: boxes cover every parameter exactly once per copy, and arrays agree with integers."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lower.cases import MOE, plans
from meshwright.describe.layout import Layout
from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.describe.sharding import (
    DATA_AXES,
    RULES,
    Degrees,
    boxes,
    compressible,
    degrees_of,
    even_range,
    local_shape,
    module_styles,
    padding,
    parameters,
    partial_over,
    shard_dim,
    shard_range,
    share,
)
from meshwright.describe.workload import Workload

WORK = Workload(batch=32, seq=64)
BIASED = {"qkv_bias": True, "out_bias": True, "ffn_bias": True}
DENSE = Model(hidden=16, layers=2, heads=8, kv_heads=2, ffn=24, vocab=33, qk_norm=True, tied=True, **BIASED)
EXPERTS = Model(
    hidden=16, layers=2, heads=4, ffn=24, vocab=33, experts=4, top_k=2, expert_ffn=12, balance_bias=True, **BIASED
)
MODELS = {"dense": DENSE, "experts": EXPERTS}
PLANS = [
    {"tp": 4, "sp": True, "replicate": 2},
    {"tp": 4, "shard": 2, "zero": 3, "replicate": 2, "tp_form": "all-gather"},
    {"tp": 2, "cp": 2, "shard": 3, "zero": 1},
    {"tp": 2, "shard": 4, "zero": 2, "ep": 4},
    {"tp": 4, "shard": 2, "zero": 1, "ep": 2, "expert_tp": 2, "replicate": 2},
    {"replicate": 4, "average_every": 3, "tp": 2},
]


def tables(model, plan):
    layout = Layout(plan)
    return [boxes(model, plan, layout, rank, range(model.layers)) for rank in range(plan.world)]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("degrees", PLANS, ids=str)
def test_first_copies_cover_each_parameter_exactly_once(name, degrees):
    model = MODELS[name]
    if not model.experts:
        degrees = {k: v for k, v in degrees.items() if k not in ("ep", "expert_tp")}
    if model.experts and "average_every" in degrees:
        return
    plan = Plan(**degrees).check(model, WORK.but(batch=24))
    per_rank = tables(model, plan)
    replicas = plan.replicate if plan.average_every else 1  # each trains a separate model
    for row in zip(*per_rank, strict=True):
        seen = np.zeros(row[0].full_shape, dtype=int)
        for box in row:
            inside = tuple(slice(a, a + n) for a, n in zip(box.local_start, box.local_shape, strict=True))
            assert seen[inside].shape == box.local_shape
            seen[inside] += box.first_copy
        assert (seen == replicas).all(), row[0].name


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("degrees", PLANS[:5], ids=str)
def test_exactly_the_ranks_along_copy_axes_hold_the_same_elements(name, degrees):
    model = MODELS[name]
    if not model.experts:
        degrees = {k: v for k, v in degrees.items() if k not in ("ep", "expert_tp")}
    plan = Plan(**degrees).check(model, WORK.but(batch=24))
    layout = Layout(plan)
    copies = degrees_of(model, plan).kv_copies
    for row in zip(*tables(model, plan), strict=True):
        holders: dict[tuple, set[int]] = {}
        for rank, box in enumerate(row):
            holders.setdefault((box.local_start, box.local_shape), set()).add(rank)
        sizes = [copies if axis == "kv_copies" else layout.size(axis) for axis in row[0].copies]
        many = math.prod(sizes)
        for key, ranks in holders.items():
            if math.prod(key[1]):  # ranks after the last row hold nothing, and so the same
                assert len(ranks) == many, (row[0].name, row[0].copies)


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_arrays_over_plans_equal_the_first_rank_of_each(name, data):
    """The same rules in arrays: shape, padding, partial sums and compressibility, on the fullest rank."""
    model = MODELS[name]
    chosen = data.draw(st.lists(plans(model, WORK), min_size=1, max_size=4))
    each = [degrees_of(model, plan) for plan in chosen]
    columns = [
        np.array(column, dtype=bool if field in ("sp", "all_gather") else float)
        for field, column in zip(Degrees._fields, zip(*each, strict=True), strict=True)
    ]
    batch = Degrees(*columns)
    firsts = [boxes(model, plan, Layout(plan), 0, range(model.layers)) for plan in chosen]
    for i, p in enumerate(parameters(model, range(model.layers))):
        shape = [np.broadcast_to(n, len(chosen)) for n in local_shape(p.style, p.shape, batch)]
        partial = partial_over(p.style, batch)
        sends = np.broadcast_to(compressible(p.style, batch), len(chosen))
        parts = np.array([float(Layout(plan).size(DATA_AXES[RULES[p.style].group].shard)) for plan in chosen])
        padded = np.broadcast_to(padding(shape, parts), len(chosen))
        for k, table in enumerate(firsts):
            box = table[i]
            assert tuple(int(n[k]) for n in shape) == box.shape
            on = [axis for axis, mask in partial.items() if np.broadcast_to(mask, len(chosen))[k] and p.learns]
            assert on == ([box.partial] if box.partial else [])
            if p.learns:
                assert sends[k] == box.compressible, p.name
            if box.zero:
                assert padded[k] == box.padded_size - box.size
                assert box.local_size * box.zero.parts == box.padded_size  # the first rank is the fullest


@given(st.integers(1, 100), st.integers(1, 9))
def test_shares_and_shards_cover_a_dimension(length, parts):
    ranges = [even_range(length, parts, i) for i in range(parts)]
    assert [stop - start for start, stop in ranges] == [share(length, parts, i) for i in range(parts)]
    assert [start for start, _ in ranges][1:] == [stop for _, stop in ranges][:-1]
    assert (ranges[0][0], ranges[-1][1]) == (0, length)
    for shape in ((length,), (length, 3), (length, 8, 3)):
        rows = [shard_range(shape, parts, i) for i in range(parts)]
        sizes = [math.prod(shape) // shape[dim] * (stop - start) for dim, start, stop in rows]
        assert sum(sizes) == math.prod(shape)
        assert math.prod(shape) + padding(shape, parts) == parts * sizes[0] >= sum(sizes)
        assert shard_dim(shape, parts) == 0 or sizes[0] == sizes[-1]
        assert all(a[2] == b[1] for a, b in itertools.pairwise(rows))
    assert shard_dim((3, 8), 4) == 1
    assert shard_dim((4, 8), 4) == shard_dim((3, 6), 4) == shard_dim((3,), 4) == 0


def test_tied_copies_on_two_stages_are_one_parameter():
    plan = Plan(pp=2)
    layout = Layout(plan)
    first, last = (boxes(DENSE, plan, layout, rank, range(rank, rank + 1)) for rank in (0, 1))
    ends = [box for box in (*first, *last) if box.tied]
    assert [box.source for box in ends] == ["embedding.tokens.weight"] * 2
    assert [box.first_copy for box in ends] == [True, False]
    frozen = boxes(DENSE, plan, layout, 1, range(1, 2), frozenset({"embedding.tokens.weight"}))
    assert not next(box for box in frozen if box.tied).learns


def test_every_module_has_one_style():
    for model in (*MODELS.values(), MOE):
        found = dict(module_styles(model))
        for p in parameters(model, range(model.layers)):
            pattern = ".".join("*" if part.isdigit() else part for part in p.module.split("."))
            assert p.style.removesuffix("-bias") == found[pattern]
