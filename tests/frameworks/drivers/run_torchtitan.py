"""torchtitan 0.2: its ConfigManager reads the TOML file, its Trainer builds mesh, model, pipeline and optimizer and makes the steps.

The settings name a model of torchtitan, whose widths are replaced by small ones; its number of layers stays, since stages are counted in layers.
Tokenizer and dataset are replaced by the test's tokens.
"""

# ruff: noqa: E402
import dataclasses

import cpu_torchtitan
import parse_common
import run_common as common

parse_common.stub("triton", "triton.language")
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
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
    """torchtitan's description of the model with small widths, and without tokenizer and dataset."""

    def get(name):
        spec = find_spec(name)
        widths = {"dim": job["hidden"], "n_heads": job["heads"], "n_kv_heads": job["kv_heads"], "vocab_size": job["vocab"]}  # fmt: skip
        widths |= {"multiple_of": job["ffn"], "ffn_dim_multiplier": None, "max_seq_len": job["seq"]}
        arguments = {flavor: dataclasses.replace(args, **widths) for flavor, args in spec.model_args.items()}
        return dataclasses.replace(
            spec, model_args=arguments, build_tokenizer_fn=None, build_dataloader_fn=None, build_metrics_processor_fn=cpu_torchtitan.Log
        )  # fmt: skip

    return get


def parse(job):
    """The settings of the file, then those of OVERRIDES."""
    words = job["words"]
    config = ConfigManager().parse_args(words[words.index("--job.config_file") :])
    replaced = []
    for (section, name), value in OVERRIDES.items():
        if getattr(getattr(config, section), name) != value:
            setattr(getattr(config, section), name, value)
            replaced.append(f"{section}.{name}={value}")
    return config, replaced


def fill(trainer, job):
    """The weights that a whole model has from one seed, whatever the layout."""
    torch.manual_seed(0)
    whole = trainer.train_spec.model_cls(trainer.model_args)
    with torch.no_grad():
        whole.init_weights()
    options = StateDictOptions(full_state_dict=True, strict=False)
    for part in trainer.model_parts:
        set_model_state_dict(part, whole.state_dict(), options=options)


def train(job):
    """Two steps of torchtitan's Trainer."""
    config, replaced = parse(job)
    train_spec.get_train_spec = small_spec(job)
    trainer = Trainer(config)
    fill(trainer, job)
    cpu_torchtitan.plain_sums(trainer.model_parts)
    dims, log = trainer.parallel_dims, trainer.metrics_processor
    data_ranks = dims.dp_replicate * dims.dp_shard
    data_rank = dims.get_mesh("batch").get_local_rank() if dims.dp_enabled else 0
    rows = common.count_forwards(next(iter(trainer.model_parts[0].layers.values())))
    local = dict(
        job, microbatch=config.training.local_batch_size
    )  # torchtitan's pipeline cuts it into micro-batches itself
    for step in range(common.STEPS):
        trainer.step += 1
        batches = common.microbatches(local, step, data_rank, data_ranks)
        trainer.train_step(iter([({"input": inputs}, labels) for inputs, labels in batches]))
    trainer.checkpointer.close()
    return {
        "world": dims.world_size, "tp": dims.tp, "pp": dims.pp, "cp": dims.cp, "replicate": dims.dp_replicate, "shard": dims.dp_shard,
        "dp": data_ranks, "virtual": len(trainer.model_parts),
        "stage": dims.get_mesh("pp").get_local_rank() if dims.pp_enabled else 0,
        "losses": [largest(loss) for loss in log.losses], "norms": log.norms, "rows": rows,
        "parameters": sum(common.elements_of_parameters(part) for part in trainer.model_parts),
        "states": sum(common.elements_of_states(each) for each in trainer.optimizers),
        "overrides": [*cpu_torchtitan.OVERRIDES, *replaced, "small widths of the model"],
    }  # fmt: skip


def largest(loss):
    """The loss of the last stage; the others have -1."""
    total = torch.tensor(loss, dtype=torch.float64)
    dist.all_reduce(total, dist.ReduceOp.MAX)
    return float(total)


common.main(train)
