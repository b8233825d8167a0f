"""Data parallelism: the same parameters everywhere (buckets), or each rank keeping a shard of them (ZeRO).

    zero 0   every rank has all; gradients are all-reduced in buckets, behind the backward that makes them
    zero 1   optimizer states are sharded: gradients reduce-scattered once a step, parameters gathered once a step
    zero 2   gradients are sharded too, where the plan reduces after every micro-batch; else as zero 1
    zero 3   parameters are sharded too: gathered layer by layer in forward, again in backward, freed in between

Gradients are **summed** here, never averaged: the loss was divided by the global number of tokens already, and an
average over ranks on top of it is this field's favourite silent bug.

Buckets: all gradients live in one flat buffer in the order backward makes them, and each parameter's `.grad` is a
view into it. The buffer is cut into ⌈bytes / bucket⌉ equal messages, wherever they fall. A message is sent when the
last parameter that touches it is done, so nothing is copied and the last message is all that backward cannot hide.
torch's own DDP does the same in C++, but averages, and stops at pipelines with several stages a rank. Of its options,
*bucket size* is `plan.bucket`; *overlap* is off where `plan.overlap` leaves out dp; frozen parameters have no place in
the buffer; *unused* parameters cost nothing to allow (their place stays zero and leaves at the end of backward); the
graph may change from step to step, since messages leave in their own order, not in the gradients', and where it is
*static* the unused hold no message back from the second step on; of several micro-batches only the last sends, or
*each* of them does (`reduce = "microbatch"`: more bytes and one more buffer, for nothing but to see what that
costs). A `compressor` sends less (`compress`).

ZeRO 1 to 3 are torch's `fully_shard`, a unit so many layers (`plan.wrap`) and one for each end (`gathering`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from meshwright.describe.plan import Plan
from meshwright.errors import MeshwrightError
from meshwright.parallel.data.gathering import Gathering, Unit, grouped, shard_units
from meshwright.parallel.expert.dispatch import experts_of
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.numerics.compress.compressors import Compressor, Layout, Running, compressor_of
from meshwright.parallel.numerics.compress.scatter import CompressedScatter, managed
from meshwright.parallel.numerics.precision import DTYPES, narrow

AFTER_LAST = "Messages leave in the backward that begin(last=True) announces, and finish() awaits them"


class Buckets:
    """Gradients of a module's parameters, or `only` of some of them, summed over a group (None: nobody to sum with).

    Replicas must start alike: unlike torch's DDP nothing is sent before the first gradient, and buffers are each rank's own.
    """

    def __init__(
        self,
        module: nn.Module,
        group: ProcessGroup | None,
        bucket_bytes: float,
        *,
        compressor: Compressor | None = None,
        overlap: bool = True,
        dtype: torch.dtype | None = None,
        only: set[nn.Parameter] | None = None,
        static: bool = False,
        each: bool = False,
    ) -> None:
        self.group, self.compressor, self.overlap = group, compressor, overlap
        self.static, self.each = static, each
        if compressor is not None:
            compressor.feedback.claim()
        parameters = [p for p in module.parameters() if wants(p) and (only is None or p in only)][::-1]
        self._wanted = module.parameters if only is None else lambda: only
        starts = [0, *accumulate(p.numel() for p in parameters)]
        device = parameters[0].device if parameters else None
        self.flat = torch.zeros(starts[-1], dtype=dtype or dtype_of(parameters), device=device)
        least, most = self.flat.element_size(), self.flat.nbytes
        count = max(1, -(-most // max(least, int(min(bucket_bytes, most)))))
        length = max(1, -(-self.flat.numel() // count))
        edges = [*range(0, starts[-1], length), starts[-1]]
        if compressor is not None and compressor.aligned:
            edges = sorted({starts[bisect_left(starts, edge)] for edge in edges})
        self.parameters, self.edges = parameters, edges
        self.messages = [self.flat[a:b] for a, b in pairwise(edges)]
        self.layouts: list[Layout] = [[] for _ in self.messages]
        self._touched: dict[torch.Tensor, range] = {}
        self._places: dict[torch.Tensor, torch.Tensor] = {}
        for p, at in zip(parameters, starts, strict=False):
            if dtype is not None and dtype != p.dtype:
                p.grad_dtype = dtype  # autograd then adds a narrow gradient into the wide one
            p.grad = self._places[p] = self.flat[at : at + p.numel()].view_as(p)
            message = bisect_right(edges, at) - 1
            self._touched[p] = range(message, bisect_left(edges, at + p.numel()))
            self.layouts[message].append((at - edges[message], p.shape))
            if group is not None:
                p.register_post_accumulate_grad_hook(self._done)
        self._holders = [[p for p, own in self._touched.items() if i in own] for i in range(len(self.messages))]
        self._touching = [len(holders) for holders in self._holders]
        self._missing: list[int] = []
        self._work: list[Any] = []
        self._started = 0
        self._used: set[torch.Tensor] = set()
        self._known = False  # whether `_used` are all that a static graph uses
        self._total: torch.Tensor | None = None  # of the micro-batches that were summed each by itself
        self._begun = False

    def begin(self, last: bool) -> None:
        """Before a micro-batch: gradients are complete after the backward of the `last` one."""
        if any(wants(p) and p not in self._places for p in self._wanted()):
            raise MeshwrightError(
                "MW-ZERO-003",
                "a parameter wants a gradient that was frozen, or another, when these buckets were made",
                why="It has no place in the buffer: each rank would go its own way",
                fix="other Buckets",
            )
        if self._work and not self.each:
            raise MeshwrightError(
                "MW-ZERO-004",
                "a micro-batch begins after the gradients of the last one have left",
                why=AFTER_LAST,
                fix="finish() before it, or zero() to give the step up",
            )
        if self.each and self._begun:
            self._complete()
            self._total = self.flat.clone() if self._total is None else self._total.add_(self.flat)
            self.flat.zero_()
        self._begun = True
        sends = (last or self.each) and self.overlap and self.group is not None
        self._missing = list(self._touching) if sends else []
        self._started = 0

    def _done(self, parameter: torch.Tensor) -> None:
        if self.static and not self._known:
            self._used.add(parameter)
        elif self.static and parameter not in self._used:
            raise MeshwrightError(
                "MW-ZERO-002",
                "a parameter has a gradient that had none in the first step",
                why="The graph was said to be static, and its message may have left",
                fix="static=False",
            )
        if not self._missing:
            return
        for i in self._touched[parameter]:
            self._missing[i] -= 1
            if self._missing[i] < 0:
                raise MeshwrightError(
                    "MW-ZERO-004",
                    "a parameter has a gradient after its message has left",
                    why=AFTER_LAST,
                    fix="begin(last=False) before each backward but the last",
                )
        # In order, so that every rank sends its messages in the same order whatever order gradients came in.
        while self._started < len(self.messages) and self._missing[self._started] == 0:
            self._send()

    def _send(self) -> None:
        i, message, group = self._started, self.messages[self._started], self.group
        self._started += 1
        for p in self._holders[i]:
            self._put(p)
        if group is None:
            return
        if self.compressor is None:
            self._work.append(distributed.all_reduce(message, group=group, async_op=True))
        else:
            steps = self.compressor.reduce(i, message, self.layouts[i], group.rank(), group.size())
            self._work.append(Running(steps, group))

    def _put(self, parameter: torch.Tensor) -> None:
        """Let a gradient stand where it is sent from: an optimizer's `zero_grad`, say, makes autograd begin another."""
        place, gradient = self._places[parameter], parameter.grad
        if gradient is place:
            return
        if gradient is None:
            place.zero_()
        else:
            place.copy_(gradient.detach())
        parameter.grad = place

    def start(self) -> None:
        """Send what has not been sent: a split backward writes gradients without calling hooks."""
        while self._started < len(self.messages):
            self._send()

    def finish(self) -> None:
        self._complete()
        if self._total is not None:
            self.flat.add_(self._total)
        self._total, self._begun = None, False
        if self.static and not self._known and self._used:
            for p, messages in self._touched.items():
                for i in messages if p not in self._used else ():
                    self._touching[i] -= 1
            self._known = True

    def _complete(self) -> None:
        self.start()
        if self.compressor is None:
            for work in self._work:
                work.wait()
        else:  # round by round, so that every rank asks for its exchanges in the same order
            left = self._work
            while left:
                left = [work for work in left if work.wait()]
        self._work = []
        self._missing = []
        self._started = 0

    def zero(self) -> None:
        """Before the next step; of one that was given up, what has left must arrive first."""
        if self._work:
            self._complete()
        self._total, self._begun = None, False
        self.flat.zero_()
        for p, place in self._places.items():
            if p.grad is not place:
                p.grad = place


