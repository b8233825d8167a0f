"""Plain data parallelism: gradients in one flat buffer, all-reduced in buckets while backward still runs.

All gradients are in one flat buffer in the order in which backward produces them, and each parameter's `.grad` is a
view into it. The buffer is cut into ⌈bytes / bucket⌉ equal messages, at any element. A message is sent as soon as the
last parameter that touches it has its gradient, so nothing is copied, and only the last message cannot be hidden behind
backward. torch's own DDP does the same in C++, but it averages, and it does not support pipelines with several stages
on one rank. Its options have these counterparts:

    bucket size         `plan.bucket`
    overlap             off where `plan.overlap` leaves out dp
    frozen parameters   have no place in the buffer
    unused parameters   always allowed: their part of the buffer stays zero and is sent at the end of backward
    changing graphs     always allowed: messages are sent in their own order, not in the order of the gradients
    no_sync             only the last micro-batch sends, unless `per_microbatch` (`reduce = "microbatch"`): more bytes and
                        one more buffer, which exists to measure what that costs
    communication hook  a `compressor` (`numerics.compress`)
"""

from bisect import bisect_left, bisect_right
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup

from meshwright.errors import MeshwrightError
from meshwright.parallel.numerics.compress.base import Compressor, Layout, RunningReduction

SENT_IN_LAST_BACKWARD = "Messages are sent during the backward that begin(last=True) announces; finish() waits for them"


