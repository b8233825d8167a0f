"""torchtitan's parts: its Llama under its own parallelize_llama; fsdp2, hsdp, tp2, any of them; recompute."""

from contextlib import nullcontext

import common
import torch
from torch import distributed, nn
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as titan_utils
from torchtitan.models.llama3 import llama3_args
from torchtitan.models.llama3.infra.parallelize import parallelize_llama
from torchtitan.models.llama3.model.model import Transformer


def settings(chosen):
    config = JobConfig()
    config.training.mixed_precision_param = "bfloat16" if chosen.dtype == "bf16" else "float32"
    config.training.mixed_precision_reduce = "float32"
    config.training.seq_len = common.SEQ
    config.activation_checkpoint.mode = "full" if "recompute" in chosen.layout else "none"
    config.compile.enable = False
    config.parallelism.disable_loss_parallel = True
    return config


def main():
    chosen = common.options()
    if chosen.bug:
        import bugs_titan

        bugs_titan.plant(chosen)
    size = llama3_args["debugmodel"]
    size.n_layers, size.dim, size.n_heads, size.vocab_size, size.max_seq_len = 2, 32, 4, common.VOCAB, common.SEQ
    torch.manual_seed(0)
    model, place, ranks = Transformer(size), 0, 1
    with torch.no_grad():
        model.init_weights()
    model = model.double() if chosen.dtype == "fp64" else model
    cuts = common.degree(chosen.layout, "tp")
    if chosen.world > 1:
        distributed.init_process_group("gloo")
        replicas = 2 if "hsdp" in chosen.layout else chosen.world // cuts if "ddp" in chosen.layout else 1
        dims = ParallelDims(
            dp_replicate=replicas,
            dp_shard=chosen.world // cuts // replicas,
            cp=1,
            tp=cuts,
            pp=1,
            ep=1,
            etp=1,
            world_size=chosen.world,
        )
        place, ranks = chosen.rank // cuts, chosen.world // cuts
        model = parallelize_llama(model, dims, settings(chosen))
    optimizer = common.optimizer_of(chosen, model.parameters())
    alone = chosen.world == 1 and chosen.dtype == "bf16"
    for step in range(common.STEPS):
        optimizer.zero_grad()
        for inputs, labels in common.micro_batches(chosen, step, place, ranks):
            with torch.autocast("cpu", torch.bfloat16) if alone else nullcontext():
                logits = model(inputs)
            loss = nn.functional.cross_entropy(
                logits.flatten(0, 1).to(torch.float64 if chosen.dtype == "fp64" else torch.float32),
                labels.flatten(),
                reduction="sum",
            )
            tokens = common.BATCH * common.SEQ // (ranks if "ddp" in chosen.layout and chosen.world > 1 else 1)
            (loss / tokens).backward()
        if chosen.clip:
            titan_utils.clip_grad_norm_(model.parameters(), chosen.clip)
        optimizer.step()
    if chosen.world > 1:
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
