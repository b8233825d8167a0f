"""A Python file for Ray Train: a worker for each rank, which calls `mw.train`, or starts a rank of another framework.

Ray makes a process group of its workers. Our trainer uses it. The script of another framework makes a group too, which fails in a
process that has one, so the worker starts the script as a child process. The variables of `env://` that Ray sets for the worker (RANK,
LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, and the visible devices of all workers of a node) are right for the child; only MASTER_PORT is taken
by Ray's group. The workers agree on another port over Ray's group, which therefore is one of gloo: it uses no memory of the GPU.
"""

from meshwright.errors import MeshwrightError
from meshwright.view.launch_files.job import LaunchJob, comment


def write(job: LaunchJob) -> str:
    """The file. An agent other than torchrun sets more variables than Ray does, so its frameworks are refused."""
    if job.program.is_ours:
        return our_trainer(job)
    if job.program.agent != "torchrun":
        raise MeshwrightError(
            "MW-LAUNCH-004",
            f"{job.program.framework} cannot be started by Ray Train",
            why=f"Its command `{job.program.agent}` starts the ranks with variables of the framework, which Ray does not set",
            fix="--for meshwright, or --slurm, --kubernetes, --skypilot, --torchrun",
        )
    return framework_rank(job)


def trainer_call(job: LaunchJob, backend: str) -> str:
    """The call that starts the workers."""
    kind = "GPU" if job.has_gpus else "CPU"
    return f'''\
if __name__ == "__main__":
    ray.init()
    available = ray.cluster_resources().get("{kind}", 0)
    if available < {job.config.plan.world}:
        print(f"Ray's nodes have {{available:.0f}} {kind}s and the plan needs {job.config.plan.world}: Ray waits for more nodes", flush=True)
    trainer = TorchTrainer(
        train_rank,
        torch_config=TorchConfig(backend="{backend}"),
        # One worker is one rank. PACK fills a node before the next one, so that neighbouring ranks share the fast links.
        scaling_config=ScalingConfig(num_workers={job.config.plan.world}, use_gpu={job.has_gpus}, placement_strategy="PACK"),
        # After a failure Ray starts all workers again, at most {job.restarts} times.
        run_config=RunConfig(name="{job.name}", failure_config=FailureConfig(max_failures={job.restarts})),
    )
    trainer.fit()
'''


def framework_rank(job: LaunchJob) -> str:
    """The file for another framework: each worker starts one rank of it."""
    program = job.program
    variables = {"OMP_NUM_THREADS": str(job.threads)} | {name: value for name, (value, _) in program.variables.items()}
    words = ",\n    ".join(repr(word) for word in program.begin)
    return f'''\
{comment(job.heading())}
"""Train a plan of {program.framework} with Ray Train. Submit it from a machine that reaches the Ray cluster; all nodes must share the run folder."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import ray
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from torch import distributed

WORDS = [
    {words},
]
VARIABLES = {variables!r}
RUN = {job.folder!r}
FILE = {program.file!r}
SETTINGS = {program.settings!r}
HERE = os.getcwd()  # paths are relative to the folder of the job; Ray Train starts the workers in another one


def free_port() -> int:
    """A port of this host, the same on all workers: rank 0 chooses it. MASTER_PORT is used by the process group of Ray."""
    port = torch.zeros(1, dtype=torch.int64)
    if distributed.get_rank() == 0:
        with socket.socket() as found:
            found.bind(("", 0))
            port[0] = found.getsockname()[1]
    distributed.broadcast(port, 0)
    return int(port)


def train_rank() -> None:
    """One rank, as a child process: the framework makes its own process group, which it cannot in a process that has one of Ray."""
    os.chdir(HERE)
    if FILE:  # all workers write the same text, each into a new file that then takes the name
        Path(RUN).mkdir(parents=True, exist_ok=True)
        new = Path(RUN, f"{{FILE}}.{{os.environ['RANK']}}")
        new.write_text(SETTINGS, "utf-8")
        new.replace(Path(RUN, FILE))
    environment = {{**os.environ, **VARIABLES, "MASTER_PORT": str(free_port())}}
    library = ctypes.CDLL(None)
    end_with_worker = lambda: library.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a killed worker leaves no rank behind
    subprocess.run([sys.executable, *WORDS], env=environment, check=True, preexec_fn=end_with_worker)


{trainer_call(job, "gloo")}'''


def our_trainer(job: LaunchJob) -> str:
    """The file for our trainer, which uses the process group of Ray."""
    plan = job.program.begin[3]
    options = "".join(f", {name}={value!r}" for name, value in job.options.items())
    source = f"mw.load(PLAN{options})" if options else "PLAN"
    backend = "nccl" if job.has_gpus else "gloo"
    return f'''\
{comment(job.heading())}
"""Train a plan with Ray Train. Submit it from a machine that reaches the Ray cluster; all nodes must share the run folder."""

import os
from pathlib import Path

import meshwright as mw
import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

PLAN = {plan!r}
RUN = {job.folder!r}
HERE = os.getcwd()  # paths are relative to the folder of the job; Ray Train starts the workers in another one


def train_rank() -> None:
    """One rank. Ray has made the process group (TorchConfig), which `mw.train` uses and leaves.

    A run folder with a plan is a run that was begun before: after a failure it continues from its last good checkpoint.
    """
    os.chdir(HERE)
    if Path(RUN, "plan.toml").is_file():
        mw.train(resume=RUN, save_every={job.save_every})
    else:
        # Checkpoints every {job.save_every} steps: {job.save_reason}.
        mw.train({source}, out=RUN, save_every={job.save_every})


{trainer_call(job, backend)}'''
