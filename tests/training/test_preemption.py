"""A preemption signal: all ranks stop after the same step, also those that were not signalled."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import torch

import ranks
from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.describe.workload import Workload
from meshwright.training.faults.guard import StopOnSignal, StopRequest, next_common_step
from meshwright.training.hooks import Hook, StepRecord

MODEL = Model(hidden=16, layers=2, heads=2, ffn=24, vocab=33)
WORKLOAD = Workload(batch=4, seq=4, precision="fp64")


class Tokens:
    def sample(self, step, index):
        tokens = np.random.default_rng((step, index)).integers(0, MODEL.vocab, WORKLOAD.seq + 1)
        return tokens[:-1], tokens[1:]


class SignalOneself(Hook):
    def __init__(self, step):
        self.step = step

    def after_gradients(self, trainer):
        if trainer.step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


def signalled(context, plan):
    from torch import distributed

    from meshwright.comm.communicator import group_store
    from meshwright.parallel.apply import apply
    from meshwright.training.loop import Trainer

    trainer = Trainer(apply(MODEL, plan, WORKLOAD, context.rank, dtype=torch.float64), Tokens())
    stop = StopOnSignal(StopRequest(group_store(distributed.group.WORLD)))
    trainer.hooks += [stop, *([SignalOneself(5)] if context.rank == 1 else [])]
    records = trainer.train(100)
    return len(records), trainer.step, stop.stop_step, stop.received, signal.getsignal(signal.SIGTERM)


def test_all_ranks_stop_after_the_same_step():
    first, second = ranks.run(2, signalled, Plan(replicate=2))
    assert first == (7, 7, 6, None, signal.SIG_DFL)  # signalled in step 5: step 6 is the last one
    assert second == (7, 7, 6, signal.SIGTERM, signal.SIG_DFL)


def test_replicas_of_local_sgd_stop_where_they_average():
    results = ranks.run(2, signalled, Plan(replicate=2, average_every=4))
    assert [result[:3] for result in results] == [(8, 8, 7)] * 2


def request_of_one_process(path):
    from torch import distributed

    return StopRequest(distributed.FileStore(str(path / "store"), 1))


def test_the_first_request_stays(tmp_path):
    request = request_of_one_process(tmp_path)
    assert request.step() is None
    request.make(7)
    request.make(5)
    assert request.step() == 7


def test_an_early_reader_waits_for_the_step(tmp_path):
    stop = StopOnSignal(request_of_one_process(tmp_path))
    stop.request.make(4)
    trainer = SimpleNamespace(stopped=False)
    stop.after_step(trainer, StepRecord(3, 1.0, 1.0, 1, 0.1))
    assert not trainer.stopped
    stop.after_step(trainer, StepRecord(4, 1.0, 1.0, 1, 0.1))
    assert trainer.stopped


def test_local_sgd_meets_at_its_average():
    local = SimpleNamespace(every=8, since=3)
    assert next_common_step(SimpleNamespace(step=11, parallel=SimpleNamespace(local=local))) == 15
    assert next_common_step(SimpleNamespace(step=11, parallel=SimpleNamespace(local=None))) == 11


def test_a_signal_is_seen_by_another_thread_before_its_handler_runs(tmp_path):
    stop = StopOnSignal(request_of_one_process(tmp_path), (signal.SIGUSR1,))
    assert not stop.arrived()
    stop.start(None)
    try:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop.arrived()
        assert not stop.arrived()
        assert stop.received == signal.SIGUSR1
    finally:
        stop.finish(None)
    assert signal.set_wakeup_fd(-1) == -1


def test_a_rank_in_a_thread_leaves_the_handlers_of_the_process(tmp_path):
    """Ray runs a rank in a thread, where Python installs no handlers."""
    stop, before = StopOnSignal(request_of_one_process(tmp_path)), signal.getsignal(signal.SIGTERM)
    with ThreadPoolExecutor(1) as thread:
        thread.submit(stop.start, None).result()
        assert signal.getsignal(signal.SIGTERM) is before
        thread.submit(stop.finish, None).result()
