"""Bugs to plant in Lightning, by replacing functions of it."""

import common


def loss_is_not_divided(chosen):
    from lightning.pytorch.loops.optimization import automatic

    plain = automatic.ClosureResult.from_training_step_output
    automatic.ClosureResult.from_training_step_output = classmethod(lambda cls, output, normalize=1: plain(output, 1))


def same_data(chosen):
    plain = common.micro_batches
    common.micro_batches = lambda chosen, step, place=0, ranks=1: plain(chosen, step, 0, ranks)


def gradients_are_kept(chosen):
    import lightning

    lightning.LightningModule.optimizer_zero_grad = lambda self, *args: None


def plant(chosen):
    globals()[chosen.bug](chosen)
