"""Run accelerate with FSDP on CPU processes with gloo.

accelerate chooses what it does by the kind of the processes: those on CPUs get DDP, whatever the file says. Here the processes are of the kind
of GPUs, so that it prepares FSDP, while the device stays the CPU and the backend gloo. Call `use_cpu()` before the first Accelerator.
"""

import os

from accelerate.state import PartialState
from accelerate.utils import DistributedType


def use_cpu():
    """Take the path of several GPUs with the device cpu."""
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    PartialState._prepare_backend = lambda self, *args, **kwargs: ("gloo", DistributedType.MULTI_GPU)
