"""The options of `meshwright bench`, checked before any rank starts."""

from __future__ import annotations

from collections.abc import Iterable

from meshwright.comm.bench.backends import BACKENDS, OPERATIONS
from meshwright.comm.bench.collectives import DEVICE, LARGEST, PAIR, SMALLEST, Sweep
from meshwright.errors import MeshwrightError, unknown
from meshwright.units import parse_bytes, parse_seconds

LEAST_BUDGET_S, MOST_BUDGET_S = 1.0, 86_400.0


def sweep_of(backends: str, operations: str, smallest: str, largest: str, budget: str) -> Sweep:
    """The sweep that these words describe; empty words take the defaults."""
    sizes = [int(parse_bytes(text)) for text in (smallest or SMALLEST, largest or LARGEST)]
    if not 4 <= sizes[0] <= sizes[1] <= 2**40:
        raise MeshwrightError(
            "MW-BENCH-006",
            f"message sizes from {smallest} to {largest} are not a range",
            why="The smallest is at least 4 bytes, the largest at most 1 TiB",
            fix="--min-size 1KiB --max-size 1GiB",
        )
    seconds = parse_seconds(budget)
    if not LEAST_BUDGET_S <= seconds <= MOST_BUDGET_S:
        raise MeshwrightError(
            "MW-BENCH-006",
            f"--budget {budget} is not a time from {LEAST_BUDGET_S:.0f} s to one day",
            fix="--budget 60s",
        )
    names = tuple(words(backends, BACKENDS, "backend", "--backends"))
    everything = [PAIR, *OPERATIONS, DEVICE]
    known = words(operations, everything, "operation", "--operations") or everything
    return Sweep(names, tuple(known), sizes[0], sizes[1], seconds)


def words(text: str, known: Iterable[str], what: str, option: str) -> list[str]:
    """The words of a list separated by commas; an unknown one is refused."""
    choices = list(known)
    found = [word.strip() for word in text.split(",") if word.strip()]
    for word in found:
        if word not in choices:
            raise unknown("MW-BENCH-006", what, word, choices, option + " {}")
    return list(dict.fromkeys(found))
