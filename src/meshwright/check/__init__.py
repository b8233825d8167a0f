"""Anybody's training code against one device: record the first steps of both, compare them, and name the first difference.

meshwright check record --out many -- torchrun --nproc-per-node 4 train.py      # no change of the script

with mw.check.record("many"):                                                   # or in the script, around the loop
    train()

mw.check.attach("many")                                                         # or one line, before a trainer that hides its loop

mw.check.watch(model, optimizer, every=50)                                      # what must hold between ranks, during a whole training
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn, optim

    from meshwright.check.live import LiveWatch
    from meshwright.check.recorder import StepRecorder


def attach(out: str | Path, steps: int = 2) -> StepRecorder:
    """Record the next steps of this process into a folder; `close()` ends it, otherwise the end of the process."""
    from meshwright.check.recorder import StepRecorder

    recorder = StepRecorder(str(out), steps)
    recorder.attach()
    return recorder


@contextmanager
def record(out: str | Path, steps: int = 2) -> Iterator[StepRecorder]:
    """Record the steps inside of a `with` into a folder."""
    recorder = attach(out, steps)
    try:
        yield recorder
    finally:
        recorder.close()


def watch(
    model: nn.Module | None = None,
    optimizer: optim.Optimizer | None = None,
    every: int = 50,
    out: str | Path = "watch",
    stop: bool = False,
    without: tuple[str, ...] = (),
    table: str | Path = "",
) -> LiveWatch:
    """Compare the ranks of this training every few steps (`invariants`); without a model, those that are called in training.

    Every rank calls it. `stop`: a violation ends the run with exit code 1. `without`: codes that are not checked.
    `table`: a TOML file that says what ranks hold where no framework does (`names`). `close()` ends it."""
    from meshwright.check.live import LiveWatch

    live = LiveWatch(str(out), every, stop, without, str(table))
    live.attach(model, optimizer)
    return live
