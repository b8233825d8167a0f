"""Offload: keep tensors on the host while the device does not need them.

    states        Adam's moments and the masters are on the host and are updated there (`precision.Masters`): a step
                  sends each gradient down and each parameter up, 4 + 2 bytes, and frees 12 of 16 bytes per parameter
    activations   tensors that a layer saves for backward go to the host after forward and return before its backward

The trade is bytes over PCIe against memory: S bytes saved by a layer take 2·S/B, B ≈ 25 GB/s (PCIe 4) to 50 (PCIe 5),
and are hidden behind compute while S/B is less than the layer's forward, of 24·T·h² FLOPs. With S ≈ 34·T·h bytes and at
400 TFLOP/s a layer hides its own offload for h ≥ 34·400e12 / (24·25e9) ≈ 23,000: rarely. With *full recompute* only the
layer's input, 2·T·h bytes, is moved: hidden from h ≈ 1,300 on. Use both together.

On a GPU copies run on a separate stream, to pinned memory, and the device's memory is freed once the copy is done. In backward the
tensors of a layer return while the layer after it computes. On a
CPU the host copy is another tensor, so that tests see what would be moved. A tensor that several operations save is moved
once. Weights are not moved: they stay on the device anyway. Under sequence parallelism a region's share is moved, and the
gathered tensor is gathered from it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from meshwright.parallel.saved_tensors import keeping, without_history


class _Moved:
    """A tensor on the host, the event of its copy, and its copy back on the device while backward needs it."""

    def __init__(self, host: Tensor, device: torch.device, copied: Any) -> None:
        self.host, self.device, self.copied = host, device, copied
        self.back: Tensor | None = None
        self.returned: Any = None


class _Forward:
    """One forward of a layer: what it moved, and the forward of the layer before it. The graph keeps moves alive; here they are weak."""

    def __init__(self, layer: int, before: _Forward | None) -> None:
        self.layer = layer
        self.before = None if before is None else weakref.ref(before)
        self.moves: list[weakref.ref[_Moved]] = []


class _Saved:
    """Stands for a tensor that autograd saved: where it was moved, its shape there, and by which forward. Several may share one move."""

    def __init__(self, moved: _Moved, shape: torch.Size, forward: _Forward | None) -> None:
        self.moved, self.shape, self.forward = moved, shape, forward


class ActivationOffload:
    """Moves saved tensors to the host; counts the bytes moved each way.

    When backward asks for the first tensor of a layer, the tensors of the layer before it start to return too: they travel while the
    backward of this layer computes."""

    def __init__(self) -> None:
        self.down_bytes = self.up_bytes = 0
        self._moved: dict[tuple, tuple[StorageWeakRef, _Moved]] = {}
        self._forward: _Forward | None = None  # the last one
        self._stream: Any = None

    def wrap(self, module: nn.Module, forward: Callable[..., Any], layer: int = 0) -> Callable[..., Any]:
        def pack(tensor: Tensor) -> Any:
            return without_history(tensor) if is_weight(tensor, module) else self.send(tensor)

        def run(*args: Any, **kwargs: Any) -> Any:
            last = self._forward
            self._forward = _Forward(layer, last if last is not None and last.layer == layer - 1 else None)
            with keeping(pack, self.fetch):
                out = forward(*args, **kwargs)
            self._moved.clear()  # a later forward may reuse the same addresses for other tensors
            return out

        return run

    def send(self, tensor: Tensor) -> _Saved:
        # One product saves [B, S, H] and the next the same memory as [B·S, H]: they share one copy.
        shape = "any" if tensor.is_contiguous() else (tensor.size(), tensor.stride())
        key = (tensor.data_ptr(), tensor.numel(), shape, tensor.dtype, tensor._version)
        alive, moved = self._moved.get(key, (None, None))
        if alive is None or moved is None or alive.expired():
            self.down_bytes += tensor.nbytes
            if tensor.is_cuda:
                host, copied = self._copy_on_stream(tensor)
            else:
                host, copied = tensor.detach().clone(), None
            moved = _Moved(host, tensor.device, copied)
            self._moved[key] = StorageWeakRef(tensor.untyped_storage()), moved
            if self._forward is not None:
                self._forward.moves.append(weakref.ref(moved))
        return _Saved(moved, tensor.shape, self._forward)

    def _copy_on_stream(self, tensor: Tensor) -> tuple[Tensor, Any]:
        self._stream = self._stream or torch.cuda.Stream(tensor.device)
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self._stream):
            host.copy_(tensor.detach(), non_blocking=True)
            tensor.record_stream(self._stream)
            copied = self._stream.record_event()
        return host, copied

    def fetch(self, saved: Any) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        moved = saved.moved
        self._return(moved)
        if moved.copied is not None:
            before = saved.forward and saved.forward.before and saved.forward.before()
            for reference in before.moves if before else ():
                if (earlier := reference()) is not None:
                    self._return(earlier)
            current = torch.cuda.current_stream(moved.device)
            current.wait_event(moved.returned)
            moved.back.record_stream(current)
        return moved.back.view(saved.shape)

    def _return(self, moved: _Moved) -> None:
        """Start the copy to the device, once."""
        if moved.back is not None:
            return
        self.up_bytes += moved.host.nbytes
        if moved.copied is None:
            moved.back = moved.host.clone()
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(moved.copied)
            moved.back = moved.host.to(moved.device, non_blocking=True)
            moved.returned = self._stream.record_event()


def is_weight(tensor: Tensor, module: nn.Module) -> bool:
    """Whether a saved tensor is a parameter of the module. Checked when it is saved: ZeRO-3 gathers experts only then."""
    address = tensor.untyped_storage().data_ptr()
    whole = (p for p in module.parameters() if not isinstance(p, DTensor))
    return any(p.untyped_storage().data_ptr() == address for p in whole)


def offload_activations(modules: Iterable[nn.Module]) -> ActivationOffload:
    """Offload what these modules save for backward: any modules, typically the layers of a model."""
    offload = ActivationOffload()
    for i, module in enumerate(modules):
        module.forward = offload.wrap(module, module.forward, i)
    return offload
