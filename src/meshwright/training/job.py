"""What every rank of a run must know. The process that starts local ranks makes it; under a launcher each rank makes the same one."""

from dataclasses import dataclass
from pathlib import Path

from meshwright.describe.config import Config
from meshwright.training.measure.measurement import LoadWatch


@dataclass(frozen=True)
class TrainingJob:
    """A run of a plan: `config` is complete (recompute, paths of data, length of the schedule), and `watch` has its prediction."""

    config: Config
    watch: LoadWatch
    steps: int  # in all, those before a resume included
    seed: int
    device: str  # cpu, cuda or auto: each rank finds its device
    backend: str
    folder: Path
    resume: bool = False  # continue the run that is in the folder
    from_scratch: bool = False  # of a run to continue: begin at step 0, with its checkpoints and rows set aside
    aim: Config | None = None  # the user's plan, if `config` has another one for the number of ranks that there are
    faults: str = ""  # a file of faults to inject (`faults.inject`), relative to the folder
    agents: tuple[str, ...] = ()  # of torchrun, which started these ranks
    rejoins: bool = False  # an agent of torchrun restarts a rank that ends with an error
    saves: bool = True  # false if the folder is removed after the run: there are no checkpoints
