"""Transformers' Trainer with the DeepSpeed file: TrainingArguments(deepspeed=FILE), and arguments that repeat the file's batch and optimizer.

The Trainer compares both, prepares DeepSpeed through accelerate and runs its own loop. Its sampler is replaced by one that keeps the order of the
sequences, so that the global batch of each step is known.
"""

# ruff: noqa: E402
import json

from meshwright.check import cpu

cpu.install()
import deepspeed_common
import run_common as common
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

OVERRIDES = [*deepspeed_common.OVERRIDES, "use_cpu=True"]


class InOrder(torch.utils.data.Dataset):
    """The sequences of both steps. Rank r gets every dp-th micro-batch of the Trainer's order; they are laid out so that a step has its batch."""

    def __init__(self, job):
        self.rows = torch.cat([common.tokens(job, step) for step in range(common.STEPS)])

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, number):
        return {
            "input_ids": self.rows[number, :-1],
            "labels": self.rows[number, :-1],
            "shift_labels": self.rows[number, 1:],
        }


class InOrderTrainer(Trainer):
    def _get_train_sampler(self, *args, **kwargs):
        return torch.utils.data.SequentialSampler(self.train_dataset)


class Logs(TrainerCallback):
    """The losses that the Trainer logs after every step, and the gradient norms."""

    def __init__(self):
        self.losses, self.norms = [], []

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.losses.append(float(logs["loss"]))
            self.norms.append(deepspeed_common.norm_of(self.trainer.model_wrapped))


def train(job):
    """Two steps of Transformers' Llama by the Trainer's loop."""
    file = job["words"][-1]
    with open(file) as stream:
        settings = json.load(stream)
    optimizer = settings["optimizer"]["params"]
    arguments = TrainingArguments(
        output_dir=job["folder"], deepspeed=file, use_cpu=True, bf16=False, per_device_train_batch_size=job["microbatch"],
        gradient_accumulation_steps=job["accumulation"], learning_rate=optimizer["lr"], adam_beta1=optimizer["betas"][0],
        adam_beta2=optimizer["betas"][1], weight_decay=optimizer["weight_decay"], max_grad_norm=settings["gradient_clipping"],
        lr_scheduler_type="constant", max_steps=common.STEPS, logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True,
        remove_unused_columns=False,
    )  # fmt: skip
    model = common.llama(job)
    rows = common.count_forwards(model.model.layers[0])
    logs = Logs()
    trainer = InOrderTrainer(model=model, args=arguments, train_dataset=InOrder(job), callbacks=[logs])
    logs.trainer = trainer
    trainer.train()
    engine = trainer.model_wrapped
    stage = engine.zero_optimization_stage()
    return {
        "world": arguments.world_size, "dp": engine.dp_world_size, "zero": stage, "batch": engine.train_batch_size(),
        "microbatch": engine.train_micro_batch_size_per_gpu(), "accumulation": engine.gradient_accumulation_steps(),
        "losses": logs.losses, "norms": logs.norms, "rows": rows, "kind": type(engine).__name__,
        "parameters": deepspeed_common.elements_of_parameters(model, stage), "states": deepspeed_common.elements_of_states(engine.optimizer, stage),
        "overrides": OVERRIDES,
    }  # fmt: skip


common.main(train)
