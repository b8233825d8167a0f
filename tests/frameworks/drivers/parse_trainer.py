"""Transformers' Trainer: TrainingArguments takes the DeepSpeed file, and compares its batch, precision and optimizer with its own arguments."""

import json
import os

import parse_common as common

os.environ["DS_ACCELERATOR"] = "cpu"


def parse(case):
    from transformers import TrainingArguments
    from transformers.integrations import deepspeed as integration

    settings = json.loads(case["text"])
    tp = settings.get("tensor_parallel", {}).get("autotp_size", 1)
    ranks = case["world"] // tp
    TrainingArguments.world_size = property(lambda self: ranks)
    optimizer = settings.get("optimizer", {}).get("params", {})
    betas = optimizer.get("betas", (0.9, 0.999))
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
        "dp": ranks, "batch": arguments.train_batch_size * arguments.gradient_accumulation_steps * ranks,
        "microbatch": arguments.per_device_train_batch_size, "accumulation": arguments.gradient_accumulation_steps,
        "zero": config.get_value("zero_optimization.stage", 0), "dtype": "bf16" if arguments.bf16 else "fp32",
    }  # fmt: skip


common.main(parse)
