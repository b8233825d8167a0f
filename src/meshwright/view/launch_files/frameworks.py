"""The programs of other frameworks: their settings, written by `interop.write`, and the command that reads them.

    Megatron-LM          pretrain_gpt.py FLAGS                           checkpoints: --save, --load
    torchtitan           -m torchtitan.train --job.config_file FILE      version 0.2
    torchtitan 0.3       -m torchtitan.train --module settings --config plan
    DeepSpeed            YOUR-SCRIPT --deepspeed --deepspeed_config FILE
    nanotron             run_train.py --config-file FILE
    NeMo Automodel       -m nemo_automodel.cli.app FILE
    axolotl              -m axolotl.cli.train FILE
    accelerate           YOUR-SCRIPT, after `accelerate launch --config_file FILE` in place of torchrun
    Megatron-Bridge      run_recipe.py --recipe NAME KEY=VALUE …         a recipe of the model, with the settings of the plan

A launch file must start the plan and nothing else, so a plan that the settings cannot express is an error here; `plan --write` writes such
settings with a comment. Data, tokenizer and, for some, the model are not part of a plan: the notes of the file name them.
"""

import json
import re
from dataclasses import replace
from typing import Any

from meshwright.describe import catalog
from meshwright.describe.config import OURS, Config, with_own_stack
from meshwright.errors import unknown
from meshwright.interop.frameworks import FRAMEWORKS, find
from meshwright.interop.frameworks.bridge import RECIPES
from meshwright.interop.keys import Framework
from meshwright.interop.write import check_runnable, settings_of, text_of, versions_line
from meshwright.view.launch_files import megatron
from meshwright.view.launch_files.program import SCRIPT, TrainingProgram, our_program

# Settings of the plan's file that state the shape of the model, which a recipe of Megatron-Bridge has already.
BRIDGE_SHAPE = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "vocab_size")

ZERO_BUBBLE = (
    "On CPU processes, with torchtitan 0.2.2 and PyTorch 2.13, the last stage got no gradients under InterleavedZeroBubble with FSDP: "
    "compare the gradient norm of the first steps with Interleaved1F1B."
)


def torchtitan(config: Config, plan: str, folder: str, save_every: int) -> TrainingProgram:
    """A TOML file; torchtitan continues from the last checkpoint of its folder."""
    framework = FRAMEWORKS["torchtitan"]
    optimizer, steps = config.optimizer, config.run.steps
    more = {
        "job.dump_folder": folder,
        "training.steps": steps,
        "training.max_norm": optimizer.clip,
        "training.dataset": "c4",
        "optimizer.lr": optimizer.learning_rate,
        "lr_scheduler.warmup_steps": min(optimizer.warmup, steps),
        "checkpoint.enable": True,
        "checkpoint.folder": "checkpoints",
        "checkpoint.interval": save_every,
    }
    notes = (
        "torchtitan 0.2, with settings in TOML: for newer releases, `meshwright launch --for torchtitan-0.3`.",
        "It trains on its dataset c4: change training.dataset, and set model.hf_assets_path to the folder with the tokenizer.",
        *([ZERO_BUBBLE] if config.plan.schedule == "interleaved-zb" and config.plan.pp > 1 else []),
    )
    return with_file(framework, config, folder, more, ("-m", "torchtitan.train", "--job.config_file"), notes)


def torchtitan_03(config: Config, plan: str, folder: str, save_every: int) -> TrainingProgram:
    """A Python file with a function that makes the settings; torchtitan imports it from the run folder."""
    optimizer, steps = config.optimizer, config.run.steps
    more = {
        "dump_folder": folder,
        "training.steps": steps,
        "training.max_norm": optimizer.clip,
        "lr_scheduler.warmup_steps": min(optimizer.warmup, steps),
        "checkpoint.enable": True,
        "checkpoint.folder": "checkpoints",
        "checkpoint.interval": save_every,
    }
    notes = (
        "torchtitan 0.3, with settings in Python: a function in settings.py.",
        "It trains on its dataset c4, with its learning rate: change both, and hf_assets_path, in settings.py.",
    )
    program = with_file(FRAMEWORKS["torchtitan-0.3"], config, folder, more, (), notes)
    begin = ("-m", "torchtitan.train", "--module", "settings", "--config", "plan")
    return replace(program, begin=begin, variables={"PYTHONPATH": (folder, "torchtitan imports settings.py from here")})


