"""The interpreter: execute one rank's schedule of a collective program on tensors, through a transport.

All (step, lane) pairs are executed in one order, step by step and lane by lane within a step, which is the same on all
ranks. So the messages between two ranks are sent and expected in the same order, and need no tags.

    begin (step, lane)    wait for sends that a receive would overwrite, post the sends
    finish (step, lane)   wait for the receives and apply them: store or reduce

`finish (t, lane)` is followed by `begin (t + 1, lane)`: while one lane's data is reduced, the data of the following lanes
is in transfer. Receives are posted up to WINDOW pairs early, because a receive that is posted after the send has
reached the receiver costs gloo one more trip over the network.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from meshwright.comm.call import Call, Place
from meshwright.comm.reductions import Combine, combiner, divide, name_of
from meshwright.comm.schedule import Schedule, Span
from meshwright.comm.transport.base import Begin, Destination, Pending, Transport
from meshwright.errors import MeshwrightError

WINDOW = 4  # (step, lane) pairs whose receives are posted early
STAGED = 64 * 1024  # a receive up to this size goes through a staging buffer if its target is not free yet


def execute(
    schedule: Schedule,
    source: torch.Tensor,
    result: torch.Tensor,
    transport: Transport,
    call: Call,
    largest: int = -1,
    scratch: torch.Tensor | None = None,
) -> None:
    """Run a collective: `source` and `result` are contiguous, one-dimensional, of one dtype, and may be the same tensor.

    `largest` is the number of elements of the largest message of any rank; −1 if ranks cannot know it.
    """
    check_sizes(schedule, source, result, call)
    combine = combiner(call.reduction, source.dtype) if call.reduction else None
    if scratch is None:
        scratch = torch.empty(schedule.scratch, dtype=source.dtype, device=source.device)
    size = source.element_size()
    sent, received = ({peer: n * size for peer, n in table.items()} for table in (schedule.sent, schedule.received))
    transport.begin(Begin(call, combine, sent, received, largest * size))
    Run(schedule, (source, result, scratch), transport, call, combine).run()
    transport.end()
    for at, to in schedule.unmoved:
        from_, into = source[at.start : at.stop], result[to.start : to.stop]
        if from_.data_ptr() != into.data_ptr():
            into.copy_(from_)
    if call.reduction == "avg" and schedule.outputs:
        divide(result, transport.size)


def check_sizes(schedule: Schedule, source: torch.Tensor, result: torch.Tensor, call: Call) -> None:
    for tensor, elements, name in ((source, schedule.inputs, "input"), (result, schedule.outputs, "output")):
        if elements and (tensor.numel() != elements or tensor.dim() != 1 or not tensor.is_contiguous()):
            raise MeshwrightError(
                "MW-COMM-001",
                f"the {name} of {call.operation} needs {elements} contiguous elements in one dimension, not shape {tuple(tensor.shape)}",
            )
    if source.dtype != result.dtype and schedule.inputs and schedule.outputs:
        raise MeshwrightError(
            "MW-COMM-001",
            f"input and output have different dtypes: {name_of(source.dtype)} and {name_of(result.dtype)}",
        )


class Run:
    """One execution: the position of each lane, and what is posted and not complete."""

    def __init__(
        self,
        schedule: Schedule,
        buffers: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        transport: Transport,
        call: Call,
        combine: Combine | None,
    ) -> None:
        self.lanes, self.buffers, self.transport, self.call = schedule.lanes, buffers, transport, call
        self.combine = combine
        self.steps = len(schedule.lanes[0]) if schedule.lanes else 0
        self.begun = [-1] * len(self.lanes)  # the step that each lane has begun
        self.sends: dict[tuple[int, int], list[Pending]] = {}  # (step, lane) → sends that may not be complete
        self.posted: dict[tuple[int, int, int], Pending] = {}  # (step, lane, number of the receive) → receive

    def run(self) -> None:
        count = len(self.lanes)
        pairs = self.steps * count if self.steps else 0
        for lane in range(count if self.steps else 0):
            self.begin(0, lane)
        for pair in range(pairs):
            if self.transport.posts_early:
                for ahead in range(pair + 1, min(pair + WINDOW + 1, pairs)):
                    self.post_receives(*divmod(ahead, count))
            step, lane = divmod(pair, count)
            self.finish(step, lane)
            if step + 1 < self.steps:
                self.begin(step + 1, lane)
        for key in list(self.sends):
            self.wait_for_sends(*key)

    def begin(self, step: int, lane: int) -> None:
        """Post the receives and the sends of a step."""
        self.begun[lane] = step
        if self.transport.posts_early:
            self.post_receives(step, lane)
        now = self.lanes[lane][step]
        if now.sends:
            place = Place(self.transport.rank, self.call, now.number, lane)
            self.sends[step, lane] = [self.transport.send(s.peer, self.views(s.spans), place) for s in now.sends]

    def finish(self, step: int, lane: int) -> None:
        """Apply the receives of a step, and the local copies."""
        now = self.lanes[lane][step]
        self.wait_for_sends(step - 1, lane)
        self.post_receives(step, lane)  # all of them now: a peer's send completes only when its receive is posted
        if now.copies or any(receive.after_sends for receive in now.receives):
            self.wait_for_sends(step, lane)
        for source, (into, base) in now.copies:
            if base is None:
                self.view(into).copy_(self.view(source))
            else:
                assert self.combine is not None
                self.combine(self.view(base), self.view(source), self.view(into))
        for k in range(len(now.receives)):
            self.posted.pop((step, lane, k)).wait()

    def post_receives(self, step: int, lane: int) -> None:
        """Post the receives of a step that are not posted yet and can be."""
        now = self.lanes[lane][step]
        for k, receive in enumerate(now.receives):
            if (step, lane, k) in self.posted:
                continue
            direct = receive.stores and self.is_free(receive.direct_from, step, lane)
            if receive.stores and not direct and receive.elements * self.buffers[0].element_size() > STAGED:
                continue
            targets = [
                Destination(self.view(into), None if base is None else self.view(base))
                for into, base in receive.targets
            ]
            place = Place(self.transport.rank, self.call, now.number, lane)
            self.posted[step, lane, k] = self.transport.receive(receive.peer, targets, place, direct)

    def is_free(self, direct_from: int, step: int, lane: int) -> bool:
        """Whether nothing that this rank has begun still uses the target of a receive that stores.

        In its own step it is free when the sends of the previous step are complete: no step stores what it sends.
        """
        begun = self.begun[lane]
        return direct_from <= begun or (begun == step and not self.sends.get((step - 1, lane)))

    def wait_for_sends(self, step: int, lane: int) -> None:
        for pending in self.sends.pop((step, lane), ()):
            pending.wait()

    def views(self, spans: Sequence[Span]) -> list[torch.Tensor]:
        return [self.view(span) for span in spans]

    def view(self, span: Span) -> torch.Tensor:
        return self.buffers[span.buffer][span.start : span.stop]
