"""The comparison: what counts as a difference, which difference is the first, and the bound of float32 from one device."""

import copy
import json
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from meshwright.describe.config import Config
from meshwright.proof import prove
from meshwright.proof.compare import Agreement, compare, tolerance_of
from meshwright.proof.page import page
from meshwright.proof.prove import without_ties
from meshwright.proof.records import Job, PieceTrace, Row, Trace
from meshwright.proof.result import CopyProof, Proof
from meshwright.proof.small import small_copy
from meshwright.proof.tolerance import FLOOR, MARGIN

NAMES = ("embedding", "layer.0", "layer.1", "zero")


def trace(dtype="fp64", rank=0, steps=2, noise=0.0):
    random = np.random.default_rng(0)
    wobble = np.random.default_rng(1)

    def values(scale):
        exact = scale * random.standard_normal((4, 3))
        return exact * (1 + noise * wobble.uniform(-1, 1, exact.shape))

    pieces = []
    for name in NAMES:
        scale = 1e-15 if name == "zero" else 1.0
        pieces.append(
            PieceTrace(name, (0, 0), [values(scale) for _ in range(steps)], [values(1.0) for _ in range(steps)])
        )
    return Trace(rank, dtype, losses=[3.0, 2.0][:steps], norms=[1.0, 0.5][:steps], pieces=pieces)


def test_equal_traces_agree_and_rounding_does_too():
    one = trace()
    assert compare(one, [trace(rank=r) for r in range(3)]).breaks == []
    assert compare(one, [trace(noise=1e-12)]).breaks == []
    assert compare(one, [trace(noise=1e-8)]).breaks != []


def test_a_box_is_compared_with_its_position_in_the_full_tensor():
    one, part = trace(), trace(rank=1)
    for piece in part.pieces:
        piece.start = (2, 0)
        piece.gradients = [g[2:] for g in piece.gradients]
        piece.parameters = [p[2:] for p in piece.parameters]
    assert compare(one, [part]).breaks == []
    for piece in part.pieces:
        piece.start = (1, 0)
    assert compare(one, [part]).breaks[0].rank == 1


def test_a_zero_gradient_may_be_noise():
    one, other = trace(), trace()
    other.pieces[3].gradients[0] = other.pieces[3].gradients[0] * -1.0
    assert compare(one, [other]).breaks == []
    other.pieces[3].gradients[0] = np.full((4, 3), 1e-9)
    assert [b.name for b in compare(one, [other]).breaks] == ["zero"]


def test_the_first_difference_is_the_earliest_and_closest_to_the_loss():
    one, other = trace(), trace()
    for piece in other.pieces[:3]:
        piece.gradients = [2 * g for g in piece.gradients]
        piece.parameters = [p + 1 for p in piece.parameters]
    other.norms = [2.0, 1.0]
    found = compare(one, [other]).breaks
    assert [(b.step, b.what, b.name) for b in found[:4]] == [
        (0, "gradient", "layer.1"),
        (0, "gradient", "layer.0"),
        (0, "gradient", "embedding"),
        (0, "norm", ""),
    ]
    assert found[0].ratio == pytest.approx(2.0)
    assert "2 times one device's" in str(found[0])
    other.losses[0] += 1e-6
    assert compare(one, [other]).breaks[0].what == "loss"


def test_nan_is_a_difference():
    one, other = trace(), trace()
    other.pieces[0].parameters[1] = np.full((4, 3), np.nan)
    other.losses[1] = float("nan")
    assert {b.what for b in compare(one, [other]).breaks} == {"loss", "parameter"}


def test_bounds_follow_one_devices_rounding():
    double, single = trace(), trace("fp32", noise=1e-6)
    bounds = tolerance_of(double, single)
    assert bounds.bound("loss", 0) == FLOOR["fp32"]
    most = 2 * MARGIN["fp32"] * 1e-6 + FLOOR["fp32"]
    for piece in double.pieces:  # one that was rounded well has the usual bound
        first, second = (bounds.bound("gradient", step, piece.name) for step in (0, 1))
        assert 0.05 * most < first <= second < most
    wider = tolerance_of(double, single, trace("fp32", noise=1e-5))
    assert wider.bound("gradient", 0, "layer.0") > 2 * bounds.bound("gradient", 0, "layer.0")
    assert compare(double, [trace("fp32", noise=3e-6)], bounds).breaks == []
    wrong = copy.deepcopy(single)
    wrong.pieces[1].gradients[0] = wrong.pieces[1].gradients[0] * 1.01
    found = compare(double, [wrong], bounds)
    assert (found.dtype, found.breaks[0].name, found.breaks[0].dtype) == ("fp32", "layer.0", "fp32")


def test_a_parameter_may_differ_by_the_noise_of_its_gradient_only():
    one, other = trace(steps=1), trace("fp32", steps=1)
    bounds = tolerance_of(one, trace("fp32", steps=1, noise=1e-7))
    where = (1, 2)
    for size, allowed in ((1e-9, True), (1.0, False)):  # a step of Adam is 1e-3 whatever the size of the gradient
        for t in (one, other):
            t.pieces[1].gradients[0][where] = size
        moved = copy.deepcopy(other)
        moved.pieces[1].parameters[0][where] += 1e-3
        assert (compare(one, [moved], bounds).breaks == []) == allowed
    moved.pieces[1].gradients[0][where] = one.pieces[1].gradients[0][where] = 1e-9
    moved.pieces[1].parameters[0][where] += 4e-3
    assert compare(one, [moved], bounds).breaks != []


