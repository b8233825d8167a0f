"""Measure one rank of a large plan on one device: the trainer's step with real tensors of that rank, on a fake process group.

    group      `fake_group`: one process is rank N of the plan's world
    apply      the plan, as `train` applies it: the shapes, strategies, kernels and compiled graphs of this rank
    warm up    compilers, caches, optimizer states
    time       steps without a pause between them: forward and backward, and the end of the step. What a rank would receive is filled by copies
               that are no compute of it (`Fills`): every second step repeats them, and what that adds is taken off (`without_fills`)
    parts      one more step under torch's profiler (GPU: seconds by group of kernels) or our tracer (CPU: seconds by block)

The numbers that a step computes have no meaning, so no loss is reported. Experts receive equal numbers of tokens (`balanced_routing`).
Memory is the peak of the allocator in the timed steps; on a CPU the peak of all live tensors in one observed step. With a pipeline, twice as many
micro-batches as stages run (`predict.one_rank.measured_config`): more of them repeat the same work and hold no more memory.
"""

import gc
import json
import math
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from meshwright.describe.config import Config
from meshwright.describe.layout import Layout
from meshwright.describe.result import GIB
from meshwright.errors import MeshwrightError
from meshwright.models.initialise import Weights
from meshwright.models.router import Routing
from meshwright.parallel.apply import apply
from meshwright.parallel.numerics.precision import DTYPES
from meshwright.predict.one_rank import RankMeasurement, measured_config
from meshwright.predict.prediction import predict
from meshwright.training.data.samples import RandomSamples
from meshwright.training.fake_group import Fills, balanced_routing, fake_group, filled_receives
from meshwright.training.hooks import Hook, StepRecord
from meshwright.training.loop import Trainer
from meshwright.training.machine import available_memory
from meshwright.training.measure import timeline
from meshwright.training.measure.observe import Observer
from meshwright.training.measure.profile import trace_step, write
from meshwright.training.optimizer.make import FusedAdamW
from meshwright.training.run import completed
from meshwright.training.step_graph import StepGraph
from meshwright.units import Json, format_bytes

WARMUP = 3
REPEATED = 3  # times that a step with repeated copies fills what it receives
BALANCED = "experts receive equal numbers of tokens"


def ranks_of_stages(config: Config) -> list[int]:
    """The rank of each pipeline stage in the first data-parallel replica."""
    layout = Layout(config.plan, config.plan.order or config.stack.order)
    return sorted(int(rank) for rank in layout.groups("pp")[0]) if config.plan.pp > 1 else [0]


def measure_plan(
    config: Config, stage: int | None, rank: int | None, steps: int, device: str
) -> tuple[Config, list[RankMeasurement]]:
    """The complete configuration, and the measurement of one rank, of one stage, or of one rank of every stage."""
    if rank is not None and rank >= config.plan.world:
        raise MeshwrightError(
            "MW-MEASURE-001",
            f"--rank {rank}: the plan has {config.plan.world} ranks",
            why=config.plan.title(),
            fix=f"--rank {config.plan.world - 1}",
        )
    config = completed(config.check_trainable(), WARMUP + steps)
    ranks = ranks_of_stages(config) if rank is None else [rank]
    if stage is not None and rank is None:
        ranks = [ranks[stage]]
    if device == "cpu":
        check_memory(config, ranks)
    return config, [measure_rank(config, number, steps, device) for number in ranks]


def check_memory(config: Config, ranks: Sequence[int]) -> None:
    """Raise if the tensors of a rank do not fit in the memory of this machine: the kernel would end this process, and others with it."""
    stages = ranks_of_stages(config)
    held = predict(measured_config(config)).tensors_gib
    largest = max(held[stages.index(rank)] if rank in stages else max(held) for rank in ranks) * GIB
    if largest > (available := available_memory()):
        raise MeshwrightError(
            "MW-MEASURE-002",
            f"a rank of '{config.plan.title()}' does not fit on this machine: its tensors need {format_bytes(largest)} of memory, and "
            f"{format_bytes(available)} are available",
            fix="measure it on a GPU, or --set plan.recompute=full",
            exit_code=3,
        )