class Buckets:
    """Gradients of a module's parameters, or `only` of some of them, summed over a group. No group: nothing is sent.

    Replicas must start with equal parameters: unlike torch's DDP, nothing is broadcast before the first step, and
    buffers are not synchronised.
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
        per_microbatch: bool = False,
    ) -> None:
        self.group, self.compressor, self.overlap = group, compressor, overlap
        self.per_microbatch = per_microbatch
        if compressor is not None:
            compressor.feedback.claim()
        self._candidates = module.parameters if only is None else lambda: only
        parameters = [p for p in module.parameters() if has_gradient(p) and (only is None or p in only)][::-1]
        starts = [0, *accumulate(p.numel() for p in parameters)]
        device = parameters[0].device if parameters else None
        self.flat = torch.zeros(starts[-1], dtype=dtype or common_dtype(parameters), device=device)
        self.parameters, self.edges = parameters, message_edges(self.flat, bucket_bytes)
        if compressor is not None and compressor.aligned:
            self.edges = sorted({starts[bisect_left(starts, edge)] for edge in self.edges})
        self.messages = [self.flat[a:b] for a, b in pairwise(self.edges)]
        self.layouts: list[Layout] = [[] for _ in self.messages]
        self._messages_of: dict[Tensor, range] = {}
        self._views: dict[Tensor, Tensor] = {}
        for p, start in zip(parameters, starts, strict=False):
            if dtype is not None and dtype != p.dtype:
                p.grad_dtype = None  # autograd adds a narrow gradient into the wide one as it is; if asked for `dtype`, it converts a copy first
            p.grad = self._views[p] = self.flat[start : start + p.numel()].view_as(p)
            message = bisect_right(self.edges, start) - 1
            self._messages_of[p] = range(message, bisect_left(self.edges, start + p.numel()))
            self.layouts[message].append((start - self.edges[message], p.shape))
            if group is not None:
                p.register_post_accumulate_grad_hook(self._on_gradient)
        self._parameters_of = [
            [p for p, own in self._messages_of.items() if i in own] for i in range(len(self.messages))
        ]
        self._expected = [len(touching) for touching in self._parameters_of]  # gradients a message waits for
        self._missing: list[int] = []
        self._work: list[Any] = []
        self._sent = 0
        self._total: Tensor | None = None  # sum of earlier micro-batches, if each is reduced separately
        self._begun = False

    def begin(self, last: bool) -> None:
        """Before each micro-batch: gradients are complete after the backward of the `last` one."""
        if any(has_gradient(p) and p not in self._views for p in self._candidates()):
            raise MeshwrightError(
                "MW-ZERO-003",
                "a parameter requires a gradient that was frozen, or not there, when these buckets were made",
                why="It has no place in the buffer, so its gradient would not be summed and the ranks would diverge",
                fix="make new Buckets",
            )
        if self._work and not self.per_microbatch:
            raise MeshwrightError(
                "MW-ZERO-004",
                "a micro-batch begins after the gradients of the last one have been sent",
                why=SENT_IN_LAST_BACKWARD,
                fix="call finish() first, or zero() to abandon the step",
            )
        if self.per_microbatch and self._begun:
            self._complete()
            self._total = self.flat.clone() if self._total is None else self._total.add_(self.flat)
            self.flat.zero_()
        self._begun = True
        sends = (last or self.per_microbatch) and self.overlap and self.group is not None
        self._missing = list(self._expected) if sends else []
        self._sent = 0

    def _on_gradient(self, parameter: Tensor) -> None:
        if not self._missing:
            return
        for i in self._messages_of[parameter]:
            self._missing[i] -= 1
            if self._missing[i] < 0:
                raise MeshwrightError(
                    "MW-ZERO-004",
                    "a parameter has a gradient after its message was sent",
                    why=SENT_IN_LAST_BACKWARD,
                    fix="begin(last=False) before each backward but the last",
                )
        # In the order of messages, so that all ranks send in the same order, whatever order gradients came in.
        while self._sent < len(self.messages) and self._missing[self._sent] == 0:
            self._send()

    def _send(self) -> None:
        i, message, group = self._sent, self.messages[self._sent], self.group
        self._sent += 1
        for p in self._parameters_of[i]:
            self._copy_into_view(p)
        if group is None:
            return
        if self.compressor is None:
            self._work.append(distributed.all_reduce(message, group=group, async_op=True))
        else:
            steps = self.compressor.reduce(i, message, self.layouts[i], group.rank(), group.size())
            self._work.append(RunningReduction(steps, group))

    def _copy_into_view(self, parameter: Tensor) -> None:
        """Put a gradient back into the buffer: after `zero_grad(set_to_none=True)` autograd allocates another tensor."""
        view, gradient = self._views[parameter], parameter.grad
        if gradient is view:
            return
        if gradient is None:
            view.zero_()
        else:
            view.copy_(gradient.detach())
        parameter.grad = view

    def start(self) -> None:
        """Send what has not been sent: a split backward writes gradients without calling hooks."""
        while self._sent < len(self.messages):
            self._send()

    def finish(self) -> None:
        """Wait until all gradients of the step are summed."""
        self._complete()
        if self._total is not None:
            self.flat.add_(self._total)
        self._total, self._begun = None, False

    def _complete(self) -> None:
        self.start()
        if self.compressor is None:
            for work in self._work:
                work.wait()
        else:  # round by round, so that all ranks issue their collectives in the same order
            running = self._work
            while running:
                running = [work for work in running if work.wait()]
        self._work = []
        self._missing = []
        self._sent = 0

    def zero(self) -> None:
        """Zero the gradients before the next step. Messages of an abandoned step must arrive first."""
        if self._work:
            self._complete()
        self._total, self._begun = None, False
        self.flat.zero_()
        for p, view in self._views.items():
            if p.grad is not view:
                p.grad = view


def message_edges(flat: Tensor, bucket_bytes: float) -> list[int]:
    """Offsets of messages of at most `bucket_bytes`: equal ones, the last one shorter."""
    smallest, total = flat.element_size(), flat.nbytes
    count = max(1, -(-total // max(smallest, int(min(bucket_bytes, total)))))
    length = max(1, -(-flat.numel() // count))
    return [*range(0, flat.numel(), length), flat.numel()]


def has_gradient(parameter: nn.Parameter) -> bool:
    """Whether backward will produce a gradient of at least one number for it."""
    return parameter.requires_grad and parameter.numel() > 0


def common_dtype(parameters: list[nn.Parameter]) -> torch.dtype | None:
    """The dtype of a buffer for their gradients; None (torch's default) where there are no parameters."""
    dtypes = sorted({p.dtype for p in parameters}, key=str)
    if len(dtypes) > 1:
        raise MeshwrightError(
            "MW-ZERO-005",
            f"parameters of {' and '.join(map(str, dtypes))} in one buffer",
            why="An optimizer needs each gradient in its parameter's dtype",
            valid=["Buckets(…, only=parameters of one dtype) for each", "dtype=… for all"],
        )
    return dtypes[0] if dtypes else None
