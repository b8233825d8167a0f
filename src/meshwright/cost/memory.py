"""Peak memory of a rank, by part.

    parameters   N·2 bytes, sharded by ZeRO-3; the frozen matrices of a quantised base as they are kept. What is frozen has no gradient and no state
    gradients    N·4 (accumulated in fp32) or N·2, sharded by ZeRO-2 and 3 unless accumulation is unsharded
    optimizer    N·(4 master + 4 + 4), sharded by ZeRO-1, 2 and 3; 4 less for matrices under Muon, 4 more with a moving average
    activations  saved bytes of a micro-batch × micro-batches in flight, and the logits, or one more layer while it is recomputed
    gathered     ZeRO-3: the weights of the running layer and of the prefetched layer
    working      gradients of activations, or of logits; communication buckets, compressors' buffers; a tile of attention with dropout;
                 the largest matrix of a quantised base, as products read it;
                 the workspace of matrix products
    context      driver, libraries, communicators
    slack        memory that the allocator reserves and cannot use, as for flat copies of gradients

PyTorch's FSDP has no second copy of what it shards (`fp32_shards`): the shards of ZeRO-3 are the masters, and the parameters in 16 bits are gathered.

With everything in 16/32-bit mixed precision the states are 16 bytes per parameter (2+2+12) or 18 with fp32 gradients. A 7B model at P = 8:
DDP 112 GB, ZeRO-1 38.5, ZeRO-2 26.25, ZeRO-3 14 (docs/figures.md lists published figures that do not add up).
"""

from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

import numpy as np

from meshwright.describe.sharding import DATA_AXES
from meshwright.describe.variants import COMPRESSIONS
from meshwright.lower.program import AFTER_LAYERS, ENDS, Array, Column, RankProgram, StepProgram, present

PARTS = ("parameters", "gradients", "optimizer", "activations", "gathered", "working", "context", "slack")


def state_memory(program: StepProgram, rank: RankProgram) -> dict[str, Array]:
    """Parameters, gradients and optimizer states on this rank, in bytes."""
    b = program.batch
    out: dict[str, Array] = {"parameters": np.zeros(b.n), "gradients": np.zeros(b.n), "optimizer": np.zeros(b.n)}
    for group, size in rank.frozen.items():
        whole = _scales(program, rank, group) if b.stack.whole_scales else 0.0
        out["parameters"] += np.where(b.zero >= 3, (size - whole) / b.size(DATA_AXES[group].shard) + whole, size)
    on_device = np.where(b.offload_states, 0.0, 1.0)
    master = np.where(b.master & (b.param_bytes < 4), 4.0, 0.0)
    shards: Array = b.param_bytes * np.ones(b.n)  # bytes of an element of a ZeRO-3 shard besides its master
    if b.stack.fp32_shards:
        shards = np.where(master > 0, 0.0, b.param_bytes)
    if (
        b.units
    ):  # ZeRO-1 and 2 update shards and gather them into other memory; where they have a master, it is the shard
        master = np.where((b.zero >= 1) & (b.zero < 3), np.maximum(master, b.param_bytes), master)
    second = np.zeros(b.n) if b.stack.frees_narrow else narrow_gradients(program)
    # Compression keeps the unsent part of the gradient (error feedback), unsharded even under ZeRO; casts to 16 bits do not.
    error_feedback = COMPRESSIONS.column("keeps_error")[b.compression] * b.grad_bytes
    for group, count in rank.elements.items():
        shard = b.size(DATA_AXES[group].shard)
        share = rank.padded[group] / shard  # elements on the fullest rank
        out["parameters"] += np.where(b.zero >= 3, shards * share, b.param_bytes * count)
        # What no rank shares is in no unit of FSDP: its gradients have the dtype of the parameters, whatever the reduction has.
        is_plain = (b.zero >= 3) & (shard == 1) & b.stack.half_states
        bytes_each = np.where(is_plain, np.minimum(b.grad_bytes, b.param_bytes), b.grad_bytes)
        out["gradients"] += bytes_each * np.where((b.zero >= 2) & b.reduce_each, share, count)
        # If unsharded gradients are reduced after each micro-batch, the sums of earlier ones need a second buffer.
        twice = np.where(b.reduce_each & (b.zero == 0) & (b.microbatches > 1), b.grad_bytes, 0.0)
        out["gradients"] += count * (second + (error_feedback + twice) * (b.size("dp_cp") > 1))
        states = master + b.workload.state_copies * b.state_bytes + (b.average_bytes if b.workload.ema else 0.0)
        out["optimizer"] += on_device * states * np.where(b.zero >= 1, share, count)
        if group in rank.by_muon:  # other parameters have Adam's second moment as well
            before, after = rank.by_muon[group]
            out["optimizer"] += on_device * b.state_bytes * np.where(b.zero >= 1, share - after, count - before)
    if b.stack.fp8_passes and b.workload.precision == "fp8":
        layers = [kind for kind in program.parameters if kind in b.model.kinds]
        if b.workload.scaling == "tensor":  # weights of layers in fp8, and transposed
            layer_elements = sum(rank.counts[kind] * program.parameters[kind]["dense"] for kind in layers)
            out["parameters"] += 2.0 * np.where((b.zero == 0) & (b.tp == 1), layer_elements, 0.0)
        for group, axes in DATA_AXES.items() if b.gathers_fp8 else ():  # the shards in fp8, as they are sent
            sent = sum(rank.counts[kind] * program.loads[kind][group].fp8 for kind in layers)
            out["parameters"] += np.where(b.gathers_fp8_weights(group), sent / b.size(axes.shard), 0.0)
    return out


