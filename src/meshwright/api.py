"""The functions of `import meshwright as mw`, which the commands of the same name call too.

    load        a plan file or a catalog name                → Config
    estimate    step time, memory and traffic of one plan    → Estimate
    decode      generating text: KV cache, prompt, token     → Decoding
    plan        the fastest plan that fits                   → Result
    simulate    the step of a plan, walked rank by rank      → Simulation
    verify      parity of a plan with one device             → Proof
    train       a plan, on this machine or in every rank     → Training
    parallelize a plan on a user's own `nn.Module`           → ParallelModule

The first argument is what a command takes: a plan file (`.toml`), a catalog name, a Hugging Face `config.json`, or an object (`Model`,
`Config`). `set=["plan.tp=8"]` overrides any field, as `--set` does. Results have `as_dict()`: what the command prints with `--json`.
Each function imports what it needs when it is called: torch only for `verify`, `train` and `parallelize`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from meshwright.errors import MeshwrightError
from meshwright.version import require_torch

if TYPE_CHECKING:
    import torch
    from torch import nn

    from meshwright.describe.config import Asked, Config
    from meshwright.describe.plan import Plan
    from meshwright.planner.result import Result
    from meshwright.predict.decode import Decoding
    from meshwright.predict.estimate import Estimate, Simulation
    from meshwright.proof.prove import Proof
    from meshwright.training.hooks import StepRecord
    from meshwright.training.measure.measurement import Training
    from meshwright.training.user_module.module import ParallelModule


def load(source: Any, *, cluster: Any = "", **asked: Unpack[Asked]) -> Config:
    """Load the configuration of a plan file, or of a catalog model with `cluster="dgx-h100"` (a name, a file or an object)."""
    from meshwright.describe.config import Config
    from meshwright.interop.files import configure

    if isinstance(source, Config) and not (cluster or any(asked.values())):
        return source
    return configure(source, cluster, **asked)


def estimate(model: Any = "", cluster: Any = "", **asked: Unpack[Asked]) -> Estimate:
    """Predict step time, memory and traffic of one plan, and what bounds the step.

    `model` is a plan file, or a model with a `cluster` and a `plan`. Without a plan the planner's best common plan is taken; `assumed` says so.
    """
    from meshwright.interop.files import configure
    from meshwright.predict.estimate import estimate as estimate_plan

    config = configure(model, cluster, **asked)
    return estimate_plan(config if is_planned(model, asked) else with_best_plan(config))


def decode(model: Any = "", cluster: Any = "", **asked: Unpack[Asked]) -> Decoding:
    """Predict generating text: the KV cache at a context of `seq` tokens, and the times of a prompt and of one more token.

    The arguments are those of `estimate`. Without a plan the degrees with the fastest token are taken; `assumed` says so."""
    from meshwright.interop.files import configure
    from meshwright.predict.decode import decoding, fastest

    config = configure(model, cluster, **asked)
    return decoding(config) if is_planned(model, asked) else fastest(config)


def is_planned(model: Any, asked: Any) -> bool:
    """Whether the arguments of a call say a plan."""
    from meshwright.describe.config import Config, is_plan_file
    from meshwright.interop.files import is_settings_file

    file = is_plan_file(model) or is_settings_file(model) or isinstance(model, Config)
    return bool(asked.get("plan") or file or any(w.strip().startswith("plan.") for w in asked.get("set", ())))


def with_best_plan(config: Config) -> Config:
    """Add the best common plan to the configuration (if none fits, the one closest to fitting), and note this assumption."""
    from meshwright.planner.question import base_plan
    from meshwright.planner.search.common_plans import best_common_plan, first_that_fits
    from meshwright.planner.search.space import Space

    best, count = best_common_plan(Space(config.but(plan=base_plan(config))))
    if best is None:
        chosen = first_that_fits(config)
        return config.but(
            plan=chosen, assumed=(*config.assumed, f"plan: no common plan fits; shown is {chosen.title()}")
        )
    words = f"plan: the best of {count:,} common plans ({best.plan.title()}); `meshwright plan` searches all"
    return config.but(plan=best.plan, assumed=(*config.assumed, words))


def plan(model: Any, cluster: Any = "", **question: Any) -> Result:
    """Find the fastest plan that fits in memory, with the reasons.

    `nodes`, `gpus`, `batch`, `seq`, `tokens`, `stack` describe the training; `fix={"tp": 8}`, `most={"pp": 4}`, `least`,
    `without=["zero3"]`, `allow`, `headroom="10%"` and `framework="torchtitan"` constrain the search; `mtbf`, `checkpoint`, `restart`, `sites` and
    `line` add failures and several sites. They are the options of `meshwright plan`; `meshwright.planner.plan` lists them with their types.
    """
    from meshwright import planner

    return planner.plan(model, cluster, **question)


def simulate(model: Any = "", cluster: Any = "", **asked: Unpack[Asked]) -> Simulation:
    """Simulate the step of a plan action by action on every rank; the arguments are those of `estimate`."""
    from meshwright.predict.estimate import Simulation

    result = estimate(model, cluster, **asked)
    return Simulation(result, result.walked)


def verify(
    source: Any,
    *,
    plan: Any = None,
    example: Any = None,
    loss: Any = None,
    table: Any = None,
    layers: str | None = None,
    batch_first: bool | None = None,
    reduction: str = "mean",
    check: bool = True,
    ranks: int = 8,
    steps: int = 5,
    seed: int = 0,
    device: str = "auto",
    backend: str = "auto",
    share_device: bool = False,
    whole: bool = False,
    allow_differences: str | Sequence[str] = (),
    set: Sequence[str] = (),
) -> Proof:
    """Train a plan on at most `ranks` local processes and on one device, and compare the two. With `share_device` several processes use
    one GPU. `whole` adds a run on the data of the run file, which is evaluated, saved, and resumed on another layout.

    `source` is a plan file, whose model is trained in a small copy, or a function that returns a module of yours: itself, or its place
    ("script.py:make"). Then `plan` is a `Plan`, a dictionary of its fields or a plan file. `example` is the batch of all ranks together: a
    pair (inputs, targets) with a `loss(output, targets)`, else the inputs of a module that returns its loss; or a function of a seed
    that returns it. `table`, `layers`, `batch_first`, `reduction` and `check` are those of `parallelize`. Functions are at the top level of a
    file. `allow_differences` names parts of a described model (`Model.not_run`) that may be computed in another way.
    """
    require_torch("`verify`")
    from meshwright.proof.prove import prove
    from meshwright.proof.whole import prove_whole
    from meshwright.training.machine import shared_device

    device = shared_device(device, share_device)
    common: dict[str, Any] = {"ranks": ranks, "steps": steps, "seed": seed, "device": device, "backend": backend}
    if plan is not None or is_module(source):
        from meshwright.proof.user_module.prove import prove_module

        if whole:
            why = "your module has no run file with data, evaluations and checkpoints"
            raise MeshwrightError("MW-VERIFY-002", f"whole has no effect here: {why}", fix="leave it out")
        own = {"example": example, "loss": loss, "table": table, "layers": layers, "batch_first": batch_first}
        return prove_module(source, plan, set, **own, reduction=reduction, check=check, **common)
    config = load(source, set=[*set, *difference_settings(allow_differences)])
    return (prove_whole if whole else prove)(config, **common)


def is_module(source: Any) -> bool:
    """Whether `verify` is given a module of the user: a function, or the place of one."""
    return callable(source) or (isinstance(source, str) and (source.endswith(".py") or ":" in source))


def difference_settings(names: str | Sequence[str] = ()) -> list[str]:
    """Turn `allow_differences` (a list, or a text with commas) into a setting of the plan file."""
    words = [name.strip() for name in (names.split(",") if isinstance(names, str) else names) if name.strip()]
    return [f"model.allow_differences={json.dumps(words)}"] if words else []


def run_settings(
    steps: int | None = None,
    seed: int | None = None,
    learning_rate: float | None = None,
    save_every: int | None = None,
    start_from: str | Path = "",
    profile_steps: int | None = None,
) -> list[str]:
    """Turn options of a run into settings of its run file; options that are not set are left to the file."""
    options: dict[str, Any] = {
        "run.steps": steps,
        "run.seed": seed,
        "optimizer.learning_rate": learning_rate,
        "checkpoint.every": save_every,
        "run.start_from": json.dumps(str(start_from)) if start_from else None,
        "run.profile_steps": profile_steps,
    }
    return [f"{path}={value}" for path, value in options.items() if value is not None]


def config_to_train(
    source: Any, device: str, shrink: bool, resumes: bool, **asked: Any
) -> tuple[Config, Sequence[str]]:
    """The configuration of a run on this machine, and what was changed in that of the plan file. A run that goes on keeps its precision."""
    import os

    from meshwright.training.launch.rank import placement
    from meshwright.training.machine import resolve_device, with_precision

    changes: Sequence[str] = ()
    config = load(source, **asked)
    if shrink:
        from meshwright.proof.shrink import small_config

        config, changes = small_config(config.check_trainable(), device)
    if not resumes:
        here = placement(os.environ) is None
        config, note = with_precision(
            config, device == "cpu" or (here and resolve_device(device, config.plan.world) == "cpu")
        )
        changes = changes or [note] if note else changes
    return config, changes


def train(
    source: Any = "",
    *,
    steps: int | None = None,
    seed: int | None = None,
    learning_rate: float | None = None,
    start_from: str | Path = "",
    save_every: int | None = None,
    resume: str | Path | None = None,
    from_scratch: bool = False,
    device: str = "auto",
    backend: str = "auto",
    share_device: bool = False,
    out: str | Path | None = None,
    shrink: bool = False,
    allow_differences: str | Sequence[str] = (),
    set: Sequence[str] = (),
    listen: Callable[[StepRecord], None] | None = None,
    calibrate: bool = True,
    recalibrate: bool = False,
    announce: Callable[[str], None] | None = None,
) -> Training | None:
    """Train a plan and compare the run with its prediction: on processes of this machine, or as one rank of torchrun, Slurm, Open MPI or
    Ray, where rank 0 gets the result and the other ranks None (docs/launching.md).

    `steps`, `seed`, `learning_rate` and `save_every` replace those of the run file; `start_from` is a Transformers folder with the
    initial weights. `out` is the run folder (default: nothing is written); `resume` is the folder of a run to continue, by default with
    its plan; it raises if none of its checkpoints can be used, unless `from_scratch` begins it again at step 0, with its checkpoints and rows kept
    under other names. `backend` is the one of torch.distributed: auto, gloo, meshwright or nccl. With `share_device` several ranks use one GPU,
    for tests. `shrink` trains the small copy of the plan that `verify` uses; `allow_differences` as for `verify`;
    `listen` is called with the record of every finished step.
    A run on CPU processes is predicted from a calibration of this machine, measured in seconds and cached (`calibrate`); if it cannot be
    measured, the run is predicted without it and its prediction says so. `recalibrate` measures again; `announce` is called with what a
    calibration is doing.
    """
    import os

    require_torch("`train`")
    from meshwright.training.folder import claimed
    from meshwright.training.launch.rank import placement
    from meshwright.training.machine import shared_device
    from meshwright.training.run import calibrate_run, check_resume, plan_of_run, run_training

    device = shared_device(device, share_device)
    check_resume(Path(resume) if resume is not None else None, from_scratch)
    if resume is not None:
        source, out = source or plan_of_run(Path(resume)), resume
    options = run_settings(steps, seed, learning_rate, save_every, start_from) + difference_settings(allow_differences)
    config, _ = config_to_train(source, device, shrink, resume is not None, set=[*set, *options])
    folder = Path(out) if out is not None else None
    started_here = placement(os.environ) is None
    machine, uncalibrated = None, ""
    with claimed(folder if started_here else None):
        if calibrate and started_here:
            machine, uncalibrated = calibrate_run(
                config, device, backend, folder, resume is not None, recalibrate, announce
            )
        return run_training(
            config,
            config.run.steps,
            seed=config.run.seed,
            device=device,
            backend=backend,
            folder=folder,
            listen=listen,
            machine=machine,
            uncalibrated=uncalibrated,
            resume=resume is not None,
            from_scratch=from_scratch,
        )


def parallelize(
    module: nn.Module,
    plan: Plan | dict[str, Any] | str | Path,
    table: Sequence[tuple[str, str]] | None = None,
    *,
    optimizer: Callable[[Any], torch.optim.Optimizer] | str | dict[str, Any] | None = None,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    reduction: str = "mean",
    layers: str | None = None,
    example: Any = None,
    batch_first: bool | None = None,
    check: bool = True,
) -> ParallelModule:
    """Apply a plan to your own module, in every rank of a `torchrun`; the result has `step`, `backward`, `clip_norm` and `state_dict`.

    Data parallelism, ZeRO, recompute and precision work on every module. Tensor and sequence parallelism take a `table` of rows (pattern of
    names, style), built in for Hugging Face's Llama, Mistral, Qwen, Phi-3, Mixtral, GPT-2 and ViT and for `nn.TransformerEncoder`. A
    pipeline divides the list of layers at the path `layers`, and needs an `example`: the inputs of one micro-batch.
    `optimizer` makes a torch optimizer of (name, parameter) pairs, or names one of ours ("adamw").
    `loss(output, targets)` is a mean over samples, or a sum with
    `reduction="sum"`. `batch_first=False`: inputs are [sequence, batch, …]. Trial runs on `example` and in the first step refuse a module
    that the plan would train differently from one device; `check=False` skips them. docs/parallel.md shows each.
    """
    require_torch("`parallelize`")
    from meshwright.training.user_module.parallelize import parallelize as apply_plan

    return apply_plan(
        module,
        plan,
        table,
        optimizer=optimizer,
        loss=loss,
        reduction=reduction,
        layers=layers,
        example=example,
        batch_first=batch_first,
        check=check,
    )
