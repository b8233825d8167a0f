"""The watchdog: what it learns, when it acts, and that it names the hung rank and the collective on real ranks."""

import time
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import ranks
from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.describe.workload import Workload
from meshwright.training.faults import watchdog as module
from meshwright.training.faults.heartbeat import HeartbeatFolder, Operation
from meshwright.training.faults.watchdog import UNKNOWN_S, Watchdog
from meshwright.training.hooks import CommEvent, Hook, RecordedStep, StepRecord
from meshwright.training.launch.rank import RankFailure

MODEL = Model(hidden=16, layers=2, heads=2, ffn=24, vocab=33)
WORKLOAD = Workload(batch=4, seq=4, precision="fp64")


class Idle:
    """A recorder that sees nothing."""

    def __init__(self):
        self.completed, self.issued, self.steps, self.operation = 0, {}, deque(), None

    def open_operation(self):
        return self.operation


def watched(tmp_path, rank=0, world=1, **more):
    errors = []
    dog = Watchdog(
        rank,
        world,
        HeartbeatFolder(tmp_path, "one"),
        more.pop("activity", Idle()),
        report=lambda error, rank: errors.append(error),
        leave=lambda code: errors.append(code),
        **more,
    )
    return dog, errors


def train_steps(dog, count, seconds=0.5):
    for step in range(count):
        trainer = SimpleNamespace(step=step)
        dog.before_step(trainer)
        dog.after_step(trainer, StepRecord(step, 1.0, 1.0, 1, seconds))
    dog.before_step(SimpleNamespace(step=count))


def test_the_limit_is_learned_from_the_median_step(tmp_path):
    dog, _ = watched(tmp_path)
    assert dog.hang_limit == UNKNOWN_S
    train_steps(dog, 2)
    assert dog.hang_limit == UNKNOWN_S
    train_steps(dog, 5, seconds=3.0)
    dog.seconds.append(100.0)  # a slow one
    assert dog.hang_limit + module.CONFIRM_S + module.REACT_S == 2 * 3.0 + 10
    dog.after_step(None, StepRecord(7, 1.0, 1.0, 1, 3.0))
    assert dog.hang_limit == UNKNOWN_S  # a checkpoint or an evaluation
    assert dog.silence_limit < 16


def test_the_run_file_sets_another_limit(tmp_path):
    dog, _ = watched(tmp_path, hang_s=30.0)
    dog.before_step(SimpleNamespace(step=0))
    assert dog.hang_limit + module.CONFIRM_S + module.REACT_S == 30.0


def test_finished_operations_are_progress(tmp_path):
    activity = Idle()
    dog, errors = watched(tmp_path, activity=activity, hang_s=4.0)
    train_steps(dog, 4)
    for now in range(100, 140):
        activity.completed += 1
        dog.tick(float(now))
    assert errors == []
    assert dog.folder.read(0).stalled_s == 0.0


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(module, "CONFIRM_S", 0.15)
    monkeypatch.setattr(module, "FAST_BEAT_S", 0.03)
    monkeypatch.setattr(module, "SLOW_BEAT_S", 0.03)
    monkeypatch.setattr(module, "TICK_S", 0.01)
    monkeypatch.setattr(module, "REACT_S", 0.0)
    monkeypatch.setattr(module, "GRACE_S", 0.0)


def test_a_rank_alone_that_hangs_names_itself(tmp_path, quick):
    dog, errors = watched(tmp_path, hang_s=1.0)
    train_steps(dog, 3)
    dog.tick(time.monotonic() - 10)
    dog.tick(time.monotonic())
    assert errors[0].code == "MW-FAULT-001"
    assert "rank 0 hangs in step 3" in str(errors[0])
    assert errors[1] == module.HUNG_EXIT


def test_a_rank_that_moves_meanwhile_is_no_hang(tmp_path, quick, monkeypatch):
    activity = Idle()
    dog, errors = watched(tmp_path, activity=activity, hang_s=1.0)
    train_steps(dog, 3)
    dog.tick(time.monotonic() - 10)
    monkeypatch.setattr(dog.ended, "wait", lambda seconds: setattr(activity, "completed", 9) or time.sleep(seconds))
    dog.tick(time.monotonic())
    assert errors == []


def test_while_hooks_run_only_silence_is_a_fault(tmp_path, quick):
    """Rank 0 saves a checkpoint for a long time; rank 1 still answers, then no longer."""
    dog, errors = watched(tmp_path, world=2, hang_s=1.0)
    other, _ = watched(tmp_path, rank=1, world=2)
    train_steps(dog, 3)
    dog.phase = "hooks"
    dog.tick(time.monotonic() - 10)
    other.thread.start()
    time.sleep(0.2)
    dog.tick(time.monotonic())
    assert errors == []
    other.stop()
    dog.tick(time.monotonic())
    assert "rank 1 does not respond" in str(errors[0])


