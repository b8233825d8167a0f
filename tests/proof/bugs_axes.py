"""Historical bugs of tensor, sequence, context, pipeline and expert parallelism, as in `bugs`."""

from dataclasses import replace

import torch
from torch import distributed
from torch.nn import functional as F

from meshwright.describe.sharding import RULES, ShardingRule
from meshwright.models.dropout import DrawsForSamples, mixed, sample_hashes
from meshwright.models.moe import routed_experts
from meshwright.parallel import apply, exchange, pipeline, recompute, stages
from meshwright.parallel.context import blocks, sequence
from meshwright.parallel.context import sequence as context
from meshwright.parallel.data import gathering, reduction
from meshwright.parallel.expert import dispatch as expert
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.tensor import styles as tensor
from meshwright.parallel.tensor import vocabulary
from meshwright.training import loop

# Tensor and sequence parallel


def bias_on_every_row_parallel_rank():
    """The bias is added before the sum over ranks, so it counts once per rank (seed)."""

    def row(done, name, part):
        tensor.shard_parameters(done, name, part, "row")
        part.forward = lambda x: exchange.reduce_out(F.linear(x, part.weight, part.bias), done.group)

    tensor.STYLES["row"] = row


def backward_of_column_parallel_not_summed():
    """Megatron's f is a plain identity: the partial input gradients of the ranks are not summed."""
    exchange.copy_in = lambda x, group: x


def embedding_not_summed():
    """A vocabulary-parallel embedding without its all-reduce: tokens of other ranks stay zero."""

    def silent(done, name, part):
        tensor.shard_parameters(done, name, part, "vocabulary")
        cut = done.cuts[f"{name}.weight"]
        part.forward = lambda ids: vocabulary.embed(ids, part.weight, cut.start, cut.full)

    tensor.STYLES["vocabulary"] = silent


def softmax_without_a_common_maximum():
    """Each rank shifts its logits by its local maximum before the sums are added."""
    plain = distributed.all_reduce

    def skip(values, op=distributed.ReduceOp.SUM, group=None, async_op=False):
        return None if op == distributed.ReduceOp.MAX else plain(values, op, group=group, async_op=async_op)

    distributed.all_reduce = skip


def uneven_vocabulary_by_floor():
    """The first column of a rank is computed by ⌊V/P⌋, which is wrong if the vocabulary does not divide."""

    def choose(model, mesh, compilation):
        group = mesh.group("tp")
        size = model.padded_vocab
        start = size // group.size() * group.rank()
        return lambda logits, target: vocabulary.cross_entropy(logits, target, start, size, group)

    apply.choose_loss = choose


def norms_not_summed_over_sequence():
    """Under sequence parallelism a norm sees a share of the tokens only (Megatron-LM #1464)."""
    RULES["between"] = ShardingRule()


def head_norms_not_summed():
    """A norm inside attention sees this rank's heads only, with sequence parallelism or without."""
    RULES["inside"] = ShardingRule()


def row_bias_not_summed_over_sequence():
    RULES["row-bias"] = ShardingRule()


def positions_start_at_zero_on_every_rank():
    """All sequence-parallel ranks use the first learned positions."""

    def first(done, name, part):
        forward = part.forward
        tensor.shard_parameters(done, name, part, "positions")
        part.forward = lambda n: forward(n).chunk(done.group.size())[0]

    tensor.STYLES["positions"] = first


def tensor_parallel_ranks_read_different_samples():
    """A sampler keyed by the global rank."""
    prepare = loop.Trainer.__post_init__

    def separate(self):
        prepare(self)
        shift = self.parallel.mesh.index("tp")
        self.indices = range(self.indices.start + shift, self.indices.stop + shift)

    loop.Trainer.__post_init__ = separate


def kv_copies_not_summed():
    """Each rank trains its copy of a KV head with the gradient of its queries only: the copies diverge."""
    plain = apply.Parallel._sum_partial
    apply.Parallel._sum_partial = lambda self, axis: None if axis == "kv_copies" else plain(self, axis)


def kv_copies_summed_over_all_ranks():
    """Gradients of different KV heads are summed, as if all tp ranks had the same head."""
    group = Mesh.group
    Mesh.group = lambda self, axis: group(self, "tp" if axis == "kv_copies" else axis)


def norm_counts_each_kv_copy():
    pieces_of = apply.pieces_of

    def counted(*args):
        return [
            replace(p, box=replace(p.box, first_copy=p.box.first_copy or p.box.partial == "kv_copies"))
            for p in pieces_of(*args)
        ]

    apply.pieces_of = counted


def whole_gradient_summed_again():
    """A gathered output has the same gradient on every rank; a reduce-scatter counts it once per rank."""
    exchange.join = exchange.gather_in


# Dropout


def same_dropout_on_every_tp_rank():
    """One seed for all ranks: wrong where each rank has a share of the sequence."""
    tensor.STYLES["dropout"] = lambda done, name, part: None


def different_dropout_on_every_tp_rank():
    """One seed per rank: ranks with the same tensor drop different elements."""
    apply.sample_hashes = lambda seed, *a: sample_hashes(seed + distributed.get_rank(), *a)


def same_dropout_on_every_data_rank():
    """Samples are numbered from the first sample of this rank."""
    apply.sample_hashes = lambda seed, step, samples, *a: sample_hashes(seed, step, range(len(samples)), *a)