def wants(parameter: nn.Parameter) -> bool:
    """A gradient of at least one number."""
    return parameter.requires_grad and parameter.numel() > 0


def dtype_of(parameters: list[nn.Parameter]) -> torch.dtype | None:
    """Of a buffer for their gradients; none: torch's own."""
    dtypes = sorted({p.dtype for p in parameters}, key=str)
    if len(dtypes) > 1:
        raise MeshwrightError(
            "MW-ZERO-005",
            f"parameters of {' and '.join(map(str, dtypes))} in one buffer",
            why="An optimizer wants each gradient in its parameter's dtype",
            valid=["Buckets(…, only=parameters of one dtype) for each", "dtype=… for all"],
        )
    return dtypes[0] if dtypes else None


class Alone:
    """Gradients with nobody to sum them with: autograd's own tensors, made as backward frees activations and given
    back after the update. A buffer for all of them would stand beside the activations of forward."""

    def __init__(self, parameters: Iterable[nn.Parameter], dtype: torch.dtype | None = None) -> None:
        self.parameters = list(parameters)
        for p in self.parameters:
            p.grad_dtype = dtype or p.dtype

    def begin(self, last: bool) -> None:
        """Every micro-batch adds to what is there."""

    def start(self) -> None:
        """Nothing to send."""

    def finish(self) -> None:
        for p in self.parameters:
            if p.grad is None and p.requires_grad:  # unused in this step
                p.grad = torch.zeros_like(p, dtype=p.grad_dtype)

    def zero(self) -> None:
        for p in self.parameters:
            p.grad = None


