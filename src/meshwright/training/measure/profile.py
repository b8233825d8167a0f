"""Traces of some steps by torch's profiler, in the format of `simulate`: a process per rank, a thread per stream.

    meshwright train RUN.toml --profile 3       profile/rank-N.json in the run folder, for Perfetto or chrome://tracing
    meshwright report RUN --trace trace.json    all ranks, below them the simulated step

Streams of a rank are its host threads (operators, nested as they were called) and the streams of its GPU (kernels, copies). The steps and
their phases are spans of the main host thread. Profiling starts a few steps after the first, when caches and buffers are warm. One
data-parallel replica is profiled, that is one rank of each tensor-parallel rank and stage: the others do the same work.

A profiled step is slower than others: the event `profile` in the run folder says which steps these were.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from meshwright.describe.run_folder import PROFILE
from meshwright.errors import MeshwrightError, cannot_write
from meshwright.training.folder import RunFolder
from meshwright.training.hooks import Hook
from meshwright.training.loop import Trainer
from meshwright.training.records import StepRecord
from meshwright.view.trace import MICROSECONDS, Span, trace_events, write_trace

WARMUP = 3  # steps before the first profiled one
OPERATORS = ("cpu_op", "user_annotation")  # categories of torch's trace on the host
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation")
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
            self.running = profile(activities=activities)
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
    return mesh.index("dp") == 0 and mesh.index("cp") == 0


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
    spans = [Span(s.rank, s.stream, s.name, s.start - zero, s.duration, s.category, s.args) for s in spans]
    origin = float(content.get("baseTimeNanoseconds", 0)) / 1e9 + zero
    about = {"rank": rank, "steps": list(steps), "origin_s": origin}
    return write_trace(trace_events(spans, about=about), folder / PROFILE / f"rank-{rank}.json")


def spans_of(events: Iterable[dict[str, Any]], rank: int) -> Iterable[Span]:
    """The operators, kernels and copies of a torch trace, on streams named as people call them."""
    found = [e for e in events if e.get("ph") == "X" and e.get("cat") in (*OPERATORS, *DEVICE)]
    steps = [e for e in found if e["cat"] == "user_annotation" and str(e["name"]).startswith(f"{STEP} ")]
    main = steps[0]["tid"] if steps else None
    threads = dict.fromkeys(e["tid"] for e in found if e["cat"] in OPERATORS and e["tid"] != main)
    names = {main: "host"} | {tid: f"host thread {i}" for i, tid in enumerate(threads, 2)}
    for e in found:
        stream = names[e["tid"]] if e["cat"] in OPERATORS else f"GPU stream {e['tid']}"
        category = "comm" if is_communication(str(e["name"])) else e["cat"]
        args = {key: value for key, value in e.get("args", {}).items() if isinstance(value, str | int | float)}
        yield Span(rank, stream, str(e["name"]), e["ts"] / MICROSECONDS, e.get("dur", 0) / MICROSECONDS, category, args)


def is_communication(name: str) -> bool:
    return name.startswith(("nccl", "gloo:", "c10d::", "_c10d_functional::", "record_param_comms"))
