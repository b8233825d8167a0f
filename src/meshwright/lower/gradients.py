"""The messages of data parallelism: how gradients are reduced and sharded parameters gathered.

    zero 0   all-reduce of the gradients over dp·cp, in buckets
    zero 1   reduce-scatter, the optimizer on one shard, all-gather of the parameters: the same bytes as an all-reduce, apart from
             rows padded to a multiple of the ranks; unit by unit, or in buckets where a stack shards flat buffers (`flat_shards`).
             A stack with another `zero_reduction` all-reduces gradients, in buckets or in one call: twice the bytes
    zero 2   the same; gradients are kept only as shards, so each micro-batch reduces (unless the plan accumulates them whole)
    zero 3   parameters are kept as shards: each unit gathers them forward and (if freed) backward, 1.5× the bytes of zero 0
    hybrid   shard inside a group, then all-reduce the shard over the replicas

A unit of zero 3 is also copied: from the buffer of its gather to its parameters, from its gradients to the buffer of their reduction (`_unit_copy`).

A *message* is one of two things:

    bucket   each pipeline stage has one flat buffer of the gradients that dp·cp sums and one of experts', cut into
             ⌈bytes / bucket⌉ messages of equal length; gradients that must not be compressed have a separate buffer.
             PowerSGD's messages end between parameters
    unit     under ZeRO: `plan.wrap` layers, each end of the model (both together if they share a weight), each layer's experts

One description serves two evaluations. `reduce_once` says which collectives one message needs, and `data_parallel_ops` how often a step
sends it. What they are given is a list of messages: `batch_messages` lists those of the fullest rank of a pipeline stage for a batch of
plans, with a count for messages that are equal; `lower.rank` lists those of any one rank, parameter by parameter.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from meshwright.describe.sharding import DATA_AXES
from meshwright.describe.variants import COMPRESSIONS
from meshwright.lower.batch import Batch
from meshwright.lower.compressed import on_the_wire
from meshwright.lower.program import ENDS, Array, Load, Op, StageBlocks, StepProgram, collective_op, present
from meshwright.lower.stages import blocks_by_stage, stage_ranges


class GradientMessage(NamedTuple):
    """`count` equal messages. A unit of ZeRO is gathered too, forward and (`regathered`) backward."""

    count: Array  # type: ignore[assignment]
    load: Load
    unit: bool = False
    regathered: Array = 1.0
    passed: float | None = None  # values above a threshold on the fullest rank, if measured


class GradientExchange(NamedTuple):
    """One collective of a message: how often the message issues it, and the bytes of the full buffer."""

    name: str
    axis: str
    collective: str
    count: Array  # type: ignore[assignment]
    bytes: Array


def combined(parts: Iterable[tuple[Array, Load]]) -> Load:
    """The sum of loads, each taken a number of times."""
    out = list(Load())
    for times, load in parts:
        out = [total + times * x if present(x) else total for total, x in zip(out, load, strict=True)]
    return Load(*out)


def reduce_once(
    b: Batch, group: str, load: Load, scattered: bool, passed: float | None = None
) -> Iterator[GradientExchange]:
    """The collectives that reduce one message once."""
    whole, shard, replicas = DATA_AXES[group]
    axis, width = (shard, b.summed_bytes) if scattered else (whole, b.grad_bytes)
    if present(load.sent):
        for wire, chosen in b.wires:
            factors = (load.first, load.second)
            for kind, n in on_the_wire(b, wire, load.sent, width, b.size(axis), scattered, factors, passed):
                on = chosen & (np.asarray(load.sent) > 0) & (n > 0)
                yield GradientExchange("reduce-gradients", axis, kind, on, n)
    if present(load.exact):
        kind = "reduce_scatter" if scattered else "all_reduce"
        yield GradientExchange("reduce-gradients", axis, kind, np.asarray(load.exact) > 0, load.exact * b.grad_bytes)
    if scattered and present(b.size(replicas) > 1):
        n = (load.sent + load.exact) * b.summed_bytes / b.size(shard)
        yield GradientExchange("reduce-shards", replicas, "all_reduce", (n > 0) & (b.size(replicas) > 1), n)


def data_parallel_ops(b: Batch, group: str, messages: Sequence[GradientMessage], zero_3: bool = False) -> list[Op]:
    """Return the operations of these messages in a step. Messages of ZeRO-3 belong to the blocks they overlap with (`unit_ops`); `zero_3`
    lists them here as well."""
    whole, shard, _ = DATA_AXES[group]
    scattered, m = b.sharded(group) & ~b.all_reduced, np.maximum(b.microbatches, 1.0)
    on = (b.size(whole) > 1) & np.equal(b.average_every, 0) & (zero_3 | ~(scattered & (b.zero == 3)))
    in_units, rounds = scattered & b.units, {True: b.reduce_each, False: b.reduce_whole}
    total: dict[tuple[str, str, str], list[Array]] = {}
    extra: Array = 0.0
    selected: Array = 0.0

    def add(e: GradientExchange, times: Array) -> None:
        count = times * e.count
        amounts = total.setdefault((e.name, e.axis, e.collective), [0.0, 0.0])
        amounts[0], amounts[1] = amounts[0] + count, amounts[1] + count * e.bytes

    for message in messages:
        active = on & (in_units if message.unit else ~in_units)
        for kind, applies in ((False, active & ~scattered), (True, active & scattered)):
            if not applies.any():
                continue
            times = applies * message.count * np.where(rounds[kind], m, 1.0)
            for e in reduce_once(b, group, message.load, kind, message.passed):
                add(e, times)
            if b.compresses:
                extra = extra + times * message.load.sent * _passes(b)
                selected = selected + times * message.load.sent * _selects(b)
        if message.unit and active.any():
            updated, weights = message.load.updated * b.param_bytes, gathered_weights(b, group, message.load)
            freed = np.where(b.reshard, m * (1.0 + message.regathered), 1.0)
            for name, when, times, n in (
                ("gather-parameters", b.zero < 3, 1.0, updated),
                ("gather-weights", b.zero == 3, freed, weights),
            ):
                add(GradientExchange(name, shard, "all_gather", when & (n > 0), n), active * message.count * times)
    ops = [
        _op(name, group, axis, kind, *amounts) for (name, axis, kind), amounts in total.items() if present(amounts[0])
    ]
    if present(extra):
        ops.append(_compress(b, group, (np.asarray(extra) > 0) * 1.0, extra, selected, b.parameter_tensors))
    return ops


def _compress(b: Batch, part: str, count: Array, passes: Array, selected: Array, tensors: Array) -> Op:
    """Compressing and expanding gradients in device memory: bytes, torch operators, and elements that a top-k selects from. With PowerSGD
    each parameter has products and a basis."""
    launches: Array = 0.0
    for code, wire in b.compressions:
        message, parameter = COMPRESSIONS[wire].operators
        launches = launches + (b.compression == code) * (message + parameter * tensors)
    return Op("compress", part, "memory", count, bytes=passes, launches=launches, selected_from=selected)


def gathered_weights(b: Batch, group: str, load: Load) -> Array:
    """Bytes of the weights that ZeRO-3 gathers for a message. With `gather_dtype=fp8` the matrices that fp8 products multiply by, of layers and
    of experts, take a byte per element (their scales are reduced once per step: `sync`); the ends of the model, norms, biases and routers
    stay in the parameters' dtype. A quantised base is gathered as it is kept."""
    n = load.held * b.param_bytes - fp8_saving(b, group, load)
    return n - load.packed * b.param_bytes + load.packed_bytes if present(load.packed) else n


