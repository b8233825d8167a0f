"""Classic bugs, injected into every rank before it trains: each a function that breaks one thing."""

import torch
from torch import distributed
from torch.nn import functional as F

from meshwright.parallel import apply, exchange, tensor, zero
from meshwright.train import loop


def gradient_averaged_twice():
    """The loss is divided by the global tokens already; an average over ranks divides again."""
    finish = zero.Buckets.finish

    def averaged(self):
        finish(self)
        if self.group is not None:
            self.flat.div_(self.group.size())

    zero.Buckets.finish = averaged


def bias_on_every_row_parallel_rank():
    """The bias added before the sum over ranks counts once a rank."""

    def row(done, name, part):
        tensor._cut(done, part, name, "weight", 1)
        part.forward = lambda x: exchange.reduce_out(F.linear(x, part.weight, part.bias), done.group)

    tensor.STYLES["row"] = row


def loss_normalised_per_rank():
    """A mean of each rank's mean, though ranks have different numbers of valid tokens."""
    summed = loop.Trainer.summed

    def local(self, values, axis):
        return values * self.parallel.mesh.size(axis) if axis == "dp_cp" else summed(self, values, axis)

    loop.Trainer.summed = local


def clip_by_local_norm():
    """Each rank clips by the norm of its own pieces."""
    clip = loop.clip

    def local(pieces, norm, most):
        clip(pieces, torch.nn.utils.get_total_norm([p.gradient for p in pieces]), most)

    loop.clip = local


def tied_embedding_not_summed():
    apply.Parallel._sum_tied = lambda self, *axes: None


def norms_not_summed_over_sequence():
    """Under sequence parallelism a norm sees a share of the tokens only."""
    apply.Parallel._sum_partial = lambda self, *axes: None


def microbatch_loss_not_divided():
    """Every micro-batch's loss is scaled as if it were the whole batch: gradients grow with accumulation."""
    scaled = apply.Parallel.scaled_loss

    def grown(self, output, target):
        return scaled(self, output, target) * self.plan.microbatches(self.workload)

    apply.Parallel.scaled_loss = grown


def wasted_all_reduce():
    """Nothing trains wrongly, but a barrier's worth of traffic is issued that no plan asked for."""
    finish = zero.Buckets.finish

    def wasteful(self):
        finish(self)
        if self.group is not None:
            distributed.all_reduce(torch.zeros(1000), group=self.group)

    zero.Buckets.finish = wasteful
