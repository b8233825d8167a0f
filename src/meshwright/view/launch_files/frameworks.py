"""The programs of other frameworks: their settings, written by `interop.write`, and the command that reads them.

    Megatron-LM          pretrain_gpt.py FLAGS                           checkpoints: --save, --load
    torchtitan           -m torchtitan.train --job.config_file FILE      version 0.2
    torchtitan 0.3       -m torchtitan.train --module settings --config plan
    DeepSpeed            YOUR-SCRIPT --deepspeed --deepspeed_config FILE
    nanotron             run_train.py --config-file FILE
    NeMo Automodel       -m nemo_automodel.cli.app FILE
    axolotl              -m axolotl.cli.train FILE
    accelerate           YOUR-SCRIPT, after `accelerate launch --config_file FILE` in place of torchrun
    TRL                  -m trl.scripts.sft --config FILE
    LLaMA-Factory        -m llamafactory.launcher FILE
    Megatron-Bridge      run_recipe.py --recipe NAME KEY=VALUE …         a recipe of the model, with the settings of the plan

A launch file must start the plan and nothing else, so a plan that the settings cannot express is an error here; `plan --write` writes such
settings with a comment. Data, tokenizer and, for some, the model are not part of a plan: the notes of the file name them.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from meshwright.describe import catalog
from meshwright.describe.config import Config
from meshwright.describe.own_stack import OURS, with_own_stack
from meshwright.errors import unknown
from meshwright.interop.frameworks import FRAMEWORKS, find
from meshwright.interop.frameworks.bridge import RECIPES
from meshwright.interop.keys import Framework
from meshwright.interop.write import check_runnable, settings_of, text_of, versions_line
from meshwright.units import Json
from meshwright.view.launch_files import megatron
from meshwright.view.launch_files.program import SCRIPT, TrainingProgram, our_program

# Settings of the plan's file that state the shape of the model, which a recipe of Megatron-Bridge has already.
BRIDGE_SHAPE = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "vocab_size")

# Of each framework: the words after the agent, the settings of the run beside those of the plan, and notes for the reader. "$steps" stands for
# a value of `run_values`, and so does {steps} in a note; a note of `notes_if` is written where the value of that name holds.
STARTS: dict[str, Json] = {
    "torchtitan": {  # it continues from the last checkpoint of its folder
        "begin": ("-m", "torchtitan.train", "--job.config_file", "{file}"),
        "settings": {
            "job.dump_folder": "$folder", "training.steps": "$steps", "training.max_norm": "$clip", "training.dataset": "c4",
            "optimizer.lr": "$rate", "lr_scheduler.warmup_steps": "$warmup", "checkpoint.enable": True,
            "checkpoint.folder": "checkpoints", "checkpoint.interval": "$every",
        },
        "notes": (
            "torchtitan 0.2, with settings in TOML: for newer releases, `meshwright launch --for torchtitan-0.3`.",
            "It trains on its dataset c4: change training.dataset, and set model.hf_assets_path to the folder with the tokenizer.",
        ),
    },
    "torchtitan-0.3": {  # the file has a function that makes the settings; torchtitan imports it from the run folder
        "begin": ("-m", "torchtitan.train", "--module", "settings", "--config", "plan"),
        "settings": {
            "dump_folder": "$folder", "training.steps": "$steps", "training.max_norm": "$clip", "lr_scheduler.warmup_steps": "$warmup",
            "checkpoint.enable": True, "checkpoint.folder": "checkpoints", "checkpoint.interval": "$every",
        },
        "notes": (
            "torchtitan 0.3, with settings in Python: a function in settings.py.",
            "It trains on its dataset c4, with its learning rate: change both, and hf_assets_path, in settings.py.",
        ),
        "notes_if": {"pipeline": "Its pipelines need a PyTorch after 2.13, whose schedules take micro-batches."},
        "variables": {"PYTHONPATH": ("{folder}", "torchtitan imports settings.py from here")},
    },
    "deepspeed": {  # for a training script of the reader's, which calls `deepspeed.initialize`
        "begin": ("{script}", "--deepspeed", "--deepspeed_config", "{file}"),
        "settings": {
            "optimizer.params.lr": "$rate", "optimizer.params.betas": "$betas", "optimizer.params.weight_decay": "$decay",
            "gradient_clipping": "$clip_or_zero",
        },
        "notes": (
            "{script} is yours: it builds the model and the data and calls deepspeed.initialize with the arguments --deepspeed_config names.",
            "In it: sequences of {seq} tokens, activation checkpointing {recompute}, a checkpoint in {folder}/checkpoints every "
            "{every} steps, and load_checkpoint at its start.",
        ),
        "notes_if": {
            "ulysses": "In it, for Ulysses: UlyssesSPAttentionHF.register_with_transformers with sequence_parallel_size={cp}, whose mpu "
            "deepspeed.initialize takes, and the data in an UlyssesSPDataLoaderAdapter.",
        },
    },
    "nanotron": {  # it resumes from `checkpoints.resume_checkpoint_path` if a checkpoint is there
        "begin": ("run_train.py", "--config-file", "{file}"),
        "settings": {
            "general.run": "meshwright", "general.seed": "$seed", "model.init_method.std": 0.02, "optimizer.weight_decay": "$decay",
            "optimizer.clip_grad": "$clip_or_none", "optimizer.optimizer_factory.name": "adamW",
            "optimizer.optimizer_factory.adam_beta1": "$beta1", "optimizer.optimizer_factory.adam_beta2": "$beta2",
            "optimizer.optimizer_factory.adam_eps": 1e-8, "optimizer.optimizer_factory.torch_adam_is_fused": True,
            "tokens.train_steps": "$steps", "checkpoints.checkpoints_path": "$checkpoints",
            "checkpoints.resume_checkpoint_path": "$checkpoints", "checkpoints.checkpoint_interval": "$every",
            "optimizer.learning_rate_scheduler.learning_rate": "$rate",
            "optimizer.learning_rate_scheduler.lr_warmup_steps": "$warmup",
            "optimizer.learning_rate_scheduler.lr_warmup_style": "linear",
        },
        "notes": (
            "Start it in a checkout of nanotron, which has run_train.py.",
            "Add the sections data_stages and tokenizer: a plan does not have them.",
        ),
        "variables": {"CUDA_DEVICE_MAX_CONNECTIONS": ("1", "kernels start in the order of their launches, as overlap needs")},
    },
    "automodel": {  # a recipe of NeMo Automodel
        "begin": ("-m", "nemo_automodel.cli.app", "{file}"),
        "settings": {
            "recipe": "TrainFinetuneRecipeForNextTokenPrediction", "step_scheduler.max_steps": "$steps",
            "step_scheduler.ckpt_every_steps": "$every", "checkpoint.enabled": True, "checkpoint.checkpoint_dir": "$checkpoints",
            "optimizer.lr": "$rate",
        },
        "notes": (
            "Add the model (model._target_, model.pretrained_model_name_or_path) and the dataset: a plan does not have them.",
        ),
    },
    "axolotl": {  # `auto_resume_from_checkpoints` continues from the last checkpoint of the output folder
        "begin": ("-m", "axolotl.cli.train", "{file}"),
        "settings": {
            "output_dir": "$checkpoints", "save_steps": "$every", "max_steps": "$steps", "learning_rate": "$rate",
            "auto_resume_from_checkpoints": True,
        },
        "notes": ("Add base_model and datasets: a plan does not have them.",),
    },
    "accelerate": {  # the file is for `accelerate launch`, which starts a training script of the reader's in place of torchrun
        "begin": ("{script}",),
        "agent": "accelerate",
        "settings": {"compute_environment": "LOCAL_MACHINE", "main_training_function": "main", "use_cpu": "$on_cpu"},
        "notes": (
            "{script} is yours: it builds the model and the data, and prepares them with accelerate.Accelerator.",
            "In it: Accelerator(gradient_accumulation_steps={accumulated}), a micro-batch of {microbatch} × {seq} tokens on each "
            "data-parallel rank, {optimizer} with a learning rate of {rate:g}, save_state in {folder}/checkpoints "
            "every {every} steps, and load_state at its start.",
        ),
    },
    "trl": {  # the program that `trl sft` starts
        "begin": ("-m", "trl.scripts.sft", "--config", "{file}"),
        "settings": {
            "output_dir": "$checkpoints", "save_steps": "$every", "max_steps": "$steps", "learning_rate": "$rate", "warmup_steps": "$warmup",
            "weight_decay": "$decay", "max_grad_norm": "$clip_or_zero",
        },
        "notes": (
            "Add model_name_or_path and dataset_name: a plan does not have them.",
            "To continue from the last checkpoint, add resume_from_checkpoint with its folder.",
        ),
    },
    "llama-factory": {  # the program that `llamafactory-cli train` starts; it continues from the last checkpoint of the output folder
        "begin": ("-m", "llamafactory.launcher", "{file}"),
        "settings": {
            "stage": "sft", "do_train": True, "output_dir": "$checkpoints", "save_steps": "$every", "max_steps": "$steps",
            "learning_rate": "$rate", "warmup_steps": "$warmup", "weight_decay": "$decay", "max_grad_norm": "$clip_or_zero",
        },
        "notes": ("Add model_name_or_path, dataset and template: a plan does not have them.",),
    },
    "megatron-bridge": {  # overrides of a recipe; it loads the last checkpoint of `checkpoint.load` if there is one
        "settings": {
            "train.train_iters": "$steps", "optimizer.lr": "$rate", "scheduler.lr_warmup_iters": "$warmup",
            "checkpoint.save": "$checkpoints", "checkpoint.load": "$checkpoints", "checkpoint.save_interval": "$every",
        },
        "notes": (
            "Start it in a checkout of Megatron-Bridge, which has scripts/training/run_recipe.py.",
            "The recipe trains on mock data: set dataset.blend and the tokenizer.",
        ),
    },
}  # fmt: skip


def run_values(config: Config, folder: str, save_every: int) -> Json:
    """The values of a run that the settings of frameworks and the notes about them name."""
    plan, work, optimizer = config.plan, config.workload, config.optimizer
    clip, steps = optimizer.clip if work.clip else None, config.run.steps
    rates: Json = {
        "rate": optimizer.learning_rate,
        "warmup": min(optimizer.warmup, steps),
        "decay": optimizer.weight_decay,
    }
    rates |= {"betas": list(optimizer.betas), "beta1": optimizer.betas[0], "beta2": optimizer.betas[1]}
    clips = {"clip": optimizer.clip, "clip_or_none": clip, "clip_or_zero": 0.0 if clip is None else clip}
    saving = {"folder": folder, "checkpoints": f"{folder}/checkpoints", "every": save_every, "steps": steps}
    batch = {"microbatch": plan.microbatch, "accumulated": max(1, work.batch // (plan.microbatch * plan.dp))}
    conditions = {"pipeline": plan.pp > 1, "ulysses": plan.cp > 1}
    return {
        **rates, **clips, **saving, **batch, **conditions, "script": SCRIPT, "seed": config.run.seed or 42, "seq": work.seq, "cp": plan.cp,
        "optimizer": work.optimizer, "recompute": "on" if plan.recompute == "full" else "off",
        "on_cpu": config.cluster.accelerator.name == "cpu",
    }  # fmt: skip


def run_settings(name: str, values: Json) -> tuple[Json, tuple[str, ...]]:
    """The settings of the run, which come after those of the plan; and the notes."""
    start = STARTS[name]
    more = {key: values[v[1:]] if str(v).startswith("$") else v for key, v in start["settings"].items()}
    notes = [*start["notes"], *(text for condition, text in start.get("notes_if", {}).items() if values[condition])]
    return more, tuple(note.format(**values) for note in notes)


def with_file(
    framework: Framework,
    config: Config,
    folder: str,
    more: Json,
    words: Sequence[str],
    notes: Sequence[str],
    **fields: Any,
) -> TrainingProgram:
    """A program that reads a settings file in the run folder, {file} in its words: the settings of the plan, then `more`."""
    settings = settings_of(config, framework).settings | more
    file = "settings.py" if framework.form == "python" else f"settings.{framework.form}"
    text = text_of(settings, framework, framework.form, {})
    words = tuple(word.replace("{file}", f"{folder}/{file}") for word in words)
    install = framework.package or framework.name
    return TrainingProgram(
        framework.name, words, file=file, settings=text, notes=tuple(notes), install=install, **fields
    )


def file_program(name: str, config: Config, plan: str, folder: str, save_every: int) -> TrainingProgram:
    """The program of a framework of `STARTS`."""
    start, values = STARTS[name], run_values(config, folder, save_every)
    more, notes = run_settings(name, values)
    variables = {key: (value.format(**values), why) for key, (value, why) in start.get("variables", {}).items()}
    if name == "accelerate" and values["on_cpu"]:
        variables["ACCELERATE_USE_CPU"] = ("true", "without it, every process trains alone")
    words = [word.format(**values, file="{file}") for word in start["begin"]]
    agent = start.get("agent", "torchrun")
    return with_file(FRAMEWORKS[name], config, folder, more, words, notes, agent=agent, variables=variables)


def megatron_bridge(config: Config, plan: str, folder: str, save_every: int) -> TrainingProgram:
    """Overrides of a recipe, as words of the command line."""
    name, shape = "megatron-bridge", {f"model.{key}" for key in BRIDGE_SHAPE}
    more, notes = run_settings(name, run_values(config, folder, save_every))
    settings = settings_of(config, FRAMEWORKS[name]).settings | more
    # The recipe has no adapters: theirs are added, the others change its values.
    words = (
        f"{'+' * key.startswith('peft.')}{key}={override(value)}" for key, value in settings.items() if key not in shape
    )
    begin = ("scripts/training/run_recipe.py", "--recipe", f"{RECIPES[config.model.name]}_pretrain_config", *words)
    return TrainingProgram(name, begin, notes=notes, install=name, variables=megatron.variables(config.plan))


def override(value: object) -> str:
    """A value as an override on a command line states it; a text with other signs than a name's is quoted there."""
    if value is None:
        return "null"
    if isinstance(value, str) and not re.fullmatch(r"[\w./-]*", value):
        return json.dumps(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


for framework in STARTS:
    own = megatron_bridge if framework == "megatron-bridge" else partial(file_program, framework)
    FRAMEWORKS.provide(framework, program=own)
FRAMEWORKS.provide("megatron-lm", program=megatron.program)


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