def measure_rank(config: Config, rank: int, steps: int, device: str) -> RankMeasurement:
    """Measure rank `rank` of a configuration that `training.run.completed` has completed."""
    with one_rank(config, rank, device) as (trainer, fills):
        found = measure_trainer(trainer, fills, config, steps)
        parts = measured_parts(trainer, fills, device)
    return replace(found, parts_s=parts)


def measured_parts(trainer: Trainer, fills: Fills, device: str) -> dict[str, float]:
    """Seconds of a step by group of kernels on a GPU, by block on a CPU."""
    once, repeated = (
        timeline.of_trace(profiled(trainer)) if device.startswith("cuda") else blocks(trainer)
        for fills.times in (1, REPEATED)
    )
    fills.times = 1
    return {part: without_fills(seconds, repeated.get(part, seconds)) for part, seconds in once.items()}


def without_fills(once: float, repeated: float) -> float:
    """Seconds of a step without the copies that stand for received data, from a step with them and one that repeats them."""
    return max(once - (repeated - once) / (REPEATED - 1), 0.0)


@contextmanager
def one_rank(config: Config, rank: int, device: str) -> Iterator[tuple[Trainer, Fills]]:
    """Inside the `with` block this process is rank `rank` of the plan, with a trainer whose collectives send nothing, and how they fill what they
    would receive."""
    free_device(device)  # what an earlier rank has left
    try:
        with (
            fake_group(rank, config.plan.world),
            filled_receives() as fills,
            balanced_routing(equal_counts, spread),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            trainer = make_trainer(measured_config(config), rank, DeviceWeights(device), device)
            try:
                yield trainer, fills
            finally:
                trainer.loader.close()
    except torch.OutOfMemoryError as error:
        raise MeshwrightError(
            "MW-MEASURE-002",
            f"rank {rank} of '{config.plan.title()}' does not fit on this device",
            why=str(error).split(". ")[0],
            fix="--set plan.recompute=full, or a smaller plan.microbatch",
            exit_code=3,
        ) from None


def make_trainer(config: Config, rank: int, weights: Weights, device: str = "cpu") -> Trainer:
    """The trainer of one rank."""
    parallel = apply(
        config.model,
        config.plan,
        config.workload,
        rank,
        device=device,
        dtype=DTYPES[config.plan.param_dtype],
        weights=weights,
        order=config.plan.order or config.stack.order,
        compile=config.run.compile,
    )
    graph = StepGraph(parallel) if config.run.graphs == "step" else None
    return Trainer(parallel, RandomSamples(config.model, config.workload.seq, 0), config.optimizer, graph=graph)


class DeviceWeights:
    """Initial weights of the usual size, drawn on the device for this rank's part only: which numbers they are has no meaning here."""

    def __init__(self, device: str) -> None:
        self.device = device

    def read(self, name: str, full: Sequence[int], start: Sequence[int], shape: Sequence[int]) -> Tensor:
        values = torch.empty(tuple(shape), device=self.device)
        return values.fill_(1.0) if len(full) == 1 else values.normal_(0.0, 0.02)


def free_device(device: str) -> None:
    gc.collect()
    torch.compiler.reset()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def measure_trainer(
    trainer: Trainer, fills: Fills, config: Config, steps: int, before_timing: Callable[[], None] = lambda: None
) -> RankMeasurement:
    """Time steps of a trainer after its warm-up, and the peak of its memory."""
    device, shown = str(trainer.parallel.mesh.device), measured_config(config)
    on_gpu, plan = device.startswith("cuda"), config.plan
    trainer.policy.accept = lambda *_: True  # type: ignore[method-assign]  # every step updates, whatever the numbers are
    if isinstance(trainer.optimizer, FusedAdamW):
        trainer.optimizer.guarded = False
    records = trainer.train(WARMUP)
    before_timing()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    marks = Marks(on_gpu, fills)
    trainer.hooks.append(marks)
    records += trainer.train(2 * steps)
    trainer.hooks.remove(marks)
    fills.times = 1
    times = marks.times()
    once, repeated = times[::2], times[1::2]
    allocated, reserved, phases = 0.0, None, None
    if on_gpu:
        reserved = torch.cuda.max_memory_reserved() / GIB
        phases = {phase: max(sizes) / GIB for phase, sizes in marks.peaks.items()}
        phases["between steps"] = torch.cuda.memory_allocated() / GIB
        allocated = max(phases.values())
    else:
        with Observer(trainer) as observer:
            trainer.train_step()
        allocated = observer.observed().peak_bytes / GIB
    notes = [BALANCED] if config.model.experts else []
    if wrong := sum(not math.isfinite(record.gradient_norm) for record in records):
        notes.append(f"{wrong} of {len(records)} steps computed with NaN, which a GPU multiplies faster")
    whole = [backward + closing for backward, closing in once]
    backward_s, closing_s = (
        without_fills(*(statistics.median(step[part] for step in steps) for steps in (once, repeated)))
        for part in (0, 1)
    )
    return RankMeasurement(
        trainer.parallel.mesh.rank,
        trainer.parallel.mesh.coordinates["pp"],
        shown.workload.batch // (plan.dp * plan.microbatch),
        steps,
        backward_s,
        closing_s,
        (max(whole) - min(whole)) / statistics.median(whole),
        allocated,
        reserved,
        None,
        phases,
        tuple(notes),
    )


class Marks(Hook):
    """Marks the start of each step and the end of its gradients, on a GPU by events, which the host does not wait for; and the peak of
    allocated bytes in each of the two parts, which the allocator counts as the host issues work. Every second step repeats its copies."""

    def __init__(self, on_gpu: bool, fills: Fills) -> None:
        self.on_gpu, self.fills, self.marks = on_gpu, fills, list[Any]()
        self.peaks: dict[str, list[int]] = {"forward and backward": [], "update": []}

    def peak(self, phase: str) -> None:
        if self.on_gpu:
            self.peaks[phase].append(torch.cuda.max_memory_allocated())
            torch.cuda.reset_peak_memory_stats()

    def mark(self) -> None:
        if self.on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def start(self, trainer: Any) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()
        self.mark()

    def before_step(self, trainer: Any) -> None:
        self.fills.times = REPEATED if len(self.marks) % 4 == 3 else 1

    def after_gradients(self, trainer: Any) -> None:
        self.mark()
        self.peak("forward and backward")

    def after_step(self, trainer: Any, record: StepRecord) -> None:
        self.mark()
        self.peak("update")

    def times(self) -> list[tuple[float, float]]:
        """Seconds of forward and backward, and of the end, of each step."""
        if self.on_gpu:
            torch.cuda.synchronize()
        seconds = [a.elapsed_time(b) / 1e3 if self.on_gpu else b - a for a, b in pairwise(self.marks)]
        return list(zip(seconds[::2], seconds[1::2], strict=True))


def profiled(trainer: Trainer) -> Json:
    """The trace of one step on a GPU."""
    with tempfile.TemporaryDirectory() as folder:
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
            trainer.train(1)
            torch.cuda.synchronize()
        step = trainer.step - 1
        return json.loads(write(found, Path(folder), 0, (step, step)).read_text("utf-8"))


def blocks(trainer: Trainer) -> dict[str, float]:
    """Seconds of one traced step by block and direction."""
    traced = trace_step(trainer)
    found: dict[str, float] = {}
    for block in traced.blocks:
        action = next((a.name for a in traced.actions if a.start <= block.start < a.end), "F")
        name = f"{block.name} {action}"
        found[name] = found.get(name, 0.0) + block.end - block.start
    return found


def equal_counts(routing: Routing, experts: int) -> Tensor:
    """As many tokens for each expert; the counts stay on the device."""
    rows = len(routing.token_R)
    counts = torch.full_like(routing.counts_E, rows // experts)
    counts[: rows % experts] += 1
    return counts


def spread(row: Tensor, shape: tuple[int, ...]) -> Tensor:
    return row.expand(shape).contiguous()
