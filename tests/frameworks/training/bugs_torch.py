"""Bugs to plant in PyTorch's parallelism, or in the loop around it, by replacing functions of them."""

import common
import torch
from torch import nn
from torch.nn import functional as F


def ddp_never_reduces(chosen):
    plain = nn.parallel.DistributedDataParallel.forward

    def forward(self, *inputs):
        self.require_backward_grad_sync = False
        return plain(self, *inputs)

    nn.parallel.DistributedDataParallel.forward = forward


def ddp_is_bypassed(chosen):
    nn.parallel.DistributedDataParallel.forward = lambda self, *inputs: self.module(*inputs)


def loss_is_not_divided(chosen):
    loss_of = common.loss_of
    common.loss_of = lambda logits, labels: loss_of(logits, labels) * chosen.accumulate


def gradients_are_kept(chosen):
    calls = []
    plain = torch.optim.Optimizer.zero_grad
    torch.optim.Optimizer.zero_grad = lambda self, *a, **k: (
        plain(self, *a, **k) if not calls.append(1) and len(calls) == 1 else None
    )


def same_data(chosen):
    plain = common.micro_batches
    common.micro_batches = lambda chosen, step, place=0, ranks=1: plain(chosen, step, 0, ranks)


def other_learning_rate(chosen):
    plain = common.optimizer_of

    def optimizer_of(chosen, parameters):
        made = plain(chosen, parameters)
        if chosen.rank == 1:
            made.param_groups[0]["lr"] *= 3
        return made

    common.optimizer_of = optimizer_of


def other_weight_decay(chosen):
    plain = common.optimizer_of

    def optimizer_of(chosen, parameters):
        made = plain(chosen, parameters)
        if chosen.rank == 1:
            made.param_groups[0]["weight_decay"] = 5.0
        return made

    common.optimizer_of = optimizer_of


def forgotten_layer(chosen):
    plain = common.optimizer_of
    common.optimizer_of = lambda chosen, parameters: plain(chosen, list(parameters)[:-3])


def clips_with_the_local_norm(chosen):
    from torch.distributed.fsdp import FullyShardedDataParallel

    FullyShardedDataParallel.clip_grad_norm_ = lambda self, limit: nn.utils.clip_grad_norm_(self.parameters(), limit)


def row_parallel_is_not_summed(chosen):
    from torch.distributed.tensor.parallel import RowwiseParallel

    plain = RowwiseParallel._prepare_output_fn

    def prepare(output_layouts, use_local, module, outputs, mesh):
        return (
            plain(output_layouts, use_local, module, outputs, mesh)
            if module.in_features != common.HIDDEN
            else outputs.to_local()
        )

    RowwiseParallel._prepare_output_fn = staticmethod(prepare)


def gradient_of_input_is_not_summed(chosen):
    from torch.distributed.tensor import _api

    plain = _api._FromTorchTensor.backward

    def backward(ctx, gradient):
        results = plain(ctx, gradient)
        return (gradient.to_local(), *results[1:]) if any(p.is_partial() for p in gradient.placements) else results

    _api._FromTorchTensor.backward = staticmethod(backward)


def other_dropout(chosen):
    plain = common.model_of

    def model_of(*args, **kwargs):
        made = plain(*args, **kwargs)
        torch.manual_seed(chosen.rank)
        return made

    common.model_of = model_of


def reduces_in_bf16(chosen):
    from torch.distributed import fsdp

    plain = fsdp.MixedPrecisionPolicy.__init__

    def begin(self, *args, **kwargs):
        plain(self, reduce_dtype=torch.bfloat16)

    fsdp.MixedPrecisionPolicy.__init__ = begin


def labels_are_not_shifted(chosen):
    plain = common.loss_of
    common.loss_of = lambda logits, labels: plain(logits, labels.roll(1, 1) if chosen.rank == 1 else labels)


def positions_begin_again(chosen):
    def forward(self, tokens):
        x = self.embedding(tokens) + self.positions((torch.arange(tokens.shape[1]) + chosen.rank) % common.SEQ)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))

    common.Gpt.forward = forward


def attention_sees_the_future(chosen):
    plain = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = lambda q, k, v, is_causal=True: plain(q, k, v, is_causal=chosen.rank != 1)


def last_batch_is_dropped(chosen):
    plain = common.micro_batches
    common.micro_batches = lambda *args: plain(*args)[:-1]


def zeroes_in_between(chosen):
    plain = common.loss_of

    def loss_of(logits, labels):
        return ClearBefore.apply(plain(logits, labels))

    class ClearBefore(torch.autograd.Function):
        @staticmethod
        def forward(ctx, loss):
            return loss.clone()

        @staticmethod
        def backward(ctx, gradient):
            for model in MODELS:
                for parameter in model.parameters():
                    parameter.grad = None
            return gradient

    remember_models()
    common.loss_of = loss_of


