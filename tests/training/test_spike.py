"""Loss spikes: what counts as one, and what does not."""

from types import SimpleNamespace

import pytest

from meshwright.training.faults.spike import LEAST, LossSpikes
from meshwright.training.optimizer.finite import Rollback
from meshwright.training.records import StepRecord

TRAINER = SimpleNamespace(parallel=SimpleNamespace(local=None))


def feed(hook, *losses, first=0):
    for step, loss in enumerate(losses, first):
        hook.after_step(TRAINER, StepRecord(step, loss, 1.0, 1, 0.1))


def test_a_loss_far_above_the_median_goes_back():
    hook = LossSpikes(2.0)
    feed(hook, *[4.0] * LEAST, 7.9)
    with pytest.raises(Rollback) as raised:
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
