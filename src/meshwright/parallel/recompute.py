"""Recompute: drop what forward computed and compute it again in backward, trading time for memory.

    none        a layer keeps all it needs                        saved bytes S a layer, no extra work
    selective   attention's core, softmax(QKᵀ)V, is recomputed    S less the core's part, a little work
    full        a layer keeps its input only, T·h elements        T·h a layer and S once, one more forward: 4/3 the work
    every n-th  full, on layers 0, n, 2n, … of a stage            between none and full
    auto        full, on the fewest layers that fit a budget      (n − c)·S + c·T·h + S ≤ budget (`lower.recompute`), or the
                                                                  memory of the device (`predict.prediction`)

With an attention kernel that stores the softmax, `selective` is the best trade (Korthikanti et al. 2022): the core
holds 5·a·s/h of a layer's 34 + 5·a·s/h bytes per element and little of its work. A flash kernel already recomputes the
softmax; there `selective` saves only the log-sum-exp, and is not worth its extra forward.

Communication inside a recomputed part is repeated, with two exceptions: forward is rerun only until backward has all
tensors it needs, so the sum after a layer's last product is not repeated; and under sequence parallelism the input that
the recomputed forward gathers is still there when the gradients of the weights need it.

How it works: whatever a layer saves for backward becomes an empty handle. The first handle that is unpacked reruns
forward, in the random state it had, fills all handles, and restores the module's buffers (running statistics count a
batch once). A handle's tensor lives as long as autograd holds the handle: an ordinary backward frees them node by node,
and a split backward (I now, W later) recomputes a layer once, in I, and keeps it until W; zero-bubble schedules trade
their bubbles for that memory. (torch's own checkpoint reruns forward for every group of parameters in W.) The input
itself is saved through autograd, so that hooks outside, such as offload, see it.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from meshwright.describe.plan import Plan
from meshwright.errors import MeshwrightError
from meshwright.models.step_context import current, within


@dataclass(frozen=True)
class RandomState:
    """The state of the random numbers of the host, and of a GPU."""

    host: Tensor
    device: torch.device
    gpu: Tensor | None

    @classmethod
    def of(cls, device: torch.device) -> RandomState:
        return cls(torch.get_rng_state(), device, torch.cuda.get_rng_state(device) if device.type == "cuda" else None)

    def restore(self) -> None:
        torch.set_rng_state(self.host)
        if self.gpu is not None:
            torch.cuda.set_rng_state(self.gpu, self.device)


class _AllFilled(Exception):
    """Stops a rerun once every handle that autograd still holds has its tensor."""


class _Handle:
    """A placeholder for one tensor that the original forward saved."""

    def __init__(self, tensor: Tensor) -> None:
        self.kind = tensor.shape, tensor.dtype


class _SaveArguments(torch.autograd.Function):
    """Saves the arguments through autograd, so that hooks outside apply to them."""

    @staticmethod
    def forward(ctx: Any, switch: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return switch.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise AssertionError("nothing depends on the output of _SaveArguments")


def recomputation_differs(how: str) -> MeshwrightError:
    return MeshwrightError(
        "MW-PAR-005",
        f"the recomputed forward {how}",
        why="A recomputed module must compute the same from the same inputs and random state",
        fix="call train() or eval() before forward, not between forward and backward",
    )


def storage_address(tensor: Tensor) -> int:
    """What tensors of one storage share: its address. A subclass that wraps other tensors, as gathers in fp8 make, has no memory: its identity."""
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return id(tensor)


class _Call:
    """One call of a function that backward will recompute."""

    def __init__(self, function: Callable[..., Any], args: tuple, module: nn.Module | None) -> None:
        self.function, self.module = function, module
        self.tensors = [i for i, a in enumerate(args) if isinstance(a, Tensor)]
        self.other_args = [None if isinstance(a, Tensor) else a for a in args]
        kept = [args[i] for i in self.tensors]
        # Keep the tensor: its node alone would not keep the saved arguments
        self.kept = _SaveArguments.apply(torch.empty(0, requires_grad=True), *kept)
        self.requires_grad = [a.requires_grad for a in kept]
        self.device = next((a.device for a in kept if a.is_cuda), torch.device("cpu"))
        self.random = RandomState.of(self.device)
        self.autocast = torch.is_autocast_enabled(self.device.type), torch.get_autocast_dtype(self.device.type)
        self.context = current()  # dropout reads the samples of the step from it
        self.own: set[int] = set()
        self.handles: list[weakref.ref[_Handle]] = []
        self.values: weakref.WeakKeyDictionary[_Handle, Tensor] = weakref.WeakKeyDictionary()

    def weights(self) -> set[int]:
        """The storages of the module's parameters, of which nothing is recomputed. Two compiled graphs of one function, that of the forward and
        that of its rerun, may save them at other places among the activations."""
        return {storage_address(p) for p in self.module.parameters()} if self.module is not None else set()

    def pack(self, tensor: Tensor) -> _Handle | Tensor:
        if storage_address(tensor) in self.own:
            return tensor
        handle = _Handle(tensor)
        self.handles.append(weakref.ref(handle))
        return handle

    def unpack(self, handle: _Handle | Tensor) -> Tensor:
        if isinstance(handle, Tensor):
            return handle
        if handle not in self.values:
            self.rerun()
        if handle not in self.values:
            raise recomputation_differs("saved fewer tensors than the original")
        return self.values[handle]

    def forward(self, args: tuple) -> Any:
        self.own = self.weights()
        with saved_tensors_hooks(self.pack, self.unpack), within(keeps_gathered=True):
            return self.function(*args)

    def rerun(self) -> None:
        args = list(self.other_args)
        for i, tensor, requires_grad in zip(
            self.tensors, self.kept.grad_fn.saved_tensors, self.requires_grad, strict=True
        ):
            args[i] = tensor.detach().requires_grad_(requires_grad)
        handles = enumerate([h() for h in self.handles])
        last = max(i for i, h in enumerate(self.handles) if h() is not None)

        own = self.weights()
        filled: list[bool] = []

        def collect(tensor: Tensor) -> None:
            if storage_address(tensor) in own:
                return
            number, handle = next(handles)
            if handle is not None and handle.kind != (tensor.shape, tensor.dtype):
                raise recomputation_differs(
                    f"saved a tensor of shape {tuple(tensor.shape)} where the original saved {tuple(handle.kind[0])}"
                )
            if handle is not None:
                self.values[handle] = tensor.detach()
            if number == last:
                filled.append(True)
                raise _AllFilled

        buffers = [(b, b.clone()) for b in self.module.buffers()] if self.module is not None else []
        cuda = [self.device] if self.device.type == "cuda" else []
        scope = within(self.context, recomputing=True, keeps_gathered=True)
        with torch.random.fork_rng(devices=cuda), torch.enable_grad(), scope:
            self.random.restore()
            autocast = torch.autocast(self.device.type, dtype=self.autocast[1], enabled=self.autocast[0])
            try:
                with autocast, saved_tensors_hooks(collect, lambda tensor: tensor):
                    self.function(*args)
            except (_AllFilled, SystemError):  # torch < 2.13 loses what a hook raises inside of `Function.apply`
                if not filled:
                    raise
        for buffer, before in buffers:
            buffer.copy_(before)


def recomputed(function: Callable[..., Any], module: nn.Module | None = None) -> Callable[..., Any]:
    """The function, saving only its arguments for backward and rerunning there. `module` is the one whose method it is, if
    any: the rerun leaves its buffers unchanged."""

    def call(*args: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return function(*args, **named)
        if torch.compiler.is_compiling():  # the compiler recomputes what this marks
            return checkpoint(function, *args, use_reentrant=False, **named)

        def positional(*given: Any) -> Any:
            return function(*given[: len(args)], **dict(zip(named, given[len(args) :], strict=True)))

        given = (*args, *named.values())
        check_no_cache(given)
        return _Call(positional, given, module).forward(given)

    return call


def check_no_cache(arguments: tuple) -> None:
    """Raise for a key-value cache, as Hugging Face's models hand to their layers: each run would append to it."""
    cache = next((a for a in arguments if hasattr(a, "get_seq_length") and hasattr(a, "update")), None)
    if cache is not None:
        raise MeshwrightError(
            "MW-PAR-008",
            f"a recomputed layer is given a key-value cache ({type(cache).__name__})",
            why="The second run would append the same keys and values again",
            fix="model.config.use_cache = False",
        )


