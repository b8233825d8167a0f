"""megatron-core names its device in many places: `device="cuda"`, `.cuda()`, `torch.cuda.current_device()`, streams, CUDA random states. None of
them changes what is computed, so each is sent to the CPU. Kernels of Transformer Engine and Apex are not replaced: use the "local" layers."""

from __future__ import annotations

import contextlib
import typing
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed

FACTORIES = (
    "tensor", "zeros", "ones", "empty", "full", "arange", "zeros_like", "empty_like", "ones_like", "full_like", "rand", "randn"
)  # fmt: skip
TYPES = {
    "Float": torch.float32,
    "Int": torch.int32,
    "Long": torch.int64,
    "BFloat16": torch.bfloat16,
    "Half": torch.float16,
}


class IdleStream:
    """A CUDA stream or event that does nothing: on a CPU every operation is done when its call returns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.cuda_stream = 0

    def record_event(self, *args: Any) -> IdleStream:
        return self

    def wait_stream(self, *args: Any) -> None:
        pass

    wait_event = synchronize = record = wait = wait_stream


def on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    """A factory of tensors that takes the CPU where it is asked for CUDA."""

    def make(*args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return make


def typed(dtype: torch.dtype) -> type:
    """`torch.cuda.FloatTensor` and its like: a class whose calls make a tensor of a dtype, from values or from a size."""

    def make(cls: type, *args: Any) -> torch.Tensor:
        values = bool(args) and isinstance(args[0], (list, tuple))
        return torch.tensor(args[0], dtype=dtype) if values else torch.empty(*args, dtype=dtype)

    return type("CudaTensor", (), {"__new__": make})


def use_cpu() -> None:
    """torch.cuda's devices, streams, events, memory and types; `device="cuda"`, `.cuda()`, `Tensor.type()`; sizes of all-to-all as lists"""
    if not hasattr(typing, "override"):  # Python 3.12
        setattr(typing, "override", lambda method: method)  # noqa: B010
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.device_count = lambda: 1
    for name in ("set_device", "synchronize", "empty_cache", "manual_seed", "set_rng_state"):
        setattr(cuda, name, lambda *a, **k: None)
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *a, **k: torch.get_rng_state()
    cuda.get_device_capability = lambda *a: (9, 0)
    cuda.get_device_properties = lambda *a: type("Device", (), {"major": 9, "minor": 0, "name": "cpu"})()
    cuda.Stream = cuda.Event = IdleStream
    cuda.current_stream = cuda.default_stream = lambda *a: IdleStream()
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *a: None
    for name, dtype in TYPES.items():
        setattr(cuda, f"{name}Tensor", typed(dtype))
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *a, **k: self
    torch.nn.Module.cuda = lambda self, *a, **k: self  # type: ignore[method-assign]
    for name in FACTORIES:
        setattr(torch, name, on_cpu(getattr(torch, name)))
    kind = tensor.type  # optimizers ask whether a parameter's type is torch.cuda.FloatTensor
    tensor.type = lambda self, *a, **k: kind(self, *a, **k) if a or k else kind(self).replace("torch.", "torch.cuda.")
    exchange = distributed.all_to_all_single  # the sizes of the parts stay tensors where they are not on CUDA

    def all_to_all_single(output: Any, input: Any, outputs: Any = None, inputs: Any = None, **more: Any) -> Any:
        outputs, inputs = more.pop("output_split_sizes", outputs), more.pop("input_split_sizes", inputs)
        return exchange(output, input, as_list(outputs), as_list(inputs), **more)

    distributed.all_to_all_single = all_to_all_single  # type: ignore[assignment]


def as_list(sizes: Any) -> Any:
    return sizes.tolist() if hasattr(sizes, "tolist") else sizes


def one_random_state(module: Any) -> None:
    """the fork of CUDA random states: one generator for all"""
    module.CudaRNGStatesTracker.fork = lambda self, name=None: contextlib.nullcontext()
    module.CudaRNGStatesTracker.add = lambda self, name, seed: None


def without_engine(module: Any) -> None:
    """a name of Transformer Engine that experts look up without having imported it"""
    if not hasattr(module, "te_general_gemm"):
        module.te_general_gemm = None


def marked_norm(module: Any) -> None:
    """PyTorch's norm under sequence parallelism, marked as Transformer Engine's is: megatron-core's own wrapper refuses it"""

    def norm(cls: type, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> torch.nn.Module:
        kind = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
        made: torch.nn.Module = kind(hidden_size, eps=eps)
        for parameter in made.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return made

    module.WrappedTorchNorm.__new__ = staticmethod(norm)


BEFORE = {"megatron.core": use_cpu}
AFTER = {
    "megatron.core.tensor_parallel.random": one_random_state,
    "megatron.core.transformer.moe.moe_utils": without_engine,
    "megatron.core.transformer.torch_norm": marked_norm,
}
