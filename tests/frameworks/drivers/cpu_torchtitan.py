"""Run torchtitan on CPU processes with gloo: import this before torchtitan.

torchtitan asks PyTorch for the kind of the device once, when it is imported; here the answer is the CPU. gloo has no pre-multiplied sum, which FSDP
uses for the division that torchtitan switches off, so FSDP is asked for a plain sum (`plain_sums`).
"""

import torch
import torch._utils
from torch.distributed.fsdp import FSDPModule

torch._utils._get_available_device_type = lambda: "cpu"
torch._utils._get_device_module = lambda name: torch.cpu
OVERRIDES = ["gloo in place of NCCL, without pre-multiplied sums", "no metrics of GPU memory"]


def plain_sums(models):
    """Reduce gradients of FSDP by a sum; torchtitan divides the loss by the tokens of the global batch."""
    for module in (module for model in models for module in model.modules()):
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


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
