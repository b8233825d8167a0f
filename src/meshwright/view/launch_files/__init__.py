"""Files that start a plan on a cluster: for Slurm, Kubernetes, SkyPilot, torchrun and Ray, with comments that give the reasons.

    job.py          what every launcher needs to know: nodes, ranks per node, run folder, restarts, and the program to start
    program.py      the command line that trains, and that of our trainer
    agent.py        the command that starts the ranks of a host: torchrun, or accelerate's
    frameworks.py   those of other frameworks, with their settings; megatron.py has the flags of Megatron-LM
    slurm.py  kubernetes.py  skypilot.py  torchrun.py  ray_train.py      one function each: Job → text of the file

A launcher only starts processes: rendezvous, sharding and checkpoints are the trainer's. So each file answers three questions: where do
the ranks meet, over which interface, and what happens after a failure. docs/launching.md describes the same in prose.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from meshwright.view.launch_files import kubernetes, ray_train, skypilot, slurm, torchrun
from meshwright.view.launch_files.job import LaunchJob


class LaunchFormat(NamedTuple):
    """Functions that write, name and submit a launch file. `{}` in `submit` is the file; `submit_alone`: for a single host, if it differs."""

    write: Callable[[LaunchJob], str]
    suffix: str
    submit: str
    submit_alone: str = ""

    def command(self, job: LaunchJob, file: Path) -> str:
        """The command that submits the file of a job."""
        return (self.submit_alone if self.submit_alone and job.nodes == 1 else self.submit).format(file)


LAUNCHERS: dict[str, LaunchFormat] = {
    "slurm": LaunchFormat(slurm.write, ".sbatch", "sbatch {}"),
    "kubernetes": LaunchFormat(kubernetes.write, "-trainjob.yaml", "kubectl apply -f {}"),
    "pytorchjob": LaunchFormat(kubernetes.write_pytorchjob, "-pytorchjob.yaml", "kubectl apply -f {}"),
    "skypilot": LaunchFormat(skypilot.write, "-sky.yaml", "sky jobs launch {}"),
    "torchrun": LaunchFormat(torchrun.write, "-torchrun.sh", "HEAD=first-host bash {}   # on every node", "bash {}"),
    "ray": LaunchFormat(ray_train.write, "-ray.py", "ray job submit --working-dir . -- python {}"),
}
