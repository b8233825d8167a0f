"""Transformers' Trainer: TrainingArguments takes the DeepSpeed file, and compares its batch, precision and optimizer with its own arguments.

The number of processes is given. TrainingArguments has no degrees: DeepSpeed's own parser says them."""

import json
import os

import parse_common as common

os.environ["DS_ACCELERATOR"] = "cpu"


def parse(case):
    from transformers import TrainingArguments
    from transformers.integrations import deepspeed as integration

    settings = json.loads(case["text"])
    optimizer = settings.get("optimizer", {}).get("params", {})
    betas = optimizer.get("betas", (0.9, 0.999))
    TrainingArguments.world_size = property(lambda self: case["world"])  # all processes: there is one here
    arguments = TrainingArguments(
        output_dir="/nonexistent", deepspeed=settings, use_cpu=True, bf16=bool(settings.get("bf16", {}).get("enabled")),
        per_device_train_batch_size=settings["train_micro_batch_size_per_gpu"], gradient_accumulation_steps=settings["gradient_accumulation_steps"],
        learning_rate=optimizer.get("lr", 5e-5), adam_beta1=betas[0], adam_beta2=betas[1], weight_decay=optimizer.get("weight_decay", 0.0),
        max_grad_norm=settings.get("gradient_clipping", 1.0), max_steps=10,
    )  # fmt: skip
    assert isinstance(arguments.hf_deepspeed_config, integration.HfTrainerDeepSpeedConfig)
    config = arguments.hf_deepspeed_config
    config.trainer_config_finalize(arguments, None, 10)
    assert not config.mismatches, config.mismatches
    return {
        "microbatch": arguments.per_device_train_batch_size, "accumulation": arguments.gradient_accumulation_steps,
        "zero": config.get_value("zero_optimization.stage", 0), "dtype": "bf16" if arguments.bf16 else "fp32",
        **({"batch": config.get_value("train_batch_size")} if "train_batch_size" in settings else {}),
    }  # fmt: skip


common.main(parse)
