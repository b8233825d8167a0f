"""The section [checkpoint] of a run file: when a run saves its state, and how many of its checkpoints are kept.

[checkpoint]
every = 1000                # steps; 0: only at the end of the run
keep = 3                    # the last good checkpoints; 0: the run writes none
"""

from __future__ import annotations

from pydantic import Field

from meshwright.describe.base import Described, Whole


class Checkpoint(Described):
    """Intervals and limits of saving a run's state to its folder."""

    every: Whole = Field(default=0, description="steps between checkpoints; 0: only at the end of the run")
    keep: Whole = Field(default=2, description="how many of the last good checkpoints are kept; 0: the run writes none")
    asynchronous: bool = Field(
        default=True, description="training continues while a checkpoint is written; false: it waits"
    )
    on_signal: bool = Field(
        default=True, description="SIGTERM or SIGUSR1 saves a checkpoint and ends the run; false: ends it at once"
    )
