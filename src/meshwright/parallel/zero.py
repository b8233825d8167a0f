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
torch's own DDP does the same in C++, but averages, and stops at pipelines with several stages a rank.

ZeRO 1 to 3 are torch's `fully_shard`, a unit a layer and one for each end of the model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule, fully_shard

from meshwright.describe.plan import Plan
from meshwright.parallel.mesh import Mesh


class Buckets:
    """Gradients of one module's parameters, summed over a group (None: nobody to sum with)."""

    def __init__(self, module: nn.Module, group: ProcessGroup | None, bucket_bytes: float) -> None:
        self.group = group
        parameters = list(module.parameters())[::-1]
        first = parameters[0]
        self.flat = torch.zeros(sum(p.numel() for p in parameters), dtype=first.dtype, device=first.device)
        count = max(1, -(-self.flat.nbytes // max(int(bucket_bytes), first.element_size())))
        length = -(-self.flat.numel() // count)
        self.messages = list(self.flat.split(length))
        self._touched: dict[torch.Tensor, range] = {}
        at = 0
        for p in parameters:
            p.grad = self.flat[at : at + p.numel()].view_as(p)
            self._touched[p] = range(at // length, (at + p.numel() - 1) // length + 1)
            at += p.numel()
            if group is not None:
                p.register_post_accumulate_grad_hook(self._done)
        self._touching = [0] * len(self.messages)
        for messages in self._touched.values():
            for i in messages:
                self._touching[i] += 1
        self._missing: list[int] = []
        self._work: list[Any] = []
        self._started = 0

    def begin(self, last: bool) -> None:
        """Before a micro-batch: gradients are complete after the backward of the `last` one."""
        self._missing = list(self._touching) if last and self.group is not None else []
        self._started = 0

    def _done(self, parameter: torch.Tensor) -> None:
        if not self._missing:
            return
        for i in self._touched[parameter]:
            self._missing[i] -= 1
        # In order, so that every rank sends its messages in the same order whatever order gradients came in.
        while self._started < len(self.messages) and self._missing[self._started] == 0:
            self._send()

    def _send(self) -> None:
        message = self.messages[self._started]
        self._started += 1
        self._work.append(distributed.all_reduce(message, group=self.group, async_op=True))

    def start(self) -> None:
        """Send what has not been sent: a split backward writes gradients without calling hooks."""
        while self.group is not None and self._started < len(self.messages):
            self._send()

    def finish(self) -> None:
        self.start()
        for work in self._work:
            work.wait()
        self._work.clear()
        self._missing = []
        self._started = 0

    def zero(self) -> None:
        self.flat.zero_()


class Shards:
    """Gradients of one module under `fully_shard`: torch reduces them; this says when."""

    def __init__(self, module: FSDPModule, plan: Plan) -> None:
        self.module, self.plan = module, plan

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
        for p in self.module.parameters():  # type: ignore[attr-defined]
            p.grad = None


def units(module: nn.Module) -> list[nn.Module | list[nn.Module]]:
    """What is gathered together: each layer, and each end; the two ends are one unit where they share a weight."""
    layers: list[nn.Module | list[nn.Module]] = []
    ends: list[nn.Module] = []
    for child in module.children():
        if isinstance(child, nn.ModuleDict):
            layers += child.values()
        else:
            ends.append(child)
    owners = [{id(p) for p in end.parameters()} for end in ends]
    shared = len(ends) == 2 and bool(owners[0] & owners[1])
    return [*([ends] if shared else ends), *layers]


def shard(module: nn.Module, mesh: Mesh, plan: Plan) -> None:
    """Put `fully_shard` on a module still on the meta device.

    A pipeline stage is gathered once a step, before its first action, and freed after its last, whatever the plan
    says of resharding: freed between forward and a *split* backward, torch would silently lose the gradients of W
    actions.
    """
    frees = plan.zero == 3 and plan.reshard and plan.pp == 1
    options: dict[str, Any] = {"mesh": mesh.sharding(), "reshard_after_forward": frees}
    for unit in units(module):
        fully_shard(unit, **options)
    fully_shard(module, **options)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)  # else the factor 1 would ask for PREMUL_SUM, which gloo lacks


Reduction = Buckets | Shards


def reduction(module: nn.Module, mesh: Mesh, plan: Plan) -> Reduction:
    if isinstance(module, FSDPModule):
        return Shards(module, plan)
    return Buckets(module, mesh.group("dp"), plan.bucket)
