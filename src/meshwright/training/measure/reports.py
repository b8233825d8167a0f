"""What each rank reports at the end of a run, and how the reports come to rank 0; and the metrics of each step.

**A report** has the recorded steps of a rank, a few traced steps, and one that is observed. Traced and observed steps follow the timed ones:
tracing gives the timeline of actions and blocks, observing counts bytes sent and memory of tensors. No checkpoint contains their updates.
Long steps are not traced, and where one rank trains on a GPU nothing is observed: it sends no bytes, and the allocator counts its memory.

**Gathering.** Reports travel as text over the process group: nothing is unpickled. With many ranks fewer steps are sent, so that rank 0
receives about as much from a thousand ranks as from ten. Times are those of the host's clock. Rank 0 compares its clock with that of one rank
of every other host: it notes its time, asks for the time of that rank, and notes when the answer arrives. The answer was given in the
middle, up to half of the round trip; the shortest of a few round trips counts.

**Metrics** is the hook that adds to the record of a step what the step itself does not measure. Nothing is communicated: the values are those
of this rank.

    MFU       seconds that the model's FLOPs take at the peak rate of all devices, over the seconds of the step
    memory    peak of this rank so far: what a GPU's allocator has reserved, or the resident memory of the process
    compiler  seconds of this rank in `torch.compile`, in the first steps of a run
    exposed   seconds that this rank was blocked in communication, by the parts of a prediction. Waiting for another rank counts
"""

import json
import resource
import time
import zlib
from dataclasses import asdict, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, distributed

from meshwright.comm.bench.backends import host_name
from meshwright.cost.step import TRAFFIC_AXIS
from meshwright.describe.config import Config
from meshwright.describe.result import GIB
from meshwright.parallel.compile import compile_seconds
from meshwright.parallel.expert.balance import copies_sent
from meshwright.predict.prediction import seconds_at_peak
from meshwright.training.hooks import (
    CommEvent,
    Hook,
    Interval,
    Observed,
    RankReport,
    RecordedStep,
    StepRecord,
    TracedStep,
)
from meshwright.training.launch.rank import RankContext
from meshwright.training.loop import Trainer
from meshwright.training.machine import peak_resident_bytes
from meshwright.training.measure.communication import AXES, LoweredNames
from meshwright.training.measure.observe import Observer
from meshwright.training.measure.profile import trace_steps
from meshwright.training.measure.record_comm import CommRecorder
from meshwright.units import Json

MOST_STEPS = 512  # recorded steps of all ranks together
ROUND_TRIPS = 5


def gather_reports(context: RankContext, report: RankReport) -> list[RankReport]:
    """On rank 0 the reports of all ranks, with times of its clock; empty on the other ranks."""
    if context.world == 1:
        return [report]
    data = encode(report, context.world)
    table = all_gather(context, [len(data), zlib.crc32(host_name().encode())])
    lengths, hosts = table[:, 0].tolist(), table[:, 1].tolist()
    offsets = {host: compare_clocks(context, hosts.index(host)) for host in dict.fromkeys(hosts)}
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    padded = padded.to(context.device)
    received = [torch.empty_like(padded) for _ in lengths] if context.rank == 0 else None
    distributed.gather(padded, received)
    if received is None:
        return []
    found = [decode(t[:n].cpu().numpy().tobytes()) for t, n in zip(received, lengths, strict=True)]
    steps = min(len(r.recorded) for r in found)
    found = [replace(r, recorded=r.recorded[len(r.recorded) - steps :]) for r in found]
    return [shifted(r, offsets[host]) for r, host in zip(found, hosts, strict=True)]


def all_gather(context: RankContext, numbers: list[int]) -> Tensor:
    """A row of whole numbers of each rank."""
    own = torch.tensor(numbers, dtype=torch.int64, device=context.device)
    rows = [torch.zeros_like(own) for _ in range(context.world)]
    distributed.all_gather(rows, own)
    return torch.stack(rows).cpu()


def compare_clocks(context: RankContext, other: int) -> float:
    """On rank 0, its clock minus the clock of rank `other`, in seconds; 0 if that is rank 0. The two ranks exchange messages."""
    value = torch.zeros(1, dtype=torch.float64, device=context.device)
    if other == 0 or context.rank not in (0, other):
        return 0.0
    if context.rank == other:
        for _ in range(ROUND_TRIPS):
            distributed.recv(value, 0)
            value.fill_(time.perf_counter())
            distributed.send(value, 0)
        return 0.0
    shortest, offset = float("inf"), 0.0
    for _ in range(ROUND_TRIPS):
        asked = time.perf_counter()
        distributed.send(value, other)
        distributed.recv(value, other)
        there, answered = float(value), time.perf_counter()
        if answered - asked < shortest:
            shortest, offset = answered - asked, (asked + answered) / 2 - there
    return offset


