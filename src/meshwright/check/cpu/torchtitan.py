"""torchtitan takes the kind of its device from PyTorch at import. It switches the division of FSDP off by a pre-multiplied sum, which gloo lacks."""

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from typing import Any
from unittest.mock import MagicMock

import torch


def take_cpu() -> None:
    """the kind of the device: cpu; FSDP sums gradients without a pre-multiplied sum; Triton, which it imports for kernels that are not used"""
    if importlib.util.find_spec("triton") is None:
        replace_triton()
    from torch.distributed.fsdp import FSDPModule

    torch._utils._get_available_device_type = lambda: "cpu"
    torch._utils._get_device_module = lambda name: torch.cpu  # type: ignore[assignment]
    plain = FSDPModule.set_gradient_divide_factor

    def set_gradient_divide_factor(self: Any, factor: float) -> None:
        plain(self, factor)
        self.set_force_sum_reduction_for_comms(True)

    FSDPModule.set_gradient_divide_factor = set_gradient_divide_factor  # type: ignore[method-assign]


def replace_triton() -> None:
    """Put modules in which every name exists in the place of Triton; PyTorch, which asks for it too, has its answer before."""
    import torch._inductor.compile_fx
    import torch.utils._triton

    torch.utils._triton.has_triton_package()
    for name in ("triton", "triton.language"):
        module = MagicMock(name=name)
        module.__spec__, module.__path__, module.__version__ = ModuleSpec(name, None), [], "3.6.0"
        sys.modules[name] = module


BEFORE = {"torchtitan": take_cpu}
