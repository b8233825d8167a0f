"""Prove that a program is a valid pipeline step: all work once, dependencies respected, no deadlock, memory within limits.

1. Every action names a stage of its rank and an existing micro-batch.
2. For each (stage, micro-batch): one F, and either one B or one I and one W.
3. In the list of a rank, for each (stage, micro-batch): F is before B or I, and I is before W.
4. Across ranks each action depends on one other action (`needs`): F on the F of the previous stage; B or I on the B or
   I of the next stage (on the last stage, on the F of the same stage). The check runs each list as far as possible and
   resumes a rank when the action it waits for is done. An action that never runs is part of a **deadlock**; the error
   shows the cycle. The order in which actions ran is a topological order, which `walk` uses.
5. On each rank the number of activations in flight (F minus B or W) never exceeds the limit that the builder states.

Checks 1, 2, 3 and 5 use array operations; 4 visits each action once.
"""

from itertools import pairwise
from typing import NoReturn

import numpy as np

from meshwright.errors import MeshwrightError
from meshwright.programs.pipelines.program import KIND_NAMES, KINDS, B, F, I, PipelineProgram, W

IN_FLIGHT_STEP = np.array([1, -1, 0, -1])  # F, B, I, W: change of the number of activations in flight


def check(program: PipelineProgram) -> PipelineProgram:
    """Return the program if it is valid; else raise an error that names the rank, position and action."""
    needs_and_order(program)
    return program


def needs_and_order(program: PipelineProgram) -> tuple[np.ndarray, np.ndarray]:
    """Check the program and return (needs, topological order); the result is cached on the program."""
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
    """(actions,) the index of the action that must be done first, in addition to the earlier ones of the rank; −1: none.

    `table[k, s, m]` is the index of the F (k = 0) and of the B or I (k = 1) of stage s and micro-batch m.
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
    """Run each rank's list as far as possible. Return the actions in the order they ran; fewer than `needs`: a deadlock."""
    done = [False] * len(needs) + [True]  # needs[i] = −1 reads the last entry
    sleeper = [-1] * len(needs)  # the rank that waits for an action; at most one other action needs it
    position = first[:-1]
    order: list[int] = []
    awake = list(range(len(position)))[::-1]
    while awake:
        rank = awake.pop()
        start, stop = position[rank], first[rank + 1]
        for i in range(start, stop):
            need = needs[i]
            if not done[need]:
                sleeper[need] = rank
                stop = i
                break
            done[i] = True
            if sleeper[i] >= 0:
                awake.append(sleeper[i])
        order += range(start, stop)
        position[rank] = stop
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
    stages_of_rank = np.bincount(program.rank_of, minlength=program.ranks)
    if len(stages_of_rank) != program.ranks or (stages_of_rank == 0).any():
        what = f"{program.stages} stages do not cover {program.ranks} ranks"
        raise MeshwrightError("MW-PIPE-010", what, why=f"Stages a rank: {stages_of_rank.tolist()}")
    outside = (program.stage < 0) | (program.stage >= program.stages)
    outside |= (program.microbatch < 0) | (program.microbatch >= program.microbatches)
    bad = _first(outside)
    if bad is not None:
        why = f"There are {program.stages} stages and {program.microbatches} micro-batches, counted from 0"
        raise MeshwrightError("MW-PIPE-010", f"{place(program, bad)} does not exist", why=why)
    bad = _first(program.rank_of[program.stage] != program.rank)
    if bad is not None:
        owner = int(program.rank_of[program.stage[bad]])
        what = f"{place(program, bad)} is on the wrong rank"
        raise MeshwrightError("MW-PIPE-010", what, why=f"Stage {program.stage[bad]} is held by rank {owner}")
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
    """Checks 2 and 3. Return the table of the indices of F and of B or I."""
    size = program.stages * program.microbatches
    piece = program.stage * program.microbatches + program.microbatch
    where = np.full((4, size), -1)
    where[program.kind, piece] = np.arange(len(program))
    twice = _first(where[program.kind, piece] != np.arange(len(program)))
    if twice is not None:
        other = int(where[program.kind[twice], piece[twice]])
        raise MeshwrightError(
            "MW-PIPE-011", f"{place(program, twice)} occurs twice", why=f"It is also at {place(program, other)}"
        )
    has = where >= 0
    for kind, missing in ((F, ~has[F]), (B, ~has[B] & ~has[I]), (W, has[I] & ~has[W]), (I, has[W] & ~has[I])):
        bad = _first(missing)
        if bad is not None:
            _raise_missing(program, kind, bad)
    both = _first(has[B] & has[I])
    if both is not None:
        what = f"{place(program, int(where[I, both]))} repeats part of a full backward"
        raise MeshwrightError("MW-PIPE-011", what, why=f"The full backward is at {place(program, int(where[B, both]))}")
    backward = np.maximum(where[B], where[I])
    _check_position(program, backward, where[F], "is before its forward")
    _check_position(program, where[W][has[W]], where[I][has[W]], "is before the backward of its inputs")
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
        problem = f"{place(program, int(later[bad]))} {what}"
        raise MeshwrightError("MW-PIPE-012", problem, why=f"That is at {place(program, int(earlier[bad]))}")


def _raise_deadlock(program: PipelineProgram, needs: np.ndarray, order: list[int]) -> NoReturn:
    """Raise the error with the cycle: follow, from the first stuck rank, the action it waits for, until one repeats."""
    done = np.zeros(len(program), bool)
    done[order] = True
    stuck = [next((i for i in range(a, b) if not done[i]), -1) for a, b in pairwise(program.first.tolist())]
    at = next(i for i in stuck if i >= 0)
    path: list[int] = []
    while at not in path:
        path.append(at)
        at = stuck[int(program.rank[needs[at]])]
    cycle = path[path.index(at) :]
    chain = "; ".join(f"{place(program, i)} waits for {program.action(int(needs[i]))}" for i in cycle[:6])
    more = f"; and {len(cycle) - 6} more" if len(cycle) > 6 else ""
    what = f"deadlock: {chain}{more}"
    why = "Each is behind another of these actions in its rank's list, so none can ever run"
    raise MeshwrightError("MW-PIPE-013", what, why=why)


def _check_memory(program: PipelineProgram) -> None:
    if program.promised is None:
        return
    in_flight = count_in_flight(program)
    bad = _first(in_flight > program.promised[program.rank])
    if bad is not None:
        what = f"{place(program, bad)} is activation number {in_flight[bad]} in flight"
        why = f"{program.schedule} allows at most {int(program.promised[program.rank[bad]])} on this rank"
        raise MeshwrightError("MW-PIPE-014", what, why=why)
