"""Arguments and options of `meshwright train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

PlanArgument = Annotated[
    Path | None, typer.Argument(help="A plan file or run file. Default: that of the run to resume.")
]
StepsOption = Annotated[
    int | None,
    typer.Option("--steps", help="Number of training steps. Default: that of [run], or 100.", min=1, max=10**9),
]
SeedOption = Annotated[
    int | None,
    typer.Option("--seed", help="Seed of the initial weights and of the batches. Default: that of [run], or 0.", min=0),
]
LearningRateOption = Annotated[
    float | None,
    typer.Option(
        "--learning-rate", help="Learning rate after the warm-up. Default: that of [optimizer], or 0.001.", min=0.0
    ),
]
StartFromOption = Annotated[
    Path | None,
    typer.Option(
        "--from",
        help="Start from the weights in a Transformers folder. A run file without a model also takes the folder's model.",
    ),
]
DeviceOption = Annotated[str, typer.Option("--device", help="cpu, cuda, or auto (GPUs if there is one for each rank).")]
BackendOption = Annotated[
    str,
    typer.Option(
        "--backend", help="gloo, meshwright (our collectives, on the CPU), nccl, or auto (nccl on GPUs, else gloo)."
    ),
]
ShareDeviceOption = Annotated[
    bool,
    typer.Option("--share-device", help="Several ranks on one GPU, for tests: their tensors move through the host."),
]
OutOption = Annotated[Path | None, typer.Option("--out", help="The run folder. Default: runs/PLAN-TIME.")]
SaveEveryOption = Annotated[
    int | None,
    typer.Option(
        "--save-every", help="Steps between checkpoints. Default: that of [checkpoint], or only at the end.", min=0
    ),
]
ResumeOption = Annotated[
    Path | None,
    typer.Option(
        "--resume", help="Continue the run in this folder, from its last good checkpoint, until it has done --steps."
    ),
]
FromScratchOption = Annotated[
    bool,
    typer.Option(
        "--from-scratch",
        help="With --resume: begin again at step 0. Checkpoints and rows of the run are kept under names that begin with unused-.",
    ),
]
ProfileOption = Annotated[
    int | None,
    typer.Option(
        "--profile",
        help="Number of steps to record with torch's profiler, in profile/ of the run folder. Default: that of [run], or none.",
        min=0,
    ),
]
DryRunOption = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Check configuration, data, memory, disk and rendezvous, run a step without memory or messages, and stop.",
    ),
]
TraceOption = Annotated[
    Path | None,
    typer.Option(
        "--trace", help="Write a measured and the simulated step as one trace for Perfetto or chrome://tracing."
    ),
]
ShrinkOption = Annotated[
    bool,
    typer.Option(
        "--shrink", help="Train a small copy of the model and the plan, as `verify` does, on at most 8 processes."
    ),
]
CalibrateOption = Annotated[
    bool,
    typer.Option(
        "--calibrate/--no-calibrate",
        help="Predict from a calibration of this machine: measured once, in seconds, then cached.",
    ),
]
RecalibrateOption = Annotated[bool, typer.Option("--recalibrate", help="Measure this machine again.")]
