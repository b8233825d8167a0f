"""The loss computed with its projection, in chunks: the loss and all gradients of logits that are held whole."""

import pytest
import torch

from meshwright.describe.files import entry
from meshwright.describe.stack import Stack
from meshwright.models import loss
from meshwright.models.loss import IGNORED, cross_entropy, linear_cross_entropy, rows_per_chunk
from meshwright.models.step_context import Targets

TOKENS, HIDDEN, VOCAB = 10, 6, 23


def inputs(dtype=torch.float64):
    drawn = torch.Generator().manual_seed(0)
    x, weight = (
        torch.randn(*s, generator=drawn, dtype=torch.float64) for s in ((2, TOKENS // 2, HIDDEN), (VOCAB, HIDDEN))
    )
    target = torch.randint(0, VOCAB, (2, TOKENS // 2), generator=drawn)
    target[0, 1] = target[1, -1] = IGNORED
    return x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), target


@pytest.mark.parametrize("rows", [1, 3, TOKENS])
def test_chunks_give_the_loss_and_gradients_of_whole_logits(monkeypatch, rows):
    monkeypatch.setattr(loss, "rows_per_chunk", lambda *sizes: rows)
    x, weight, target = inputs()
    factor = torch.tensor(0.125, dtype=torch.float64)
    found = linear_cross_entropy(x, weight, Targets(target, factor))
    expected = cross_entropy(x @ weight.T, target) * factor
    assert found.item() == pytest.approx(expected.item(), rel=1e-14)
    gradients = [torch.autograd.grad(3 * total, (x, weight)) for total in (found, expected)]
    for ours, theirs in zip(*gradients, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-13, atol=1e-15)


def test_tokens_without_a_target_add_nothing():
    x, weight, target = inputs()
    nothing = Targets(torch.full_like(target, IGNORED), torch.tensor(0.5, dtype=torch.float64))
    for total in (linear_cross_entropy(x, weight, nothing), cross_entropy(x @ weight.T, nothing.target_BS)):
        assert total.item() == 0
        assert all(not g.any() for g in torch.autograd.grad(total, (x, weight)))


def test_a_frozen_projection_and_an_evaluation_have_no_gradient_of_the_weight():
    x, weight, target = inputs()
    targets = Targets(target, torch.tensor(1.0, dtype=torch.float64))
    linear_cross_entropy(x, weight.detach(), targets).backward()
    assert x.grad is not None
    with torch.no_grad():
        value = linear_cross_entropy(x, weight, targets)
    assert not value.requires_grad
    assert value.item() == pytest.approx(cross_entropy(x @ weight.T, target).item(), rel=1e-14)


def test_bf16_chunks_sum_the_gradient_of_the_weight_in_single_precision(monkeypatch):
    """Summed in bf16, thousands of chunks would lose what is 256 times smaller than the sum so far."""
    monkeypatch.setattr(loss, "rows_per_chunk", lambda *sizes: 1)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    x = torch.ones(1, 1024, 1, dtype=torch.bfloat16)
    linear_cross_entropy(x, weight, Targets(torch.zeros(1, 1024, dtype=torch.long), torch.tensor(1.0))).backward()
    assert weight.grad.flatten().tolist() == [-512.0, 512.0]


@pytest.mark.parametrize(("tokens", "limit", "rows"), [(16, 10**9, 16), (16, 16 * 8, 4), (17, 16 * 8, 4), (3, 1, 1)])
def test_chunks_are_equal_and_within_the_limit(tokens, limit, rows):
    assert rows_per_chunk(tokens, 16, 2, limit) == rows


def test_predictions_count_chunks_of_the_size_that_is_used():
    stack = Stack(**entry("stacks", "meshwright"))
    assert stack.logits_chunk == loss.CHUNK_BYTES
