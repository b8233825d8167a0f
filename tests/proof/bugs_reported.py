"""Bugs of further kinds in the trackers of training frameworks. Their phase, pattern and place were written down before `verify` ran on them."""

import torch
from bugs_further import EXPERTS, Further
from torch import distributed
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from meshwright.parallel import apply
from meshwright.parallel.data import buckets, reduction, zero


def heads_of_a_group_tiled():
    """Grouped queries read KV head i mod n instead of i ÷ (heads of a group): `repeat` in place of `repeat_interleave`."""
    plain = F.scaled_dot_product_attention

    def tiled(q, k, v, *more, enable_gqa=False, **options):
        k, v = (x.repeat(1, q.shape[1] // k.shape[1], 1, 1) for x in (k, v))
        return plain(q, k, v, *more, **options)

    F.scaled_dot_product_attention = tiled


def documents_of_the_first_micro_batch():
    """A mask is built for the first micro-batch of a step and kept for the others."""
    begin = apply.Parallel.begin_step

    def kept(self, step, samples, documents_BS=None):
        size = self.plan.microbatch
        begin(self, step, samples, documents_BS[:size].repeat(len(documents_BS) // size, 1))

    apply.Parallel.begin_step = kept


def after_sharded_reduction(change):
    """Change the shards of the gradients after a step's backward."""

    def finish(self):
        for parameter in self.module.parameters():
            if isinstance(parameter, DTensor) and parameter.grad is not None:
                change(parameter.grad.to_local(), parameter.device_mesh.get_group())

    zero.ShardedGradients.finish = finish


def shards_of_the_next_rank():
    """Chunks are sent in another order than that of the ranks."""

    def swap(local, group):
        parts = [torch.empty_like(local) for _ in range(group.size())]
        distributed.all_gather(parts, local.contiguous(), group=group)
        local.copy_(parts[(group.rank() + 1) % group.size()])

    after_sharded_reduction(swap)


def last_row_of_a_shard_lost():
    """The last rank takes its last row for padding."""

    def lose(local, group):
        if group.rank() == group.size() - 1 and local.ndim > 1:
            local[-1].zero_()

    after_sharded_reduction(lose)


def first_micro_batch_counted_twice():
    begin, zeroed = buckets.Buckets.begin, buckets.Buckets.zero

    def doubled(self, last):
        self.begun = getattr(self, "begun", 0) + 1
        if self.begun == 2:
            self.flat.mul_(2)
        begin(self, last)

    def reset(self):
        self.begun = 0
        zeroed(self)

    buckets.Buckets.begin, buckets.Buckets.zero = doubled, reset


def split_biases_averaged():
    """Gradients of biases are averaged over tensor-parallel ranks, as if each had the whole."""
    finish = apply.Parallel.finish_gradients

    def finish_gradients(self):
        finish(self)
        for piece in self.pieces:
            if piece.name.endswith(("q.bias", "k.bias", "v.bias")):
                piece.gradient.div_(self.mesh.size("tp"))

    apply.Parallel.finish_gradients = finish_gradients


def norms_of_ranks_added():
    """The norms of the ranks' parts are summed, not their squares."""
    plain = apply.Parallel.all_reduce

    def added(self, values, axis):
        if axis != "world" or values.numel() != 2:
            return plain(self, values, axis)
        values[0] = values[0].sqrt()
        plain(self, values, axis)
        values[0] = values[0].square()
        return values

    apply.Parallel.all_reduce = added


def decay_in_the_gradient():
    """L2 regularisation: the decay goes through Adam's moments."""
    step = torch.optim.AdamW.step

    @torch.no_grad()
    def coupled(self, closure=None):
        decays = [group["weight_decay"] for group in self.param_groups]
        for group, decay in zip(self.param_groups, decays, strict=True):
            for parameter in group["params"]:
                parameter.grad.add_(parameter, alpha=decay)
            group["weight_decay"] = 0.0
        out = step(self, closure)
        for group, decay in zip(self.param_groups, decays, strict=True):
            group["weight_decay"] = decay
        return out

    torch.optim.AdamW.step = coupled


def shared_experts_not_reduced():
    """Every tensor below the experts is taken for a routed one, which ranks do not share."""
    make = reduction.make_reduction

    def made(module, mesh, plan, dtype, pieces, units):
        own = {p.parameter for p in pieces if ".shared." in p.name}
        rest = make(module, mesh, plan, dtype, [p for p in pieces if p.parameter not in own], units)
        return reduction.CombinedReduction([*reduction.reductions_in([rest]), reduction.LocalGradients(own)])

    reduction.make_reduction = made


Z2 = {"shard": 2, "zero": 2}
REPORTED = [
    Further("heads_of_a_group_tiled", {"replicate": 2}, "forward", "other", "layers.0.attention", {"kv_heads": 2}, shared=True),
    Further("documents_of_the_first_micro_batch", {"pp": 2}, "forward", "part", "layers.0.attention", documents=True),
    Further("shards_of_the_next_rank", Z2, "reduction", "permutation"),
    Further("last_row_of_a_shard_lost", Z2, "reduction", "part"),
    Further("first_micro_batch_counted_twice", {"replicate": 2}, "reduction", "counted twice"),
    Further("split_biases_averaged", {"tp": 2}, "reduction", "factor", "bias", {"qkv_bias": True}),
    Further("norms_of_ranks_added", {"tp": 2}, "clipping", "other"),
    Further("decay_in_the_gradient", {"replicate": 2}, "update", "other", shared=True),
    Further("shared_experts_not_reduced", {"replicate": 2, "ep": 2}, "reduction", "missing sum", "shared", {**EXPERTS, "shared_experts": 1}),
]  # fmt: skip
