"""accelerate drops FSDP without a word when its processes are on CPUs, and makes the model DDP."""

import os
from typing import Any


def keep_fsdp(module: Any) -> None:
    """the kind of the processes when FSDP was asked for: that of several GPUs, with the device cpu and gloo"""
    plain_state, plain_accelerator = module.PartialState.__init__, module.AcceleratorState.__init__

    def begin_state(self: Any, cpu: bool = False, **kwargs: Any) -> None:
        if os.environ.get("ACCELERATE_USE_FSDP") == "true":
            os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
            kind = module.DistributedType.MULTI_GPU
            module.PartialState._prepare_backend = lambda self, *a, **k: ("gloo", kind)
            cpu = False
        plain_state(self, cpu, **kwargs)

    def begin_accelerator(self: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("fsdp_plugin") is not None:
            os.environ["ACCELERATE_USE_FSDP"] = "true"
        if os.environ.get("ACCELERATE_USE_FSDP") == "true":
            kwargs["cpu"] = False
        plain_accelerator(self, *args, **kwargs)

    module.PartialState.__init__, module.AcceleratorState.__init__ = begin_state, begin_accelerator


AFTER = {"accelerate.state": keep_fsdp}