class Shards:
    """Gradients of one module under `fully_shard`: torch reduces them; this says when."""

    def __init__(self, module: FSDPModule, plan: Plan, scatters: list[CompressedScatter]) -> None:
        self.module, self.plan, self.scatters = module, plan, scatters

    def begin(self, last: bool) -> None:
        plan = self.plan
        frees_each = plan.zero == 3 and plan.reshard
        self.module.set_reshard_after_backward(frees_each or last)
        self.module.set_requires_gradient_sync(plan.reduces_each or last)

    def start(self) -> None:
        """Torch starts by itself, from its hooks or from the pipeline's own action."""

    def finish(self) -> None:
        """Torch waits at the end of backward."""

    def zero(self) -> None:
        """What was gathered since backward, by an evaluation before the update, is old by now."""
        for part in self.module.modules():  # type: ignore[attr-defined]
            if isinstance(part, FSDPModule):
                part.reshard()
        for p in self.module.parameters():  # type: ignore[attr-defined]
            if isinstance(p, DTensor):
                p.grad = None


def units(module: nn.Module, layers: int = 1) -> list[Unit]:
    """What is gathered together, in the order it runs: so many layers, and each end; the two ends are one unit where
    they share a weight. With 0 layers a unit, the whole module is the one unit there is."""
    children = list(module.children())
    ends = [child for child in children if not isinstance(child, nn.ModuleDict)]
    owners = [{id(p) for p in end.parameters()} for end in ends]
    shared = len(ends) == 2 and bool(owners[0] & owners[1])
    out = [ends] if shared else []
    for child in children if layers else ():
        if isinstance(child, nn.ModuleDict):
            out += grouped(list(child.values()), layers)
        elif not shared:
            out.append([child])
    return out if layers else []


def shard(module: nn.Module, mesh: Mesh, plan: Plan, dtype: torch.dtype) -> None:
    """Put `fully_shard` on a stage still on the meta device.

    A pipeline stage is gathered once a step, before its first action, and freed after its last, whatever the plan
    says of resharding: freed between forward and a *split* backward, torch would silently lose the gradients of W
    actions.
    """
    frees = plan.zero == 3 and plan.reshard and plan.pp == 1
    ahead = None if plan.prefetch else 0
    sent = plan.grad_dtype if plan.wire != "none" else plan.reduce_dtype  # what is sent narrower is narrowed by us
    how = Gathering(
        forward=ahead,
        backward=ahead,
        reshard=frees,
        param_dtype=dtype if narrow(dtype) else None,
        reduce_dtype=DTYPES.get(sent) if narrow(dtype) else None,
    )
    apart, over = experts_of(module), mesh.expert_sharding
    ignored = {p for experts in apart for p in experts.parameters()} if over is None else None
    if over is not None:
        for experts in apart:
            shard_units(experts, [], over, how)
    shard_units(module, units(module, plan.wrap), mesh.sharding(), how, ignored)


