"""Historical bugs. Each is a function that puts one bug into every rank before it trains.

This file has bugs of data parallelism and of the update; `bugs_axes` has those of the other axes, `bugs_lossy` those of compression.

`CORPUS` lists the model and plan on which each bug is tried, and the first difference that the comparison must find: its kind
(loss, gradient, norm or parameter), step and tensor. References are to reports of the same bug in public code; "seed" marks an
example from an introductory text.

Bugs that cannot be expressed here, and so are not in the corpus:

    rotary offset under sequence parallelism  attention sees the gathered sequence; learned positions are cut, and are in the corpus
    an overflow only some ranks see           float64 has no loss scale
    a shorter message silently accepted       the shape of every message is known in advance
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import distributed

from meshwright.parallel import apply
from meshwright.parallel.data import buckets, gathering, zero
from meshwright.parallel.mesh import Mesh
from meshwright.training import loop
from meshwright.training.data import samples


class Bug(NamedTuple):
    name: str
    model: str
    plan: dict[str, Any]
    what: str
    tensor: str = ""  # a part of the first broken tensor's name
    step: int = 0
    ratio: float = 0.0  # 0: any
    router: tuple[tuple[str, Any], ...] = ()


# Data parallel


def gradient_averaged_twice():
    """The loss is already divided by the global tokens; an average over ranks divides a second time."""
    finish = buckets.Buckets.finish

    def averaged(self):
        finish(self)
        if self.group is not None:
            self.flat.div_(self.group.size())

    buckets.Buckets.finish = averaged


def reduce_scatter_averages():
    """`fully_shard` divides by the ranks by default (torchtitan #2318: norms differ between DDP and FSDP)."""
    gathering.FSDPModule.set_gradient_divide_factor = lambda self, factor: None
    gathering.FSDPModule.set_force_sum_reduction_for_comms = lambda self, force: None


def never_synchronised():
    """`no_sync` is also active in the last micro-batch."""
    begin = zero.ShardedGradients.begin

    def quiet(self, last):
        begin(self, last)
        self.module.set_requires_gradient_sync(False)

    zero.ShardedGradients.begin = quiet


def replicas_not_reduced():
    """Hybrid sharding reduces over its shards, but not over its replicas."""
    Mesh.sharding = lambda self: self.device_mesh["shard"]


def every_microbatch_synchronises():
    """Reduced gradients are reduced again with the next micro-batch: accumulation without `no_sync` in a shared buffer."""
    begin = buckets.Buckets.begin

    def eager(self, last):
        if self._work:
            self.finish()
        begin(self, True)

    buckets.Buckets.begin = eager


def accumulation_zeroed_every_microbatch():
    """Gradients are zeroed at every micro-batch instead of every step."""
    begin = buckets.Buckets.begin

    def forgetful(self, last):
        self.zero()
        begin(self, last)

    buckets.Buckets.begin = forgetful


def gradients_not_zeroed():
    apply.Parallel.zero_gradients = lambda self: None


def stale_bucket_views():
    """`zero_grad(set_to_none=True)`: backward then allocates new gradients outside the buffer that is reduced."""
    plain = buckets.Buckets.zero
    buckets.Buckets._copy_into_view = lambda self, parameter: None

    def drop(self):
        plain(self)
        for p in self._views:
            p.grad = None

    buckets.Buckets.zero = drop


def last_bucket_not_sent():
    """Buckets are sent when they are full, and the last one is never flushed."""
    send = buckets.Buckets._send

    def most(self):
        if self._sent < len(self.messages) - 1:
            send(self)
        else:
            self._sent += 1

    buckets.Buckets._send = most


def hooks_miss_split_backward():
    """A split backward writes gradients without calling hooks, so a reducer that relies on hooks sends nothing."""
    buckets.Buckets.start = lambda self: None


def replicas_start_differently():
    """Each rank draws from a different seed, without a broadcast."""
    initialise = apply.initialise
    apply.initialise = lambda pieces, weights: initialise(
        pieces, replace(weights, seed=weights.seed + distributed.get_rank())
    )


def every_rank_reads_the_same_samples():
    """A sampler that ignores its rank."""
    prepare = loop.Trainer.__post_init__

    def same(self):
        prepare(self)
        self.indices = range(len(self.indices))

    loop.Trainer.__post_init__ = same


def loss_normalised_per_rank():
    """A mean of the means of the ranks, although ranks have different numbers of valid tokens."""
    all_reduce = apply.Parallel.all_reduce

    def local(self, values, axis):
        return values * self.mesh.size(axis) if axis == "dp_cp" else all_reduce(self, values, axis)

    apply.Parallel.all_reduce = local


def microbatch_loss_not_divided():
    scaled = apply.Parallel.scaled_loss

    def grown(self, output, target):
        return scaled(self, output, target) * self.plan.microbatches(self.workload)

    apply.Parallel.scaled_loss = grown


def padding_counted():
    """Tokens counted by shape, padding included."""
    samples.TokenBatch.valid = property(lambda self: torch.tensor(self.targets.numel()))


# The update


def clip_by_local_norm():
    clip = loop.clip

    def local(pieces, norm, most, optimizer):
        clip(pieces, torch.nn.utils.get_total_norm([p.gradient for p in pieces]), most)

    loop.clip = local


def norm_counts_copies():
    """Sums the squares of every local parameter, including copies."""
    loop.counted_squares = lambda pieces: sum((p.gradient.double() ** 2).sum() for p in pieces)


def norm_counts_the_tied_copy():
    loop.counted_squares = lambda pieces: sum(
        (p.gradient.double() ** 2).sum() for p in pieces if p.box.first_copy or p.box.tied
    )


def update_before_reduction():
    """The optimizer uses the gradients of this rank: it steps before the reduction is complete."""
    finish, clip = apply.Parallel.finish_gradients, loop.clip
    own = []

    def early(self):
        own[:] = [p.gradient.clone() for p in self.pieces]
        finish(self)

    def late(pieces, norm, most, optimizer):
        for piece, gradient in zip(pieces, own, strict=True):
            piece.gradient.copy_(gradient)
        clip(pieces, norm, most)

    apply.Parallel.finish_gradients, loop.clip = early, late


def weight_decay_twice():
    """Weight decay by the optimizer and a second time by hand."""
    make = loop.make_optimizer

    def heavy(*args):
        optimizer = make(*args)
        for group in optimizer.param_groups:
            group["weight_decay"] *= 2
        return optimizer

    loop.make_optimizer = heavy


def initialised_by_local_shape():
    """Each rank draws its shard as if it were the full tensor: every tp rank starts from the same columns."""

    @torch.no_grad()
    def local(pieces, weights):
        for piece in pieces:
            shape = piece.local.shape
            piece.local.copy_(weights.read(piece.name, shape, [0] * len(shape), shape))

    apply.initialise = local


DP, Z3 = {"replicate": 2, "bucket": 2000}, {"shard": 2, "zero": 3}
ACCUMULATED = {**DP, "microbatch": 2}
EP = {"replicate": 2, "ep": 2}
CORPUS = [
    Bug("gradient_averaged_twice", "llama", DP, "gradient", ratio=0.5),
    Bug("reduce_scatter_averages", "llama", Z3, "gradient", ratio=0.5),
    Bug("never_synchronised", "llama", {"shard": 2, "zero": 1}, "gradient"),
    Bug("replicas_not_reduced", "llama", {"replicate": 2, **Z3}, "gradient"),
    Bug("every_microbatch_synchronises", "llama", ACCUMULATED, "gradient"),
    Bug("accumulation_zeroed_every_microbatch", "llama", ACCUMULATED, "gradient"),
    Bug("gradients_not_zeroed", "llama", DP, "gradient", step=1),
    Bug("stale_bucket_views", "llama", DP, "gradient", step=1),
    Bug("last_bucket_not_sent", "llama", DP, "gradient", "embedding"),
    Bug("hooks_miss_split_backward", "llama", {**DP, "pp": 2, "schedule": "zb-h1"}, "gradient"),
    Bug("replicas_start_differently", "llama", DP, "loss"),
    Bug("every_rank_reads_the_same_samples", "llama", DP, "loss"),
    Bug("loss_normalised_per_rank", "llama", DP, "loss"),
    Bug("microbatch_loss_not_divided", "llama", {"microbatch": 2}, "loss", ratio=3.0),
    Bug("padding_counted", "llama", DP, "loss"),
    Bug("clip_by_local_norm", "llama", {"pp": 2}, "parameter"),
    Bug("clip_by_local_norm", "llama", Z3, "parameter"),
    Bug("clip_by_local_norm", "llama", {"tp": 2}, "parameter"),
    Bug("norm_counts_copies", "llama", {"tp": 2}, "norm"),
    Bug("norm_counts_copies", "llama", DP, "norm", ratio=2**0.5),
    Bug("norm_counts_the_tied_copy", "qwen", {"pp": 2}, "norm"),
    Bug("update_before_reduction", "llama", {"replicate": 2, "overlap": ()}, "parameter"),
    Bug("weight_decay_twice", "llama", DP, "parameter"),
    Bug("initialised_by_local_shape", "llama", {"tp": 2}, "loss"),
    Bug("initialised_by_local_shape", "llama", Z3, "loss"),
    Bug("bias_on_every_row_parallel_rank", "gpt", {"tp": 2}, "loss"),
    Bug("backward_of_column_parallel_not_summed", "llama", {"tp": 2}, "gradient", "head.norm"),
    Bug("embedding_not_summed", "llama", {"tp": 2}, "loss"),
    Bug("softmax_without_a_common_maximum", "llama", {"tp": 2}, "loss"),
    Bug("uneven_vocabulary_by_floor", "llama", {"tp": 2}, "loss"),
    Bug("norms_not_summed_over_sequence", "llama", {"tp": 2, "sp": True}, "gradient", "norm"),
    Bug("head_norms_not_summed", "qwen", {"tp": 2}, "gradient", "attention.k_norm"),
    Bug("row_bias_not_summed_over_sequence", "gpt", {"tp": 2, "sp": True}, "gradient", "ffn.down.bias"),
    Bug("positions_start_at_zero_on_every_rank", "gpt", {"tp": 2, "sp": True}, "loss"),
    Bug("kv_copies_not_summed", "one-kv", {"tp": 2}, "gradient", "layers.1.attention.k_norm"),
    Bug("kv_copies_summed_over_all_ranks", "llama", {"tp": 4}, "gradient", "layers.1.attention.v"),
    Bug("norm_counts_each_kv_copy", "one-kv", {"tp": 2}, "norm"),
    Bug(
        "whole_gradient_summed_again",
        "llama",
        {"tp": 2, "tp_form": "all-gather"},
        "gradient",
        "layers.1.ffn",
        ratio=2.0,
    ),
    Bug("same_dropout_on_every_tp_rank", "drops", {"tp": 2, "sp": True}, "loss"),
    Bug("different_dropout_on_every_tp_rank", "drops", {"tp": 2}, "loss"),
    Bug("same_dropout_on_every_data_rank", "drops", DP, "loss"),
    Bug("dropout_differs_when_recomputed", "drops", {"recompute": "full"}, "gradient", "layers.1"),
    Bug("tensor_parallel_ranks_read_different_samples", "llama", {"tp": 2}, "loss"),
    Bug("context_ranks_not_summed", "llama", {"cp": 2}, "gradient"),
    Bug("rotation_starts_at_zero_on_every_rank", "llama", {"cp": 2}, "loss"),
    Bug("data_loader_without_zigzag", "llama", {"cp": 2}, "loss"),
    Bug("causal_by_local_position", "llama", {"cp": 2, "cp_kind": "all-gather"}, "loss"),
    Bug("gradients_of_keys_not_exchanged_back", "llama", {"cp": 2, "cp_kind": "ulysses"}, "gradient", "layers.1.attention"),
    Bug("key_copies_not_summed", "one-kv", {"cp": 2, "cp_kind": "ulysses"}, "gradient", "layers.1.attention.k_norm"),
    Bug("targets_in_another_order", "llama", {"pp": 2}, "loss"),
    Bug("output_gradient_sent_back", "llama", {"pp": 4}, "gradient", "layers.1"),
    Bug("rank_zero_is_false", "llama", {"pp": 2}, "gradient", "layers.1"),
    Bug("tied_embedding_not_summed", "qwen", {"pp": 2}, "gradient", "embedding.tokens"),
    Bug("shards_freed_between_halves", "llama", {**Z3, "pp": 2, "schedule": "zb-h1"}, "gradient"),
    Bug("experts_summed_over_data_ranks", "mixtral", EP, "gradient", "moe.experts"),
    Bug("expert_gradients_not_scaled", "mixtral", EP, "gradient", "moe.experts", ratio=2.0),
    Bug("expert_copies_not_summed", "mixtral", {"replicate": 4, "ep": 2}, "gradient", "moe.experts"),
    Bug("balance_of_each_rank", "mixtral", {**EP, "microbatch": 4}, "gradient", "", router=(("aux", 0.1),)),
    Bug("expert_bias_on_every_rank", "qwen-moe", {"tp": 2}, "loss"),
    Bug("router_not_summed", "mixtral", {"tp": 2}, "gradient", "moe.router"),
    Bug("error_feedback_dropped", "llama", {**DP, "compression": "int4"}, "gradient", step=1),
    Bug("decoded_with_the_first_ranks_scale", "llama", {"cp": 2, "compression": "int8"}, "gradient"),
    Bug("positions_drawn_separately", "llama", {**DP, "compression": "random-k", "compression_ratio": 0.1}, "gradient"),
    Bug("partial_sums_compressed", "qwen", {**DP, "tp": 2, "sp": True, "compression": "int8"}, "gradient", "norm"),
    Bug("compressed_experts_summed_over_data_ranks", "mixtral", {"replicate": 4, "ep": 2, "compression": "int8"}, "gradient",
        "moe.experts"),
    Bug("owners_rows_by_neighbour", "llama", {**Z3, "compression": "int8"}, "gradient"),
]  # fmt: skip
