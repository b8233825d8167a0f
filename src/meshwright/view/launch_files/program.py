"""The command that trains a plan: of our trainer, or of the framework that the plan's stack names.

A program is what stands after `torchrun` (`-m meshwright train …`), once for a new run and once for a run that continues. Another framework
adds itself with one entry in `PROGRAMS`: a function from the plan and the run folder to its `Program`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meshwright.describe.config import Config
from meshwright.errors import unknown

OURS = "meshwright"


@dataclass(frozen=True)
class Program:
    """The words after `torchrun` that begin a run and that continue it.

    `proceed` is empty for a framework that looks for checkpoints each time it starts: the same words do both. `saves_on` is
    the signal upon which every rank saves a checkpoint and ends; empty if there is none.
    """

    framework: str
    begin: tuple[str, ...]
    proceed: tuple[str, ...] = ()
    saves_on: str = ""

    @property
    def is_ours(self) -> bool:
        return self.framework == OURS


def our_program(config: Config, plan: str, folder: str, save_every: int) -> Program:
    """`meshwright train`; the plan in the run folder has the number of steps of the first attempt."""
    config.check_trainable()
    begin = ("-m", "meshwright", "train", plan, "--out", folder, "--save-every", str(save_every))
    proceed = ("-m", "meshwright", "train", "--resume", folder, "--save-every", str(save_every))
    return Program(OURS, begin, proceed, saves_on="USR1" if config.checkpoint.on_signal else "")


# By the name of a framework: (plan, path of the plan file, run folder, steps between checkpoints) → its program.
PROGRAMS: dict[str, Callable[[Config, str, str, int], Program]] = {OURS: our_program}


def program_for(framework: str, config: Config, plan: str, folder: str, save_every: int) -> Program:
    """The program of a framework; without a name, of the plan's stack if it has one here, else of our trainer."""
    if not framework:
        framework = config.stack.name if config.stack.name in PROGRAMS else OURS
    if framework not in PROGRAMS:
        raise unknown("MW-LAUNCH-002", "framework", framework, PROGRAMS, "--for {}")
    return PROGRAMS[framework](config, plan, folder, save_every)
