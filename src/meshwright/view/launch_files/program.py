"""The command that trains a plan, as every launch file needs it.

A program is the command line after `torchrun` (`-m meshwright train …`), once for a new run and once for a run that continues; a framework that
reads its settings from a file brings the text of that file.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from meshwright.describe.config import Config
from meshwright.describe.own_stack import OURS
from meshwright.version import WHEEL

SCRIPT = "train.py"  # the reader's, for frameworks that are a library


@dataclass(frozen=True)
class TrainingProgram:
    """The words after `torchrun`, or another agent, that begin a run and that continue it.

    `proceed` is empty for a framework that looks for checkpoints each time it starts: the same words do both. `saves_on` is
    the signal on which every rank saves a checkpoint and ends; empty if there is none. `file` and `settings` are a settings file, which the
    launch file writes into the run folder. `notes` are lines for the reader, `install` is what pip installs.
    No index has Meshwright, so this is a wheel in the folder of the plan file (docs/install.md).
    """

    framework: str
    begin: tuple[str, ...]
    proceed: tuple[str, ...] = ()
    saves_on: str = ""
    file: str = ""
    settings: str = ""
    notes: tuple[str, ...] = ()
    install: str = f"./{WHEEL}[train]"
    agent: str = "torchrun"  # the command that starts the ranks of a host (`agent.command`)
    variables: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # environment: name → value and reason

    @property
    def reads_checkpoints(self) -> str:
        """Who looks for checkpoints at the start: the framework, or a script of the reader's."""
        return SCRIPT if SCRIPT in self.begin else self.framework

    @property
    def is_ours(self) -> bool:
        return self.framework == OURS


def our_program(config: Config, plan: str, folder: str, save_every: int) -> TrainingProgram:
    """`meshwright train`; the plan in the run folder has the number of steps of the first attempt."""
    config.check_trainable()
    begin = ("-m", "meshwright", "train", plan, "--out", folder, "--save-every", str(save_every))
    proceed = ("-m", "meshwright", "train", "--resume", folder, "--save-every", str(save_every))
    return TrainingProgram(OURS, begin, proceed, saves_on="USR1" if config.checkpoint.on_signal else "")