def dropout_differs_when_recomputed():
    """A recomputed layer draws from the current state of the generator instead of the saved one (Chen et al. 2016)."""
    rerun = recompute._Call.rerun

    def later(self):
        plain = DrawsForSamples.sample_hashes
        DrawsForSamples.sample_hashes = lambda module, x: mixed(plain(module, x))
        try:
            rerun(self)
        finally:
            DrawsForSamples.sample_hashes = plain

    recompute._Call.rerun = later


# Context parallel


def context_ranks_not_summed():
    """Gradients are reduced over dp only: no reduction if dp is 1 and cp is not."""
    group = Mesh.group
    Mesh.group = lambda self, axis: None if axis == "dp_cp" and self.size("cp") > 1 else group(self, axis)

    # Tokens are still counted over all of them.
    all_reduce = apply.Parallel.all_reduce

    def counted(self, values, axis):
        if axis == "dp_cp":
            distributed.all_reduce(values)
            return values
        return all_reduce(self, values, axis)

    apply.Parallel.all_reduce = counted


def rotation_starts_at_zero_on_every_rank():
    put_on = context.shard_sequence

    def local(module, *args):
        places = put_on(module, *args)
        module.geometry.position_ids = torch.arange(len(places))
        return places

    context.shard_sequence = local


def data_loader_without_zigzag():
    """Attention expects zigzag runs, but the data loader gives each rank one run."""
    put_on = context.shard_sequence

    def run(module, model, group, kind, seq, *rest):
        put_on(module, model, group, kind, seq, *rest)
        return torch.arange(seq).chunk(group.size())[group.rank()]

    context.shard_sequence = run


def causal_by_local_position():
    """Every block is masked as if it were the block of this rank."""
    blocks.rectangles = lambda queries, keys, pattern: [
        blocks.Rectangle(slice(0, sum(map(len, queries))), slice(0, sum(map(len, keys))), "triangle")
    ]


def gradients_of_keys_not_exchanged_back():
    """The backward of Ulysses does not exchange: gradients stay on the rank that has the heads."""
    sequence._AllToAll.backward = staticmethod(lambda ctx, grad_output: (grad_output, None))


class _FirstCopy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, times):
        ctx.times = times
        return x.repeat_interleave(times, dim=1)

    @staticmethod
    def backward(ctx, grad_output):
        return grad_output[:, :: ctx.times].contiguous(), None


def key_copies_not_summed():
    """KV heads are copied so that each rank has one, and the gradient of one copy is used for all."""
    plain = sequence.attend_by_heads

    def copied(q, k, v, group, attend):
        times = max(1, group.size() // k.shape[1])
        return plain(q, _FirstCopy.apply(k, times), _FirstCopy.apply(v, times), group, attend)

    context.attend_by_heads = copied


# Pipeline


def targets_in_another_order():
    """The last stage reads its micro-batches of targets from the end."""
    run = apply.Parallel.forward_backward

    def swapped(self, inputs, targets):
        return run(self, inputs, targets.flip(0))

    apply.Parallel.forward_backward = swapped


def _change_sent_gradient(change):
    backward = pipeline.Stage.backward_one_chunk

    def changed(self, chunk, *args, **options):
        received = None if self.is_last else self.grad_recv_info[chunk][0].buffer.clone()
        backward(self, chunk, *args, **options)
        if not self.is_first:
            self.bwd_cache[chunk] = (change(self, self.bwd_cache[chunk][0], received), *self.bwd_cache[chunk][1:])

    pipeline.Stage.backward_one_chunk = changed


def output_gradient_sent_back():
    """1F1B sends the gradient that it received instead of that of its input (seed)."""
    _change_sent_gradient(lambda stage, own, received: own if received is None else received)


def rank_zero_is_false():
    """`if prev_rank:` is false for rank 0, whose stage then gets no gradient (seed)."""
    _change_sent_gradient(lambda stage, own, received: torch.zeros_like(own) if stage.stage_index == 1 else own)


def tied_embedding_not_summed():
    apply.Parallel._sum_tied = lambda self, copies, group: None


def shards_freed_between_halves():
    """ZeRO-3 frees a stage between the halves of a split backward and loses the gradients of the weights."""
    plain = gathering.fully_shard
    gathering.fully_shard = lambda module, **options: plain(module, **{**options, "reshard_after_forward": True})


# Experts


def experts_summed_over_data_ranks():
    """Gradients of different experts are summed, as if dp were their group."""
    group = Mesh.group
    Mesh.group = lambda self, axis: group(self, "dp" if axis == "expert_dp" else axis)


def expert_gradients_not_scaled():
    """Wrong by a factor of ep, as with an average that counts ranks without a copy (pytorch #160285)."""
    finish = reduction.CombinedReduction.finish

    def doubled(self):
        finish(self)
        for p in self.parts[-1].parameters:
            p.grad.mul_(2)

    reduction.CombinedReduction.finish = doubled


def expert_copies_not_summed():
    group = Mesh.group
    Mesh.group = lambda self, axis: None if axis == "expert_dp" else group(self, axis)


def balance_of_each_rank():
    """The auxiliary loss uses the load of this rank instead of that of the batch (Megatron-LM #7452)."""
    expert.ParallelPlacement.sum_over_ranks = lambda self, values: values


def expert_bias_on_every_rank():
    """The bias of experts that are split over ranks counts once per rank."""
    place = stages.place_experts

    def whole(module, *args):
        place(module, *args)
        for experts in routed_experts(module):
            experts.down.bias_share = 1.0

    stages.place_experts = whole


def router_not_summed():
    """The gradient of the router has only the tokens of this rank, although tensor-parallel ranks hold copies of it."""
    RULES["inside"] = ShardingRule()
