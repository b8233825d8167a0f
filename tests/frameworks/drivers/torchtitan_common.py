"""What a driver of torchtitan does with its Trainer: the same weights in every layout, two steps, the layout that took effect."""

import run_common as common
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

OVERRIDES = ["gloo in place of NCCL, without pre-multiplied sums", "no metrics of GPU memory"]


class Log:
    """In the place of torchtitan's metrics: the losses and gradient norms of the steps."""

    def __init__(self, *args, **kwargs):
        self.losses, self.norms = [], []
        self.color = type("Color", (), {"__getattr__": lambda self, name: ""})()
        stats = type("Stats", (), {"max_reserved_gib": 0.0, "max_reserved_pct": 0.0})()
        self.device_memory_monitor = type("Monitor", (), {"device_name": "cpu", "get_peak_stats": lambda self: stats})()

    def should_log(self, step):
        return True

    def log(self, step, loss, largest_loss, norm, extra_metrics=None):
        self.losses.append(float(loss))
        self.norms.append(float(norm))


def fill(trainer, whole):
    """Give every part of the model the weights of a whole model that is made from one seed."""
    torch.manual_seed(0)
    with torch.no_grad():
        whole.init_weights()
    values = dict(whole.named_parameters())
    for name, parameter in (pair for part in trainer.model_parts for pair in part.named_parameters()):
        value = values[name.replace("_checkpoint_wrapped_module.", "")].detach()
        if isinstance(parameter, DTensor):
            everywhere = [Replicate()] * parameter.device_mesh.ndim
            value = distribute_tensor(value, parameter.device_mesh, everywhere)
            value, parameter = value.redistribute(placements=parameter.placements).to_local(), parameter.to_local()
        with torch.no_grad():
            parameter.copy_(value)


def train(trainer, job, rows_of_a_batch):
    """Make the steps with torchtitan's own `train_step`; the answer of a run."""
    dims, log = trainer.parallel_dims, trainer.metrics_processor
    data_ranks = dims.dp_replicate * dims.dp_shard
    data_rank = dims.get_mesh("batch").get_local_rank() if dims.dp_enabled else 0
    rows = common.count_forwards(next(iter(trainer.model_parts[0].layers.values())))
    for step in range(common.STEPS):
        trainer.step += 1
        batches = common.microbatches(dict(job, microbatch=rows_of_a_batch), step, data_rank, data_ranks)
        trainer.train_step(iter([({"input": inputs}, labels) for inputs, labels in batches]))
    if dims.pp_enabled:
        del rows[0]  # before its first step the pipeline passes a micro-batch through, to learn the shapes
    return {
        "world": dims.world_size, "tp": dims.tp, "pp": dims.pp, "cp": dims.cp, "replicate": dims.dp_replicate, "shard": dims.dp_shard,
        "dp": data_ranks, "virtual": len(trainer.model_parts),
        "stage": dims.get_mesh("pp").get_local_rank() if dims.pp_enabled else 0,
        "losses": [of_last_stage(loss) for loss in log.losses], "norms": log.norms, "rows": rows,
        "parameters": sum(common.elements_of_parameters(part) for part in trainer.model_parts),
        "states": sum(common.elements_of_states(each) for each in trainer.optimizers),
    }  # fmt: skip


def of_last_stage(loss):
    """The loss of the last stage; the others have -1."""
    largest = torch.tensor(loss, dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return float(largest)


def replace_settings(config, settings):
    """Replace settings by their path; the names of those that differed."""
    replaced = []
    for (section, name), value in settings.items():
        part = getattr(config, section)
        if getattr(part, name) != value:
            setattr(part, name, value)
            replaced.append(f"{section}.{name}={value}")
    return replaced
