"""Modules that cannot be split: those that compute more than a product, and dropout that differs between ranks."""

import pytest
import torch
from torch import nn

import ranks
import split_sums
from meshwright.errors import MeshwrightError
from meshwright.parallel.tensor.cutting import check_plain, output_dim, product


class Halved(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 0.5


class Spelled(nn.Linear):
    """A different implementation of the same product."""

    def forward(self, x):
        return x @ self.weight.T + self.bias


class Scaled(nn.Embedding):
    def forward(self, ids):
        return super().forward(ids) * 2


class Conv1D(nn.Module):
    """A linear layer of another library, with a weight [in, out]."""

    def __init__(self, device=None):
        super().__init__()
        self.nf, self.weight, self.bias = 6, nn.Parameter(torch.randn(4, 6, device=device)), None

    def forward(self, x):
        return x @ self.weight


def patched(part):
    own = part.forward
    part.forward = lambda x: own(x).relu()
    return part


def test_a_weight_may_be_transposed():
    ours, theirs, x = nn.Linear(4, 6, bias=False), Conv1D(), torch.randn(3, 4)
    assert (output_dim(ours), output_dim(theirs)) == (0, 1)
    for part in (ours, theirs):
        assert torch.equal(product(part, x), part(x))


@pytest.mark.parametrize(
    "part",
    [
        nn.Linear(4, 6),
        nn.Linear(4, 6, bias=False, dtype=torch.bfloat16),
        Spelled(4, 6),
        nn.Embedding(2, 3),
        nn.Linear(4, 6, device="meta"),
        Conv1D("meta"),
    ],
)
def test_a_custom_forward_that_equals_a_product_is_accepted(part):
    check_plain("part", part)


@pytest.mark.parametrize(
    "part", [Halved(4, 6), Scaled(5, 3), patched(nn.Linear(4, 6)), patched(Conv1D()), Spelled(4, 6, device="meta")]
)
def test_more_than_a_product_is_refused(part):
    with pytest.raises(MeshwrightError, match="MW-TP-004: 'part'"):
        check_plain("part", part)


def pair(context, seeds, drop, frozen):
    """Two products split over two ranks, with a norm between them that is unfrozen after the split."""
    from torch import distributed

    from meshwright.parallel.tensor.split import split

    torch.manual_seed(0)
    norm = nn.LayerNorm(8, dtype=torch.float64).requires_grad_(not frozen)
    made = nn.Sequential(
        norm, nn.Linear(8, 4, dtype=torch.float64), nn.Dropout(drop), nn.Linear(4, 8, dtype=torch.float64)
    )
    torch.manual_seed(seeds[context.rank])
    table = (("", "region"), ("0", "inside"), ("1", "column"), ("3", "row"))
    done = split(made, table, distributed.group.WORLD)
    norm.requires_grad_()
    x = torch.arange(24.0, dtype=torch.float64).view(1, 3, 8).sin()
    made(x).square().sum().backward()
    split_sums.sum_gradients(done, made)
    return norm.weight.grad.numpy()


def test_parameters_unfrozen_after_the_split_are_summed_too():
    frozen, trained = (ranks.run(2, pair, [0, 0], 0.0, f) for f in (True, False))
    assert (
        abs(trained[0] - trained[1]).max()
        == abs(frozen[0] - trained[0]).max()
        == abs(frozen[1] - trained[0]).max()
        == 0
    )
    assert abs(trained[0]).max() > 0


def test_dropout_that_differs_between_ranks_is_refused():
    ranks.run(2, pair, [1, 1], 0.5, False)
    ranks.run(2, pair, [1, 2], 0.0, False)
    with pytest.raises(MeshwrightError, match="MW-TP-007: '2' has dropout"):
        ranks.run(2, pair, [1, 2], 0.5, False)
