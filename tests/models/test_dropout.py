"""Dropout by a hash of positions: known values, the right share, and the same mask on every layout."""

from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from meshwright.describe.model import Model
from meshwright.errors import MeshwrightError
from meshwright.models import build
from meshwright.models.dropout import GOLDEN, Dropout, advanced, drop, kept, key_of, mixed, sample_hashes, tokens
from meshwright.models.step_context import within

CPU = torch.device("cpu")
MOMENT = sample_hashes(5, 3, range(8), CPU)
PLACES = torch.arange(64)


def mask(rate=0.3, site="layers.1.ffn", places=PLACES, width=64, seed=5, step=3, samples=range(8)):
    sample_B = mixed(sample_hashes(seed, step, samples, CPU) + key_of(site))
    return kept(tokens(sample_B, places), rate, width)


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


def test_states_advance_by_the_golden_constant_and_wrap_around():
    numbers, states = [0, 1, 2, 3, 10**6, 2**31 + 5], [0, -1, 2**63 - 1, key_of("a")]
    found = advanced(torch.tensor(states)[:, None], torch.tensor(numbers)).tolist()
    assert [[n % 2**64 for n in row] for row in found] == [[(s + n * GOLDEN) % 2**64 for n in numbers] for s in states]


class NumbersOfRanges(TorchFunctionMode):
    """Notes all whole numbers that follow from `arange` and constants alone."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [x for x in args if isinstance(x, torch.Tensor)]
        if isinstance(out, torch.Tensor) and all(any(x is y for y in self.found) for x in tensors):
            self.found.append(out)
        return out


def test_a_compiled_graph_multiplies_no_range_beyond_32_bits(monkeypatch):
    """The compiler computes what follows from a range as an index, and an index has 32 bits on a GPU: torch 2.11 refuses GOLDEN there."""
    layer = Dropout(0.3, "a")
    layer.share = (1, 2)
    x = torch.ones(8, 16, 10)
    eager = drop(x, tokens(MOMENT, layer.positions(x)), 0.3)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with NumbersOfRanges() as numbers:
        assert torch.equal(drop(x, tokens(MOMENT, layer.positions(x)), 0.3), eager)
    assert max(int(x.max()) for x in numbers.found) == 48
    assert next(x for x in numbers.found if len(x) == 16).tolist() == list(range(16, 32))


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
