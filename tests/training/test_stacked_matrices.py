"""Matrices of equal shape are orthogonalised together, a round of bounded size at a time."""

import torch

from meshwright.training.optimizer import muon as whole_matrices
from meshwright.training.optimizer.muon import orthogonalise


def test_stacks_have_one_shape():
    shapes = [(2, 3), (3, 2), (2, 3), (2, 3), (5, 5)]
    found = whole_matrices.equal_shapes({i: torch.zeros(shape) for i, shape in enumerate(shapes)})
    assert found == [[0, 2, 3], [1], [4]]


def test_a_matrix_in_a_stack_gets_the_same_update():
    matrices = torch.randn(3, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for alone, stacked in zip(matrices, orthogonalise(matrices), strict=True):
        torch.testing.assert_close(orthogonalise(alone), stacked, rtol=1e-12, atol=1e-12)
