"""Every compressor against its definition, written out by hand, and what it asks for against what is lowered. Without ranks."""

import pytest
import torch
from torch import nn

from meshwright.describe.plan import Plan
from meshwright.lower.compressed import exchanges
from meshwright.parallel.numerics.compress.base import CompressedScatter, RunningReduction, columns_of, unit_parameters
from meshwright.parallel.numerics.compress.compressors import make_compressor
from meshwright.parallel.numerics.compress.powersgd import PowerSGD
from meshwright.parallel.numerics.compress.schemes import Cast, Quantised, RandomK, Threshold, TopK, count_kept
from meshwright.proof.emulation.lossy_sum import from_rows, to_rows
from one_process import perform, run_together

RANKS = 3
NAMES = ("fp16", "bf16", "int8", "int4", "fp8", "top-k", "random-k", "threshold", "powersgd")
OPTIONS = {"ratio": 0.1, "rank": 2, "threshold": 1.5, "seed": 3}


def numbers(*shape, seed=0, dtype=torch.float64):
    random = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=random, dtype=torch.float64).to(dtype)


def shapes(scattered):
    """A matrix and a vector: of a message, or of the columns of rows for three owners."""
    return [(0, torch.Size([5, 6])), (12 if scattered else 30, torch.Size([5]))]


def asked_for(compressors, given, scattered, index=0):
    """What each rank holds at the end, and (operation, bytes of n) of what rank 0 asked for."""
    layout, seen = shapes(scattered), []
    out = torch.zeros(RANKS, given[0].shape[-1], dtype=given[0].dtype)
    messages = [g.clone() for g in given]
    steps = [
        c.scatter(index, given[r], layout, r, out[r]) if scattered else c.reduce(index, messages[r], layout, r, RANKS)
        for r, c in enumerate(compressors)
    ]
    while requests := [asked for step in steps if (asked := next(step, None)) is not None]:
        seen.append((requests[0].operation, max(requests[0].out.nbytes, requests[0].given.nbytes)))
        perform(requests)
    return list(out) if scattered else messages, seen


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_lowered_is_what_it_asks_for(name, dtype, scattered):
    compressors = [make_compressor(name, **OPTIONS) for _ in range(RANKS)]
    plan = Plan(replicate=RANKS, compression=name, compression_ratio=0.1, compression_rank=2, compression_threshold=1.5)
    elements = 42 if scattered else 35
    for step in range(3):
        given = [numbers(*((RANKS, 14) if scattered else (35,)), seed=9 * step + r, dtype=dtype) for r in range(RANKS)]
        asked = asked_for(compressors, given, scattered, index=4)[1]
        sent_values = compressors[0].sent_counts[4][step] if isinstance(compressors[0], Threshold) else None
        whole = [tuple(shape) for _, shape in shapes(scattered)]
        assert exchanges(plan, elements, dtype.itemsize, whole, RANKS, scattered, sent_values) == asked


def rounded(x, levels):
    """Round each row to integer multiples of its maximum divided by `levels`."""
    scale = (x.abs().amax(-1, keepdim=True) / levels).float().double()
    return (x / scale).round() * scale


def largest(x, k):
    places = x.abs().argsort(-1, descending=True)[..., :k]
    return torch.zeros_like(x).scatter(-1, places, x.gather(-1, places))


def above(x, factor):
    return torch.where(x.abs() >= factor * x.square().mean().sqrt(), x, 0.0)


@pytest.mark.parametrize(
    ("name", "sent"),
    [
        ("bf16", lambda x: x.bfloat16().double()),
        ("int8", lambda x: rounded(x, 127)),
        ("int4", lambda x: rounded(x, 7)),
        ("top-k", lambda x: largest(x, 2)),
        ("threshold", lambda x: above(x, 1.5)),
    ],
)
def test_an_owner_has_the_sum_of_what_all_sent_it(name, sent):
    """Of 15 columns, an odd number; and in a second step of what the first has kept back."""
    compressors, given = (
        [make_compressor(name, **OPTIONS) for _ in range(2)],
        [numbers(2, 15, seed=r) for r in range(2)],
    )
    held = [torch.zeros_like(g) for g in given]
    for _ in range(2):
        out = torch.full((2, 15), 7.0, dtype=torch.float64)
        run_together([c.scatter(0, given[r], [], r, out[r]) for r, c in enumerate(compressors)])
        sent_values = [sent(g + e) for g, e in zip(given, held, strict=True)]
        want = sum(sent_values) if name != "bf16" else sum(t.bfloat16() for t in sent_values).double()
        torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-12)
        if name != "bf16":
            held = [g + e - t for g, e, t in zip(given, held, sent_values, strict=True)]


