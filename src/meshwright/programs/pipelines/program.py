"""A pipeline schedule as plain data: for each rank the list of actions it runs, in order, and nothing else.

An **action** is a piece of work on one (stage, micro-batch):

    F  forward                     needs F of the stage before
    B  full backward               needs F of its own stage and B or I of the stage after
    I  backward of the inputs      the same needs as B; its gradient is what the stage before waits for
    W  backward of the weights     needs I of its own stage; nobody waits for it, so it can fill a bubble

B is I followed by W in one piece. A **stage** is a run of consecutive layers; a rank holds V of them. Two placements
are in use: *looped* (stage s on rank s mod P: the activations go round and round) and *V-shaped* (the second half
comes back: with V = 2, rank r holds stages r and 2P−1−r, so the first and the last stage, embedding and loss, meet on
rank 0).

The arrays are flat, one entry an action, the ranks one after the other: rank r owns `first[r]:first[r + 1]`. A
program of a hundred thousand actions is four small arrays; builders, `check` and `walk` work on them whole. Since a
rank runs its list in order, an action has at most **one** need outside of that order (`need`): the rest of the
dependencies are positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from meshwright.errors import MeshwrightError

KINDS = "FBIW"
F, B, I, W = range(4)  # noqa: E741  (the field's own letters)
KIND_NAMES = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights"}


class Action(NamedTuple):
    """One entry of a rank's list; its text is stage, kind, micro-batch: `3F0`."""

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True, eq=False)
class PipelineProgram:
    """The lists of all ranks. Built by `SCHEDULES`, read by `check`, `walk`, the drawings and the runtime."""

    schedule: str
    microbatches: int
    rank_of: np.ndarray  # (stages,) the rank that holds a stage
    kind: np.ndarray  # (actions,) index into KINDS
    stage: np.ndarray  # (actions,)
    microbatch: np.ndarray  # (actions,)
    first: np.ndarray  # (ranks + 1,) where each rank's list begins
    joined: np.ndarray  # (actions,) true for an F that may run at the same time as the B right after it
    promised: np.ndarray | None = None  # (ranks,) most activations in flight that the builder promises

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
        """Stages a rank holds (the most, should ranks differ)."""
        return int(np.bincount(self.rank_of, minlength=1).max())

    @property
    def splits_backward(self) -> bool:
        """Whether any backward is split into I and W."""
        return bool((self.kind >= I).any())

    @property
    def chunk_of(self) -> np.ndarray:
        """For each stage, which of its rank's stages it is, in model order: 0 … V−1."""
        chunk, seen = np.zeros(self.stages, int), np.zeros(self.ranks, int)
        for s, r in enumerate(self.rank_of.tolist()):
            chunk[s] = seen[r]
            seen[r] += 1
        return chunk

    @cached_property
    def rank(self) -> np.ndarray:
        """(actions,) the rank whose list an action stands in."""
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
        """One rank's list."""
        part = slice(int(self.first[rank]), int(self.first[rank + 1]))
        rows = zip(self.stage[part].tolist(), self.kind[part].tolist(), self.microbatch[part].tolist(), strict=True)
        return [Action(s, KINDS[k], m) for s, k, m in rows]

    def lines(self) -> list[str]:
        """One line a rank, as in `0F0 0F1 0B0`; an F joined to the B after it is written `(0F1;0B0)`."""
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
        """The same actions in another order (`order[i]` is the old index of the new action i, within ranks)."""
        return PipelineProgram(
            schedule or self.schedule,
            self.microbatches,
            self.rank_of,
            self.kind[order],
            self.stage[order],
            self.microbatch[order],
            self.first,
            self.joined[order],
            self.promised,
        )


def looped(ranks: int, virtual: int) -> np.ndarray:
    """Stage s on rank s mod P."""
    return np.tile(np.arange(ranks), virtual)


def v_shaped(ranks: int, virtual: int = 2) -> np.ndarray:
    """Back and forth: with two stages a rank, stage s on rank s, then on rank 2P−1−s."""
    there = np.arange(ranks)
    return np.concatenate([there if v % 2 == 0 else there[::-1] for v in range(virtual)])


def program_of(
    schedule: str,
    lists: Sequence[Iterable[tuple[int, str, int]]],
    rank_of: np.ndarray,
    microbatches: int,
    promised: np.ndarray | None = None,
    joined: Sequence[Sequence[int]] | None = None,
) -> PipelineProgram:
    """A program from one list of (stage, kind, micro-batch) a rank; `joined` the positions of joined Fs."""
    rows = [list(actions) for actions in lists]
    flat = [a for actions in rows for a in actions]
    first = np.concatenate([[0], np.cumsum([len(actions) for actions in rows])]).astype(np.int64)
    unknown = next((a for a in flat if a[1] not in KINDS or not a[1]), None)
    if unknown is not None:
        raise MeshwrightError("MW-PIPE-001", f"'{unknown[1]}' is not a kind of action", valid=list(KINDS))
    mark = np.zeros(len(flat), bool)
    for r, positions in enumerate(joined or ()):
        mark[first[r] + np.asarray(positions, np.int64)] = True
    columns = np.array([(s, KINDS.index(k), m) for s, k, m in flat], np.int64).reshape(-1, 3)
    return PipelineProgram(
        schedule,
        microbatches,
        np.asarray(rank_of),
        columns[:, 1].astype(np.int8),
        columns[:, 0],
        columns[:, 2],
        first,
        mark,
        promised,
    )