def fp8_saving(b: Batch, group: str, load: Load) -> Array:
    """Bytes that `gather_dtype=fp8` takes off the weights of a message."""
    if not (b.gathers_fp8 and present(load.fp8)):
        return 0.0
    on = b.gathers_fp8_weights(group) & (b.param_bytes > 1) & (np.asarray(load.fp8) > 0)
    return np.where(on, load.fp8 * b.param_bytes - b.fp8_gather_bytes(load.fp8), 0.0)


def flat_gather(b: Batch, group: str, elements: Array) -> list[Op]:
    """ZeRO-1 and 2 of a stack that shards flat buffers: updated parameters are gathered in buckets where the next forward hides them, in one
    call otherwise. Its `launches` copy the shard of each parameter of each rank, in stacks that do so (`Stack.shard_copy`)."""
    n = elements * b.param_bytes * (b.sharded(group) & (b.zero < 3))
    ahead = b.overlap["dp"] * b.prefetch * b.stack.gathers_ahead > 0
    count = np.where(ahead, np.ceil(n / b.bucket), n > 0)
    if not present(count):
        return []
    axis = DATA_AXES[group].shard
    op = _op("gather-parameters", group, axis, "all_gather", count, n)
    return [replace(op, launches=b.parameter_tensors * b.size(axis)) if b.stack.shard_copy else op]


