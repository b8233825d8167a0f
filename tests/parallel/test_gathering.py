"""Which layers are a unit, and weights that two units share: without ranks."""

import pytest
from torch import nn

from meshwright.errors import MeshwrightError
from meshwright.parallel.data.gathering import check_no_shared_weights, grouped


def test_layers_are_grouped_into_units():
    layers = [nn.Linear(3, 2) for _ in range(5)]
    assert [len(unit) for unit in grouped(layers, 2)] == [2, 2, 1]
    assert grouped(layers, 0) == []


def test_a_weight_shared_by_two_units_is_refused():
    module = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
    first, second, third = module
    third.weight = first.weight
    for units in ([[first], [third]], [[first, second]], [[third]]):
        with pytest.raises(MeshwrightError, match=r"MW-ZERO-006: '0\.weight'"):
            check_no_shared_weights(module, units)
    for units in ([[first, third], [second]], [[second]], []):
        check_no_shared_weights(module, units)
