"""Bugs of the kinds in the trackers of training frameworks, each with the meaning it was planted with: phase, pattern and place.

Each is a function that puts one bug into a process: into the ranks, and with `shared` into one device too, as it would be in the source.
"""

from typing import Any, NamedTuple

import torch
from torch import distributed

from meshwright.models import router
from meshwright.parallel import apply, exchange, pipeline
from meshwright.parallel.context import sequence
from meshwright.parallel.data import buckets, local_sgd
from meshwright.parallel.expert import dispatch
from meshwright.parallel.numerics import fp8
from meshwright.parallel.tensor import split, vocabulary
from meshwright.training import loop
from meshwright.training.checkpoint import load
from meshwright.training.optimizer import average, norm


class Further(NamedTuple):
    name: str
    plan: dict[str, Any]
    phase: str
    pattern: str
    place: str = ""  # a part of what the diagnosis names
    model: dict[str, Any] | None = None
    workload: dict[str, Any] | None = None
    optimizer: dict[str, Any] | None = None
    documents: bool = False
    shared: bool = False
    daily: bool = False


def not_resharded_after_an_evaluation():
    """ZeRO keeps the weights that an evaluation gathered. Where a training then goes back to a checkpoint, its next step computes with them.
    With ZeRO-3 that reshards, torch frees them after each forward, and nothing is left to free."""
    apply.zero.reshard = lambda modules: None


def a_stage_computes_the_previous_micro_batch():
    """A receive buffer is read before the message has arrived."""
    make = apply.make_pipeline

    def made(parallel, program, dtype):
        for i, module in parallel.stages.items():
            last = []

            def late(module, inputs, last=last):
                last.append(inputs[0].detach().clone())
                return (inputs[0] * 0 + last[-2],) if len(last) % 6 in (3, 5) else None

            if i == 1:
                module.register_forward_pre_hook(late)
        return make(parallel, program, dtype)

    apply.make_pipeline = made


def norm_of_the_heads_of_a_rank():
    """A norm over all heads is taken over those of this rank."""
    split._average_norms = lambda module, done: None


def norm_misses_the_experts():
    plain = norm.counted_squares
    loop.counted_squares = lambda pieces: plain([p for p in pieces if ".experts." not in p.name])


def rate_of_the_first_group_only():
    """A schedule sets the rate of the first parameter group; the others keep theirs."""

    def first(optimizer, rate):
        optimizer.param_groups[0]["lr"] = rate * optimizer.param_groups[0]["rate_factor"]

    loop.set_learning_rate = first


def heads_come_back_in_another_order():
    plain = sequence.attend_by_heads

    def swapped(q, k, v, group, attend):
        return plain(q, k, v, group, attend).flip(1)

    sequence.attend_by_heads = swapped


def the_second_rank_does_not_update():
    step = torch.optim.AdamW.step

    def first_rank(self, closure=None):
        return step(self, closure) if distributed.get_rank() == 0 else None

    torch.optim.AdamW.step = first_rank


def gradients_summed_in_bf16():
    """fp32 is promised, and buckets are rounded to bf16 before they are sent."""
    start = buckets.Buckets.finish

    def rounded(self):
        self.flat.copy_(self.flat.bfloat16().to(self.flat.dtype))
        start(self)

    buckets.Buckets.finish = rounded


def gradients_accumulated_in_bf16():
    """fp32 is promised, and every micro-batch is added to a bf16 buffer."""
    begin = buckets.Buckets.begin

    def rounded(self, last):
        self.flat.copy_(self.flat.bfloat16().to(self.flat.dtype))
        begin(self, last)

    buckets.Buckets.begin = rounded


def tokens_counted_over_dp_only():
    """Context-parallel ranks divide by the tokens of their part of the sequence."""
    plain = apply.Parallel.all_reduce
    apply.Parallel.all_reduce = lambda self, x, axis: plain(self, x, "dp" if axis == "dp_cp" else axis)


def local_sgd_averages_matrices_only():
    make = local_sgd.Average.__init__
    local_sgd.Average.__init__ = lambda self, tensors, group, every: make(
        self, [t for t in tensors if t.ndim > 1], group, every
    )


def first_token_of_each_range_dropped():
    plain = vocabulary._CrossEntropy.forward

    def forward(ctx, logits_TV, target_T, start, group):
        return plain(
            ctx, logits_TV, torch.where(target_T == start, start - 1 + 2 * (start == 0), target_T), start, group
        )

    vocabulary._CrossEntropy.forward = staticmethod(forward)


def parts_of_the_sequence_scattered_in_reverse():
    plain = exchange.reduce_scatter
    exchange.reduce_scatter = lambda x, group, dim: plain(
        x.unflatten(dim, (group.size(), -1)).flip(dim).flatten(dim, dim + 1), group, dim
    )


def the_gradient_of_another_micro_batch_sent_back():
    backward, sent = pipeline.Stage.backward_one_chunk, {}

    def late(self, chunk, *args, **options):
        backward(self, chunk, *args, **options)
        if not self.is_first:
            own = self.bwd_cache[chunk]
            self.bwd_cache[chunk] = (sent.get(chunk - 1, own[0]) if chunk % 2 else own[0], *own[1:])
            sent[chunk] = own[0].clone()

    pipeline.Stage.backward_one_chunk = late