def _op(name: str, group: str, axis: str, collective: str, count: Array, total: Array) -> Op:
    """Messages of the mean length: their time and bytes add up to those of the real ones."""
    each = total / np.where(count > 0, count, 1.0)
    return collective_op(name, group, collective, axis, count, each)


def _passes(b: Batch) -> Array:
    """Bytes of memory traffic that compressing costs for each element."""
    return sum(COMPRESSIONS[wire].passes * (b.compression == code) for code, wire in b.compressions) * b.comm_bytes


def _selects(b: Batch) -> Array:
    """1 where a plan keeps the largest gradients by a top-k."""
    return sum(1.0 * (b.compression == code) for code, wire in b.compressions if COMPRESSIONS[wire].selects)


def unit_ops(b: Batch, group: str, unit: Load, times: Array) -> dict[str, list[Op]]:
    """ZeRO-3 of one block in one micro-batch: gather its weights forward and backward, reduce its gradients. The block is a share `times`
    of a unit, or several units like it. A stack that gathers parameter by parameter sends the bytes of a unit in more messages."""
    shard, by_parameter = DATA_AXES[group].shard, b.stack.gathers == "parameter"
    on = (b.zero == 3) & (b.size(shard) > 1) & (np.asarray(unit.held) > 0) & np.True_
    once = 1.0 / np.maximum(b.microbatches, 1)
    reduces = on * np.where(b.reduce_each, 1.0, once) * times

    def op(e: GradientExchange, count: Array) -> Op:
        count, n = count * e.count, e.bytes
        if by_parameter:
            count, n = count * b.layer_tensors, n / b.layer_tensors
        return collective_op(e.name, group, e.collective, e.axis, count, n)

    scatter = [op(e, reduces) for e in reduce_once(b, group, unit, True)]
    if b.compresses:
        passes = unit.sent * _passes(b)
        selected = unit.sent * _selects(b)
        scatter.append(_compress(b, "optimizer", reduces * (passes > 0), passes, selected, b.layer_tensors))
    gather = GradientExchange("gather-weights", shard, "all_gather", 1.0, gathered_weights(b, group, unit))
    backward = on * b.reshard * times
    if by_parameter:  # a parameter is freed when its module ends, so recompute and backward each gather it
        backward = backward * np.where(b.recompute == 2, 2.0, 1.0)
    # Without resharding after forward, the weights are gathered once per step, not once per micro-batch.
    forward = on * np.where(b.reshard, 1.0, once) * times
    widened = np.where(b.kept_bytes > b.param_bytes, b.kept_bytes + b.param_bytes, 0.0) * unit.held
    copied = [
        *_unit_copy(b, "shard-copy-in", forward, (widened + 2 * gather.bytes) / b.size(shard), 2.0),
        *_unit_copy(b, "unit-copy-out", forward, 2 * gather.bytes),
    ]
    copied_in = _unit_copy(b, "unit-copy-in", reduces, unit.held * (b.param_bytes + b.summed_bytes))
    return {
        "F": [op(gather, forward), *copied],
        "I": [op(gather, backward), *(replace(x, count=backward) for x in copied)],
        "W": [*copied_in, *scatter],
    }