def narrow_gradients(program: StepProgram) -> Array:
    """Bytes of an element in a second buffer: of the 16-bit result of the product, if this does not add into the wider sum of gradients itself."""
    b = program.batch
    separate = "accumulate" not in b.stack.fused
    return np.where(separate & (b.grad_bytes > b.param_bytes) & (b.zero < (1 if b.units else 3)), b.param_bytes, 0.0)


def _scales(program: StepProgram, rank: RankProgram, group: str) -> Array:
    """Bytes of the scales of a rank's quantised weights of a group."""
    adapter = program.batch.model.adapter
    if adapter.base == "plain":
        return 0.0
    loads = {block: groups[group] for block, groups in program.loads.items()}
    return rank.total({block: load.packed_bytes - adapter.code_bytes(load.packed) for block, load in loads.items()})


def largest_state(program: StepProgram) -> Column:
    """Bytes of parameters, gradients and optimizer states on the fullest rank of each plan."""
    totals = [sum(state_memory(program, rank).values()) for rank in program.ranks]
    return np.maximum.reduce([program.batch.full(total) for total in totals])


class Moment(NamedTuple):
    """Bytes that a rank holds at one moment of backward, besides the states that it always holds."""

    saved: Array  # for backward
    working: Array
    gradients: Array = 0.0  # of parameters
    gathered: Array = 0.0  # weights of ZeRO-3

    @property
    def total(self) -> Array:
        return self.saved + self.working + self.gradients + self.gathered


def fullest(moments: list[Moment]) -> Moment:
    """The moment with the most bytes, for each plan."""

    def fuller(best: Moment, other: Moment) -> Moment:
        more = other.total > best.total
        return Moment(*(np.where(more, new, old) for new, old in zip(other, best, strict=True)))

    return reduce(fuller, moments)


def loss_moment(program: StepProgram, rank: RankProgram) -> Moment:
    """Memory of the loss alone. The head's backward directly follows its forward, so its logits are freed after each micro-batch and before any
    layer runs backward."""
    head = sum(
        rank.counts[block] * sum(program.saved[block].values())
        - rank.times(block, "E") * program.unsaved.get(block, 0.0)
        for block in AFTER_LAYERS
        if block in program.saved
    )
    return Moment(head, rank.counts["head"] * _loss_bytes(program), gathered=gathered_memory(program, rank))


