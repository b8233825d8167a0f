"""What the events of a trace are: the main thread, steps, phases, micro-batches, layers, and which call launched which kernel.

    steps        "ProfilerStep#5", our "step 5", Lightning's batches; else from one update of the optimizer to the next; else the largest period
    backward     nodes of the autograd engine, on whatever thread; DeepSpeed's and Megatron's own annotations
    optimizer    "Optimizer.step#AdamW.step", our "norm and update"
    data         the loader's annotation
    layers       modules of FSDP's annotations, or "nn.Module:" events of a profile with stacks; else from one attention of forward to the next

A kernel belongs to the step and the phase in which it was launched. It may run after the host has begun the next step, so a step of a device
begins when the kernels of the step before have ended.
"""

import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from meshwright.explain.intervals import EMPTY, Intervals, clip, complement, contains, length, of_spans, subtract, union
from meshwright.explain.trace import ANNOTATION, ON_DEVICE, OPERATOR, PYTHON, RUNTIME, EventTable, NamedSpan, RankTrace

STEP_NAMES = re.compile(
    r"ProfilerStep#(\d+)|step (\d+)|\[pl\]\[profile\]run_training_batch|Iteration[# ](\d+)|train_batch"
)
UPDATES = ("Optimizer.step#", "norm and update", "[pl][profile][Strategy]", "optimizer-step", "DeepSpeedEngine.step")
BACKWARD = ("autograd::engine::evaluate_function", "DeepSpeedEngine.backward", "backward-compute", "FSDP::pre_backward",
            "FSDP::post_backward", "FSDP::root_post_backward", "BackwardPass")  # fmt: skip
DATA = (
    "enumerate(DataLoader)",
    "[pl][profile][_TrainingEpochLoop].train_dataloader_next",
    "batch-generator",
    "data loading",
    "get_batch",
)
SYNCHRONISES = re.compile(r"(cuda|hip)(Stream|Device|Event)Synchronize|cu(Stream|Ctx|Event)Synchronize|cudaMemcpy$")
READS_NUMBER = ("aten::item", "aten::_local_scalar_dense", "aten::is_nonzero", "aten::nonzero")
ATTENTION = (  # one calls the next; a compiled program begins with the second
    "aten::scaled_dot_product_attention",
    "aten::_scaled_dot_product_",
    "aten::_flash_attention_forward",
    "flash_attn::",
)
MANY_LOST = 0.01  # share of launches without a kernel that is worth a note: the last ones may run after the recording
LAYER = re.compile(r"FSDP::pre_forward \((.*)\)|nn\.Module: (\w+_\d+)")


