"""What the drivers of DeepSpeed read off its engine: norms, and what a rank holds."""

import deepspeed.runtime.engine
import run_common as common
import torch

OVERRIDES = ["gloo in place of NCCL", "torch.optim.Adam in place of DeepSpeed's fused kernel"]
take_step = deepspeed.runtime.engine.DeepSpeedEngine.step


def step(engine, *args, **kwargs):
    """DeepSpeed's step, which notes the norm of plain gradients first: only ZeRO reports one."""
    gradients = [p.grad for p in engine.module.parameters() if p.grad is not None]
    engine.plain_norm = torch.nn.utils.get_total_norm(gradients)
    return take_step(engine, *args, **kwargs)


deepspeed.runtime.engine.DeepSpeedEngine.step = step


def norm_of(engine):
    """The norm of the gradients of the last step, before they were clipped."""
    norm = engine.get_global_grad_norm()
    return float(engine.plain_norm if norm is None else norm)


def elements_of_parameters(model, stage):
    """Elements of parameters that this rank holds; ZeRO-3 keeps its shard beside the empty parameter."""
    return sum(p.ds_tensor.numel() if stage == 3 else p.numel() for p in model.parameters())


def elements_of_states(optimizer, stage):
    """Elements of Adam's first moment on this rank, in the optimizer that ZeRO wraps."""
    return common.elements_of_states(optimizer.optimizer if stage else optimizer)
