"""Which schedules there are, and what each can be asked for.

`RULES` is the one table of names: what a schedule is in a sentence, how many stages a rank it takes, whether it wants
a least number of micro-batches, where its stages sit. `require` holds a request to it; the planner reads it to know
what is legal.
"""

from __future__ import annotations

from numbers import Integral
from typing import NamedTuple

from meshwright.errors import MeshwrightError, unknown

MOST_ACTIONS = 20_000_000  # a program beyond this is a typing mistake, not a pipeline


class Rule(NamedTuple):
    """What is legal for one schedule."""

    about: str
    virtual: int = 1  # stages a rank unless told otherwise
    most_virtual: int = 1
    placement: str = "looped"
    least_microbatches_per_rank: int = 0
    splits: bool = False  # whether backward is split into I and W


RULES: dict[str, Rule] = {
    "naive": Rule("one micro-batch at a time through all stages and back"),
    "gpipe": Rule("all forwards, then all backwards"),
    "1f1b": Rule("one forward, one backward in turn: GPipe's bubble, P micro-batches in flight instead of M"),
    "interleaved": Rule("1F1B with V stages a rank: a V times shorter bubble, V times the messages", 2, 1024),
    "looped-bfs": Rule("V stages a rank, all micro-batches through one stage before the next", 2, 1024),
    "zb-h1": Rule("backward split in two; the weights' half fills the drain: a third of 1F1B's bubble", splits=True),
    "zb-h2": Rule("more forwards first: no bubble when steps overlap, twice 1F1B's memory", splits=True),
    "interleaved-zb": Rule("interleaved with split backwards", 2, 1024, splits=True),
    "zbv": Rule("two stages a rank on a V: no bubble when steps overlap, 1F1B's memory", 2, 2, "v", splits=True),
    "dualpipev": Rule("two stages a rank on a V, forwards and backwards in pairs", 2, 2, "v", 2, splits=True),
    "auto": Rule("found for the given stage times and memory limit", 1, 1024, "either", splits=True),
}
ALIASES = {
    "zb-1p": "zb-h1", "zb-2p": "zb-h2", "zb1p": "zb-h1", "zbh1": "zb-h1", "zbh2": "zb-h2", "zero-bubble": "zb-h1",
    "zb-v": "zbv", "dualpipe-v": "dualpipev", "1f1b-i": "interleaved", "interleaved-1f1b": "interleaved",
    "bfs": "looped-bfs", "breadth-first": "looped-bfs", "interleaved-zero-bubble": "interleaved-zb",
}  # fmt: skip


def name_of(schedule: str) -> str:
    """The schedule's own name, from it or an alias."""
    name = schedule.lower().replace("_", "-")
    name = ALIASES.get(name, name)
    if name not in RULES:
        raise unknown("MW-PIPE-002", "pipeline schedule", schedule, RULES)
    return name


def refusal(schedule: str, ranks: int, microbatches: int, virtual: int) -> MeshwrightError | None:
    """Why a schedule cannot be built so, or None when it can."""
    rule = RULES[schedule]
    for what, value in (("ranks", ranks), ("microbatches", microbatches), ("virtual", virtual)):
        if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
            return MeshwrightError("MW-PIPE-003", f"{schedule}: {what} = {value!r} is not a whole number from 1 up")
    least = 2 if schedule == "interleaved" else 1 if rule.most_virtual > 2 else rule.virtual
    if not least <= virtual <= rule.most_virtual:
        near = least if virtual < least else rule.most_virtual
        valid = [least] if least == rule.most_virtual else [f"{least} to {rule.most_virtual}"]
        return MeshwrightError(
            "MW-PIPE-004",
            f"{schedule} does not take {virtual} stages a rank",
            why=rule.about,
            valid=valid,
            fix="1f1b" if schedule == "interleaved" and virtual == 1 else f"virtual={near}",
        )
    if microbatches < rule.least_microbatches_per_rank * ranks:
        needed = rule.least_microbatches_per_rank * ranks
        return MeshwrightError(
            "MW-PIPE-005",
            f"{schedule} on {ranks} ranks needs {needed} micro-batches, not {microbatches}",
            why="Both stages of every rank must be filled",
            valid=[f"{needed} or more"],
            fix=f"microbatches={needed}",
        )
    if ranks * microbatches * virtual * 3 > MOST_ACTIONS:
        return MeshwrightError(
            "MW-PIPE-006",
            f"{ranks} ranks × {microbatches} micro-batches × {virtual} stages a rank is too large",
            why=f"A program holds at most {MOST_ACTIONS:,} actions",
        )
    return None


def require(schedule: str, ranks: int, microbatches: int, virtual: int) -> None:
    """Raise unless the schedule can be built so."""
    problem = refusal(schedule, ranks, microbatches, virtual)
    if problem is not None:
        raise problem
