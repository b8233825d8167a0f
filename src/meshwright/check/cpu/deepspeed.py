"""DeepSpeed has an accelerator for CPUs, which it takes when told before its import. It would compile Adam, and collectives in shared memory, for
minutes."""

import os
from typing import Any

import torch


def take_cpu() -> None:
    """DS_ACCELERATOR=cpu"""
    os.environ["DS_ACCELERATOR"] = "cpu"


def without_compiling(module: Any) -> None:
    """collectives in shared memory, which would be compiled: gloo's"""
    module.build_shm_op = lambda: None


class FusedAdam(torch.optim.Adam):
    """PyTorch's Adam with the arguments of DeepSpeed's."""

    def __init__(self, params: Any, adam_w_mode: bool = True, **options: Any) -> None:
        for name in ("bias_correction", "set_grad_none"):
            options.pop(name, None)
        super().__init__(params, decoupled_weight_decay=adam_w_mode, **options)


def plain_adam(module: Any) -> None:
    """the fused Adam, which would be compiled: PyTorch's"""
    module.FusedAdam = FusedAdam


BEFORE = {"deepspeed": take_cpu}
AFTER = {"deepspeed.comm.torch": without_compiling, "deepspeed.ops.adam": plain_adam}