@pytest.mark.parametrize(
    ("seconds", "operation", "phase", "limit"),
    [
        (0.5, "all_reduce", "step", 3.0),
        (5.0, "all_reduce", "step", 10.0),  # the others may need as long as a step
        (0.5, None, "step", None),  # it computes
        (0.5, "all_reduce", "end", None),  # it saves
    ],
)
def test_a_rank_that_waits_for_others_exits_after_a_signal(tmp_path, seconds, operation, phase, limit):
    """Another rank has failed. One that computes or saves is left alone: the job is to end."""
    signals, activity = [True], Idle()
    activity.operation = operation
    dog, errors = watched(tmp_path, signalled=lambda: bool(signals) and signals.pop(), activity=activity)
    train_steps(dog, 3, seconds)
    dog.phase = phase
    dog.beat = lambda now: None
    for now in (100.0, 102.0, 102.9, 99.9 + (limit or 5.0)):
        dog.tick(now)
    assert errors == []
    dog.tick(100.1 + (limit or 5.0))
    assert errors == ([128 + 15] if limit else [])


def test_own_work_is_the_step_without_blocked_time(tmp_path):
    activity = Idle()
    dog, _ = watched(tmp_path, activity=activity)
    events = [
        CommEvent("dp", "all_reduce", 8, -1, 1.0, 1.5, 2.0, 3.0, 3.0),
        CommEvent("dp", "all_reduce", 8, -1, 2.5, 2.6, 3.5, 4.0, 4.0),
    ]
    for step in range(module.ENOUGH):
        assert dog.beat(0.0).own_s == 0.0  # too few steps
        activity.steps.append(RecordedStep(step, 0.0, 4.5, 5.0, events))
    dog.beat(0.0)
    assert dog.folder.read(0).own_s == pytest.approx(5.0 - 0.5 - 1.0 - 0.5)


def test_slow_ranks_are_noted_once_and_so_is_their_recovery(tmp_path):
    notes = []
    dog, _ = watched(tmp_path, world=3, note=lambda kind, text: notes.append((kind, text)))
    dogs = [dog, *(watched(tmp_path, rank, 3)[0] for rank in (1, 2))]
    for slow in (3.0, 1.0, 3.0, 3.0, 3.0, 1.0):
        for one in dogs:
            one.own.extend([slow if one.rank == 2 else 1.0] * one.own.maxlen)
            one.seconds.append(3.0)
            one.beat(0.0)
        dog.name_slow_ranks()
    assert [kind for kind, _ in notes] == ["slow", "slow"]
    assert notes[0][1].startswith("rank 2 on ")
    assert notes[1][1] == "rank 2 is as fast as the other ranks again"


# On real ranks


class Tokens:
    def sample(self, step, index):
        tokens = np.random.default_rng((step, index)).integers(0, MODEL.vocab, WORKLOAD.seq + 1)
        return tokens[:-1], tokens[1:]


def hanging(context, folder, kind):
    from meshwright.parallel.apply import apply
    from meshwright.training.faults.inject import Fault, Injector
    from meshwright.training.loop import Trainer
    from meshwright.training.measure.record_comm import CommRecorder

    class Limit(Hook):
        """The short limit holds from the step of the fault on: the first steps of ranks on a busy machine may take seconds."""

        def before_step(self, trainer):
            if trainer.step == 6:
                dog.hang_s = module.REACT_S + module.CONFIRM_S + 0.5

    module.FAST_BEAT_S, module.TICK_S = 0.1, 0.05
    trainer = Trainer(apply(MODEL, Plan(tp=2), WORKLOAD, context.rank, dtype=torch.float64), Tokens())
    with CommRecorder(trainer) as recorder:
        dog = Watchdog(
            context.rank,
            context.world,
            HeartbeatFolder(Path(folder), "one"),
            recorder,
            report=lambda error, rank: context.send(str(error)),
        )
        trainer.hooks += [dog, Limit(), Injector([Fault(kind, 1, 6)], context.rank, Path(folder))]
        trainer.train(1000 if kind != "none" else 5)
        dog.stop()
        return recorder.issued, recorder.open, recorder.completed


@pytest.mark.parametrize(
    ("kind", "words"), [("hang", "rank 1 hangs after step 5"), *ranks.soak([("stop", "rank 1 does not respond")])]
)
def test_a_hung_rank_is_named_with_the_collective(tmp_path, kind, words):
    """The first collective of a step with tp = 2 sums the embedding's output."""
    messages = []
    with pytest.raises(RankFailure):
        ranks.run(2, hanging, str(tmp_path), kind, listen=lambda rank, message: messages.append((rank, message)))
    ((rank, text),) = messages
    assert rank == 0
    assert words in text
    assert "rank 0 waits in all_reduce of tp (" in text


def test_operations_are_counted_by_group_equally_on_all_ranks(tmp_path):
    (issued, opened, completed), other = ranks.run(2, hanging, str(tmp_path), "none")
    assert other[0] == issued
    assert issued["tp 0-1"] % 5 == 0
    assert issued["tp 0-1"] > 5 * 4
    assert opened is None
    assert completed >= sum(issued.values())


def test_an_open_operation_is_what_the_rank_waits_in():
    operation = Operation("receive", "pp", (2, 3), 4)
    assert (operation.key, operation.needed_key) == ("pp 2-3 receive", "pp 2-3 send")
