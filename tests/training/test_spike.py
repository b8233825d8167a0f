"""Loss spikes: what counts as one, and what does not."""

from types import SimpleNamespace

import pytest

from meshwright.training.faults.guard import LEAST, LossSpikes, Spike, train_with_rollback
from meshwright.training.hooks import StepRecord
from meshwright.training.optimizer.norm import Rollback

TRAINER = SimpleNamespace(parallel=SimpleNamespace(local=None))


def feed(hook, *losses, first=0):
    for step, loss in enumerate(losses, first):
        hook.after_step(TRAINER, StepRecord(step, loss, 1.0, 1, 0.1))


def test_a_loss_far_above_the_median_goes_back():
    hook = LossSpikes(2.0)
    feed(hook, *[4.0] * LEAST, 7.9)
    with pytest.raises(Spike) as raised:
        feed(hook, 8.1, first=LEAST + 1)
    assert raised.value.step == LEAST + 1
    assert "2.02 times" in raised.value.cause


def test_the_first_losses_and_nan_are_no_spikes():
    hook = LossSpikes(2.0)
    feed(hook, 1.0, 100.0, 1.0)
    hook.reset()
    feed(hook, *[1.0] * LEAST, float("nan"), float("inf"), 1.9)


def test_after_a_rollback_the_losses_are_learned_anew():
    hook = LossSpikes(2.0)
    feed(hook, *[1.0] * LEAST)
    hook.reset()
    feed(hook, 5.0)


# Rollback


class Run:
    """A trainer that saves every ten steps and fails at some steps as often as given."""

    def __init__(self, failures, error=Rollback):
        self.step, self.skip_steps, self.hooks, self.trained = 0, set(), [LossSpikes(2.0)], []
        self.failures, self.error, self.notes = dict(failures), error, []

    def until(self, step):
        while self.step < step:
            self.trained.append(self.step)
            self.step += 1
            failed = self.step - 1
            if self.failures.get(failed, 0) and failed not in self.skip_steps:
                self.failures[failed] -= 1
                raise self.error(failed, "the loss rose")
            yield failed

    def restore(self, trainer):
        self.step = self.step // 10 * 10
        return self.step

    def go(self, most=3):
        note = lambda step, resumed, text: self.notes.append((step, resumed, text))  # noqa: E731
        return list(train_with_rollback(self, 30, self.restore, note, most))


def test_a_transient_fault_repeats_the_same_batches():
    run = Run({17: 1})
    assert run.go()[-1] == 29
    assert run.skip_steps == set()
    assert run.notes == [(17, 10, "the loss rose: back to step 10")]
    assert run.trained == [*range(18), *range(10, 30)]


@pytest.mark.parametrize(
    ("error", "skipped", "text"),
    [
        (Rollback, {17}, "the updates of step 17 are left out"),
        (Spike, set(range(10, 18)), "steps 10 to 17 are left out"),
    ],
)
def test_a_fault_that_comes_back_leaves_out_updates(error, skipped, text):
    run = Run({17: 9}, error)
    assert run.go()[-1] == 29
    assert run.skip_steps == skipped
    assert text in run.notes[1][2]


def test_rollbacks_without_progress_end_the_run():
    run = Run({15: 9, 16: 9, 17: 9})
    run.skip_steps = type("Nothing", (set,), {"update": lambda self, steps: None})()
    with pytest.raises(Rollback, match="step 15"):
        run.go(most=2)
    assert len(run.notes) == 2


def test_faults_at_later_steps_are_counted_anew():
    run = Run({5: 1, 15: 1, 25: 1})
    assert run.go(most=1)[-1] == 29


def test_without_a_checkpoint_the_cause_ends_the_run():
    run = Run({7: 1}, Spike)
    run.restore = lambda trainer: None
    with pytest.raises(Spike, match="MW-OPT-004"):
        run.go()