@pytest.mark.parametrize(("kind", "levels"), [("int8", 127), ("int4", 7)])
def test_a_quantised_sum_is_rounded_by_its_owner_and_told_to_all(kind, levels):
    """37 numbers over three ranks: shares of 14, the last of them padded with five zeros."""
    given = [numbers(37, seed=r) for r in range(RANKS)]
    (got, *others), _ = asked_for([Quantised(kind) for _ in given], given, False)
    rows = [rounded(torch.nn.functional.pad(g, (0, 5)).view(3, 14), levels) for g in given]
    torch.testing.assert_close(got, rounded(sum(rows), levels).flatten()[:37], rtol=1e-12, atol=1e-12)
    assert all(torch.equal(got, other) for other in others)
    assert [Quantised(kind).width(n, 3) for n in (1, 6, 7, 12, 13)] == [2, 2, 4, 4, 6]


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize(
    "make_one",
    [
        lambda on: Cast(torch.float16, on),
        lambda on: Quantised("int8", on),
        lambda on: TopK(0.1, on),
        lambda on: Threshold(1.5, on),
        lambda on: RandomK(0.1, 3, on),
        lambda on: PowerSGD(2, 3, on),
    ],
)
def test_feedback_keeps_what_is_lost_and_without_it_nothing_is_kept(make_one, scattered):
    shape = (RANKS, 14) if scattered else (35,)
    for on in (True, False):
        compressors, total, given = [make_one(on) for _ in range(RANKS)], 0, 0
        for step in range(2):
            gradients = [numbers(*shape, seed=9 * step + r) for r in range(RANKS)]
            if scattered:  # the last owner has one row less of either parameter: what is padded is zero
                for g in gradients:
                    g[2, 6:12] = g[2, 13] = 0.0
            if isinstance(compressors[0], Cast):  # the sum would be rounded too, so only one rank has a gradient
                gradients[1:] = [torch.zeros_like(g) for g in gradients[1:]]
            sums, _ = asked_for(compressors, gradients, scattered)
            total, given = total + (torch.stack(sums) if scattered else sums[0]), given + sum(gradients)
        errors = [c.feedback.errors for c in compressors]
        assert [len(e) for e in errors] == [int(on)] * RANKS
        if on and not (scattered and isinstance(compressors[0], PowerSGD)):  # whose errors are of whole matrices
            assert (total + sum(e[0] for e in errors) - given).abs().max() < 1e-12
            assert max(e[0].abs().max() for e in errors) > 1e-6


def test_values_above_a_threshold_may_be_none_and_are_counted():
    """Nothing stands out of equal numbers, and no list is empty: one pair of nothing is sent."""
    compressors = [Threshold(1.5) for _ in range(RANKS)]
    for scattered, equal in ((False, torch.ones(35)), (True, torch.ones(RANKS, 14))):
        held, seen = asked_for(compressors, [equal] * RANKS, scattered, index=int(scattered))
        assert all((h == 0).all() for h in held)
        assert seen[1][1] == RANKS * (4 + 4)
    assert [c.sent_counts for c in compressors] == [{0: [1], 1: [1]}] * RANKS
    at_it = torch.tensor([3.0, 3.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])  # twice their root mean square to the bit
    message = at_it.clone()
    run_together([Threshold(2.0).reduce(0, message, [], 0, 1)])
    assert torch.equal(message, at_it)
    for compressor in (Threshold(2.0), TopK(0.25)):  # of one owner
        run_together([compressor.scatter(0, at_it[None], [], 0, message.zero_())])
        assert torch.equal(message, at_it)


def test_places_are_drawn_anew_for_each_message_and_step_and_alike_on_all_ranks():
    one, other = RandomK(0.1, 3), RandomK(0.1, 3)
    drawn = [(one.indices(i, 200, torch.device("cpu")), other.indices(i, 200, torch.device("cpu"))) for i in (0, 0, 1)]
    assert all(torch.equal(a, b) for a, b in drawn)
    assert len({tuple(a.tolist()) for a, _ in drawn}) == 3
    assert all(len(set(a.tolist())) == 20 for a, _ in drawn)
    assert not torch.equal(drawn[0][0], RandomK(0.1, 4).indices(0, 200, torch.device("cpu")))


def test_how_many_are_kept_and_which_matrices_shrink():
    assert [
        count_kept(n, r) for n, r in ((188, 0.1), (200, 0.1), (3, 0.01), (10, 1.0), (10, 2.0), (2_000_001, 1e-5))
    ] == [
        19,
        20,
        1,
        10,
        10,
        21,
    ]
    widths = [
        PowerSGD(2).width(torch.Size(s)) for s in ((9,), (), (5, 5), (4, 4), (3, 6), (3, 7), (3, 7, 2), (1, 9), (9, 2))
    ]
    assert widths == [0, 0, 2, 0, 0, 2, 2, 0, 0]
    assert PowerSGD(9).width(torch.Size([30, 5])) == 0
    assert PowerSGD(3).width(torch.Size([30, 5])) == 3


