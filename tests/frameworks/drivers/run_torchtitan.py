"""torchtitan 0.2: its ConfigManager reads the TOML file, its Trainer builds mesh, model, pipeline and optimizer and makes the steps.

The settings name a model of torchtitan, whose widths are replaced by small ones; its number of layers stays, since stages are counted in layers.
Tokenizer and dataset are replaced by the test's tokens.
"""

# ruff: noqa: E402
import dataclasses

from meshwright.check import cpu

cpu.install()
import run_common as common
import torchtitan_common
from torchtitan.config import ConfigManager
from torchtitan.protocols import train_spec
from torchtitan.train import Trainer

# Settings that are replaced after they were parsed.
OVERRIDES = {
    ("compile", "enable"): False,  # would be compiled for minutes
    ("parallelism", "enable_async_tensor_parallel"): False,  # symmetric memory of GPUs
}
find_spec = train_spec.get_train_spec


def small_spec(job):
    """A function that finds torchtitan's description of a model, with small widths and without tokenizer and dataset."""

    def get(name):
        spec = find_spec(name)
        widths = {"dim": job["hidden"], "n_heads": job["heads"], "n_kv_heads": job["kv_heads"], "vocab_size": job["vocab"]}  # fmt: skip
        widths |= {"multiple_of": job["ffn"], "ffn_dim_multiplier": None, "max_seq_len": job["seq"]}
        arguments = {flavor: dataclasses.replace(args, **widths) for flavor, args in spec.model_args.items()}
        return dataclasses.replace(
            spec, model_args=arguments, build_tokenizer_fn=None, build_dataloader_fn=None, build_metrics_processor_fn=torchtitan_common.Log
        )  # fmt: skip

    return get


def train(job):
    """Two steps of torchtitan's Trainer."""
    words = job["words"]
    config = ConfigManager().parse_args(words[words.index("--job.config_file") :])
    replaced = torchtitan_common.replace_settings(config, OVERRIDES)
    train_spec.get_train_spec = small_spec(job)
    trainer = Trainer(config)
    torchtitan_common.fill(trainer, trainer.train_spec.model_cls(trainer.model_args))
    answer = torchtitan_common.train(trainer, job, config.training.local_batch_size)
    trainer.checkpointer.close()
    return answer | {"overrides": [*torchtitan_common.OVERRIDES, *replaced, "small widths of the model"]}


common.main(train)
