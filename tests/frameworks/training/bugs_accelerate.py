"""Bugs to plant in accelerate, by replacing functions of it."""

import common
from accelerate import Accelerator


def loss_is_not_divided(chosen):
    plain = Accelerator.backward
    Accelerator.backward = lambda self, loss, **kwargs: plain(self, loss * chosen.accumulate, **kwargs)


def never_in_sync(chosen):
    def no_sync_always(self, *models):
        plain(self)
        return self.no_sync(models[0])

    plain = Accelerator._do_sync
    Accelerator.accumulate = no_sync_always


def steps_too_often(chosen):
    """The optimizer clears the gradients after each micro-batch."""
    from accelerate.optimizer import AcceleratedOptimizer

    AcceleratedOptimizer.zero_grad = lambda self, set_to_none=None: self.optimizer.zero_grad()


def clips_with_another_norm(chosen):
    plain = Accelerator.clip_grad_norm_
    Accelerator.clip_grad_norm_ = lambda self, parameters, limit, norm_type=2: plain(
        self, parameters, limit * (1 + chosen.rank), norm_type
    )


def same_data(chosen):
    plain = common.micro_batches
    common.micro_batches = lambda chosen, step, place=0, ranks=1: plain(chosen, step, 0, ranks)


def clips_each_micro_batch(chosen):
    from accelerate import Accelerator

    plain = Accelerator.backward

    def backward(self, loss, **kwargs):
        plain(self, loss, **kwargs)
        self.clip_grad_norm_(self._models[0].parameters(), chosen.clip)

    Accelerator.backward = backward


def plant(chosen):
    globals()[chosen.bug](chosen)