def layer_moment(program: StepProgram, rank: RankProgram) -> Moment:
    """Memory that only the backward of a layer needs: its gradients of activations, and with full recompute the tensors that its forward saved again.

    The gradients of the inputs and of the outputs of the widest product exist together. A backward that reuses the memory of saved tensors
    allocates one of them, of one column: the gradient of the input of the down projection, which the others replace. With offloaded activations
    it was measured not to reuse the tensors of a layer that was run again: there every column has a separate gradient."""
    b, m, e = program.batch, program.batch.model, program.element
    columns = 2 if m.gated else 1
    experts = 2 * m.top_k * m.expert_width * columns
    widest: Array = max(2 * m.ffn * columns, experts, 6 * m.hidden, 2 * m.linear.projected)
    if b.stack.reuses_saved:  # routed experts are not compiled
        once, each = (max(m.ffn * copies, experts, m.linear.projected) for copies in (1, 1 + columns))
        widest = np.where(b.reruns_layers & b.offload_activations, each, once)
    scores: Array = 0.0
    # The gradient of stored scores; of an unfused softmax, in fp32 and before it or after it in 16 bits.
    if b.stack.attention == "stored":
        scores = m.heads * b.seq * (e if "softmax" in b.stack.fused else 4 + e)
    flow = b.tokens * (2 * m.hidden * e + np.maximum(widest * e, scores) / b.tp) + program.tile
    return Moment(
        np.where(b.reruns_layers, program.transient, 0.0), flow, gathered=gathered_memory(program, rank, layers=True)
    )


def embedding_moment(program: StepProgram, rank: RankProgram) -> Moment:
    """The end of backward under ZeRO-3: the gradient of the embedding's unit and the copy of it that is reduced; its weights are freed."""
    b = program.batch
    size = rank.counts.get("embedding", 0.0) * program.unit_elements.get("embedding", 0.0)
    return Moment(0.0, np.where(b.zero == 3, size * (b.param_bytes + b.comm_bytes), 0.0))


def reduction_moments(program: StepProgram, rank: RankProgram) -> list[Moment]:
    """Memory of reductions of ZeRO units, where each micro-batch is reduced: at the end of a layer the gradients of the unit and the copy that is
    sent, and in the next layer still that copy. The tensors that the reduced layer saved are freed by then."""
    b = program.batch
    on = (b.zero >= 2) & b.reduce_each & (b.size("shard_cp") > 1)
    unit = _largest(program, rank, {block: groups["dense"].updated for block, groups in program.loads.items()}) * b.wrap
    freed = rank.kept / np.maximum(sum(rank.counts[kind] for kind in b.model.kinds), 1.0)
    layer, flow = layer_moment(program, rank), 2 * b.tokens * b.model.hidden * program.element
    if b.stack.flat_shards:  # their buffer is in `bucket_memory`
        return []
    if not b.stack.gradient_views:
        reduced = layer._replace(working=layer.working + unit_gradients(program, rank))
        return [reduced, embedding_moment(program, rank)._replace(saved=-rank.kept)]
    moments = [
        Moment(-freed, flow + unit * (b.param_bytes + b.comm_bytes)),
        Moment(layer.saved - freed, layer.working + unit * b.comm_bytes),
    ]
    return [Moment(np.where(on, m.saved, 0.0), np.where(on, m.working, 0.0), gathered=layer.gathered) for m in moments]


def unit_gradients(program: StepProgram, rank: RankProgram) -> Array:
    """Bytes of the unsharded gradient of the largest ZeRO-3 unit, which is copied for its reduce-scatter while the next unit computes."""
    b = program.batch
    if not present(b.zero == 3):
        return np.zeros(b.n)
    size = _largest(program, rank, program.unit_elements) * np.maximum(b.param_bytes, b.comm_bytes)
    return np.where(b.zero == 3, size, 0.0)