class Several:
    """The reductions of a stage whose parameters are not all summed over the same ranks."""

    def __init__(self, parts: list[Buckets | Shards | Alone]) -> None:
        self.parts = parts

    def begin(self, last: bool) -> None:
        for part in self.parts:
            part.begin(last)

    def start(self) -> None:
        for part in self.parts:
            part.start()

    def finish(self) -> None:
        for part in self.parts:
            part.finish()

    def zero(self) -> None:
        for part in self.parts:
            part.zero()


Reduction = Buckets | Shards | Alone | Several


def reduction(
    module: nn.Module, mesh: Mesh, plan: Plan, dtype: torch.dtype, exact: Collection[nn.Parameter] = ()
) -> Reduction:
    """Experts are summed over expert_dp, all else over dp·cp; what `fully_shard` holds, torch sums. Where gradients are
    compressed, those of `exact` parameters are not."""
    options: dict[str, Any] = {
        "overlap": plan.overlap is None or "dp" in plan.overlap,
        "each": plan.reduce == "microbatch",
    }
    if narrow(dtype):
        options["dtype"] = DTYPES[plan.grad_dtype]
    experts = {p for part in experts_of(module) for p in part.parameters() if not isinstance(p, DTensor)}
    apart = set(exact) if plan.wire != "none" else set()
    dense = set(module.parameters()) - experts
    parts: list[Buckets | Shards | Alone] = []
    if isinstance(module, FSDPModule):
        parts.append(Shards(module, plan, scatters(module, mesh, plan, apart)))
    elif mesh.group("dp_cp") is None:
        parts.append(Alone(dense, options.get("dtype")))
    else:
        parts.append(
            Buckets(
                module, mesh.group("dp_cp"), plan.bucket, compressor=compressor_of(plan), only=dense - apart, **options
            )
        )
    if experts:
        parts.append(
            Buckets(
                module,
                mesh.group("expert_dp"),
                plan.bucket,
                compressor=compressor_of(plan),
                only=experts - apart,
                **options,
            )
        )
    if apart & experts:
        parts.append(Buckets(module, mesh.group("expert_dp"), plan.bucket, only=apart & experts, **options))
    if apart & dense and isinstance(parts[0], Buckets):
        parts.append(Buckets(module, mesh.group("dp_cp"), plan.bucket, only=apart & dense, **options))
    return parts[0] if len(parts) == 1 else Several(parts)


def scatters(module: nn.Module, mesh: Mesh, plan: Plan, exact: set[nn.Parameter]) -> list[CompressedScatter]:
    """Let every unit of a sharded module send its gradients compressed, if the plan says so."""
    if plan.wire == "none":
        return []
    experts = [part for part in experts_of(module) if isinstance(part, FSDPModule)]
    sizes: list[tuple[list[Any], str]] = [(unit, "shard_cp") for unit in [*units(module, plan.wrap), [module]]]
    out = []
    for parts, axis in [*sizes, *(([part], "expert_shard") for part in experts)]:
        parameters = list(dict.fromkeys(p for part in parts for p in managed(part) if isinstance(p, DTensor)))
        compressor = compressor_of(plan)
        if parameters and compressor is not None:
            out.append(CompressedScatter(compressor, parameters, axis, mesh.size(axis), exact))
            parts[0].set_custom_reduce_scatter(out[-1])
    return out


def compressors_of(reductions: list[Reduction]) -> list[Compressor]:
    scattered = [s.compressor for part in parts_of(reductions) if isinstance(part, Shards) for s in part.scatters]
    return [*(b.compressor for b in buckets_of(reductions) if b.compressor is not None), *scattered]


def parts_of(reductions: list[Reduction]) -> list[Buckets | Shards | Alone]:
    return [p for r in reductions for p in (r.parts if isinstance(r, Several) else [r])]


def buckets_of(reductions: list[Reduction]) -> list[Buckets]:
    return [p for p in parts_of(reductions) if isinstance(p, Buckets)]
