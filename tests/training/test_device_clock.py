"""The clock of recorded steps on a GPU, with events and streams of a host in place of CUDA's: it records what the host's clock records."""

import math
import time
from contextlib import contextmanager

import torch

import ranks
from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.describe.workload import Workload

MODEL = Model(hidden=16, layers=2, heads=2, ffn=32, vocab=32)
WORKLOAD = Workload(batch=4, seq=8, precision="fp32")
WIDE = {"param_dtype": "fp32", "master": False}
PLANS = [Plan(replicate=2, bucket=2000, **WIDE), Plan(shard=2, zero=3, **WIDE)]


class Event:
    """A CUDA event that is complete when it is waited for."""

    def __init__(self, enable_timing=False):
        self.at, self.waited = None, False

    def synchronize(self):
        self.waited = True

    def record(self, stream=None):
        self.at = time.perf_counter()

    def query(self):
        return self.at is not None

    def elapsed_time(self, end):
        assert end.waited, "Both events must be completed before calculating elapsed time."
        return 1e3 * (end.at - self.at)


class Stream:
    """A CUDA stream on which everything is done at once."""

    def __init__(self):
        self.cuda_stream = id(self)

    def record_event(self, event=None):
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event):
        assert event.query()


def without_a_gpu():
    """Replace what `DeviceClock` uses of torch.cuda. Returns the stream that computes."""
    current = [Stream()]

    @contextmanager
    def on(stream):
        current.append(stream)
        yield
        current.pop()

    torch.cuda.Event, torch.cuda.Stream, torch.cuda.stream = Event, Stream, on
    torch.cuda.current_stream, torch.cuda.synchronize = lambda: current[-1], lambda: None
    return current[0]


def recorded(context, plans):
    """Of each plan a step by the clock of the host, and the next one by that of a device."""
    from meshwright.parallel.apply import apply
    from meshwright.training.data.samples import RandomSamples
    from meshwright.training.loop import Trainer
    from meshwright.training.measure.device_clock import DeviceClock
    from meshwright.training.measure.record_comm import CommRecorder

    out = []
    for plan in plans:
        parallel = apply(MODEL, plan, WORKLOAD, context.rank)
        trainer = Trainer(parallel, RandomSamples(MODEL, WORKLOAD.seq, 0))
        trainer.train(1)
        with CommRecorder(trainer) as on_host:
            trainer.train(1)
        out.append([on_host.steps[-1], trainer])
    without_a_gpu()
    for steps in out:
        on_device = CommRecorder(steps[1])
        on_device.clock = DeviceClock()
        with on_device:
            steps[1].train(1)
            assert on_device.open_operation() is None
        steps[1] = on_device.steps[-1]
    return out


def test_it_records_what_the_clock_of_the_host_records():
    for dp, zero_3 in ranks.run(2, recorded, PLANS):
        for on_host, on_device in (dp, zero_3):
            names = [[(e.axis, e.operation, e.bytes, e.peer) for e in step.events] for step in (on_host, on_device)]
            assert names[0] == names[1] != []
            for e in on_device.events:
                assert on_device.began <= e.issued <= e.returned <= e.waited <= e.resumed <= on_device.ended
                assert math.isnan(e.done) or e.issued <= e.done
        assert any(not math.isnan(e.done) for e in dp[1].events)  # asynchronous sums of buckets


def test_another_streams_operation_blocks_where_the_computing_stream_waits(monkeypatch):
    """As `fully_shard` gathers: issued on its stream, which records an event that the computing stream waits for."""
    from types import SimpleNamespace

    for name in ("Event", "Stream", "stream", "current_stream", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, getattr(torch.cuda, name))
    computing = without_a_gpu()
    from meshwright.training.measure.device_clock import DeviceClock

    clock, gathers = DeviceClock(), Stream()
    clock.attach(lambda owner, name, new: monkeypatch.setattr(owner, name, new))
    clock.begin_step()
    marks = clock.mark(), clock.mark()
    running = SimpleNamespace(issued=marks[0], returned=marks[1], waited=marks[1], resumed=marks[1], done=None)
    with torch.cuda.stream(gathers):
        clock.place(running)
    assert (running.returned, running.done) == marks
    event = gathers.record_event()
    computing.wait_event(event)
    seconds = [clock.seconds(mark) for mark in (running.issued, running.done, running.waited, running.resumed)]
    assert seconds == sorted(seconds)
    assert seconds[0] < seconds[2] < seconds[3]
