"""Tensors of a GPU on their way through the backend, which moves tensors of the CPU: copied to pinned host memory and back.

    call    waits until the caller's stream has written the tensor, and copies it to the host: the program runs on the copy
    wait    waits for the program and copies its result to the device; when it returns, every stream can read it

So several ranks can share one GPU (`train --share-device`): the strategies run their GPU code, with its streams and kernels, and
exchange tensors as on several GPUs, slower by the copies. It is for tests; between GPUs NCCL moves tensors without the host.
"""

from __future__ import annotations

import torch


def is_staged(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on a device and has to be copied to the host."""
    return not tensor.is_cpu


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy on the host of what the current stream has written."""
    host = host_buffer(tensor)
    host.copy_(tensor.detach())
    return host


def host_buffer(tensor: torch.Tensor) -> torch.Tensor:
    """An uninitialised contiguous host tensor of the same shape."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