def _largest(program: StepProgram, rank: RankProgram, sizes: dict[str, Array]) -> Array:
    """The largest of some sizes by block, among the blocks of a rank."""
    here = (np.minimum(rank.counts[block], 1.0) * size for block, size in sizes.items())
    return np.maximum.reduce([program.batch.full(size) for size in here])


def temporary_memory(program: StepProgram, rank: RankProgram) -> Moment:
    """Bytes that only one part of backward needs: the loss, a layer, or the reduction of a unit."""
    b = program.batch
    if b.model.kind == "counts":
        layer = np.where(b.reruns_layers, program.transient, 0.0)
        return Moment(loss_moment(program, rank).saved + layer, np.zeros(b.n), gathered=gathered_memory(program, rank))
    moments = [layer_moment(program, rank), loss_moment(program, rank)]
    moments += reduction_moments(program, rank) if present(b.zero >= 2) else []
    return fullest(moments)


def lazy_moment(program: StepProgram, rank: RankProgram, gradients: Array) -> Moment:
    """The fullest moment of a backward that allocates gradients when they are computed.

    From layer to layer activations shrink and gradients grow, both linearly, so the fullest layer is the last one or the first one of the model:

        loss          all activations, no gradient
        last layer    all activations, the gradients of the head
        first layer   its activations, the gradients of all layers after it and of the head
        embedding     no activations, all gradients, and copies of the embedding's under ZeRO-3
        update        no activations, all gradients
    """
    b = program.batch
    saved, loss, layer = rank.kept, loss_moment(program, rank), layer_moment(program, rank)
    counts = {block: rank.counts[block] for block in program.parameters}
    sizes = {block: counts[block] * sum(program.parameters[block].values()) for block in counts}
    share = {block: gradients * size / np.maximum(sum(sizes.values()), 1.0) for block, size in sizes.items()}
    head = sum((share[block] for block in AFTER_LAYERS if block in share), np.zeros(b.n))
    layers = [block for block in counts if block in b.model.kinds]
    number = np.maximum(sum(counts[block] for block in layers), 1.0)
    left = np.maximum((1 - b.offloaded_share) * number, 2.0)  # of offloaded layers the running and the transferred one
    one = saved * np.where(b.offload_activations, 2 / left, 1 / number)
    after_first = head + sum(share[block] for block in layers) * (1 - 1 / number)
    return fullest(
        [
            loss._replace(saved=saved + loss.saved),
            Moment(saved + layer.saved, layer.working + unit_gradients(program, rank), head, layer.gathered),
            Moment(
                one + layer.saved, layer.working, after_first, gathered_memory(program, rank, layers=True, first=True)
            ),
            embedding_moment(program, rank)._replace(gradients=gradients),
            Moment(np.zeros(b.n), np.zeros(b.n), gradients),
        ]
    )


def _loss_bytes(program: StepProgram) -> Array:
    """Bytes of the loss at its peak besides the tensors that it saves."""
    b, m, e = program.batch, program.batch.model, program.element
    logits = b.tokens * m.padded_vocab / b.tp
    unfused = np.where(b.tp > 1, b.stack.split_loss_bytes or b.stack.loss_bytes, b.stack.loss_bytes)
    loss = logits * (e if "loss" in b.stack.fused else unfused - 4.0 + (e - 2.0))
    if b.stack.logits_chunk:  # a chunk of logits, and the gradient of the projection that is summed over chunks in fp32
        chunk, summed = b.stack.logits_chunk, 4.0 * m.padded_vocab * m.hidden
        in_chunks = np.minimum(logits * e, chunk) + np.where(logits * e > chunk, summed, 0.0)
        if (
            not b.stack.asynchronous
        ):  # no kernel replaces logits by their gradient: in single precision, besides the gradient of the input
            wide = max(e, 4.0) + (4.0 if e < 4 else 0.0)
            in_chunks = in_chunks + np.minimum(logits * wide, chunk * wide / e) + b.tokens * m.hidden * e
        loss = np.where(b.fuses_loss, in_chunks, loss)
    return loss