def deepspeed(config: Config, plan: str, folder: str, save_every: int) -> TrainingProgram:
    """A JSON file for a training script of the reader's, which calls `deepspeed.initialize`."""
    optimizer, plan_ = config.optimizer, config.plan
    more = {
        "optimizer.params.lr": optimizer.learning_rate,
        "optimizer.params.betas": list(optimizer.betas),
        "optimizer.params.weight_decay": optimizer.weight_decay,
        "gradient_clipping": optimizer.clip if config.workload.clip else 0.0,
    }
    recompute = "on" if plan_.recompute == "full" else "off"
    notes: tuple[str, ...] = (
        f"{SCRIPT} is yours: it builds the model and the data and calls deepspeed.initialize with the arguments --deepspeed_config names.",
        f"In it: sequences of {config.workload.seq} tokens, activation checkpointing {recompute}, a checkpoint in {folder}/checkpoints every "
        f"{save_every} steps, and load_checkpoint at its start.",
    )
    if plan_.cp > 1:
        notes += (
            f"In it, for Ulysses: UlyssesSPAttentionHF.register_with_transformers with sequence_parallel_size={plan_.cp}, whose mpu "
            "deepspeed.initialize takes, and the data in an UlyssesSPDataLoaderAdapter.",
        )
    return with_file(
        FRAMEWORKS["deepspeed"], config, folder, more, (SCRIPT, "--deepspeed", "--deepspeed_config"), notes
    )


def nanotron(config: Config, plan: str, folder: str, save_every: int) -> TrainingProgram:
    """A YAML file; nanotron resumes from `checkpoints.resume_checkpoint_path` if a checkpoint is there."""
    more = {
        "general.run": "meshwright",
        "general.seed": config.run.seed or 42,
        "model.init_method.std": 0.02,
        "optimizer.weight_decay": config.optimizer.weight_decay,
        "optimizer.clip_grad": config.optimizer.clip if config.workload.clip else None,
        "optimizer.optimizer_factory.name": "adamW",
        "optimizer.optimizer_factory.adam_beta1": config.optimizer.betas[0],
        "optimizer.optimizer_factory.adam_beta2": config.optimizer.betas[1],
        "optimizer.optimizer_factory.adam_eps": 1e-8,
        "optimizer.optimizer_factory.torch_adam_is_fused": True,
        "tokens.train_steps": config.run.steps,
        "checkpoints.checkpoints_path": f"{folder}/checkpoints",
        "checkpoints.resume_checkpoint_path": f"{folder}/checkpoints",
        "checkpoints.checkpoint_interval": save_every,
        "optimizer.learning_rate_scheduler.learning_rate": config.optimizer.learning_rate,
        "optimizer.learning_rate_scheduler.lr_warmup_steps": min(config.optimizer.warmup, config.run.steps),
        "optimizer.learning_rate_scheduler.lr_warmup_style": "linear",
    }
    notes = (
        "Start it in a checkout of nanotron, which has run_train.py.",
        "Add the sections data_stages and tokenizer: a plan does not have them.",
    )
    program = with_file(FRAMEWORKS["nanotron"], config, folder, more, ("run_train.py", "--config-file"), notes)
    return replace(program, variables=megatron.ONE_QUEUE)


def automodel(config: Config, plan: str, folder: str, save_every: int) -> TrainingProgram:
    """A YAML file that names a recipe of NeMo Automodel."""
    more = {
        "recipe": "TrainFinetuneRecipeForNextTokenPrediction",
        "step_scheduler.max_steps": config.run.steps,
        "step_scheduler.ckpt_every_steps": save_every,
        "checkpoint.enabled": True,
        "checkpoint.checkpoint_dir": f"{folder}/checkpoints",
        "optimizer.lr": config.optimizer.learning_rate,
    }
    notes = (
        "Add the model (model._target_, model.pretrained_model_name_or_path) and the dataset: a plan does not have them.",
    )
    return with_file(FRAMEWORKS["automodel"], config, folder, more, ("-m", "nemo_automodel.cli.app"), notes)


def axolotl(config: Config, plan: str, folder: str, save_every: int) -> TrainingProgram:
    """A YAML file; `auto_resume_from_checkpoints` continues from the last checkpoint of the output folder."""
    more = {
        "output_dir": f"{folder}/checkpoints",
        "save_steps": save_every,
        "max_steps": config.run.steps,
        "learning_rate": config.optimizer.learning_rate,
        "auto_resume_from_checkpoints": True,
    }
    notes = ("Add base_model and datasets: a plan does not have them.",)
    return with_file(FRAMEWORKS["axolotl"], config, folder, more, ("-m", "axolotl.cli.train"), notes)


