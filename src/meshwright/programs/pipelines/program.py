"""A pipeline schedule as plain data: for each rank, the ordered list of the actions that it runs.

An **action** is one computation on a (stage, micro-batch):

    F  forward                     needs F of the previous stage
    B  full backward               needs F of the same stage and B or I of the next stage
    I  backward of the inputs      same needs as B; the previous stage waits for its gradient
    W  backward of the weights     needs I of the same stage; no rank waits for it, so it can fill a bubble

B is I and W in one action. A **stage** is a sequence of consecutive layers; a rank holds V stages. There are two
placements: *looped* (stage s is on rank s mod P) and *V-shaped* (odd chunks run in the opposite direction: with V = 2,
rank r holds the stages r and 2P−1−r, so the first and the last stage, embedding and loss, are both on rank 0).

The arrays are flat, with one entry per action, rank after rank: rank r owns `first[r]:first[r + 1]`. A program of a
hundred thousand actions is four small arrays; builders, `check` and `walk` use array operations on them. A rank runs
its list in order, so an action has at most **one** dependency beyond that order (`check.find_needs`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from meshwright.errors import MeshwrightError

KINDS = "FBIW"
F, B, I, W = range(4)  # noqa: E741  (the usual letters)
KIND_NAMES = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights"}


class Action(NamedTuple):
    """One entry of a rank's list; as text it is stage, kind, micro-batch: `3F0`."""

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True, eq=False)
class PipelineProgram:
    """The lists of all ranks. `SCHEDULES` builds it; `check`, `walk`, the figures and the runtime read it."""

    schedule: str
    microbatches: int
    rank_of: np.ndarray  # (stages,) the rank that holds a stage
    kind: np.ndarray  # (actions,) index into KINDS
    stage: np.ndarray  # (actions,)
    microbatch: np.ndarray  # (actions,)
    first: np.ndarray  # (ranks + 1,) where each rank's list begins
    joined: np.ndarray  # (actions,) true for an F that may overlap with the B directly after it
    promised: np.ndarray | None = None  # (ranks,) upper limit of activations in flight, stated by the builder

    def __post_init__(self) -> None:
        for name in ("rank_of", "kind", "stage", "microbatch", "first", "joined", "promised"):
            array = getattr(self, name)
            if array is not None:
                array.setflags(write=False)

    @property
    def ranks(self) -> int:
        return len(self.first) - 1

    @property
    def stages(self) -> int:
        return len(self.rank_of)

    @property
    def virtual(self) -> int:
        """Stages per rank; the maximum if ranks differ."""
        return int(np.bincount(self.rank_of, minlength=1).max())

    @property
    def splits_backward(self) -> bool:
        """Whether any backward is split into I and W."""
        return bool((self.kind >= I).any())

    @property
    def chunk_of(self) -> np.ndarray:
        """For each stage, its index among the stages of its rank, in model order: 0 … V−1."""
        chunk, seen = np.zeros(self.stages, int), np.zeros(self.ranks, int)
        for s, r in enumerate(self.rank_of.tolist()):
            chunk[s] = seen[r]
            seen[r] += 1
        return chunk

    @cached_property
    def rank(self) -> np.ndarray:
        """(actions,) the rank whose list contains the action."""
        return np.repeat(np.arange(self.ranks), np.diff(self.first))

    def __len__(self) -> int:
        return len(self.kind)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PipelineProgram):
            return NotImplemented
        names = ("rank_of", "first", "kind", "stage", "microbatch", "joined")
        return self.microbatches == other.microbatches and all(
            np.array_equal(getattr(self, n), getattr(other, n)) for n in names
        )

    __hash__ = None  # type: ignore[assignment]

    def action(self, index: int) -> Action:
        return Action(int(self.stage[index]), KINDS[self.kind[index]], int(self.microbatch[index]))

    def actions(self, rank: int) -> list[Action]:
        """Return the list of one rank."""
        part = slice(int(self.first[rank]), int(self.first[rank + 1]))
        rows = zip(self.stage[part].tolist(), self.kind[part].tolist(), self.microbatch[part].tolist(), strict=True)
        return [Action(s, KINDS[k], m) for s, k, m in rows]

    def lines(self) -> list[str]:
        """Return one line per rank, such as `0F0 0F1 0B0`; an F joined to the B after it is `(0F1;0B0)`."""
        text = []
        for rank in range(self.ranks):
            words = [str(a) for a in self.actions(rank)]
            for i in np.flatnonzero(self.joined[self.first[rank] : self.first[rank + 1]])[::-1].tolist():
                words[i : i + 2] = [f"({words[i]};{words[i + 1]})"]
            text.append(" ".join(words))
        return text

    def __str__(self) -> str:
        return "\n".join(f"rank {r}: {line}" for r, line in enumerate(self.lines()))

    def replace(self, order: np.ndarray, schedule: str | None = None) -> PipelineProgram:
        """Return the program with the actions of each rank reordered: `order[i]` is the old index of the new action i."""
        kind, stage, microbatch, joined = (x[order] for x in (self.kind, self.stage, self.microbatch, self.joined))
        name, place = schedule or self.schedule, (self.microbatches, self.rank_of)
        return PipelineProgram(name, *place, kind, stage, microbatch, self.first, joined, self.promised)


def looped(ranks: int, virtual: int) -> np.ndarray:
    """Stage s on rank s mod P."""
    return np.tile(np.arange(ranks), virtual)


def v_shaped(ranks: int, virtual: int = 2) -> np.ndarray:
    """Alternate the direction: with two stages per rank, stage s < P is on rank s, and stage s ≥ P on rank 2P−1−s."""
    ascending = np.arange(ranks)
    return np.concatenate([ascending if v % 2 == 0 else ascending[::-1] for v in range(virtual)])


def program_of(
    schedule: str,
    lists: Sequence[Iterable[tuple[int, str, int]]],
    rank_of: np.ndarray,
    microbatches: int,
    promised: np.ndarray | None = None,
    joined: Sequence[Sequence[int]] | None = None,
) -> PipelineProgram:
    """Build a program from one list of (stage, kind, micro-batch) per rank; `joined` are the positions of joined Fs."""
    rows = [list(actions) for actions in lists]
    flat = [a for actions in rows for a in actions]
    first = np.concatenate([[0], np.cumsum([len(actions) for actions in rows])]).astype(np.int64)
    unknown = next((a for a in flat if a[1] not in KINDS or not a[1]), None)
    if unknown is not None:
        raise MeshwrightError("MW-PIPE-001", f"'{unknown[1]}' is not a kind of action", valid=list(KINDS))
    mark = np.zeros(len(flat), bool)
    for r, positions in enumerate(joined or ()):
        mark[first[r] + np.asarray(positions, np.int64)] = True
    stage, kind, batch = np.array([(s, KINDS.index(k), m) for s, k, m in flat], np.int64).reshape(-1, 3).T
    columns = kind.astype(np.int8), stage, batch
    return PipelineProgram(schedule, microbatches, np.asarray(rank_of), *columns, first, mark, promised)
