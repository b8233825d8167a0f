"""Traces of some steps in the format of `simulate`: by torch's profiler (`Profiler`), or by the recorder and hooks of modules (`StepTracer`).

    meshwright train RUN.toml --profile 3       profile/rank-N.json in the run folder, for Perfetto or chrome://tracing
    meshwright report RUN --trace trace.json    all ranks, below them the simulated step

**Profiled steps.** A trace has a process per rank and a thread per stream. Streams of a rank are its host threads (operators, nested as
they were called) and the streams of its GPU (kernels, copies). The steps and their phases are spans of the main host thread. Profiling
starts a few steps after the first, when caches and buffers are warm. Of more than 16 ranks one data-parallel replica is profiled, that is
one rank of each tensor-parallel rank and stage: the others do the same work.

A profiled step is slower than others: the event `profile` in the run folder says which steps these were.

**Traced steps** have the times of each action of the schedule and each block of the model, and everything that `record_comm` records.
They follow the timed steps, which stay undisturbed; the timeline shows the median one. Forward of a block is timed by module hooks.
Backward of a block begins when the gradient of its output is complete and ends when the next block's begins. A split backward computes
weight gradients of all blocks together (W), so there only the action is known.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from meshwright.describe.run_folder import PROFILE
from meshwright.errors import MeshwrightError, cannot_write
from meshwright.models.step_context import current
from meshwright.parallel.pipeline import Stage
from meshwright.training.folder import RunFolder
from meshwright.training.hooks import Hook, Interval, StepRecord, TracedStep
from meshwright.training.loop import Trainer
from meshwright.training.measure.record_comm import CommRecorder
from meshwright.units import Json
from meshwright.view.trace import MICROSECONDS, TraceSpan, trace_events, write_trace

TRACED_STEPS = 3
LONG_RUN = 10  # timed steps
MOST_S = 30.0  # of all traced steps


def trace_steps(trainer: Trainer, timed: int, step_s: float) -> tuple[TracedStep, ...]:
    """Traces of further steps: three, or one after a short run; fewer where steps of `step_s` seconds would take longer than `MOST_S`."""
    wanted = TRACED_STEPS if timed >= LONG_RUN else 1
    return tuple(trace_step(trainer) for _ in range(min(wanted, int(MOST_S / max(step_s, 1e-9)))))


def trace_step(trainer: Trainer) -> TracedStep:
    """Train one step, and return its trace on this rank."""
    with CommRecorder(trainer) as recorder, StepTracer(trainer, recorder) as tracer:
        trainer.train_step()
    return TracedStep(recorder.steps[-1], tracer.actions, tracer.blocks, tracer.updated)


class StepTracer(Hook):
    """Collects marks of the recorder's clock during a step, and turns them into intervals at its end."""

    def __init__(self, trainer: Trainer, recorder: CommRecorder) -> None:
        self.trainer, self.clock = trainer, recorder.clock
        self.actions: list[Interval] = []
        self.blocks: list[Interval] = []
        self.updated = float("nan")
        self._actions: list[list[Any]] = []  # kind, stage, micro-batch, start, end
        self._forward: list[tuple[str, int, Any, Any]] = []  # block, action, start, end
        self._backward: list[tuple[str, int, Any]] = []  # block, action, start
        self._updated: Any = None
        self._undo = ExitStack()

    def __enter__(self) -> StepTracer:
        parallel = self.trainer.parallel
        if parallel.pipeline is not None:
            for stage in parallel.pipeline.stages:
                self._trace_stage(stage)
        else:
            self._trace_microbatches()
        for module in parallel.stages.values():
            for block, part in blocks_of(module):
                self._trace_block(block, part)
        noted = self.trainer.optimizer.register_step_post_hook(lambda *_: setattr(self, "_updated", self.clock.mark()))
        self._undo.callback(noted.remove)
        self.trainer.hooks.insert(0, self)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._undo.close()
        self.trainer.hooks.remove(self)

    def _begin(self, kind: str, stage: int, microbatch: int) -> None:
        self._actions.append([kind, stage, microbatch, self.clock.mark(), None])

    def _end(self) -> None:
        if self._actions and self._actions[-1][4] is None:
            self._actions[-1][4] = self.clock.mark()

    def _replace(self, owner: Any, name: str, new: Callable) -> None:
        setattr(owner, name, new)
        self._undo.callback(delattr, owner, name)

    def _trace_stage(self, stage: Stage) -> None:
        def trace(kind: str, name: str) -> None:
            plain = getattr(stage, name)

            def traced(microbatch: int, *args: Any, **kwargs: Any) -> Any:
                half = not kwargs.get("full_backward", True)
                self._begin("I" if half else kind, stage.stage_index, microbatch)
                out = plain(microbatch, *args, **kwargs)
                self._end()
                return out

            self._replace(stage, name, traced)

        trace("F", "forward_one_chunk")
        trace("B", "backward_one_chunk")
        trace("W", "backward_weight_one_chunk")

    def _trace_microbatches(self) -> None:
        """Without a pipeline the step enters the scope of a micro-batch, runs forward, computes the loss, and calls backward, in this order."""
        parallel = self.trainer.parallel
        scope, loss, finish = parallel.microbatch_scope, parallel.scaled_loss, parallel.finish_gradients

        def begin_forward(microbatch: int) -> AbstractContextManager[Any]:
            self._end()
            self._begin("F", 0, microbatch)
            return scope(microbatch)

        def begin_backward(output: Tensor, target: Tensor) -> Tensor:
            out = loss(output, target)
            self._end()
            self._begin("B", 0, self._actions[-1][2])
            return out

        def end_backward() -> None:
            self._end()
            finish()

        self._replace(parallel, "microbatch_scope", begin_forward)
        self._replace(parallel, "scaled_loss", begin_backward)
        self._replace(parallel, "finish_gradients", end_backward)

    def _trace_block(self, block: str, part: nn.Module) -> None:
        starts: list[Any] = []

        def before(*_: Any) -> None:
            starts.append(self.clock.mark())

        def after(_: Any, __: Any, output: Any) -> None:
            start, action = starts.pop(), len(self._actions) - 1
            if current().recomputing or action < 0 or self._actions[action][0] != "F":
                return
            self._forward.append((block, action, start, self.clock.mark()))
            if isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(note_gradient)

        def note_gradient(_: Any) -> None:
            self._backward.append((block, len(self._actions) - 1, self.clock.mark()))

        self._undo.callback(part.register_forward_pre_hook(before, prepend=True).remove)
        self._undo.callback(part.register_forward_hook(after).remove)

    def after_step(self, trainer: Trainer, record: StepRecord) -> None:
        seconds = self.clock.seconds
        self._end()
        self.actions = [Interval(k, s, m, seconds(a), seconds(b)) for k, s, m, a, b in self._actions]
        self.updated = seconds(self._updated)
        for block, action, start, end in self._forward:
            _, stage, microbatch, *_ = self._actions[action]
            self.blocks.append(Interval(block, stage, microbatch, seconds(start), seconds(end)))
        ends: dict[int, float] = {}
        first = {action: mark for _, action, mark in reversed(self._backward)}
        for block, action, start in reversed(self._backward):
            found = self.actions[action]
            # The first block of a backward begins with its action: the backward of the loss belongs to it.
            begins = found.start if first[action] is start else seconds(start)
            self.blocks.append(Interval(block, found.stage, found.microbatch, begins, ends.get(action, found.end)))
            ends[action] = begins
        self.blocks.sort(key=lambda b: b.start)


