"""Bugs to plant in megatron-core, by replacing functions of it."""

import torch
from torch import distributed


def input_gradient_is_not_summed(chosen):
    """Of column-parallel layers: their asynchronous all-reduce of backward."""
    plain = distributed.all_reduce

    class Done:
        def wait(self):
            pass

    distributed.all_reduce = lambda tensor, *a, async_op=False, **k: Done() if async_op else plain(tensor, *a, **k)


def norms_are_not_summed(chosen):
    from megatron.core.distributed import finalize_model_grads as module

    replace(module, "_allreduce_non_tensor_model_parallel_grads")


def tied_weights_are_not_summed(chosen):
    from megatron.core.distributed import finalize_model_grads as module

    replace(module, "_allreduce_word_embedding_grads")


def replace(module, name):
    """`finalize_model_grads` is a module and a function in it: the function of the module's dictionary is replaced."""
    import sys

    sys.modules["megatron.core.distributed.finalize_model_grads"].__dict__[name] = lambda *args, **kwargs: None
    del module


def experts_are_not_scaled(chosen):
    from megatron.core.distributed import DistributedDataParallel

    plain = DistributedDataParallel.__init__

    def begin(self, *args, **kwargs):
        plain(self, *args, **kwargs)
        for group in self.expert_parallel_bucket_groups:
            for bucket in group.buckets:
                bucket.gradient_scaling_factor = 1.0

    DistributedDataParallel.__init__ = begin


def loss_is_not_divided(chosen):
    import __main__ as script

    plain = script.forward_step

    def forward_step(batches, model):
        output, loss = plain(batches, model)
        return output, lambda output: (loss(output)[0] * chosen.accumulate, loss(output)[1])

    script.forward_step = forward_step


def parameters_are_not_gathered(chosen):
    from megatron.core.distributed import DistributedDataParallel

    DistributedDataParallel.start_param_sync = lambda self, *args, **kwargs: None


def copies_are_not_reduced(chosen):
    from megatron.core.distributed import DistributedDataParallel

    DistributedDataParallel.finish_grad_sync = lambda self, *args, **kwargs: None


def norm_is_local(chosen):
    from megatron.core.optimizer import clip_grads

    in_place_of_distributed(clip_grads)


def in_place_of_distributed(module):
    """`torch.distributed` of one module only: its all-reduce does nothing."""
    import types

    alone = types.SimpleNamespace(
        **{name: getattr(distributed, name) for name in dir(distributed) if not name.startswith("__")}
    )
    alone.all_reduce = lambda tensor, *args, **kwargs: None
    module.torch = types.SimpleNamespace(**{**vars(torch), "distributed": alone})


def norm_counts_copies(chosen):
    from megatron.core.optimizer import optimizer

    optimizer.tensor_parallel.param_is_not_tensor_parallel_duplicate = lambda *args, **kwargs: True


def embedding_is_not_summed(chosen):
    from megatron.core.tensor_parallel import layers

    plain = layers.VocabParallelEmbedding.forward

    def forward(self, tokens):
        kept, layers.reduce_from_tensor_model_parallel_region = (
            layers.reduce_from_tensor_model_parallel_region,
            lambda x, group=None: x,
        )
        out = plain(self, tokens)
        layers.reduce_from_tensor_model_parallel_region = kept
        return out

    layers.VocabParallelEmbedding.forward = forward


def bias_is_added_by_each(chosen):
    from megatron.core.tensor_parallel import layers

    plain = layers.RowParallelLinear.forward

    def forward(self, x):
        out, bias = plain(self, x)
        return out, None if bias is None else bias + 1.0

    layers.RowParallelLinear.forward = forward


def softmax_is_local(chosen):
    from megatron.core.tensor_parallel import cross_entropy

    in_place_of_distributed(cross_entropy)


def rotary_is_stretched(chosen):
    """A shift would change nothing: rotary positions are relative."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    plain, of = RotaryEmbedding.forward, 1 + chosen.rank
    RotaryEmbedding.forward = lambda self, length, *args, **kwargs: plain(self, length * of, *args, **kwargs)[::of]


def tokens_come_back_in_another_order(chosen):
    from megatron.core.transformer.moe import token_dispatcher

    plain = token_dispatcher.unpermute
    token_dispatcher.unpermute = lambda tokens, *args, **kwargs: plain(tokens.roll(1, 0), *args, **kwargs)


def row_parallel_is_not_summed(chosen):
    from megatron.core.tensor_parallel import layers

    layers.reduce_from_tensor_model_parallel_region = lambda x, group=None: x


def router_counts_in_backward(chosen):
    """The gradient that comes back from the all-gather of tokens is not summed over the ranks of experts."""
    from megatron.core.tensor_parallel import mappings

    def backward(ctx, gradient):
        size = gradient.shape[0] // ctx.group.size()
        return gradient[ctx.group.rank() * size :][:size].contiguous(), None, None, None, None

    mappings._GatherFromSequenceParallelRegion.backward = staticmethod(backward)


def step_of_one_rank_only(chosen):
    from megatron.core.optimizer import optimizer

    plain = optimizer.FP32Optimizer.step_with_ready_grads

    def step(self):
        for group in self.optimizer.param_groups:
            group["lr"] *= chosen.rank == 0
        return plain(self)

    optimizer.FP32Optimizer.step_with_ready_grads = step


def router_is_not_summed(chosen):
    """Under sequence parallelism each rank routes a part of the sequence."""
    from megatron.core.transformer.moe.router import TopKRouter

    plain = TopKRouter.__init__

    def begin(self, *args, **kwargs):
        plain(self, *args, **kwargs)
        self.weight.sequence_parallel = False

    TopKRouter.__init__ = begin


def router_is_detached(chosen):
    """The probabilities of the experts are sent without their gradient."""
    from megatron.core.transformer.moe.router import TopKRouter

    route = TopKRouter.forward

    def forward(self, *args, **kwargs):
        probabilities, chosen_experts = route(self, *args, **kwargs)
        return probabilities.detach(), chosen_experts

    TopKRouter.forward = forward


def head_norms_are_not_summed(chosen):
    """Of queries and keys: each rank's gradient is of its own heads."""
    from megatron.core.distributed import finalize_model_grads as module

    replace(module, "_allreduce_non_tensor_model_parallel_grads")


def plant(chosen):
    globals()[chosen.bug](chosen)
