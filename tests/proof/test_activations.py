"""Outputs of modules and their gradients on many ranks are parts of one device's, under every layout; only then is the first difference a bug."""

from dataclasses import replace

import kinds
import layouts
import pytest

import ranks
from meshwright.proof.activations import Sides, comparable, first_in_backward, first_in_forward

EXACT = [x for x in layouts.all_layouts() if x.plan.world <= 4 and not (x.plan.lossy or x.plan.average_every)]
EXACT = [x for x in EXACT if x.precision != "fp8" and x.dtype == "fp64"]
AXES = ("dp", "tp", "cp", "pp", "ep", "replicate", "shard")


def sides_of(world, chosen):
    """One step of layouts of the same number of ranks, and of one device."""
    jobs = [replace(x.job(), steps=1, watch=False, activations_of=0, dtypes=("fp64",)) for x in chosen]
    alone = [replace(x.reference.job(), steps=1, watch=False, activations_of=0, dtypes=("fp64",)) for x in chosen]
    alone = [replace(job, reference=True) for job in alone]
    many, one = ranks.run(world, layouts.train_all, jobs), ranks.run(1, layouts.train_all, alone)[0]
    for i, layout in enumerate(chosen):
        factors = {axis: getattr(layout.plan, axis) for axis in AXES}
        yield layout, Sides(one[i], [rank[i] for rank in many], factors)


DAILY = kinds.covering([x for x in EXACT if x.plan.world == 2], kinds.exact_kinds)[:24:6]
SETS = [DAILY]
LONG = [[x for x in EXACT if x.plan.world == world] for world in (1, 2, 4)]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("chosen", [*SETS, *ranks.soak([(some[i::8],) for some in LONG for i in range(8)])])
def test_equal_trainings_have_equal_outputs(chosen):
    wrong, compared = {}, 0
    for layout, sides in sides_of(chosen[0].plan.world, chosen):
        places = [place for place in (first_in_forward(sides), first_in_backward(sides)) if place]
        wrong |= {layout.title: places} if places else {}
        compared += sum(comparable(sides, "outputs", name) for name in sides.one.activations.outputs)
    assert not wrong
    assert compared > 8 * len(chosen)