def test_a_column_that_came_to_nothing_is_drawn_anew_and_others_stay():
    compressor, matrix = PowerSGD(2), numbers(5, 4)
    compressor.bases[0, 7] = torch.tensor([[0.5, 0.0], [0.0, 0.0], [-0.2, 0.0], [0.1, 0.0]], dtype=torch.float64)
    start = compressor._initial_q(0, 7, matrix, 3)
    assert torch.equal(start[:, 0], compressor.bases[0, 7][:, 0])
    assert (start[:, 1] != 0).all()
    compressor.bases[0, 7] = start
    assert torch.equal(compressor._initial_q(0, 7, matrix, 4), start)


def test_rows_are_cut_for_their_owners_and_put_together_again():
    whole = torch.arange(10.0).view(5, 2)
    rows = to_rows(whole, 3)
    assert rows.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 0]]
    assert torch.equal(from_rows(rows, (5, 2)), whole)
    assert columns_of([(5, 2), (4,), (3, 2, 2)], 3) == [(0, (5, 2)), (4, (4,)), (6, (3, 2, 2))]


class Inner(nn.Linear):
    """A separate unit: its parameters do not belong to the outer unit."""

    def set_custom_reduce_scatter(self):
        raise AssertionError


def test_a_unit_has_its_own_parameters_in_torchs_order():
    unit = nn.Sequential(nn.Linear(2, 2), Inner(2, 2), nn.Sequential(nn.LayerNorm(2), nn.Linear(2, 2, bias=False)))
    unit[2][1].weight.requires_grad_(False)
    unit.own = unit[0].weight  # used twice, and held where it was seen first
    unit.more = nn.Parameter(torch.zeros(2))
    norm = unit[2][0]
    assert [id(p) for p in unit_parameters(unit)] == [
        id(p) for p in (unit[0].weight, unit[0].bias, norm.weight, norm.bias, unit.more)
    ]


def test_what_goes_exactly_goes_beside_what_is_compressed():
    a, b, c = (nn.Parameter(torch.zeros(shape)) for shape in ((5, 2), (4,), (3,)))
    made = CompressedScatter(make_compressor("int8"), [a, b, c], "shard", 3, {b})
    assert [id(p) for p in made.lossy] == [id(a), id(c)]
    assert [columns.tolist() for columns in made.columns] == [[0, 1, 2, 3, 6], [4, 5]]
    assert made.layout == [(0, a.shape), (4, c.shape)]


def test_a_reduction_that_asks_for_nothing_has_nothing_to_wait_for():
    assert not RunningReduction(iter(()), None).wait()


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_finite_is_heard_at_once_by_its_owner_and_not_again(name, bad, scattered):
    """By all ranks, where all hear the sum: the step is skipped, and no step after it need be."""
    compressors = [make_compressor(name, **OPTIONS) for _ in range(RANKS)]
    for step in range(3):
        given = [numbers(*((RANKS, 14) if scattered else (35,)), seed=9 * step + r) for r in range(RANKS)]
        if step == 1:
            given[1].view(-1)[11] = bad
        sums, _ = asked_for(compressors, given, scattered)
        nonfinite = [not s.isfinite().all() for s in sums]
        assert (any(nonfinite) if scattered else all(nonfinite)) == any(nonfinite) == (step == 1)
    assert all(e.isfinite().all() for c in compressors for e in c.feedback.errors.values())


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("fp16", "bf16")])
def test_errors_follow_the_scale_of_the_loss(name, scattered):
    """A power of two changes no rounding: scaled by it from the second step on, the sums are scaled by it and nothing else."""
    plain, scaled = ([make_compressor(name, **OPTIONS) for _ in range(RANKS)] for _ in range(2))
    for step, scale in enumerate((1.0, 8.0, 8.0)):
        given = [numbers(*((RANKS, 14) if scattered else (35,)), seed=9 * step + r) for r in range(RANKS)]
        if step == 1:
            for compressor in scaled:
                compressor.feedback.rescale(8.0)
        exact, _ = asked_for(plain, given, scattered)
        moved, _ = asked_for(scaled, [g * scale for g in given], scattered)
        for a, b in zip(exact, moved, strict=True):
            torch.testing.assert_close(b, a * scale, rtol=1e-13, atol=1e-13)