def bucket_memory(program: StepProgram, rank: RankProgram) -> Array:
    """Two communication buckets, together no larger than all gradients. The buckets of a flat gradient buffer are parts of it; ZeRO-3 of flat shards
    reduces a unit at a time in a buffer."""
    b = program.batch
    if b.stack.flat_shards:
        return unit_gradients(program, rank)
    if b.stack.gradient_views:
        return np.zeros(b.n)
    gradients = sum(rank.elements.values()) * b.comm_bytes
    return np.where(b.dp > 1, np.minimum(2 * np.minimum(b.bucket, 1e9), gradients), 0.0)


def flat_copies(program: StepProgram, rank: RankProgram) -> Array:
    """Flat copies of gradients that the reduction and the update make after backward, beside the segments of activations that the allocator keeps:
    of all of them where they are reduced in one call and in another dtype; of 16-bit ones the shard, and that in fp32 for the update. And the buffer
    of a gather."""
    b = program.batch
    if not b.stack.flat_copies:
        return np.zeros(b.n)
    copies = np.zeros(b.n)
    for group, count in rank.elements.items():
        share = np.where(b.zero >= 1, rank.padded[group] / b.size(DATA_AXES[group].shard), count)
        cast = np.where(b.comm_bytes != b.grad_bytes, b.comm_bytes * count, 0.0)
        copies = copies + cast + np.where(b.grad_bytes < 4, (4.0 + b.grad_bytes) * share, 0.0)
    return np.where(b.dp > 1, copies + b.bucket, 0.0)


def message_memory(program: StepProgram, rank: RankProgram) -> Array:
    """Memory of the messages of a step in torch's pipeline: a receive buffer for each of them, and what was sent until the step has ended. The
    received inputs of micro-batches in flight are among the tensors saved for backward."""
    b = program.batch
    if not (b.stack.torch_pipeline and present(b.pp > 1)):
        return np.zeros(b.n)
    (activations, on), (_, back), *_ = rank.sends
    return activations.message_bytes * np.maximum(2 * b.rounds * (on + back) - rank.in_flight * back, 0.0)


def _add_compression(program: StepProgram, rank: RankProgram, out: dict[str, Array]) -> None:
    """Raise the working memory to what compressors need: the buffers of one message during backward, those of all messages when
    backward has freed its activations."""
    together, largest = rank.compression
    out["working"] = out["working"] + np.maximum(largest - bucket_memory(program, rank), 0.0)
    live = out["activations"] + out["gathered"] + out["working"]
    out["working"] = out["working"] + np.maximum(together - live, 0.0)


def gathered_memory(program: StepProgram, rank: RankProgram, layers: bool = False, first: bool = False) -> Array:
    """ZeRO-3: the gathered weights of the running unit and the prefetched one, or the buffer of the gather that it was copied from (of all layers if
    forward does not free them). `layers`: while a layer computes and the head is freed. `first`: while the first layer runs backward, which has
    freed those of all others. The unsharded gradient of a unit is in `reduction_moments`, or in the buffer of flat shards."""
    b = program.batch
    if not present(b.zero == 3):
        return np.zeros(b.n)

    blocks = program.gathered
    if layers and not b.stack.gradient_views:
        blocks = {block: size for block, size in blocks.items() if block not in ENDS}
    largest, copies = _largest(program, rank, blocks), np.where(b.prefetch, 2.0, 1.0)
    units = copies * largest
    if b.stack.root_unit:  # gathered beside the layers in the whole of backward
        ends = {end: rank.counts[end] * program.gathered[end] for end in ENDS if end in program.gathered}
        inner = {block: size for block, size in program.gathered.items() if block not in ENDS}
        units = copies * _largest(program, rank, inner) + sum(ends.values())
    elif b.stack.gradient_views and b.model.tied:  # the ends of the model are one unit, which stays gathered as well
        both = rank.counts["embedding"] * rank.counts["head"] * program.gathered["embedding"]
        units = units + np.where(both < largest, both, 0.0)
    return np.where(b.zero == 3, np.where(b.reshard | first, np.minimum(units, rank.gathered), rank.gathered), 0.0)


