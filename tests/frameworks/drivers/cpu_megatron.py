"""Run megatron-core on CPU processes with gloo: the smallest set of replacements of what it asks of CUDA.

Megatron-core names its device in many places: `device="cuda"`, `.cuda()`, `torch.cuda.current_device()`, streams, CUDA random states. None of
them changes what is computed, so each is sent to the CPU. Kernels that exist only on GPUs (Transformer Engine, Apex) are not replaced here:
the caller chooses megatron-core's own "local" layers instead. Call `use_cpu()` before megatron is imported and `after_import()` after.
"""

import contextlib
import os
import typing

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # read when torch is imported: the compiler would trace the replacements below

import torch
import torch.distributed as dist
import typing_extensions


class Stream:
    """A CUDA stream or event that does nothing: on a CPU every operation is done when its call returns."""

    def __init__(self, *args, **kwargs):
        self.cuda_stream = 0

    def record_event(self, *args):
        return self

    def wait_stream(self, *args):
        pass

    wait_event = synchronize = record = wait = wait_stream


def on_cpu(factory):
    """A factory of tensors that takes the CPU where it is asked for CUDA."""

    def make(*args, **kwargs):
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return make


def typed(dtype):
    """`torch.cuda.FloatTensor` and its like: a tensor of a dtype from values or from a size."""
    return lambda *args: (
        torch.tensor(args[0], dtype=dtype) if args and isinstance(args[0], list | tuple) else torch.empty(*args, dtype=dtype)
    )  # fmt: skip


def use_cpu():
    """Send what is asked of CUDA to the CPU."""
    torch.compiler.set_stance("force_eager")
    typing.override = typing_extensions.override  # of Python 3.12
    cuda = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.device_count = lambda: 1
    cuda.set_device = cuda.synchronize = cuda.empty_cache = cuda.manual_seed = lambda *a, **k: None
    cuda.get_device_capability = lambda *a: (9, 0)
    cuda.get_device_properties = lambda *a: type("Device", (), {"major": 9, "minor": 0, "name": "cpu"})()
    cuda.Stream = cuda.Event = Stream
    cuda.current_stream = cuda.default_stream = lambda *a: Stream()
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *a: None
    cuda.FloatTensor, cuda.IntTensor, cuda.LongTensor = typed(torch.float32), typed(torch.int32), typed(torch.int64)
    cuda.BFloat16Tensor, cuda.HalfTensor = typed(torch.bfloat16), typed(torch.float16)
    torch.Tensor.cuda = lambda self, *a, **k: self
    torch.nn.Module.cuda = lambda self, *a, **k: self
    for name in ("tensor", "zeros", "ones", "empty", "full", "arange", "zeros_like", "empty_like", "ones_like", "rand", "randn"):  # fmt: skip
        setattr(torch, name, on_cpu(getattr(torch, name)))
    kind = torch.Tensor.type  # optimizers ask whether a parameter's type is torch.cuda.FloatTensor
    torch.Tensor.type = lambda self, *a, **k: kind(self, *a, **k) if a or k else kind(self).replace("torch.", "torch.cuda.")  # fmt: skip
    exchange = dist.all_to_all_single  # the sizes of the parts stay tensors where they are not on CUDA
    dist.all_to_all_single = lambda output, input, output_split_sizes=None, input_split_sizes=None, **k: exchange(
        output, input, as_list(output_split_sizes), as_list(input_split_sizes), **k
    )


def as_list(sizes):
    return sizes.tolist() if hasattr(sizes, "tolist") else sizes


def after_import():
    """Replace what megatron-core itself refuses or does not define on a CPU."""
    import megatron.core.transformer.moe.moe_utils as moe
    import megatron.core.transformer.torch_norm as norms
    from megatron.core.tensor_parallel import random

    random.CudaRNGStatesTracker.fork = lambda self, name=None: contextlib.nullcontext()
    random.CudaRNGStatesTracker.add = lambda self, name, seed: None
    if not hasattr(moe, "te_general_gemm"):
        moe.te_general_gemm = None  # a NameError without Transformer Engine
    norms.WrappedTorchNorm.__new__ = staticmethod(norm)


def norm(cls, config, hidden_size, eps=1e-5, **_):
    """PyTorch's norm, marked as Transformer Engine's is: gradients of its weights are summed over tensor-parallel ranks that
    each saw a part of the sequence. Megatron-core's own wrapper refuses sequence parallelism, since it does not mark them."""
    kind = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
    module = kind(hidden_size, eps=eps)
    for parameter in module.parameters():
        parameter.sequence_parallel = config.sequence_parallel
    return module