@dataclass(frozen=True)
class RecognisedTrace:
    """A trace and the meaning of its events."""

    trace: RankTrace

    @property
    def events(self) -> EventTable:
        return self.trace.events

    def names_with(self, *prefixes: str) -> NDArray[np.bool_]:
        """Which events have a name that starts with one of the prefixes."""
        known = np.array([name.startswith(prefixes) for name in self.events.names], bool)
        return known[self.events.name] if len(known) else np.zeros(0, bool)

    def spans_of(self, mask: NDArray[np.bool_]) -> Intervals:
        """The times of some events."""
        return union(np.column_stack([self.events.start[mask], self.events.end[mask]]))

    @cached_property
    def on_host(self) -> NDArray[np.bool_]:
        return np.isin(self.events.category, (OPERATOR, ANNOTATION, PYTHON, RUNTIME))

    @cached_property
    def main(self) -> int:
        """The thread of the training loop: that of the steps or of updates, else the one with most operators."""
        e = self.events
        marks = self.names_with("ProfilerStep#", "step ", *UPDATES) & (e.category == ANNOTATION)
        threads = e.thread[marks] if marks.any() else e.thread[e.category == OPERATOR]
        return int(np.bincount(threads).argmax()) if len(threads) else 0

    @cached_property
    def backward(self) -> Intervals:
        return self.spans_of(self.names_with(*BACKWARD) & self.on_host)

    @cached_property
    def optimizer(self) -> Intervals:
        return self.spans_of(self.names_with(*UPDATES) & self.on_host)

    @cached_property
    def data(self) -> Intervals:
        return self.spans_of(self.names_with(*DATA) & self.on_host & (self.events.thread == self.main))

    @cached_property
    def device(self) -> NDArray[np.int64]:
        """Indices of kernels and copies, by start."""
        return np.flatnonzero(np.isin(self.events.category, ON_DEVICE))

    @cached_property
    def device_start(self) -> NDArray[np.int64]:
        return self.events.start[self.device]

    @cached_property
    def launches(self) -> NDArray[np.int64]:
        """For each event of `device` the call of the runtime that launched it; −1: not in the trace."""
        e = self.events
        calls = np.flatnonzero((e.category == RUNTIME) & (e.correlation >= 0))
        calls = calls[np.argsort(e.correlation[calls], kind="stable")]
        keys, wanted = e.correlation[calls], e.correlation[self.device]
        if not len(calls):
            return np.full(len(wanted), -1)
        at = np.minimum(np.searchsorted(keys, wanted), len(calls) - 1)
        return np.where((keys[at] == wanted) & (wanted >= 0), calls[at], -1)

    @cached_property
    def synchronised_at(self) -> NDArray[np.int64]:
        """When each call that waits for the device returned, in order."""
        e = self.events
        waits = np.array([bool(SYNCHRONISES.match(name)) for name in e.names], bool)[e.name]
        return np.sort(e.end[(e.category == RUNTIME) & waits])

    @cached_property
    def operators_on_main(self) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """The ends of the operators of the main thread in order, and which of them read a number of a tensor, outside of the optimizer."""
        e = self.events
        on_main = np.flatnonzero((e.category == OPERATOR) & (e.thread == self.main))
        order = on_main[np.argsort(e.end[on_main], kind="stable")]
        return e.end[order], self.names_with(*READS_NUMBER)[order] & (self.phase_of(e.start[order]) != "optimizer")

    @cached_property
    def lost_kernels(self) -> tuple[int, int]:
        """How many launches have no kernel in the trace, and all launches."""
        e = self.events
        is_launch = (
            np.array(["LaunchKernel" in name for name in e.names], bool)[e.name] if len(e) else np.zeros(0, bool)
        )
        calls = np.flatnonzero(is_launch & (e.category == RUNTIME) & (e.correlation >= 0))
        return int((~np.isin(e.correlation[calls], e.correlation[self.device])).sum()), len(calls)

    @cached_property
    def launched_at(self) -> NDArray[np.int64]:
        """When each event of `device` was launched. Kernels before the first launch of the trace were launched before it; of others without a launch
        in the trace, their start."""
        start = self.device_start
        traced = self.launches >= 0
        first = start[traced].min() if traced.any() else 0
        return np.where(traced, self.events.start[self.launches], np.where(start < first, -1, start))

    @cached_property
    def host_steps(self) -> tuple[NamedSpan, ...]:
        return self.trace.steps or marked_steps(self) or steps_of_updates(self) or periods(self)

    @property
    def doubts(self) -> list[str]:
        """What the trace lacks, so that its recognition may be wrong."""
        out, (lost, launches) = list[str](), self.lost_kernels
        if len(self.device) and lost > MANY_LOST * launches:
            out.append(f"{lost:,} of {launches:,} launched kernels are not in the trace: it is incomplete")
        if not len(self.backward):
            out.append(
                "no backward pass in the trace: it is not one of training, or it lacks the operators of the host"
            )
        elif not marked_steps(self) and not steps_of_updates(self):
            out.append("nothing marks the steps: profiler.step() after each one does")
        return out

    @cached_property
    def steps(self) -> tuple[NamedSpan, ...]:
        """Steps where their work ran: on the device if there is one."""
        host = self.host_steps
        if not len(self.device):
            return host
        order = np.argsort(self.launched_at, kind="stable")
        # Of this kernel and those launched before it
        latest = np.maximum.accumulate(self.events.end[self.device][order])
        begins = np.array([*(s.start for s in host), host[-1].end])
        before = np.searchsorted(self.launched_at[order], begins) - 1
        edges = np.where(before >= 0, np.maximum(begins, latest[before]), begins).tolist()
        on_device = (NamedSpan(s.name, a, b) for s, (a, b) in zip(host, pairwise(edges), strict=True) if b > a)
        return tuple(on_device) or host

    @cached_property
    def microbatches(self) -> int:
        """Backward passes per step: the rarest node of autograd occurs once in each."""
        e = self.events
        nodes = self.names_with("autograd::engine::evaluate_function: ")
        inside = contains(of_spans((s.start, s.end) for s in self.host_steps), e.start) & nodes
        counts = np.bincount(e.name[inside]) if inside.any() else np.zeros(0, int)
        counts = counts[counts >= len(self.host_steps)]
        return int(counts.min()) // len(self.host_steps) if len(counts) else 1

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the layers, or their numbers where only attention tells them apart."""
        return self.named_layers or tuple(map(str, range(len(self.attended))))

    @cached_property
    def named_layers(self) -> tuple[str, ...]:
        """The kind of module with several instances that takes most time; empty if no module is named."""
        e = self.events
        found = {i: m[1] or m[2] for i, name in enumerate(e.names) if (m := LAYER.fullmatch(name))}
        seconds, numbers = Counter[str](), dict[str, set[str]]()
        total = np.bincount(e.name, e.duration, len(e.names))
        for i, name in found.items():
            kind = re.sub(r"\d+", "*", name)
            seconds[kind] += total[i]
            numbers.setdefault(kind, set()).add(name)
        kinds = [kind for kind, _ in seconds.most_common() if len(numbers[kind]) > 1]
        layers = numbers[kinds[0]] if kinds else set()
        return tuple(sorted(layers, key=lambda name: [int(n) for n in re.findall(r"\d+", name)]))

    @cached_property
    def attention(self) -> NDArray[np.int64]:
        """The calls of attention in the traced steps."""
        e, steps = self.events, self.host_steps
        inside = (e.category == OPERATOR) & (e.start >= steps[0].start) & (e.start < steps[-1].end)
        by_name = (np.flatnonzero(inside & self.names_with(name)) for name in ATTENTION)
        return next((calls for calls in by_name if len(calls)), np.empty(0, np.int64))

    @cached_property
    def forward_attention(self) -> NDArray[np.int64]:
        return self.attention[self.phase_of(self.events.start[self.attention]) == "forward"]

    @cached_property
    def attended(self) -> list[Intervals]:
        """The times of the host in each layer, if every micro-batch has the same number of attentions; a layer ends where the next attention
        begins, the last one of a micro-batch after the usual time."""
        passes = self.microbatches * len(self.host_steps)
        starts = self.events.start[self.forward_attention]
        count, rest = divmod(len(starts), passes)
        if rest or count < 2 or not len(self.backward):
            return []
        grid = starts.reshape(passes, count)
        usual = int(np.median(np.diff(grid)))
        ends = np.concatenate([grid[:, 1:], grid[:, -1:] + usual], axis=1)
        return [union(np.column_stack([grid[:, i], ends[:, i]])) for i in range(count)]

    def seconds_of(self, host: Intervals) -> float:
        """Seconds per step of what the host did or launched in some intervals: of kernels if there is a device, else of the intervals themselves."""
        begin, end = self.steps[0].start, self.steps[-1].end
        if len(self.device):
            mine = self.device[contains(host, self.launched_at)]
            host = union(np.column_stack([self.events.start[mine], self.events.end[mine]]))
        return length(clip(host, begin, end)) / 1e9 / len(self.steps)

    @cached_property
    def phases(self) -> dict[str, float]:
        """Seconds per step of forward, backward and the optimizer."""
        backward = subtract(self.backward, self.optimizer)
        busy = union(self.backward, self.optimizer, self.data)
        forward = union(*(complement(clip(busy, s.start, s.end), s.start, s.end) for s in self.host_steps))
        return {
            "forward": self.seconds_of(forward),
            "backward": self.seconds_of(backward),
            "optimizer": self.seconds_of(self.optimizer),
        }

    @cached_property
    def layer_seconds(self) -> dict[str, float]:
        """Seconds per step of forward in each layer."""
        e, out = self.events, dict[str, float]()
        if not self.named_layers:
            return {str(i): self.seconds_of(times) for i, times in enumerate(self.attended)}
        for layer in self.named_layers:
            whole = (
                self.spans_of(np.isin(e.name, [e.names.index(f"nn.Module: {layer}")]))
                if f"nn.Module: {layer}" in e.names
                else EMPTY
            )
            starts = self.spans_of(self.names_with(f"FSDP::pre_forward ({layer})"))[:, 0]
            ends = self.spans_of(self.names_with(f"FSDP::post_forward ({layer})"))[:, 1]
            if len(starts) == len(ends) and len(starts):
                whole = of_spans(zip(starts.tolist(), ends.tolist(), strict=True))
            out[layer] = self.seconds_of(whole)
        return out

    def phase_of(self, times: NDArray[np.int64]) -> NDArray[np.str_]:
        """forward, backward or optimizer, of launches or operators at these times of the host."""
        return np.where(
            contains(self.optimizer, times),
            "optimizer",
            np.where(contains(self.backward, times), "backward", "forward"),
        )


def marked_steps(found: RecognisedTrace) -> tuple[NamedSpan, ...]:
    """The steps that annotations name."""
    e = found.events
    numbers = {i: m for i, name in enumerate(e.names) if (m := STEP_NAMES.match(name))}
    at = np.flatnonzero(np.isin(e.name, list(numbers)) & (e.category == ANNOTATION) & (e.thread == found.main))
    out = []
    for position, index in enumerate(at.tolist()):
        groups = numbers[int(e.name[index])].groups()
        label = next((g for g in groups if g), str(position))
        out.append(NamedSpan(label, int(e.start[index]), int(e.end[index])))
    overlaps = {a for a, b in pairwise(out) if b.start < a.end}
    return tuple(step for step in out if step not in overlaps)


def steps_of_updates(found: RecognisedTrace) -> tuple[NamedSpan, ...]:
    """Steps from one update of the optimizer to the next; what precedes the first is its step too."""
    ends = found.optimizer[:, 1].tolist()
    on_main = found.events.start[found.events.thread == found.main]
    starts = [int(on_main.min()) if len(on_main) else 0, *ends]
    return tuple(NamedSpan(str(i), a, b) for i, (a, b) in enumerate(zip(starts, ends, strict=False)))


def periods(found: RecognisedTrace) -> tuple[NamedSpan, ...]:
    """The largest period of the main thread: the rarest operator that comes back at even distances begins each; else the whole trace."""
    e = found.events
    mine = (e.thread == found.main) & (e.category == OPERATOR)
    begin, end = int(e.start.min()), int(e.end.max())
    counts = np.bincount(e.name[mine]) if mine.any() else np.zeros(0, int)
    for name in sorted(np.flatnonzero(counts > 2).tolist(), key=lambda name: (counts[name], name))[:50]:
        starts = e.start[mine & (e.name == name)]
        gaps = np.diff(starts)
        if gaps.std() < 0.25 * gaps.mean() and gaps.sum() > 0.5 * (end - begin):
            edges = [*starts.tolist(), min(end, int(starts[-1] + gaps.mean()))]
            return tuple(NamedSpan(str(i), a, b) for i, (a, b) in enumerate(pairwise(edges)))
    return (NamedSpan("all", begin, end),)