def encode(report: RankReport, world: int) -> bytes:
    """A report as compressed JSON, with fewer recorded steps if there are many ranks."""
    kept = max(1, MOST_STEPS // world)
    traced = report.traced if world <= MOST_STEPS // 8 else report.traced[:1]
    fields = asdict(replace(report, recorded=(), traced=()))
    fields |= {"recorded": report.recorded[-kept:], "traced": traced}  # named tuples become lists
    return zlib.compress(json.dumps(fields).encode(), 1)


def decode(data: bytes) -> RankReport:
    fields: Json = json.loads(zlib.decompress(data))
    recorded = tuple(recorded_step(row) for row in fields.pop("recorded"))
    traced = tuple(
        TracedStep(recorded_step(step), [Interval(*a) for a in actions], [Interval(*b) for b in blocks], updated)
        for step, actions, blocks, updated in fields.pop("traced")
    )
    return RankReport(**fields, recorded=recorded, traced=traced)


def recorded_step(row: list[Any]) -> RecordedStep:
    step, began, gradients, ended, events = row
    return RecordedStep(step, began, gradients, ended, [CommEvent(*event) for event in events])


def shifted(report: RankReport, offset: float) -> RankReport:
    """A report with all its times moved by an offset."""

    def step(found: RecordedStep) -> RecordedStep:
        events = [CommEvent(*e[:4], *(t + offset for t in e[4:])) for e in found.events]
        return RecordedStep(found.step, found.began + offset, found.gradients + offset, found.ended + offset, events)

    def intervals(found: list[Interval]) -> list[Interval]:
        return [x._replace(start=x.start + offset, end=x.end + offset) for x in found]

    traced = [(step(t.recorded), intervals(t.actions), intervals(t.blocks), t.updated + offset) for t in report.traced]
    recorded = tuple(map(step, report.recorded))
    return replace(report, recorded=recorded, traced=tuple(TracedStep(*t) for t in traced)) if offset else report


PREDICTED_AXIS = {**AXES, **TRAFFIC_AXIS}  # observed axis → axis under which its bytes are predicted


def rank_report(context: RankContext, trainer: Trainer, steps: int, recorder: CommRecorder, cpu_s: float) -> RankReport:
    """The report of this rank; trains the further steps. `cpu_s`: seconds that it computed in the timed ones. Tensors are those that the
    allocator of a GPU has allocated, or that the observed step had."""
    on_gpu, sends = context.device.startswith("cuda"), context.world > 1
    traced = trace_steps(trainer, steps, mean_step_s(trainer, recorder))
    seen = Observed() if on_gpu and not sends else observe(trainer)
    return RankReport(
        context.rank,
        trainer.parallel.mesh.coordinates["pp"],
        torch.cuda.max_memory_allocated() if on_gpu else seen.peak_bytes,
        process_memory(context.device),
        sent_by_axis(trainer, seen),
        routing(trainer),
        cpu_s,
        tuple(recorder.steps),
        traced,
    )


def mean_step_s(trainer: Trainer, recorder: CommRecorder) -> float:
    """Seconds of the last recorded step, mean over all ranks, which must agree on how many more they train."""
    last = recorder.steps[-1] if recorder.steps else None
    seconds = torch.tensor(
        last.ended - last.began if last else 0.0, dtype=torch.float64, device=trainer.parallel.mesh.device
    )
    return float(trainer.parallel.all_reduce(seconds, "world")) / trainer.parallel.plan.world


def observe(trainer: Trainer) -> Observed:
    """Train one step, and return the bytes it sends and the memory it takes."""
    if (local := trainer.parallel.local) is not None:
        local.since = local.every - 1  # local SGD averages in this step
    with Observer(trainer, separate_axes=True) as observer:
        trainer.train_step()
    return observer.observed()


def routing(trainer: Trainer) -> tuple[float, float] | None:
    """The share of this rank's token copies that the routers kept in the last step, and that which they sent to other ranks; None if their
    capacity drops none."""
    parallel, plan, model = trainer.parallel, trainer.parallel.plan, trainer.parallel.model
    if not model.experts or not model.router.can_drop(model.experts, model.top_k):
        return None
    tokens = plan.microbatch * parallel.workload.seq / (plan.cp * plan.tp)
    return copies_sent(parallel.stages.values(), tokens * model.top_k)


def sent_by_axis(trainer: Trainer, seen: Observed) -> dict[str, float]:
    """Bytes this rank sends per step, under the axes of a prediction."""
    out: dict[str, float] = {}
    for observed_axis, size in seen.sent.items():
        axis = PREDICTED_AXIS[observed_axis]
        out[axis] = out.get(axis, 0.0) + size
    if trainer.parallel.local is not None and "dp" in out:
        out["dp"] /= trainer.parallel.local.every
    return out


class Metrics(Hook):
    """Runs before the hooks that write or log the record, and after a recorder of communication if there is one."""

    def __init__(self, config: Config, recorder: CommRecorder | None = None) -> None:
        self.config, self.recorder = config, recorder
        self.peak_s = seconds_at_peak(config)
        self.compiled_s = 0.0

    def before_step(self, trainer: Trainer) -> None:
        self.compiled_s = self._compile_seconds(trainer)

    def after_step(self, trainer: Trainer, record: StepRecord) -> StepRecord:
        mesh = trainer.parallel.mesh
        recorded = self.recorder.steps[-1] if self.recorder is not None and self.recorder.steps else None
        return replace(
            record,
            mfu=self.peak_s / record.seconds if record.seconds else None,
            memory_gib=process_memory(mesh.device) / GIB,
            exposed_s=self.exposed(mesh.rank, recorded) if recorded is not None else None,
            compile_s=self._compile_seconds(trainer) - self.compiled_s or None,
        )

    def _compile_seconds(self, trainer: Trainer) -> float:
        return compile_seconds() if trainer.parallel.compilation.mode != "off" else 0.0

    @cached_property
    def names(self) -> LoweredNames:
        return LoweredNames(self.config)

    def exposed(self, rank: int, step: RecordedStep) -> dict[str, float]:
        """Blocked seconds by part. The small sums of the optimizer (tokens, norm, loss) are not communication of an axis."""
        out: dict[str, float] = {}
        for event in step.events:
            part = self.names.matches(rank, event)[0].part
            if part != "optimizer":
                out[part] = out.get(part, 0.0) + event.returned - event.issued + event.resumed - event.waited
        return out


def process_memory(device: str) -> int:
    """Peak bytes of this process so far: reserved on a GPU, resident on a CPU."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_reserved()
    return peak_resident_bytes(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