def moving_average_before_the_update():
    update = average.WeightAverage.update

    @torch.no_grad()
    def late(self):
        before = getattr(self, "before", [p.local.clone() for p in self.pieces])
        self.before = [p.local.clone() for p in self.pieces]
        now = [p.local.clone() for p in self.pieces]
        for piece, old in zip(self.pieces, before, strict=True):
            piece.local.copy_(old)
        update(self)
        for piece, weight in zip(self.pieces, now, strict=True):
            piece.local.copy_(weight)

    average.WeightAverage.update = late


def moments_swapped_at_the_resume():
    plain = load.load

    def swapped(trainer, *more):
        out = plain(trainer, *more)
        for state in trainer.optimizer.state.values():
            state["exp_avg"], state["exp_avg_sq"] = state["exp_avg_sq"], state["exp_avg"].abs()
        return out

    load.load = swapped


def samples_of_the_batch_rotated_between_steps():
    """From the second step on, data-parallel ranks swap their shares for the targets only."""
    plain = loop.Trainer.train_step

    def step(self):
        batch = self.loader.batch

        def rolled(number, indices):
            own = batch(number, indices)
            return own._replace(targets=own.targets.roll(1, 0)) if number else own

        self.loader.batch = rolled
        try:
            return plain(self)
        finally:
            self.loader.batch = batch

    loop.Trainer.train_step = step


def rows_of_experts_in_the_order_of_arrival():
    """Copies that came from several ranks are not sorted by expert."""
    dispatch.ExpertDispatch._by_expert = lambda self, device: torch.arange(self.total, device=device)


def capacity_of_half_the_tokens():
    plain = router.Router.capacity
    router.Router.capacity = lambda self, tokens, factor: plain(self, tokens // 2, factor)


def fp8_weights_of_the_first_step():
    plain, done = fp8.quantise_weights, []

    def once(stages):
        if not done:
            plain(stages)
        done.append(True)

    fp8.quantise_weights = once


def fp8_scales_of_the_first_products():
    """A scale is kept for every shape of a tensor, and never follows its values."""
    plain, first = fp8.amax_of, {}
    fp8.amax_of = lambda x: first.setdefault(tuple(x.shape), plain(x).clone())


def documents_ignored_by_the_ring():
    plain = sequence.pattern_of
    sequence.pattern_of = lambda *given: plain(*given)._replace(documents_BS=None)


Z3, SP = {"shard": 2, "zero": 3}, {"tp": 2, "sp": True}
EXPERTS = {"experts": 4, "top_k": 2, "expert_ffn": 16}
BF16 = {"param_dtype": "bf16", "master": True}
FURTHER = [
    Further("not_resharded_after_an_evaluation", {"shard": 2, "zero": 2}, "forward", "stale"),
    Further("not_resharded_after_an_evaluation", {"shard": 2, "zero": 3, "reshard": False}, "forward", "stale"),
    Further("a_stage_computes_the_previous_micro_batch", {"pp": 2}, "forward", "permutation", "layers.1"),
    Further("norm_of_the_heads_of_a_rank", {"tp": 2}, "forward", "other", "attention.q_norm", {"qk_norm": True, "qk_norm_width": "projection"}),
    Further("norm_misses_the_experts", {"replicate": 2}, "clipping", "missing sum", model=EXPERTS),
    Further("rate_of_the_first_group_only", {"replicate": 2}, "update", "factor", shared=True),
    Further("heads_come_back_in_another_order", {"cp": 2, "cp_kind": "ulysses"}, "forward", "other", "layers.0.attention.o"),
    Further("the_second_rank_does_not_update", {"shard": 2, "zero": 1}, "update", "stale"),
    Further("gradients_summed_in_bf16", {"replicate": 2}, "reduction", "noise"),
    Further("gradients_accumulated_in_bf16", {"replicate": 2, **BF16}, "reduction", "noise", workload={"precision": "bf16"}),
    Further("tokens_counted_over_dp_only", {"cp": 2}, "forward", "factor"),
    Further("local_sgd_averages_matrices_only", {"replicate": 2, "average_every": 2}, "update", "missing sum", workload={"optimizer": "sgd"}),
    Further("first_token_of_each_range_dropped", {"tp": 2}, "forward", "part", "loss"),
    Further("parts_of_the_sequence_scattered_in_reverse", SP, "forward", "permutation", "embedding"),
    Further("the_gradient_of_another_micro_batch_sent_back", {"pp": 2}, "backward", "permutation", "gradient of the output of layers.0"),
    Further("moving_average_before_the_update", {"replicate": 2}, "update", "stale", optimizer={"ema": 0.9}, shared=True),
    Further("moments_swapped_at_the_resume", {"shard": 2, "zero": 1}, "resume", "other", shared=True),
    Further("rows_of_experts_in_the_order_of_arrival", {"replicate": 2, "ep": 2}, "forward", "other", "layers.0", EXPERTS),
    Further("capacity_of_half_the_tokens", {"replicate": 2}, "forward", "other", "layers.0", {**EXPERTS, "router": {"capacity": 1.0}}),
    Further("fp8_weights_of_the_first_step", {"replicate": 2}, "forward", "stale", "layers.0", workload={"precision": "fp8"}),
    Further("fp8_scales_of_the_first_products", {"tp": 2}, "forward", "stale", "layers.0", workload={"precision": "fp8"}),
    Further("documents_ignored_by_the_ring", {"cp": 2}, "forward", "part", "layers.0.attention", documents=True),
    Further("samples_of_the_batch_rotated_between_steps", {"replicate": 2}, "forward", "permutation", "batch of targets"),
]  # fmt: skip
