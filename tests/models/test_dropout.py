"""Dropout by a hash of positions: known values, the right share, and the same mask on every layout."""

import pytest
import torch

from meshwright.describe.model import Model
from meshwright.errors import MeshwrightError
from meshwright.models import build
from meshwright.models.dropout import GOLDEN, Dropout, kept, key_of, mixed, multiples, sample_hashes, tokens
from meshwright.models.step_context import within

CPU = torch.device("cpu")
MOMENT = sample_hashes(5, 3, range(8), CPU)
PLACES = torch.arange(64)


def mask(rate=0.3, site="layers.1.ffn", places=PLACES, width=64, seed=5, step=3, samples=range(8)):
    sample_B = mixed(sample_hashes(seed, step, samples, CPU) + key_of(site))
    return kept(tokens(sample_B, places * GOLDEN), rate, width)


def test_the_hash_is_splitmix64():
    """The first three numbers from seed 0, as published with xoshiro (Vigna)."""
    states = torch.tensor([1, 2, 3]) * GOLDEN
    assert [n % 2**64 for n in mixed(states).tolist()] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


@pytest.mark.parametrize(("rate", "width"), [(0.01, 64), (0.3, 63), (0.9, 66)])
def test_it_drops_the_given_share_everywhere(rate, width):
    dropped = 1 - mask(rate, width=width).double()
    for dims in ((), (0, 1), (1, 2), (0, 2)):
        count = dropped.numel() / dropped.mean(dims).numel()
        assert (dropped.mean(dims) - rate).abs().max() < 5 * (rate * (1 - rate) / count) ** 0.5


@pytest.mark.parametrize(
    "change",
    [{"seed": 6}, {"step": 4}, {"site": "layers.1.attention"}, {"samples": range(8, 16)}, {"places": PLACES + 1000}],
)
def test_another_moment_site_sample_or_position_gives_another_mask(change):
    agree = (mask() == mask(**change)).double().mean()
    assert abs(agree - (0.3**2 + 0.7**2)) < 0.02  # of two independent ones


def test_neighbouring_features_tokens_and_samples_are_independent():
    keep = mask()
    for dim in range(3):
        for distance in (1, 2, 3, 4):
            agree = (keep == keep.roll(distance, dim)).double().mean()
            assert abs(agree - (0.3**2 + 0.7**2)) < 0.02, (dim, distance)


def test_a_part_of_the_batch_and_the_sequence_has_that_part_of_the_mask():
    whole, places = mask(), torch.tensor([40, 3, 7])
    assert torch.equal(mask(samples=[6, 2], places=places), whole[[6, 2]][:, places])


def test_a_share_of_the_sequence_has_the_mask_of_the_whole_sequence():
    x = torch.randn(8, 64, 16)
    whole, shares = Dropout(0.3, "a"), []
    for i in range(4):
        part = Dropout(0.3, "a")
        part.share = (i, 4)
        with within(samples_B=MOMENT):
            shares.append(part(x[:, 16 * i : 16 * i + 16]))
    with within(samples_B=MOMENT):
        assert torch.equal(whole(x), torch.cat(shares, 1))


def test_backward_uses_the_mask_of_forward_without_saving_it():
    layer, saved = Dropout(0.4, "a"), []
    x = torch.ones(8, 64, 16, dtype=torch.float64, requires_grad=True)
    with within(samples_B=MOMENT), torch.autograd.graph.saved_tensors_hooks(saved.append, lambda t: t):
        y = layer(x)
    assert y.grad_fn.token_BS.nbytes == 8 * 8 * 64
    y.backward(torch.ones_like(y))  # at no moment at all: it remembers its own
    assert torch.equal(x.grad, y)
    assert y.unique().tolist() == pytest.approx([0.0, 1 / (1 - 0.4)], rel=2**-15)
    assert saved == []


def test_multiples_wrap_around_and_have_constants_of_64_bits():
    """A compiler multiplies the numbers of a range exactly: 4 times GOLDEN has 65 bits."""
    for numbers in (range(3), range(4, 9), range(10**6, 10**6 + 2)):
        assert torch.equal(multiples(numbers, torch.device("cpu")), torch.tensor(list(numbers)) * GOLDEN)


def test_dropout_is_off_in_evaluation_and_refused_without_a_moment():
    layer, x = Dropout(0.4, "a"), torch.ones(8, 4, 2)
    with pytest.raises(MeshwrightError, match="MW-BUILD-004"):
        layer(x)
    with (
        within(samples_B=MOMENT),
        pytest.raises(MeshwrightError, match="dropout at a has a batch of 3 samples, and the step names 8"),
    ):
        layer(x[:3])
    assert torch.equal(layer.eval()(x), x)


def test_a_model_drops_at_every_site_if_it_has_a_rate():
    shape = {"hidden": 16, "layers": 3, "heads": 2, "ffn": 24, "vocab": 32}
    sites = [m.site for m in build(Model(**shape, dropout_rate=0.1)).modules() if isinstance(m, Dropout)]
    assert sorted(sites) == ["embedding", *(f"layers.{i}.{part}" for i in range(3) for part in ("attention", "ffn"))]
    assert not any(isinstance(m, Dropout) for m in build(Model(**shape, dropout=True)).modules())