def blocks_of(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The blocks of a stage, under the names of the step program."""
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleDict):
            for layer in child.values():
                yield ("moe" if getattr(layer, "expert", False) else "dense"), layer
        elif isinstance(child, nn.Module) and name in ("embedding", "head"):
            yield name, child


WARMUP = 3  # steps before the first profiled one
ALL_PROFILED = 16  # ranks
SHAPES = ("Input Dims", "Input type")  # lists that are kept
OPERATORS = ("cpu_op", "user_annotation")  # categories of torch's trace on the host
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation")
# Begins the names of its kernels and operators
COMMUNICATION = ("nccl", "gloo:", "c10d::", "_c10d_functional::", "record_param_comms")
STEP, GRADIENTS, UPDATE = "step", "forward and backward", "norm and update"


class Profiler(Hook):
    """Profiles `steps` steps of a training that ends with step `end`. It runs before the other hooks, whose work then is not
    in the trace."""

    def __init__(self, folder: Path, steps: int, end: int, writer: RunFolder | None = None) -> None:
        self.folder, self.steps, self.end, self.writer = folder, steps, end, writer
        self.first = 0
        self.running: profile | None = None
        self.spans: list[AbstractContextManager[Any]] = []

    def start(self, trainer: Trainer) -> None:
        self.first = min(trainer.step + WARMUP, max(trainer.step, self.end - self.steps))

    def before_step(self, trainer: Trainer) -> None:
        if trainer.step == self.first and is_profiled(trainer):
            activities = [ProfilerActivity.CPU]
            if torch.device(trainer.parallel.mesh.device).type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            self.running = profile(activities=activities, record_shapes=True)
            self.running.start()
        if self.running is not None:
            self._enter(f"{STEP} {trainer.step}")
            self._enter(GRADIENTS)

    def after_gradients(self, trainer: Trainer) -> None:
        if self.running is not None:
            self._leave()
            self._enter(UPDATE)

    def after_step(self, trainer: Trainer, record: StepRecord) -> None:
        if self.running is None:
            return
        self._leave()
        self._leave()
        if record.step + 1 >= self.first + self.steps:
            self._stop(trainer.parallel.mesh.rank, record.step)

    def finish(self, trainer: Trainer) -> None:
        """A run that ends before the last profiled step writes what it has."""
        if self.running is not None:
            self._stop(trainer.parallel.mesh.rank, trainer.step - 1)

    def _enter(self, name: str) -> None:
        self.spans.append(record_function(name))
        self.spans[-1].__enter__()

    def _leave(self) -> None:
        self.spans.pop().__exit__(None, None, None)

    def _stop(self, rank: int, last: int) -> None:
        assert self.running is not None
        self.running.stop()
        text = f"steps {self.first} to {last} were profiled: {PROFILE}/"
        try:
            write(self.running, self.folder, rank, (self.first, last))
        except MeshwrightError as error:  # a full disk does not end a training
            text = f"the profile of steps {self.first} to {last} was not written: {error}"
        self.running = None
        if self.writer is not None:
            self.writer.event("profile", last, text, first_step=self.first)


def is_profiled(trainer: Trainer) -> bool:
    mesh = trainer.parallel.mesh
    return trainer.parallel.plan.world <= ALL_PROFILED or (mesh.index("dp") == 0 and mesh.index("cp") == 0)


def write(profiled: profile, folder: Path, rank: int, steps: tuple[int, int]) -> Path:
    """Write the trace of one rank; `otherData` has the time of its origin, which is the same clock for all ranks of a host."""
    try:
        (folder / PROFILE).mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder / PROFILE) as temporary:
            raw = Path(temporary) / "torch.json"
            profiled.export_chrome_trace(str(raw))
            content = json.loads(raw.read_text("utf-8"))
    except OSError as error:
        raise cannot_write(folder / PROFILE, error) from error
    spans = list(spans_of(content["traceEvents"], rank))
    zero = min((s.start for s in spans), default=0.0)
    spans = [replace(s, start=s.start - zero) for s in spans]
    origin = float(content.get("baseTimeNanoseconds", 0)) / 1e9 + zero
    about = {"rank": rank, "steps": list(steps), "origin_s": origin}
    groups = {"distributedInfo": content.get("distributedInfo", {})}  # for `explain`
    return write_trace(trace_events(spans, about=about) | groups, folder / PROFILE / f"rank-{rank}.json")


def spans_of(events: Iterable[Json], rank: int) -> Iterable[TraceSpan]:
    """The operators, kernels and copies of a torch trace, on streams named as people call them."""
    found = [e for e in events if e.get("ph") == "X" and e.get("cat") in (*OPERATORS, *DEVICE)]
    steps = [e for e in found if e["cat"] == "user_annotation" and str(e["name"]).startswith(f"{STEP} ")]
    main = steps[0]["tid"] if steps else None
    threads = dict.fromkeys(e["tid"] for e in found if e["cat"] in OPERATORS and e["tid"] != main)
    names = {main: "host"} | {tid: f"host thread {i}" for i, tid in enumerate(threads, 2)}
    for e in found:
        stream = names[e["tid"]] if e["cat"] in OPERATORS else f"GPU stream {e['tid']}"
        category = "comm" if str(e["name"]).startswith(COMMUNICATION) else e["cat"]
        kept = e.get("args", {}).items()
        args = {key: value for key, value in kept if isinstance(value, str | int | float) or key in SHAPES}
        yield TraceSpan(
            rank, stream, str(e["name"]), e["ts"] / MICROSECONDS, e.get("dur", 0) / MICROSECONDS, category, args
        )
