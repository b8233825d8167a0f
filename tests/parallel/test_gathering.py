"""Which units are prefetched, and which fit: arithmetic on sizes, without ranks."""

import pytest
import torch
from torch import nn

from meshwright.errors import MeshwrightError
from meshwright.parallel.data.gathering import (
    Gathering,
    check_no_shared_weights,
    fitting,
    gather_ahead,
    grouped,
    size_of,
)


@pytest.mark.parametrize(
    ("at", "step", "most", "limit", "expected"),
    [
        (0, 1, 2, 99, [1, 2]),
        (0, 1, 9, 99, [1, 2, 3]),
        (0, 1, 0, 99, []),
        (3, 1, 2, 99, []),
        (2, 1, 2, 99, [3]),
        (3, -1, 2, 99, [2, 1]),
        (1, -1, 3, 99, [0]),
        (0, -1, 3, 99, []),
        (0, 1, 3, 9, [1, 2]),
        (0, 1, 3, 8, [1]),
        (0, 1, 3, 6, []),
        (3, -1, 3, 6, [2, 1]),
    ],
)
def test_number_of_units_that_fit_with_the_running_one(at, step, most, limit, expected):
    assert fitting([4, 3, 2, 1], at, step, most, limit) == expected


class Unit(nn.Linear):
    """Records the units that it should prefetch."""

    def __init__(self, width):
        super().__init__(width, width, bias=False)
        self.ahead = {}

    def set_modules_to_forward_prefetch(self, units):
        self.ahead["forward"] = [unit.in_features for unit in units]

    def set_modules_to_backward_prefetch(self, units):
        self.ahead["backward"] = [unit.in_features for unit in units]


WIDTHS = (4, 3, 2)
SIZES = [4 * width**2 for width in WIDTHS]


@pytest.mark.parametrize(
    ("fields", "forward", "backward"),
    [
        ({}, None, None),
        ({"forward": 1}, [[3], [2], []], None),
        ({"forward": 2}, [[3, 2], [2], []], None),
        ({"forward": 0}, [[], [], []], None),
        ({"backward": 1}, None, [[4], [4], [3]]),  # the first has none before it and names itself: nothing is gathered
        ({"backward": 0}, None, [[4], [3], [2]]),
        ({"limit": 1e9}, [[], [], []], [[4], [4], [3]]),
        ({"limit": SIZES[0] + SIZES[1], "forward": 2, "backward": 2}, [[3], [2], []], [[4], [4], [3]]),
        ({"limit": SIZES[0]}, [[], [], []], [[4], [3], [3]]),
    ],
)
def test_each_unit_prefetches_the_next_units_that_fit(fields, forward, backward):
    units = [[Unit(width), Unit(1)] for width in WIDTHS]
    gather_ahead(units, SIZES, Gathering(**fields))
    for which, expected in (("forward", forward), ("backward", backward)):
        assert [unit[0].ahead.get(which) for unit in units] == (expected or [None] * 3)
    assert not any(unit[1].ahead for unit in units)


def test_a_unit_larger_than_the_limit_is_refused():
    with pytest.raises(MeshwrightError, match="MW-ZERO-001"):
        gather_ahead([[Unit(4)]], [SIZES[0]], Gathering(limit=SIZES[0] - 1))
    gather_ahead([], [], Gathering(limit=0))
    layers = [nn.Linear(3, 2) for _ in range(5)]
    assert [len(unit) for unit in grouped(layers, 2)] == [2, 2, 1]
    assert grouped(layers, 0) == []
    layers[1].weight = layers[0].weight  # held once
    assert size_of(layers[:2], None) == 4 * (6 + 2 + 2)
    assert size_of(layers[:2], torch.bfloat16) == 2 * (6 + 2 + 2)


def test_a_weight_shared_by_two_units_is_refused():
    module = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
    first, second, third = module
    third.weight = first.weight
    for units in ([[first], [third]], [[first, second]], [[third]]):
        with pytest.raises(MeshwrightError, match=r"MW-ZERO-006: '0\.weight'"):
            check_no_shared_weights(module, units)
    for units in ([[first, third], [second]], [[second]], []):
        check_no_shared_weights(module, units)
