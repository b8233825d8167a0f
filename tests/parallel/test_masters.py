"""Master weights, loss scales and scheduled averages: exact values, without ranks."""

import pytest
import torch
from torch import nn

from meshwright.describe.plan import Plan
from meshwright.describe.sharding import Box, Parameter
from meshwright.errors import MeshwrightError
from meshwright.parallel.data.local_sgd import Average
from meshwright.parallel.numerics.precision import (
    LossScale,
    Masters,
    at_least_single,
    cast,
    masters_of,
    narrow,
    unscale,
)
from meshwright.parallel.pieces import Piece


def piece(values, dtype=torch.bfloat16, sums=None, trained=True):
    """A parameter whose gradient is twice its value, accumulated in `sums`."""
    parameter = nn.Parameter(torch.tensor(values, dtype=dtype), requires_grad=trained)
    if trained:
        parameter.grad_dtype = None
        parameter.grad = (2 * parameter.detach()).to(sums or dtype)
    shape = tuple(parameter.shape)
    return Piece(Box(Parameter("weight", shape, "between"), (0,), shape, (), True), parameter, ("weight",))


@pytest.mark.parametrize(
    ("dtype", "sums", "fields", "wide"),
    [
        (torch.bfloat16, torch.float32, {}, torch.float32),
        (torch.float16, None, {}, torch.float32),
        (torch.float32, None, {}, None),
        (torch.bfloat16, None, {"master": False, "grad_dtype": "bf16"}, None),
        (torch.bfloat16, torch.float32, {"master": False}, torch.bfloat16),
        (torch.float64, None, {"offload": "states"}, torch.float64),
        (torch.bfloat16, None, {"offload": "both"}, torch.float32),
        (torch.float32, None, {"offload": "activations"}, None),
    ],
    ids=str,
)
def test_masters_exist_for_narrow_or_offloaded_parameters(dtype, sums, fields, wide):
    """Also if gradients are wider than an optimizer accepts; frozen parameters do not count."""
    made = masters_of([piece([1.0], dtype, trained=False), piece([1.0], dtype, sums)], Plan(**fields))
    assert ({m.local.dtype for m in made.pieces} if made else {None}) == {wide}
    assert masters_of([piece([1.0], torch.float32, trained=False)], Plan()) is None


def test_masters_receive_gradients_and_return_rounded_parameters():
    sources = [piece([1.0, 3.0], sums=torch.float32), piece([5.0], trained=False)]
    masters = Masters(iter(sources), torch.float32, "cpu")
    first, still = masters.pieces
    assert [p.parameter.requires_grad for p in masters.pieces] == [True, False]
    assert (first.local.tolist(), still.local.tolist()) == ([1.0, 3.0], [5.0])
    masters.take_gradients()
    assert (first.gradient.tolist(), still.gradient.tolist()) == ([2.0, 6.0], [0.0])
    assert masters.moved_bytes == 2 * 4 + 2  # a frozen parameter has a zero gradient of its dtype
    with torch.no_grad():
        first.local.add_(2.0**-10)
    assert sources[0].local.tolist() == [1.0, 3.0]
    masters.give_parameters()
    assert first.local.tolist() == [1.0 + 2.0**-10, 3.0 + 2.0**-10]
    assert sources[0].local.tolist() == [1.0, 3.0]  # rounded away
    with torch.no_grad():
        first.local.add_(1.0)
    masters.give_parameters()
    assert sources[0].local.tolist() == [2.0, 4.0]
    assert masters.moved_bytes == 10 + 2 * (4 + 2)
    assert not masters.pinned


def test_the_loss_scale_halves_at_an_overflow_and_doubles_after_good_steps():
    scale = LossScale.of(torch.float16)
    assert (scale.value, scale.dynamic) == (2.0**16, True)
    good, bad = torch.tensor(1.0), torch.tensor(float("inf"))
    scale.growth_interval = 2
    seen = [(scale.accept(norm), scale.value) for norm in (bad, good, bad, good, good, good)]
    assert seen == [(False, 2**15), (True, 2**15), (False, 2**14), (True, 2**14), (True, 2**15), (True, 2**15)]
    assert (scale.skipped, scale.good_steps) == (2, 1)
    still = LossScale.of(torch.bfloat16)
    assert [still.accept(norm) for norm in (bad, good)] == [True, True]
    assert (still.value, still.skipped) == (1.0, 0)
    for factor in (1.0, 2.0, 8.0):
        pieces = [piece([4.0]), piece([8.0])]
        unscale(pieces, factor)
        assert [p.gradient.item() for p in pieces] == [8.0 / factor, 16.0 / factor]


def test_narrow_dtypes_and_casts():
    assert [narrow(d) for d in (torch.bfloat16, torch.float16, torch.float32, torch.float64)] == [
        True,
        True,
        False,
        False,
    ]
    assert [at_least_single(d) for d in (torch.float16, torch.float64)] == [torch.float32, torch.float64]
    for parameters, buffers, expected in (
        (None, None, (torch.float32, torch.float32)),
        (torch.float64, None, (torch.float64, torch.float64)),
        (None, torch.float64, (torch.float32, torch.float64)),
        (torch.bfloat16, torch.float32, (torch.bfloat16, torch.float32)),
    ):
        module = cast(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), parameters, buffers)
        assert (module[0].weight.dtype, module[1].running_mean.dtype) == expected
        assert module[1].num_batches_tracked.dtype == torch.int64


def test_averages_run_every_k_steps_and_do_nothing_on_one_replica():
    tensors = [torch.tensor([[2.0, 4.0]], dtype=torch.float64), torch.tensor([8.0], dtype=torch.float64)]
    average = Average(tensors, None, 3)
    assert [average.after_update(torch.tensor(5.0)) for _ in range(7)] == [
        False,
        False,
        True,
        False,
        False,
        True,
        False,
    ]
    assert [t.tolist() for t in tensors] == [[[2.0, 4.0]], [8.0]]
    assert (average.since, float(average.tokens)) == (1, 5.0)
    assert Average(tensors[:1], None, 1).after_update(2.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_equal_replicas_do_not_change_for_any_number_of_tokens(dtype):
    """Zero tokens, and more than 16 bits can count."""
    for tokens in (0.0, 70_001.0):
        tensor = torch.tensor([2.0, 0.1], dtype=dtype)
        assert Average([tensor], None, 1).after_update(tokens)
        assert tensor.tolist() == torch.tensor([2.0, 0.1], dtype=dtype).tolist()
    for tensors, every in (([], 1), ([tensor], 0)):
        with pytest.raises(MeshwrightError, match="MW-PAR-007"):
            Average(tensors, None, every)