def accelerate(config: Config, plan: str, folder: str, save_every: int) -> TrainingProgram:
    """A YAML file for `accelerate launch`, which starts a training script of the reader's in place of torchrun."""
    plan_, work = config.plan, config.workload
    on_cpu = config.cluster.accelerator.name == "cpu"
    more: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "main_training_function": "main",
        "use_cpu": on_cpu,
    }
    steps = max(1, work.batch // (plan_.microbatch * plan_.dp))
    notes = (
        f"{SCRIPT} is yours: it builds the model and the data, and prepares them with accelerate.Accelerator.",
        f"In it: Accelerator(gradient_accumulation_steps={steps}), a micro-batch of {plan_.microbatch} × {work.seq} tokens on each "
        f"data-parallel rank, {work.optimizer} with a learning rate of {config.optimizer.learning_rate:g}, save_state in {folder}/checkpoints "
        f"every {save_every} steps, and load_state at its start.",
    )
    program = with_file(FRAMEWORKS["accelerate"], config, folder, more, (SCRIPT,), notes)
    variables = {"ACCELERATE_USE_CPU": ("true", "without it, every process trains alone")} if on_cpu else {}
    return replace(program, begin=(SCRIPT,), agent="accelerate", variables=variables)


def megatron_bridge(config: Config, plan: str, folder: str, save_every: int) -> TrainingProgram:
    """Overrides of a recipe; Megatron-Bridge loads the last checkpoint of `checkpoint.load` if there is one."""
    framework = FRAMEWORKS["megatron-bridge"]
    shape = {f"model.{key}" for key in BRIDGE_SHAPE}
    settings = {k: v for k, v in settings_of(config, framework).settings.items() if k not in shape}
    settings |= {
        "train.train_iters": config.run.steps,
        "optimizer.lr": config.optimizer.learning_rate,
        "scheduler.lr_warmup_iters": min(config.optimizer.warmup, config.run.steps),
        "checkpoint.save": f"{folder}/checkpoints",
        "checkpoint.load": f"{folder}/checkpoints",
        "checkpoint.save_interval": save_every,
    }
    words = (f"{key}={override(value)}" for key, value in settings.items())
    notes = (
        "Start it in a checkout of Megatron-Bridge, which has scripts/training/run_recipe.py.",
        "The recipe trains on mock data: set dataset.blend and the tokenizer.",
    )
    begin = ("scripts/training/run_recipe.py", "--recipe", f"{RECIPES[config.model.name]}_pretrain_config", *words)
    return TrainingProgram(
        framework.name, begin, notes=notes, install=framework.name, variables=megatron.variables(config.plan)
    )


def override(value: object) -> str:
    """A value as an override on a command line states it; a text with other signs than a name's is quoted there."""
    if value is None:
        return "null"
    if isinstance(value, str) and not re.fullmatch(r"[\w./-]*", value):
        return json.dumps(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


# What pip installs, where it is not the framework's name.
def with_file(
    framework: Framework,
    config: Config,
    folder: str,
    more: dict[str, Any],
    words: tuple[str, ...],
    notes: tuple[str, ...],
) -> TrainingProgram:
    """A program that reads a settings file in the run folder: the settings of the plan, then `more`."""
    settings = settings_of(config, framework).settings | more
    package = framework.package or framework.name
    file = "settings.py" if framework.form == "python" else f"settings.{framework.form}"
    text = text_of(settings, framework, framework.form, {})
    return TrainingProgram(
        framework.name, (*words, f"{folder}/{file}"), file=file, settings=text, notes=notes, install=package
    )


FRAMEWORKS.provide("megatron-lm", program=megatron.program)
FRAMEWORKS.provide("torchtitan", program=torchtitan)
FRAMEWORKS.provide("torchtitan-0.3", program=torchtitan_03)
FRAMEWORKS.provide("deepspeed", program=deepspeed)
FRAMEWORKS.provide("nanotron", program=nanotron)
FRAMEWORKS.provide("automodel", program=automodel)
FRAMEWORKS.provide("axolotl", program=axolotl)
FRAMEWORKS.provide("accelerate", program=accelerate)
FRAMEWORKS.provide("megatron-bridge", program=megatron_bridge)


def program_of(framework: str, config: Config, plan: str, folder: str, save_every: int) -> TrainingProgram:
    """The command that trains a plan with a framework, or with our trainer."""
    make = our_program if framework == OURS else FRAMEWORKS.part(framework, "program")
    program: TrainingProgram = make(config, plan, folder, save_every)
    tried = versions_line(FRAMEWORKS[framework]) if framework != OURS else ""
    return replace(program, notes=(*program.notes, f"{tried}.")) if tried else program


def framework_of(config: Config, name: str) -> str:
    """The name of a framework; without a name, that of the plan's stack if it has one that we can start, else our trainer."""
    if not name:
        by_stack = {framework.stack: framework.name for framework in FRAMEWORKS.values()}
        own = by_stack.get(config.stack.name, OURS)
        return own if own in FRAMEWORKS.having("program") else OURS
    framework = find(name)
    known = framework.name if framework is not None else name
    if known not in (OURS, *FRAMEWORKS):
        raise unknown("MW-LAUNCH-002", "framework", name, [OURS, *FRAMEWORKS.having("program")], "--for {}")
    return known


def for_framework(config: Config, name: str) -> Config:
    """The plan with the stack of the framework that will run it; raises where the framework cannot run or express it."""
    framework = FRAMEWORKS.get(name)
    if framework is None:
        return with_own_stack(config)
    if config.stack.name != framework.stack:
        config = config.but(stack=catalog.load("stacks", framework.stack))
    check_runnable(config, framework)
    return config
