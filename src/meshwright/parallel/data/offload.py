"""Offload: keep on the host what the device does not need for a while.

    states        Adam's moments and the masters live on the host and are updated there (`precision.Masters`): a step
                  sends each gradient down and each parameter up, 4 + 2 bytes, and frees 12 of 16 bytes a parameter
    activations   what a layer saves for backward goes to the host after forward and comes back before its backward

The trade is bytes over PCIe against memory: S bytes saved a layer take 2·S/B, B ≈ 25 GB/s (PCIe 4) to 50 (PCIe 5), and
hide behind compute while S/B is less than the layer's forward, of 24·T·h² FLOPs. With S ≈ 34·T·h bytes and at
400 TFLOP/s a layer hides its own offload for h ≥ 34·400e12 / (24·25e9) ≈ 23,000, so alone it rarely does. With *full
recompute* only the layer's input, 2·T·h bytes, moves: it hides from h ≈ 1,300 on. Use both together.

On a GPU copies run on a stream of their own, to pinned memory, and the device's copy is freed once it has left; on a
CPU the host is another tensor, so that tests see what would move. A tensor that several operations save moves once.
Weights stay: they are on the device anyway. Under sequence parallelism a region's share goes, and is gathered from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from meshwright.parallel.saved_tensors import keeping


class _Away:
    """One tensor on the host."""

    def __init__(self, host: torch.Tensor, device: torch.device, copied: Any) -> None:
        self.host, self.device, self.copied = host, device, copied


class Activations:
    """Moves saved tensors of at least `smallest` bytes; counts what moved each way."""

    def __init__(self, smallest: int = 0) -> None:
        self.smallest = smallest
        self.down_bytes = self.up_bytes = 0
        self._moved: dict[tuple, tuple[StorageWeakRef, _Away]] = {}
        self._stream: Any = None

    def within(self, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            def pack(tensor: torch.Tensor) -> Any:
                stays = tensor.nbytes < self.smallest or is_weight(tensor, module)
                return tensor if stays else self.send(tensor)

            with keeping(pack, self.fetch):
                out = forward(*args, **kwargs)
            self._moved.clear()  # a later forward may find the same addresses with other contents
            return out

        return run

    def send(self, tensor: torch.Tensor) -> _Away:
        # One product saves [B, S, H] and the next the same memory as [B·S, H].
        shape = "any" if tensor.is_contiguous() else (tensor.size(), tensor.stride())
        key = (tensor.data_ptr(), tensor.numel(), shape, tensor.dtype, tensor._version)
        alive, away = self._moved.get(key, (None, None))
        if alive is not None and away is not None and not alive.expired():
            return _Away(away.host.view(tensor.shape), away.device, away.copied)
        self.down_bytes += tensor.nbytes
        if tensor.is_cuda:
            host, copied = self._send_aside(tensor)
        else:
            host, copied = tensor.detach().clone(), None
        away = _Away(host, tensor.device, copied)
        self._moved[key] = StorageWeakRef(tensor.untyped_storage()), away
        return away

    def _send_aside(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        self._stream = self._stream or torch.cuda.Stream(tensor.device)
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self._stream):
            host.copy_(tensor.detach(), non_blocking=True)
            tensor.record_stream(self._stream)
            copied = self._stream.record_event()
        return host, copied

    def fetch(self, saved: Any) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        self.up_bytes += saved.host.nbytes
        if saved.copied is None:
            return saved.host.clone()
        current = torch.cuda.current_stream(saved.device)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(saved.copied)
            back = saved.host.to(saved.device, non_blocking=True)
        current.wait_stream(self._stream)
        back.record_stream(current)
        return back


def is_weight(tensor: torch.Tensor, module: nn.Module) -> bool:
    """Asked at the moment it is saved: ZeRO-3 gathers experts of their own only when they run."""
    address = tensor.untyped_storage().data_ptr()
    whole = (p for p in module.parameters() if not isinstance(p, DTensor))
    return any(p.untyped_storage().data_ptr() == address for p in whole)


def put_on(modules: Iterable[nn.Module], smallest: int = 0) -> Activations:
    """Send what these modules save for backward to the host: any modules, typically a model's layers."""
    activations = Activations(smallest)
    for module in modules:
        module.forward = activations.within(module, module.forward)
    return activations
