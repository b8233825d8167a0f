"""Recompute: throw away what forward made and make it again when backward asks, time for memory.

    none        a layer keeps all it needs                        saved bytes S a layer, no work again
    selective   attention's core, softmax(QKᵀ)V, is made again    S less the core's own, a little work
    full        a layer keeps its input only, T·h elements        T·h a layer and S once, a forward more: 4/3 the work
    every n-th  full, on layers 0, n, 2n, … of a stage            between none and full
    auto        full, on the fewest layers that fit a budget      (n − c)·S + c·T·h + S ≤ budget (`lower.recompute`), or what
                                                                  the plan leaves of the device (`cost.recompute`)

Beside a kernel that stores the softmax, `selective` is the best trade there is (Korthikanti et al. 2022): the core
holds 5·a·s/h of a layer's 34 + 5·a·s/h bytes an element and little of its work. A flash kernel makes the softmax again
by itself; there `selective` saves its log-sum-exp only, and is not worth its forward.

Communication inside what is made again happens again. Two exchanges do not: forward is rerun only until backward has
what it needs, so the sum after a layer's last product is not repeated; and under sequence parallelism the input that
forward gathers again is still whole when the weights' gradients want it.

How: whatever a layer saves for backward becomes an empty handle. The first one unpacked reruns forward, in the random
state it had, and fills all of them, and leaves the module's buffers as they were (running statistics count a batch once);
a handle's tensor lives as long as autograd holds the handle. So an ordinary
backward frees them node by node, and a split backward (I now, W later) makes a layer again once, in I, and holds it
until W: the zero-bubble schedules trade their bubbles for just that memory. (torch's own checkpoint reruns forward for
every group of parameters in W.) The input itself is saved through autograd, so hooks outside, such as offload, see it.
"""

from __future__ import annotations

import contextvars
import os
import weakref
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Any

import torch
from torch import distributed, nn
from torch.autograd.graph import saved_tensors_hooks

from meshwright.describe.plan import Plan
from meshwright.errors import MeshwrightError
from meshwright.parallel.tensor.regather import keep_whole

_under_way: ContextVar[bool] = ContextVar("recompute_under_way", default=False)


def under_way() -> bool:
    """Whether what runs now runs for the second time."""
    return _under_way.get()


class _Enough(Exception):
    """Raised inside a rerun once every handle that is still wanted has its tensor."""