def memory(program: StepProgram, rank: RankProgram) -> dict[str, Array]:
    """Peak bytes of one rank by part; they sum to the peak."""
    b = program.batch
    out = state_memory(program, rank)
    peak = temporary_memory(program, rank)
    out["activations"] = rank.kept + peak.saved
    out["gathered"] = peak.gathered
    if b.stack.frees_narrow:  # only those of the layer that runs backward are there
        layers = {k: sum(load.updated for load in program.loads[k].values()) for k in program.loads if k not in ENDS}
        peak = peak._replace(working=peak.working + narrow_gradients(program) * _largest(program, rank, layers))
    out["working"] = peak.working + bucket_memory(program, rank) + message_memory(program, rank) + b.stack.workspace
    if b.model.adapter.base != "plain":
        out["working"] = out["working"] + _largest(program, rank, program.unpacked)
    if b.compresses:
        _add_compression(program, rank, out)
    if program.matrices:  # Muon: its buffers take the place of activations, which are freed by then
        live = out["activations"] + out["gathered"] + out["working"]
        out["working"] = out["working"] + np.maximum(rank.matrix_buffers - live, 0.0)
    if b.stack.lazy_gradients and b.model.kind != "counts":
        once = (b.size("dp_cp") == 1) | (
            b.units & (b.zero >= 2)
        )  # the shards of a unit's gradients come when it is reduced
        lazy, lazy_peak = (b.microbatches == 1) & once, lazy_moment(program, rank, out["gradients"])
        for part, size in zip(("activations", "working", "gradients", "gathered"), lazy_peak, strict=True):
            more = out["working"] - peak.working if part == "working" else 0.0
            out[part] = np.where(lazy, size + more, out[part])
    groups = sum((b.size(axis) > 1) * 1.0 for axis in ("tp", "cp", "pp", "dp", "ep"))
    live = out["activations"] + out["gathered"] + out["working"]
    out["slack"] = b.stack.allocator_slack * live + flat_copies(program, rank)
    out["context"] = b.stack.context - b.stack.workspace + b.stack.communicator * groups
    return out


def rank_peaks(program: StepProgram, ranks: Sequence[RankProgram] | None = None) -> Column:
    """Peak bytes of some ranks of each plan, by default those of the program: (ranks, plans)."""
    totals = [sum(memory(program, rank).values()) for rank in ranks or program.ranks]
    return np.stack([program.batch.full(total) for total in totals])


def zero_state_bytes(
    parameters: float, ranks: int, stage: int, param: float = 2, grad: float = 2, optimizer: float = 12
) -> float:
    """Bytes of model state per device for a ZeRO stage, by the textbook formula."""
    return (
        parameters * param / (ranks if stage >= 3 else 1)
        + parameters * grad / (ranks if stage >= 2 else 1)
        + parameters * optimizer / (ranks if stage >= 1 else 1)
    )


def minimum_gpus(parameters: float, memory_bytes: float, bytes_per_parameter: float = 16.0) -> int:
    """The smallest number of devices whose total memory holds the model state."""
    return max(1, int(np.ceil(parameters * bytes_per_parameter / memory_bytes)))


def largest_model(memory_bytes: float, bytes_per_parameter: float = 16.0) -> float:
    """The largest number of parameters whose state fits in one device: 2.5B at 40 GB, 5B at 80 GB."""
    return memory_bytes / bytes_per_parameter