def test_noise_where_the_gradient_is_zero_moves_adams_parameters_and_nothing_else():
    """PowerSGD leaves rounding noise in rows without a gradient, and Adam divides it by ε. An update that no gradient explains is a difference."""
    one, other = trace(steps=1), trace(steps=1)
    for t, noise in ((one, 1e-13), (other, -1e-13)):
        t.pieces[1].epsilon = 1e-8
        t.pieces[1].gradients[0][0] = noise
        t.pieces[1].parameters[0][0] = 0.5 - 1e-3 * noise / (abs(noise) + 1e-8)
    assert compare(one, [other]).breaks == []
    assert compare(one, [other]).errors["parameter"] < 1e-9
    one.pieces[1].epsilon = 0.0  # SGD divides by nothing
    assert [b.what for b in compare(one, [other]).breaks] == ["parameter"]
    one.pieces[1].epsilon = 1e-8
    other.pieces[1].parameters[0][0] += 1e-7  # more than the noise can explain
    assert [b.what for b in compare(one, [other]).breaks] == ["parameter"]
    other.pieces[1].parameters[0][0] = one.pieces[1].parameters[0][0]
    other.pieces[1].parameters[0][1] += 1e-8  # a row whose gradients agree
    assert [b.what for b in compare(one, [other]).breaks] == ["parameter"]


def test_after_a_tie_of_a_lossy_sum_a_difference_cannot_be_told():
    one, other = trace(), trace()
    other.pieces[1].gradients[1] = other.pieces[1].gradients[1] * 2
    assert without_ties(compare(one, [other]), None).verdict == "differs"
    assert without_ties(compare(one, [other]), 1).verdict == "cannot be told"
    assert without_ties(compare(one, [one]), 1).verdict == "equal within rounding"
    other.losses[1] = 5.0  # of the step that ties: computed before anything is sent
    assert without_ties(compare(one, [other]), 1).verdict == "differs"
    assert without_ties(compare(one, [other]), 0).verdict == "cannot be told"
    other.pieces[1].parameters[0] = other.pieces[1].parameters[0] * 2
    assert without_ties(compare(one, [other]), 1).verdict == "differs"


def test_a_proof_that_ties_is_repeated_from_other_weights(monkeypatch):
    tied = Agreement("fp64", {}, [], untold="ties")
    seeds = []

    def proved(config, small, job, device):
        seeds.append(job.seed)
        return SimpleNamespace(agreements=[tied if len(seeds) == 1 else compare(trace(), [trace()])])

    monkeypatch.setattr(prove, "prove_job", proved)
    for _ in range(2):
        proof = prove.prove_copy(None, None, Job(None, None, None), "cpu")
        assert proof.agreements[0].verdict == "equal within rounding"
    assert (len(seeds), len(set(seeds))) == (3, 2)


def test_a_proof_fits_a_terminal_of_80_columns():
    """Words are not cut; a data-dependent reason is printed once, below the table."""
    rows = [Row("shard", "reduce_scatter", (64, 999.9e6), (64, 999.9e6)),
            Row("replicate", "all_to_all", (120, 999.9e6), (120, 999.9e6), ["routing depends on the tokens"]),
            Row("expert_dp", "all_to_all", (120, 999.9e6), (120, 999.9e6), ["routing depends on the tokens"])]  # fmt: skip
    watched = trace()
    watched.traffic = rows
    small = small_copy(
        Config.from_parts("nano", "laptop", "gloo-cpu", {"batch": 4, "precision": "fp8"}, {"replicate": 2}), 2
    )
    with (out := Console(width=80)).capture() as text:
        out.print(page(Proof("dp 2", [CopyProof(small, 1, [compare(trace(), [trace()])], [watched])])))
    lines = [line.split() for line in text.get().splitlines()]
    assert ["shard", "reduce-scatter", "0", "64,", "1", "GB", "64,", "1", "GB", "equal"] in lines
    assert ["expert_dp", "all-to-all", "0", "120,", "1", "GB", "120,", "1", "GB", "equal", "¹"] in lines
    assert lines.count(["¹", "routing", "depends", "on", "the", "tokens"]) == 1
    assert "products in fp8" in text.get()


def test_a_proof_with_nan_can_be_written_as_json():
    one, many = trace(), trace()
    many.pieces[1].gradients[0][:] = np.nan
    small = small_copy(Config.from_parts("nano", "laptop", "gloo-cpu", {"batch": 4}, {"replicate": 2}), 2)
    reported = Proof("dp 2", [CopyProof(small, 2, [compare(one, [many])], [], "replicate")]).as_dict()
    assert not json.loads(json.dumps(reported, allow_nan=False))["passed"]
    assert reported["first_break"]["name"] == "layer.0"
    assert reported["errors"]["fp64"]["gradient"] is None
