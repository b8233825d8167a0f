"""Proof that a program is a pipeline step: all work once, nothing before its needs, no deadlock, memory as promised.

1. Every action names a stage its rank holds and a micro-batch that exists.
2. For each (stage, micro-batch): one F, and either one B or one I and one W.
3. On a rank, by position: F before the B or I of the same piece, I before its W.
4. Across ranks each action has one need (`needs`): F the F of the stage before; B or I that of the stage after (on
   the last stage its own F). Run the lists, each as far as it goes, waking a rank when what it waits for is done: an
   action that never runs is part of a **deadlock**, and the message follows who waits for whom until the circle
   closes. The order in which actions ran is kept: it is a topological order, and `walk` needs no more than that.
5. A running count of F minus B or W on each rank stays within what the builder promised.

1, 2, 3 and 5 are array arithmetic; 4 touches each action once.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NoReturn

import numpy as np

from meshwright.errors import MeshwrightError
from meshwright.programs.pipelines.program import KIND_NAMES, KINDS, B, F, I, PipelineProgram, W

IN_FLIGHT_STEP = np.array([1, -1, 0, -1])  # F, B, I, W: what an action adds to the activations in flight


def check(program: PipelineProgram) -> PipelineProgram:
    """The program itself when it is sound; otherwise an error that names rank, position and action."""
    needs_and_order(program)
    return program


def needs_and_order(program: PipelineProgram) -> tuple[np.ndarray, np.ndarray]:
    """Check once, and remember what was learned: (needs, topological order)."""
    known = program.__dict__.get("_needs_and_order")
    if known is None:
        _check_places(program)
        table = _check_once(program)
        needs = find_needs(program, table)
        order = run_order(needs.tolist(), program.first.tolist())
        if len(order) < len(program):
            _raise_deadlock(program, needs, order)
        _check_memory(program)
        known = needs, np.array(order)
        program.__dict__["_needs_and_order"] = known
    return known


def count_in_flight(program: PipelineProgram) -> np.ndarray:
    """(actions,) activations that the rank holds from this action on: one more at F, one less after B or W."""
    return np.cumsum(IN_FLIGHT_STEP[program.kind])


def find_needs(program: PipelineProgram, table: np.ndarray) -> np.ndarray:
    """(actions,) the one action that must be done first, beyond those earlier in the rank's own list; −1: none.

    `table[k, s, m]` is where the F (k = 0) and the B or I (k = 1) of stage s and micro-batch m stand.
    """
    stage, batch, last = program.stage, program.microbatch, program.stages - 1
    forward, backward = table[0], table[1]
    needs = np.full(len(program), -1)
    f = (program.kind == F) & (stage > 0)
    needs[f] = forward[stage[f] - 1, batch[f]]
    g = (program.kind == B) | (program.kind == I)
    inner, outer = g & (stage < last), g & (stage == last)
    needs[inner] = backward[stage[inner] + 1, batch[inner]]
    needs[outer] = forward[last, batch[outer]]
    return needs


def run_order(needs: list[int], first: list[int]) -> list[int]:
    """Run every rank's list as far as it goes; the actions in the order they ran. Shorter than `needs`: a deadlock."""
    done = [False] * len(needs) + [True]  # needs[i] = −1 reads the last entry
    sleeper = [-1] * len(needs)  # which rank waits for an action; an action is needed by one other at most
    position = first[:-1]
    order: list[int] = []
    awake = list(range(len(position)))[::-1]
    while awake:
        rank = awake.pop()
        i, stop = position[rank], first[rank + 1]
        while i < stop:
            need = needs[i]
            if not done[need]:
                sleeper[need] = rank
                break
            done[i] = True
            order.append(i)
            if sleeper[i] >= 0:
                awake.append(sleeper[i])
            i += 1
        position[rank] = i
    return order


def place(program: PipelineProgram, index: int) -> str:
    """`rank 1, position 4 (3F0, forward of stage 3, micro-batch 0)`."""
    rank = int(np.searchsorted(program.first, index, side="right")) - 1
    action = program.action(index)
    return (
        f"rank {rank}, position {index - int(program.first[rank])} "
        f"({action}, {KIND_NAMES[action.kind]} of stage {action.stage}, micro-batch {action.microbatch})"
    )


def _first(mask: np.ndarray) -> int | None:
    return int(mask.argmax()) if mask.any() else None


