"""Offload: keep tensors on the host while the device does not need them.

    states        Adam's moments and the masters are on the host and are updated there (`precision.Masters`): a step
                  sends each gradient down and each parameter up, 4 + 2 bytes, and frees 12 of 16 bytes per parameter
    activations   tensors that a layer saves for backward go to the host after forward and return before its backward

The trade is bytes over PCIe against memory: S bytes saved by a layer take 2·S/B, B ≈ 25 GB/s (PCIe 4) to 50 (PCIe 5),
and are hidden behind compute while S/B is less than the layer's forward, of 24·T·h² FLOPs. With S ≈ 34·T·h bytes and at
400 TFLOP/s a layer hides its own offload for h ≥ 34·400e12 / (24·25e9) ≈ 23,000: rarely. With *full recompute* only the
layer's input, 2·T·h bytes, is moved: hidden from h ≈ 1,300 on. Use both together. Or move the tensors of the first n of L layers only: their
copies are hidden behind the compute of all layers, n·S/B against that of L, and the device keeps the tensors of L − n layers.

On a GPU copies run on a separate stream, to pinned memory, and the device's memory is freed once the copy is done. When backward
reaches layer i, the tensors of layer i − (L − n − 1) start to return, so that those of L − n layers are on the device, as in the
forward; and of two, if fewer than two stay there. (Transformer Engine's `cpu_offload` starts them at the same layers.) On a
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


class _Saved:
    """Stands for a tensor that autograd saved: where it was moved, and its shape there. Several may share one move."""

    def __init__(self, moved: _Moved, shape: torch.Size) -> None:
        self.moved, self.shape = moved, shape


class ActivationOffload:
    """Moves tensors that the first `count` layers save to the host; counts the bytes moved each way.

    `ahead`: how many layers before a layer's backward its tensors start to return; they travel while those layers compute."""

    def __init__(self, count: int = 1, ahead: int = 1) -> None:
        self.count, self.ahead = count, ahead
        self.down_bytes = self.up_bytes = 0
        self._moved: dict[tuple, tuple[StorageWeakRef, _Moved]] = {}
        # Of the last forward of each layer. The graph keeps moves alive; here they are weak.
        self._moves: dict[int, list[weakref.ref[_Moved]]] = {}
        self._stream: Any = None

    def wrap(self, module: nn.Module, forward: Callable[..., Any], layer: int = 0) -> Callable[..., Any]:
        def pack(tensor: Tensor) -> Any:
            return without_history(tensor) if is_weight(tensor, module) else self.send(tensor, layer)

        def run(*args: Any, **kwargs: Any) -> Any:
            if layer < self.count:
                self._moves[layer] = []
                with keeping(pack, self.fetch):
                    out = forward(*args, **kwargs)
                self._moved.clear()  # a later forward may reuse the same addresses for other tensors
            else:
                out = forward(*args, **kwargs)
            self._return_before_backward(out, self._moves.get(layer - self.ahead, []))
            return out

        return run

    def _return_before_backward(self, out: Any, moves: list[weakref.ref[_Moved]]) -> None:
        """Start to return these tensors when backward reaches the layer of this output."""

        def start(_: Tensor) -> None:
            for reference in moves:
                if (moved := reference()) is not None:
                    self._return(moved)

        outputs = out if isinstance(out, tuple) else (out,)
        output = next((x for x in outputs if isinstance(x, Tensor) and x.requires_grad), None)
        if moves and output is not None:
            output.register_hook(start)

    def send(self, tensor: Tensor, layer: int = 0) -> _Saved:
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
            self._moves.setdefault(layer, []).append(weakref.ref(moved))
        return _Saved(moved, tensor.shape)

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


def offload_activations(modules: Iterable[nn.Module], count: int = 0) -> ActivationOffload:
    """Offload what the first `count` of these modules (0: all) save for backward: any modules, typically the layers of a model."""
    modules = list(modules)
    moved = min(count or len(modules), len(modules))
    offload = ActivationOffload(moved, max(1, len(modules) - moved - 1))
    for i, module in enumerate(modules):
        module.forward = offload.wrap(module, module.forward, i)
    return offload