class _Handle:
    """Stands for one saved tensor of the first run."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.kind = tensor.shape, tensor.dtype


class _Keep(torch.autograd.Function):
    """Saves the arguments where autograd saves everything, under whatever hooks are on outside."""

    @staticmethod
    def forward(ctx: Any, switch: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return switch.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise AssertionError("nothing depends on what _Keep returns")


def differs(how: str) -> MeshwrightError:
    return MeshwrightError(
        "MW-PAR-005",
        f"a module that was made again in backward {how}",
        why="What it computes must depend on its inputs and the random state alone",
        fix="call train() or eval() before forward, not between forward and backward",
    )


class _Run:
    """One call of a function that will be made again."""

    def __init__(self, function: Callable[..., Any], args: tuple, module: nn.Module | None) -> None:
        self.function, self.module = function, module
        self.tensors = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor)]
        self.others = [None if isinstance(a, torch.Tensor) else a for a in args]
        kept = [args[i] for i in self.tensors]
        self.kept = _Keep.apply(torch.empty(0, requires_grad=True), *kept)  # the tensor: alone its node would forget
        self.wanted = [a.requires_grad for a in kept]
        self.device = next((a.device for a in kept if a.is_cuda), torch.device("cpu"))
        self.random = (
            torch.get_rng_state(),
            torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None,
        )
        self.autocast = torch.is_autocast_enabled(self.device.type), torch.get_autocast_dtype(self.device.type)
        self.context = contextvars.copy_context()  # dropout, for one, asks it for the moment
        self.handles: list[weakref.ref[_Handle]] = []
        self.values: weakref.WeakKeyDictionary[_Handle, torch.Tensor] = weakref.WeakKeyDictionary()

    def pack(self, tensor: torch.Tensor) -> _Handle:
        handle = _Handle(tensor)
        self.handles.append(weakref.ref(handle))
        return handle

    def unpack(self, handle: _Handle) -> torch.Tensor:
        if handle not in self.values:
            self.context.run(self.rerun)
        if handle not in self.values:
            raise differs("saved less")
        return self.values[handle]

    def first(self, args: tuple) -> Any:
        with saved_tensors_hooks(self.pack, self.unpack), keep_whole():
            return self.function(*args)

    def rerun(self) -> None:
        args = list(self.others)
        for i, tensor, wanted in zip(self.tensors, self.kept.grad_fn.saved_tensors, self.wanted, strict=True):
            args[i] = tensor.detach().requires_grad_(wanted)
        missing = iter([h() for h in self.handles])
        last = max(i for i, h in enumerate(self.handles) if h() is not None)
        seen = 0

        def collect(tensor: torch.Tensor) -> None:
            nonlocal seen
            handle = next(missing)
            if handle is not None and handle.kind != (tensor.shape, tensor.dtype):
                raise differs(f"saved {tuple(tensor.shape)} in the place of {tuple(handle.kind[0])}")
            if handle is not None:
                self.values[handle] = tensor.detach()
            if seen == last:
                raise _Enough
            seen += 1

        buffers = [(b, b.clone()) for b in self.module.buffers()] if self.module is not None else []
        cuda = [self.device] if self.device.type == "cuda" else []
        token = _under_way.set(True)
        with torch.random.fork_rng(devices=cuda), torch.enable_grad(), keep_whole():
            torch.set_rng_state(self.random[0])
            if self.random[1] is not None:
                torch.cuda.set_rng_state(self.random[1], self.device)
            with torch.autocast(self.device.type, dtype=self.autocast[1], enabled=self.autocast[0]):
                try:
                    with saved_tensors_hooks(collect, lambda nothing: nothing):
                        self.function(*args)
                except _Enough:
                    pass
                finally:
                    _under_way.reset(token)
        for buffer, before in buffers:
            buffer.copy_(before)


def again(function: Callable[..., Any], module: nn.Module | None = None) -> Callable[..., Any]:
    """The function, keeping its arguments for backward and nothing else; a method of a `module`, whose buffers it may move."""

    def call(*args: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return function(*args, **named)

        def in_a_row(*given: Any) -> Any:
            return function(*given[: len(args)], **dict(zip(named, given[len(args) :], strict=True)))

        given = (*args, *named.values())
        return _Run(in_a_row, given, module).first(given)

    return call


def recompute(modules: Iterable[nn.Module], every: int = 1, count: int | None = None) -> list[nn.Module]:
    """Make every n-th of these modules again in backward, `count` of them at most. Returns those chosen.

    Works on any module: `recompute(model.blocks, every=2)`.
    """
    if every < 1 or (count is not None and count < 0):
        raise MeshwrightError("MW-PAR-002", f"every={every}, count={count}: layers to recompute are counted from 1 up")
    chosen = list(modules)[::every][:count]
    for module in chosen:
        module.forward = again(module.forward, module)
    return chosen


def core_again(geometry: Any) -> None:
    """Attention to whole sequences is made again in backward. Attention to blocks of a divided one (`context`) always
    is, by its own backward: wrapping it would only send keys and values once more."""
    undivided = geometry.attend == geometry.attend_whole
    geometry.attend_whole = again(geometry.attend_whole)
    if undivided:
        geometry.attend = geometry.attend_whole


def memory_of(device: str) -> float:
    """Bytes for what one rank holds, of all ranks the least, so that all decide alike: a GPU's, or an equal share of
    the host's."""
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
    """What the plan says, on a stage of one of our models."""
    layers = list(module.layers.values())  # type: ignore[operator]
    if plan.recompute == "full":
        recompute(layers[i] for i in plan.recomputed_layers(range(len(layers))))
    elif plan.recompute == "selective" and hasattr(module, "geometry"):
        core_again(module.geometry)
