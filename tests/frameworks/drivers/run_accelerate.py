"""accelerate: `accelerate launch --config_file FILE` starts this script, whose Accelerator has the arguments that a plan leaves to it.

DDP needs nothing else. On CPU processes accelerate ignores the settings of FSDP (the model becomes DDP) or, with a parallelism config, refuses
them: `meshwright.check.cpu` makes it take the path of GPUs with gloo.
"""

# ruff: noqa: E402
import os

from meshwright.check import cpu

cpu.install()
import run_common as common
import torch
from accelerate import Accelerator
from torch.distributed.fsdp import FSDPModule

OVERRIDES = ["gloo in place of NCCL"]
SHARDED = os.environ.get("ACCELERATE_USE_FSDP") == "true"  # `accelerate launch` made it of the file
if SHARDED:
    OVERRIDES.append("accelerate ignores FSDP on CPU processes: it is told that they are GPUs, with the device cpu")


def train(job):
    """Two steps of Transformers' Llama, prepared by the Accelerator."""
    accelerator = Accelerator(gradient_accumulation_steps=job["accumulation"])
    model = common.llama(job)
    rows = common.count_forwards(model.model.layers[0])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses, norms = [], []
    for step in range(common.STEPS):
        losses.append(0.0)
        for inputs, labels in common.microbatches(job, step, accelerator.process_index, accelerator.num_processes):
            with accelerator.accumulate(model):
                loss = common.next_token_loss(model(input_ids=inputs).logits, labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    norms.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
                optimizer.step()
                optimizer.zero_grad()
            losses[-1] += float(loss) / job["accumulation"]
        losses[-1] = common.average(losses[-1])
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    return {
        "world": accelerator.num_processes, "zero": 3 if units else 0, "dtype": {"no": "fp32"}.get(accelerator.mixed_precision, "bf16"),
        "kind": type(model).__name__, "units": len(units), "losses": losses, "norms": norms, "rows": rows,
        "parameters": common.elements_of_parameters(model), "states": common.elements_of_states(optimizer.optimizer),
        "overrides": OVERRIDES,
    }  # fmt: skip


common.main(train)