def _unit_copy(b: Batch, name: str, count: Array, size: Array, passes: float = 1.0) -> list[Op]:
    """The copies between the buffers of a unit's collectives and its parameters or gradients: `fully_shard` rounds a rank's wide shards and copies
    them to one buffer, gathers the shards rank by rank and copies them to the parameters, and brings 16-bit gradients to the order and the dtype
    of the reduce-scatter (torch: fsdp/_fully_shard/_fsdp_collectives.py, _foreach_copy_, split_with_sizes_copy and chunk_cat). Flat shards are
    gathered in place."""
    if not b.copies_units:
        return []
    rate = "unit-copy-out" if name == "unit-copy-out" else "unit-copy-in"  # as `bench` measures them
    return [Op(name, "copies", "memory", count, bytes=size, launches=passes, elementwise=rate)]


# The messages of a batch of plans


def batch_messages(program: StepProgram, blocks: StageBlocks, group: str) -> list[GradientMessage]:
    """The messages of the ranks that hold these blocks, of each plan of the batch."""
    units = program.batch.sharded(group) & program.batch.units
    out = list(_units(program, blocks, group)) if units.any() else []
    return out if units.all() else [*out, *_buckets(program, blocks, group)]


def _units(program: StepProgram, blocks: StageBlocks, group: str) -> Iterator[GradientMessage]:
    b, counts = program.batch, blocks.counts
    loads = {block: groups[group] for block, groups in program.loads.items()}
    if group == "expert":
        for block in b.model.expert_kinds:
            yield GradientMessage(counts[block], loads[block], unit=True)
        return
    yield from _ends(program, blocks, loads)
    by_layer = b.wrap == 1.0 if b.wraps else np.True_
    for block in b.model.kinds:
        if present(counts[block]):
            yield GradientMessage(counts[block] * by_layer, loads[block], unit=True)
    for i in np.flatnonzero(~by_layer).tolist() if b.wraps else ():  # rare: unit by unit
        kinds: Counter[tuple[int, ...]] = Counter()
        for layers in stage_ranges(b, blocks.rank, i):
            run = len(layers) if b.one_unit[i] else int(b.wrap[i])
            for start in range(layers.start, layers.stop, run):
                inside = b.model.layer_kinds[start : min(start + run, layers.stop)]
                ends = (layers.start == 0, layers.stop == b.model.layers) if b.one_unit[i] else (0, 0)
                kinds[*(inside.count(block) for block in b.model.kinds), *ends] += 1
        at = np.arange(b.n) == i
        for numbers, count in kinds.items():
            parts = [(n, loads[block]) for n, block in zip(numbers, (*b.model.kinds, *ENDS), strict=True) if n]
            yield GradientMessage(at * float(count), combined(parts), unit=True)


def _ends(program: StepProgram, blocks: StageBlocks, loads: dict[str, Load]) -> Iterator[GradientMessage]:
    """Each end of the model is a unit; both together where they share a weight and a stage; none where a stage is one unit."""
    b, (first, last) = program.batch, (blocks.counts[end] * np.logical_not(program.batch.one_unit) for end in ENDS)
    together = b.pp == 1 if b.model.tied else np.False_
    both = combined([(1.0, loads["embedding"]), (1.0 * together, loads["head"])])
    yield GradientMessage(first, both, unit=True)
    yield GradientMessage(last * ~together, loads["head"], unit=True)
    for block in b.model.mtp_kinds:
        yield GradientMessage(blocks.counts[block] * np.logical_not(b.one_unit), loads[block], unit=True)


