"""The pipeline schedules: their names, and what each one accepts.

`RULES` is the only table of schedules. `describe.legality` reads it to decide whether a plan is legal, `programs.pipelines` to
check what a builder is asked for, `lower` and `cost` to know which schedules split the backward pass.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import numpy as np

Schedule = Literal[
    "naive",
    "gpipe",
    "1f1b",
    "interleaved",
    "looped-bfs",
    "zb-h1",
    "zb-h2",
    "interleaved-zb",
    "zbv",
    "dualpipev",
    "auto",
]
MOST_ACTIONS = 20_000_000  # a program with more actions is a typing mistake, not a pipeline
ACTIONS_PER_MICROBATCH = 3  # forward, input gradient, weight gradient: for each stage


class Rule(NamedTuple):
    """What one schedule accepts."""

    about: str
    virtual: int = 1  # stages per rank by default
    least_virtual: int = 1
    most_virtual: int = 1
    placement: str = "looped"
    least_microbatches_per_rank: int = 0
    splits: bool = False  # the backward pass is split into I (input gradients) and W (weight gradients)
    in_rounds: bool = False  # takes micro-batches in rounds of pp, as Megatron's interleaved 1F1B


RULES: dict[str, Rule] = {
    "naive": Rule("one micro-batch at a time through all stages and back"),
    "gpipe": Rule("all forwards, then all backwards"),
    "1f1b": Rule("one forward, one backward in turn: GPipe's bubble, P micro-batches in flight instead of M"),
    "interleaved": Rule(
        "1F1B with V stages per rank: a V times shorter bubble, V times the messages", 2, 2, 1024, in_rounds=True
    ),
    "looped-bfs": Rule("V stages per rank, all micro-batches through one stage before the next", 2, 1, 1024),
    "zb-h1": Rule("backward split in two; the weight gradients fill the drain: a third of 1F1B's bubble", splits=True),
    "zb-h2": Rule("more forwards first: no bubble when steps overlap, twice 1F1B's memory", splits=True),
    "interleaved-zb": Rule("interleaved with split backwards", 2, 1, 1024, splits=True, in_rounds=True),
    "zbv": Rule("two stages per rank on a V: no bubble when steps overlap, 1F1B's memory", 2, 2, 2, "v", splits=True),
    "dualpipev": Rule("two stages per rank on a V, forwards and backwards in pairs", 2, 2, 2, "v", 2, splits=True),
    "auto": Rule("found by search for the given stage times and memory limit", 1, 1, 1024, "either", splits=True),
}
SCHEDULES: tuple[str, ...] = get_args(Schedule)
V_SHAPED = tuple(name for name, rule in RULES.items() if rule.placement == "v")
VIRTUAL_SCHEDULES = tuple(name for name, rule in RULES.items() if rule.most_virtual > 1)

# The same numbers as arrays, indexed by a schedule's position in SCHEDULES.
LEAST_VIRTUAL = np.array([RULES[name].least_virtual for name in SCHEDULES])
MOST_VIRTUAL = np.array([RULES[name].most_virtual for name in SCHEDULES])
LEAST_MICROBATCHES = np.array([RULES[name].least_microbatches_per_rank for name in SCHEDULES])
IN_ROUNDS = np.array([RULES[name].in_rounds for name in SCHEDULES])
IS_V_SHAPED = np.array([name in V_SHAPED for name in SCHEDULES])


def action_count(
    ranks: int | np.ndarray, microbatches: int | np.ndarray, virtual: int | np.ndarray
) -> int | np.ndarray:
    """Most actions of a pipeline program."""
    return ACTIONS_PER_MICROBATCH * ranks * microbatches * virtual
