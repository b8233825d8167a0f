"""Helpers of the tests of collectives: every algorithm, and random programs."""

import numpy as np
from hypothesis import strategies as st

from meshwright.programs.collectives import ALGORITHMS, accepts, build

EVERY = [(operation, name) for operation, named in ALGORITHMS.items() for name in named]


def expected(operation: str, inputs: list, ranks: int, elements: int, root: int = 0, target: int = 0) -> list:
    """The required result of each rank, by numpy; None where the operation has no result."""
    edges = [r * elements // ranks for r in range(ranks + 1)]
    shard = [slice(edges[r], edges[r + 1]) for r in range(ranks)]
    nothing = [np.zeros(0)] * ranks

    def only(rank, value):
        return [value if r == rank else nothing[r] for r in range(ranks)]

    match operation:
        case "broadcast":
            return [inputs[root]] * ranks
        case "reduce":
            return only(root, sum(inputs))
        case "scatter":
            return [inputs[root][shard[r]] for r in range(ranks)]
        case "gather":
            return only(root, np.concatenate(inputs))
        case "all-reduce":
            return [sum(inputs)] * ranks
        case "all-gather":
            return [np.concatenate(inputs)] * ranks
        case "reduce-scatter":
            return [sum(inputs)[shard[r]] for r in range(ranks)]
        case "all-to-all":
            return [np.concatenate([inputs[i][shard[r]] for i in range(ranks)]) for r in range(ranks)]
        case "point-to-point":
            return only(target, inputs[root])
        case "barrier":
            return nothing
    raise AssertionError(operation)


def inputs_of(operation: str, ranks: int, elements: int, seed: int) -> list:
    """Random integers: sums are exact in any order."""
    numbers = np.random.default_rng(seed)
    size = [elements] * ranks
    if operation in ("gather", "all-gather"):
        size = [(r + 1) * elements // ranks - r * elements // ranks for r in range(ranks)]
    if operation == "barrier":
        size = [0] * ranks
    return [numbers.integers(-1000, 1000, size=s) for s in size]


@st.composite
def groups(draw, ranks: int):
    """The ranks in any order, divided into nodes of any sizes."""
    order = draw(st.permutations(range(ranks)))
    cuts = sorted(draw(st.sets(st.integers(1, ranks - 1), max_size=6))) if ranks > 1 else []
    return [order[a:b] for a, b in zip([0, *cuts], [*cuts, ranks], strict=True)]


@st.composite
def drawn(draw, operation: str, algorithm: str, most: int = 33, fewest: int = 1):
    """A program of an algorithm with any number of ranks, size, root, segments and nodes."""
    ranks = draw(st.integers(fewest, most))
    elements = draw(st.integers(0, 3 * ranks + 2) | st.integers(100, 1000))
    options = {}
    for key in accepts(operation, algorithm):
        if key in ("root", "target"):
            options[key] = draw(st.integers(0, ranks - 1))
        elif key in ("segments", "chunks"):
            options[key] = draw(st.integers(1, 7))
        elif key == "groups":
            options[key] = draw(groups(ranks))
    return build(operation, algorithm, ranks, elements, **options), options
