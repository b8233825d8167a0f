"""The algorithms by operation and name. To add an algorithm, write one function:

    @algorithm("all-gather", "ring")
    def all_gather(ranks, elements):
        step, rank = np.ogrid[: ranks - 1, :ranks]
        return collective("all-gather", ranks, elements, moves(step, rank, (rank + 1) % ranks, (rank - step) % ranks))

The checker, the walk, the comparison, the figures, the runtime and the tests (at many numbers of ranks) then cover it.
In addition to ranks and elements, a builder may accept the options `root`, `target`, `segments` (pipelined algorithms)
and `groups` (the nodes).
"""

import functools
import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any

from meshwright.describe.cluster import Cluster
from meshwright.errors import MeshwrightError, unknown
from meshwright.programs.collectives.contract import OPERATIONS
from meshwright.programs.collectives.program import Program

MOST_RANKS = 4096
MOST_ELEMENTS = 2**48

Builder = Callable[..., Program]
Groups = tuple[tuple[int, ...], ...]
ALGORITHMS: dict[str, dict[str, Builder]] = {operation: {} for operation in OPERATIONS}


def algorithm(operation: str, name: str) -> Callable[[Builder], Builder]:
    """Register a builder. The wrapper validates its arguments and sets the name of its program."""

    def register(builder: Builder) -> Builder:
        accepted = inspect.signature(builder).parameters

        @functools.wraps(builder)
        def build_it(ranks: int, elements: int, **options: Any) -> Program:
            ranks = int_in_range("ranks", ranks, 1, MOST_RANKS)
            elements = int_in_range("elements", elements, 0, MOST_ELEMENTS)
            for key in options:
                if key not in accepted:
                    raise unknown("MW-PROG-004", f"option of {name} {operation}", key, list(accepted)[2:])
            for key in ("root", "target"):
                if key in options:
                    options[key] = int_in_range(key, options[key], 0, ranks - 1)
            if "segments" in options:
                options["segments"] = int_in_range("segments", options["segments"], 1, 2**16)
            if "groups" in accepted:
                options["groups"] = as_groups(options.get("groups"), ranks)
            return builder(ranks, elements, **options).but(algorithm=name)

        ALGORITHMS[operation][name] = build_it
        return build_it

    return register


def build(operation: str, algorithm: str, ranks: int, elements: int, **options: Any) -> Program:
    """Return the program of an operation with an algorithm of ALGORITHMS."""
    return builder(operation, algorithm)(ranks, elements, **options)


def algorithms_of(operation: str) -> dict[str, Builder]:
    if operation not in ALGORITHMS:
        raise unknown("MW-PROG-005", "collective operation", operation, ALGORITHMS)
    return ALGORITHMS[operation]


def builder(operation: str, algorithm: str) -> Builder:
    named = algorithms_of(operation)
    if algorithm not in named:
        raise unknown("MW-PROG-005", f"algorithm of {operation}", algorithm, named)
    return named[algorithm]


def accepts(operation: str, algorithm: str) -> list[str]:
    """Return the options of a builder other than ranks and elements."""
    return list(inspect.signature(builder(operation, algorithm)).parameters)[2:]


def int_in_range(name: str, value: Any, low: int, high: int) -> int:
    """Return `value` as an int; raise if it is not a whole number from low to high."""
    try:
        number = operator.index(value)
    except TypeError:
        number = low - 1
    if not low <= number <= high:
        raise MeshwrightError("MW-PROG-006", f"{name} = {str(value)[:40]} is not a whole number from {low} to {high}")
    return number


def as_groups(groups: Sequence[Sequence[int]] | None, ranks: int) -> Groups:
    """Return the validated nodes as tuples of ranks. Default: nodes of eight ranks; up to eight ranks, two halves."""
    if groups is None:
        size = 8 if ranks > 8 else max(1, (ranks + 1) // 2)
        return tuple(tuple(range(a, min(a + size, ranks))) for a in range(0, ranks, size))
    parts = tuple(tuple(int_in_range("rank", r, 0, ranks - 1) for r in group) for group in groups if len(group))
    if sorted(r for group in parts for r in group) != list(range(ranks)):
        what = f"the groups do not partition the ranks 0 to {ranks - 1}"
        raise MeshwrightError("MW-PROG-007", what, why="Every rank must be in exactly one group")
    return parts


def place(cluster: Cluster, ranks: int, placement: Sequence[int] | None = None) -> list[int]:
    """Return the device of each rank: the validated `placement`, or device r for rank r."""
    devices = list(range(ranks)) if placement is None else [operator.index(d) for d in placement]
    if len(devices) != ranks or len(set(devices)) != ranks or min(devices) < 0 or max(devices) >= cluster.world:
        what = f"{ranks} ranks do not fit on {min(len(set(devices)), cluster.world)} of the {cluster.world} devices of {cluster.name}"
        why = f"Each rank needs a separate device, numbered 0 to {cluster.world - 1}"
        raise MeshwrightError("MW-PROG-008", what, why=why)
    return devices


def groups_of(cluster: Cluster, ranks: int, placement: Sequence[int] | None = None) -> Groups:
    """Return the ranks of each node; nodes are in the order of their first rank."""
    nodes: dict[int, list[int]] = {}
    for rank, device in enumerate(place(cluster, ranks, placement)):
        nodes.setdefault(device // cluster.node_size, []).append(rank)
    return tuple(tuple(group) for group in nodes.values())
