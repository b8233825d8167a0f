"""The replay of Muon's updates puts the pieces of all ranks together, and finds a wrong factor, a missing decay and a box in the wrong place."""

from math import sqrt

import numpy as np
import pytest
import torch

from meshwright.describe.optimizer import Optimizer
from meshwright.describe.plan import Plan
from meshwright.proof.emulation.orthogonal import orthogonal, replay_matrices
from meshwright.proof.records import PieceTrace, Trace, Update
from meshwright.training.optimizer.muon import orthogonalise

RATES = [1e-4, 2e-4]


def traces(fault=""):
    """Two ranks, each with half of the rows of a matrix, after two updates of Muon in float32 with bf16 messages."""
    settings, draw = Optimizer(), np.random.default_rng(0)
    value = draw.normal(size=(12, 20)).astype(np.float32)
    momentum = np.zeros_like(value)
    pieces = [PieceTrace("layers.0.ffn.up.weight", (row, 0), orthogonal=True) for row in (0, 6)]
    for rate in RATES:
        gradient = draw.normal(size=value.shape).astype(np.float32)
        momentum = momentum + (1 - settings.momentum) * (gradient - momentum)
        u = torch.tensor(gradient + settings.momentum * (momentum - gradient)).to(torch.bfloat16).float()
        update = orthogonalise(u).to(torch.bfloat16).float().numpy() * (2.0 if fault == "factor" else 1.0)
        if fault == "place":
            update = np.roll(update, 6, axis=0)
        decay = 1.0 if fault == "decay" else 1 - rate * settings.weight_decay
        after = (value * np.float32(decay) - np.float32(rate * 0.2 * sqrt(20)) * update).astype(np.float32)
        for piece in pieces:
            rows = slice(piece.start[0], piece.start[0] + 6)
            piece.updates.append(Update("fp32", "bf16", value[rows], gradient[rows], after[rows]))
        value = after
    return [Trace(rank, "bf16", {"replicate": 0}, [0.0, 0.0], pieces=[piece]) for rank, piece in enumerate(pieces)]


def test_the_replay_agrees_with_the_iteration():
    u = np.random.default_rng(1).normal(size=(3, 5, 8))
    np.testing.assert_allclose(orthogonal(u), orthogonalise(torch.tensor(u)).numpy(), atol=1e-10)
    assert replay_matrices(traces(), Plan(), RATES, Optimizer()) == []


@pytest.mark.parametrize("fault", ["factor", "place", "decay"])
def test_the_replay_finds_a_fault(fault):
    found = replay_matrices(traces(fault), Plan(), RATES, Optimizer())
    assert [b.step for b in found] == [0, 1]
    assert found[0].what == "updated matrix"