def _check_places(program: PipelineProgram) -> None:
    held = np.bincount(program.rank_of, minlength=program.ranks)
    if len(held) != program.ranks or (held == 0).any():
        raise MeshwrightError(
            "MW-PIPE-010",
            f"{program.stages} stages do not cover {program.ranks} ranks",
            why=f"Stages a rank: {held.tolist()}",
        )
    outside = (program.stage < 0) | (program.stage >= program.stages)
    outside |= (program.microbatch < 0) | (program.microbatch >= program.microbatches)
    bad = _first(outside)
    if bad is not None:
        why = f"There are {program.stages} stages and {program.microbatches} micro-batches, counted from 0"
        raise MeshwrightError("MW-PIPE-010", f"{place(program, bad)} does not exist", why=why)
    bad = _first(program.rank_of[program.stage] != program.rank)
    if bad is not None:
        owner = int(program.rank_of[program.stage[bad]])
        raise MeshwrightError(
            "MW-PIPE-010",
            f"{place(program, bad)} is on the wrong rank",
            why=f"Stage {program.stage[bad]} is held by rank {owner}",
        )
    next_is_backward = np.append(program.kind[1:], W) == B
    next_is_backward[program.first[1:] - 1] = False
    bad = _first(program.joined & ~((program.kind == F) & next_is_backward))
    if bad is not None:
        raise MeshwrightError(
            "MW-PIPE-010",
            f"{place(program, bad)} is joined to an action that is not a backward",
            why="Only a forward and the full backward right after it can be joined",
        )


def _check_once(program: PipelineProgram) -> np.ndarray:
    """Points 2 and 3; the table of positions of F and of B or I."""
    size = program.stages * program.microbatches
    piece = program.stage * program.microbatches + program.microbatch
    where = np.full((4, size), -1)
    where[program.kind, piece] = np.arange(len(program))
    twice = _first(where[program.kind, piece] != np.arange(len(program)))
    if twice is not None:
        other = int(where[program.kind[twice], piece[twice]])
        raise MeshwrightError(
            "MW-PIPE-011", f"{place(program, twice)} is not the only one", why=f"Also at {place(program, other)}"
        )
    has = where >= 0
    for kind, missing in ((F, ~has[F]), (B, ~has[B] & ~has[I]), (W, has[I] & ~has[W]), (I, has[W] & ~has[I])):
        bad = _first(missing)
        if bad is not None:
            _raise_missing(program, kind, bad)
    both = _first(has[B] & has[I])
    if both is not None:
        raise MeshwrightError(
            "MW-PIPE-011",
            f"{place(program, int(where[I, both]))} repeats part of a full backward",
            why=f"The whole of it is at {place(program, int(where[B, both]))}",
        )
    backward = np.maximum(where[B], where[I])
    _check_position(program, backward, where[F], "stands before its forward")
    _check_position(program, where[W][has[W]], where[I][has[W]], "stands before the backward of its inputs")
    return np.stack([where[F], backward]).reshape(2, program.stages, program.microbatches)


def _raise_missing(program: PipelineProgram, kind: int, piece: int) -> NoReturn:
    stage, batch = divmod(piece, program.microbatches)
    raise MeshwrightError(
        "MW-PIPE-011",
        f"rank {int(program.rank_of[stage])} never runs {stage}{KINDS[kind]}{batch}, the {KIND_NAMES[KINDS[kind]]} of "
        f"stage {stage}, micro-batch {batch}",
        why="Every stage needs one F and either one B or one I and one W of every micro-batch",
    )


def _check_position(program: PipelineProgram, later: np.ndarray, earlier: np.ndarray, what: str) -> None:
    bad = _first(later < earlier)
    if bad is not None:
        raise MeshwrightError(
            "MW-PIPE-012",
            f"{place(program, int(later[bad]))} {what}",
            why=f"That is at {place(program, int(earlier[bad]))}",
        )


def _raise_deadlock(program: PipelineProgram, needs: np.ndarray, order: list[int]) -> NoReturn:
    """Follow the first stuck rank: it waits for an action, whose rank is stuck at another, until one comes again."""
    done = np.zeros(len(program), bool)
    done[order] = True
    stuck = [next((i for i in range(a, b) if not done[i]), -1) for a, b in pairwise(program.first.tolist())]
    at = next(i for i in stuck if i >= 0)
    path: list[int] = []
    while at not in path:
        path.append(at)
        at = stuck[int(program.rank[needs[at]])]
    circle = path[path.index(at) :]
    chain = "; ".join(f"{place(program, i)} waits for {program.action(int(needs[i]))}" for i in circle[:6])
    more = f"; and {len(circle) - 6} more" if len(circle) > 6 else ""
    raise MeshwrightError(
        "MW-PIPE-013",
        f"deadlock: {chain}{more}",
        why="Each stands behind another in its rank's list, so none can ever run",
    )


def _check_memory(program: PipelineProgram) -> None:
    if program.promised is None:
        return
    held = count_in_flight(program)
    bad = _first(held > program.promised[program.rank])
    if bad is not None:
        raise MeshwrightError(
            "MW-PIPE-014",
            f"{place(program, bad)} is activation number {held[bad]} in flight",
            why=f"{program.schedule} promises at most {int(program.promised[program.rank[bad]])} on this rank",
        )