def _buckets(program: StepProgram, blocks: StageBlocks, group: str) -> Iterator[GradientMessage]:
    b = program.batch
    aligned = b.sends_factors if b.model.kind != "counts" else np.False_
    linear = all(COMPRESSIONS[wire].proportional for wire, _ in b.wires)
    for often, counts in blocks_by_stage(b, blocks):
        load = combined((counts[block], groups[group]) for block, groups in program.loads.items())
        for field in ("sent", "exact") if b.compresses else ("sent",):
            elements = getattr(load, field)
            times = often * ~aligned if field == "sent" and present(aligned) else often
            count, each = cut(b, elements)
            if linear:
                yield GradientMessage(times * count, _plain(field, elements / np.maximum(count, 1.0)))
                continue
            yield GradientMessage(times * np.maximum(count - 1.0, 0.0), _plain(field, each))
            yield GradientMessage(times * (count > 0), _plain(field, elements - np.maximum(count - 1.0, 0.0) * each))
    for i in np.flatnonzero(aligned & np.ones(b.n, bool)).tolist():
        for layers in stage_ranges(b, blocks.rank, i):
            for elements, first, second in flat_messages(
                _in_order(program, group, layers, i), b.bucket[i], b.grad_bytes[i], True
            ):
                yield GradientMessage((np.arange(b.n) == i) * 1.0, Load(sent=elements, first=first, second=second))


def _plain(field: str, elements: Array) -> Load:
    """A load of unknown shapes, which PowerSGD would send uncompressed."""
    return Load(sent=elements, first=elements) if field == "sent" else Load(exact=elements)


def cut(b: Batch, elements: Array) -> tuple[Array, Array]:
    """Cut a flat gradient buffer into ⌈bytes/bucket⌉ equal messages: their number, and the elements of all but the last."""
    width = b.grad_bytes
    bucket = np.where(b.reduced_whole, np.inf, b.bucket) if b.stack.zero_reduction == "whole" else b.bucket
    count = np.ceil(elements * width / np.maximum(np.floor(bucket), width))
    each = np.ceil(elements / np.maximum(count, 1.0))
    return np.ceil(elements / np.maximum(each, 1.0)), each


def flat_messages(
    parts: Sequence[tuple[float, float, float]], bucket: float, width: float, aligned: bool
) -> list[tuple[float, float, float]]:
    """The messages of one flat buffer, of `parts` (elements, and PowerSGD's two sums) in the order backward fills it; `aligned` ones
    end between parameters. A parameter belongs to the message it begins in."""
    starts = [0, *accumulate(int(size) for size, *_ in parts)]
    total = starts[-1]
    count = max(1, -(-total * int(width) // max(int(bucket), int(width))))
    edges = [*range(0, total, max(1, -(-total // count))), total]
    if aligned:
        edges = sorted({starts[bisect_left(starts, edge)] for edge in edges})
    out = []
    for start, stop in pairwise(edges):
        applies = [part for part, at in zip(parts, starts, strict=False) if start <= at < stop]
        out.append((float(stop - start), sum(first for _, first, _ in applies), sum(second for *_, second in applies)))
    return out


def _in_order(program: StepProgram, group: str, layers: range, i: int) -> list[tuple[float, float, float]]:
    """The compressed parameters of a stage of plan i, in the order backward fills their buffer."""
    model = program.batch.model
    blocks = (
        [ENDS[0]] * (layers.start == 0)
        + [model.layer_kinds[k] for k in layers]
        + [ENDS[1], *model.mtp_kinds * model.mtp_layers] * (layers.stop == model.layers)
    )
    columns: dict[str, list[tuple[float, float, float]]] = {}
    for block in dict.fromkeys(blocks):
        rows = program.compressed[block][group]
        at = [tuple(float(program.batch.full(x)[i]) for x in row) for row in rows]
        columns[block] = [(size, first, second) for size, first, second in at if size]
    return [part for block in reversed(blocks) for part in reversed(columns[block])]
