"""The section [run] of a run file: how many steps, from which seed, and what happens around them.

[run]
steps = 100_000
seed = 1
start_from = "Qwen3-8B"     # a folder of Transformers with the initial weights; without [model], also the model
compile = "blocks"          # torch.compile, layer by layer: the default on GPUs
restarts = 3                # after the failure of a rank, from the last good checkpoint
loggers = ["tensorboard"]   # besides the rows in the run folder, which are always written
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from meshwright.describe.base import Described, Seconds, Size, Whole
from meshwright.describe.data import paths_in
from meshwright.errors import MeshwrightError

PORT = 29_500  # where the ranks of a job meet: torchrun's default
PATHS = ("start_from",)  # fields that hold paths
Logger = Literal["tensorboard", "wandb", "mlflow", "trackio"]


class Run(Described):
    """One training run: options of the command line replace these values."""

    steps: Size = Field(default=100, description="training steps in all, those before a resume included")
    seed: Whole = Field(default=0, description="of the initial weights, of dropout and of the order of the samples")
    start_from: str = Field(
        default="", description="a Transformers folder with the initial weights; empty: they are drawn from the seed"
    )
    deterministic: bool = Field(
        default=False, description="only kernels that give the same bits in every run; slower on GPUs"
    )
    compile: Literal["auto", "off", "blocks", "whole"] = Field(
        default="auto",
        description="torch.compile for each layer (blocks) or for a whole stage (whole); auto: blocks on GPUs, off on CPUs",
    )
    restarts: Whole = Field(default=3, description="restarts from the last good checkpoint after a failure")
    hang_s: Seconds = Field(
        default=0.0, ge=0, description="silence of a rank after which it counts as hung; 0: from its step times"
    )
    spike: float = Field(
        default=0.0,
        ge=0,
        description="loss over the running median that counts as a spike; 0: spikes are not looked for",
    )
    loggers: tuple[Logger, ...] = Field(default=(), description="packages that also receive every logged step")
    log_every: Size = Field(default=1, description="steps between the rows that loggers receive")
    profile_steps: Whole = Field(default=0, description="steps of which torch traces are written; 0: none")

    @property
    def compiled(self) -> bool:
        """Whether layers are compiled on GPUs."""
        return self.compile != "off"

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if 0 < self.spike <= 1:
            raise MeshwrightError(
                "MW-CONF-003",
                f"run.spike = {self.spike:g} is not valid",
                why="It is a factor over the running median of the loss, so every step would be a spike",
                valid=["0", "above 1"],
                fix="--set run.spike=3",
            )
        return self

    def with_paths_in(self, folder: Path) -> Self:
        """A copy whose relative paths start at `folder`."""
        return self.but(**paths_in(self.as_dict(), folder, PATHS))