MODELS = []


def remember_models():
    plain = common.model_of

    def model_of(*args, **kwargs):
        MODELS.append(plain(*args, **kwargs))
        return MODELS[-1]

    common.model_of = model_of


def gradients_are_summed(chosen):
    """Of FSDP2: the division by the number of ranks is left out."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as private

    plain = private.foreach_reduce

    def foreach_reduce(held, gradients, *args, **kwargs):
        return plain(held, [g * 2 for g in gradients], *args, **kwargs)

    private.foreach_reduce = foreach_reduce


def pipeline_does_not_divide(chosen):
    from torch.distributed.pipelining import schedules

    for kind in (schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti):
        plain = kind.__init__

        def begin(self, *args, plain=plain, **kwargs):
            plain(self, *args, **{**kwargs, "scale_grads": False})

        kind.__init__ = begin


def gradient_sent_is_halved(chosen):
    from torch.distributed.pipelining import stage

    plain = stage._PipelineStageBase.get_bwd_send_ops

    def get_bwd_send_ops(self, chunk):
        for gradient in self.bwd_cache.get(chunk, ()):
            if isinstance(gradient, torch.Tensor):
                gradient.mul_(0.5)
        return plain(self, chunk)

    stage._PipelineStageBase.get_bwd_send_ops = get_bwd_send_ops


def targets_are_reversed(chosen):
    plain = common.loss_of
    common.loss_of = lambda logits, labels: plain(logits, labels.flip(0))


def rate_is_scheduled_twice(chosen):
    plain = common.optimizer_of

    def optimizer_of(chosen, parameters):
        made = plain(chosen, parameters)
        made.register_step_post_hook(
            lambda optimizer, *_: optimizer.param_groups[0].update(lr=optimizer.param_groups[0]["lr"] * 0.5)
        )
        return made

    common.optimizer_of = optimizer_of


def small_parameters_are_not_decayed(chosen):
    def optimizer_of(chosen, parameters):
        parameters = list(parameters)
        matrices, small = [p for p in parameters if p.ndim > 1], [p for p in parameters if p.ndim < 2]
        return torch.optim.AdamW([{"params": matrices}, {"params": small, "weight_decay": 0.0}], lr=1e-3)

    common.optimizer_of = optimizer_of


def gelu_is_approximated(chosen):
    plain = F.gelu
    F.gelu = lambda x: plain(x, approximate="tanh")


def norms_have_another_epsilon(chosen):
    plain = nn.LayerNorm.__init__

    def begin(self, size):
        plain(self, size, eps=1e-6)

    nn.LayerNorm.__init__ = begin


def replicas_are_not_reduced(chosen):
    """Of HSDP: only the ranks of a shard group sum their gradients."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as private

    plain = private.dist.all_reduce
    private.dist.all_reduce = lambda tensor, *a, group=None, **k: (
        plain(tensor, *a, group=group, **k) if group is None else None
    )


def clips_each_micro_batch(chosen):
    import __main__ as script

    losses = common.loss_of

    class ClipAfter(torch.autograd.Function):
        @staticmethod
        def forward(ctx, loss):
            return loss.clone()

        @staticmethod
        def backward(ctx, gradient):
            torch.autograd.Variable._execution_engine.queue_callback(lambda: script.clip(MODELS[0], chosen.clip))
            return gradient

    remember_models()
    common.loss_of = lambda logits, labels: ClipAfter.apply(losses(logits, labels))


def updates_each_micro_batch(chosen):
    optimizers, losses = [], common.loss_of
    plain = common.optimizer_of

    def optimizer_of(chosen, parameters):
        optimizers.append(plain(chosen, parameters))
        return optimizers[0]

    class UpdateAfter(torch.autograd.Function):
        @staticmethod
        def forward(ctx, loss):
            return loss.clone()

        @staticmethod
        def backward(ctx, gradient):
            torch.autograd.Variable._execution_engine.queue_callback(optimizers[0].step)
            return gradient

    common.optimizer_of = optimizer_of
    common.loss_of = lambda logits, labels: UpdateAfter.apply(losses(logits, labels))


def root_is_not_sharded(chosen):
    """Of FSDP2: only the layers are; the gradients of what is outside of them are never reduced."""
    import __main__ as script

    plain = script.fully_shard
    script.fully_shard = lambda module, **more: plain(module, **more) if isinstance(module, common.Block) else module


def norm_counts_replicas(chosen):
    """Of HSDP: the sums of squares of the shards are added over all ranks, those of replicas too."""
    import __main__ as script

    def clip(model, limit):
        total = sum((p.grad.to_local() ** 2).sum() for p in model.parameters())
        torch.distributed.all_reduce(total)
        nn.utils.clip_grads_with_norm_(model.parameters(), limit, total.sqrt())

    script.clip = clip


def plant(chosen):
    globals()[chosen.bug](chosen)