def recompute(modules: Iterable[nn.Module], every: int = 1, count: int | None = None) -> list[nn.Module]:
    """Recompute every n-th of these modules in backward, at most `count` of them. Returns the recomputed modules.

    Works on any modules: `recompute(model.blocks, every=2)`.
    """
    if every < 1 or (count is not None and count < 0):
        raise MeshwrightError(
            "MW-PAR-002", f"every={every}, count={count}: every must be at least 1, and count at least 0"
        )
    chosen = list(modules)[::every][:count]
    for module in chosen:
        module.forward = recomputed(module.forward, module)
    return chosen


def recompute_attention(geometry: Any) -> None:
    """Recompute attention's core in backward. Attention to blocks of a divided sequence (`context`) always does so, in its
    own backward: wrapping it would only send keys and values once more."""
    whole_sequence = geometry.attend == geometry.attend_whole
    geometry.attend_whole = recomputed(geometry.attend_whole)
    if whole_sequence:
        geometry.attend = geometry.attend_whole


def memory_of(device: str) -> float:
    """Bytes of memory of one rank, the smallest of all ranks, so that all choose the same layers: a GPU's memory, or an
    equal share of the host's."""
    ranks = distributed.get_world_size() if distributed.is_initialized() else 1
    if torch.device(device).type == "cuda":
        own = float(torch.cuda.get_device_properties(device).total_memory)
    else:
        own = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) / ranks
    if ranks == 1:
        return own
    least = torch.tensor(own, dtype=torch.float64, device=device)
    distributed.all_reduce(least, distributed.ReduceOp.MIN)
    return float(least)


def recompute_plan(module: nn.Module, plan: Plan) -> None:
    """Recompute what the plan says, on a stage of one of our models."""
    layers = list(module.layers.values())  # type: ignore[operator]
    if plan.recompute == "full":
        recompute(layers[i] for i in plan.recomputed_layers(range(len(layers))))
    elif plan.recompute == "selective" and hasattr(module, "geometry"):
        recompute_attention(module.geometry)
