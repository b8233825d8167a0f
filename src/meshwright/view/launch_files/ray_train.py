"""A Python file for Ray Train: a worker for each rank, which calls `mw.train`."""

from __future__ import annotations

from meshwright.errors import MeshwrightError
from meshwright.view.launch_files.job import Job, comment


def write(job: Job) -> str:
    """The file. Ray makes the process group of its workers; our trainer joins it, another framework would make a second one."""
    if not job.program.is_ours:
        raise MeshwrightError(
            "MW-LAUNCH-004",
            f"{job.program.framework} cannot be started by Ray Train",
            why="Ray makes the process group of its workers, and the framework makes one too",
            fix="--for meshwright, or --slurm, --kubernetes, --skypilot, --torchrun",
        )
    plan = job.program.begin[3]
    backend = "nccl" if job.has_gpus else "gloo"
    return f'''\
{comment(job.heading())}
"""Train a plan with Ray Train. Submit it from a machine that reaches the Ray cluster; all nodes must share the run folder."""

from pathlib import Path

import meshwright as mw
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

PLAN = {plan!r}
RUN = {job.folder!r}


def train_rank() -> None:
    """One rank. Ray has made the process group (TorchConfig), which `mw.train` uses and leaves.

    A run folder with a plan is a run that was begun before: after a failure it continues from its last good checkpoint.
    """
    if Path(RUN, "plan.toml").is_file():
        mw.train(resume=RUN, save_every={job.save_every})
    else:
        # Checkpoints every {job.save_every} steps: {job.save_reason}.
        mw.train(PLAN, out=RUN, save_every={job.save_every})


if __name__ == "__main__":
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
