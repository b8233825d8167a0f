"""Closed forms for common questions: buckets, chunks, overlap, accumulation, stages, ring attention, inference.

chunks          T(k) = k·o + t/k  ⇒  k* = √(t/o)           o: cost of one more chunk, t: exposed time of the whole transfer
bucket          at least n* = α/β, so that bandwidth dominates latency
overlap ratio   R = T_comm / T_comp: fully hidden if R ≤ 1
between stages  bandwidth ≥ activation bytes sent and received per micro-batch / compute time of a stage
ring attention  buffers for K and V, twice each: 4·(s/P)·kv·bytes; transfers are hidden if the compute of a block takes longer
efficiency      1 − bubble fraction ≥ e: the micro-batches it takes, or the stages that these micro-batches fill
accumulation    batch = micro-batch × accumulation × dp; the learning rate scales with the batch (linear) or its root (Adam)
"""

import math

import numpy as np

from meshwright.describe.cluster import Cluster
from meshwright.lower.program import Array
from meshwright.programs.pipelines.formulas import bubble_fraction

BUCKETS = (25e6, 4e9)  # bytes: from PyTorch's default to the size that a ring of thousands of ranks needs
BUCKET_MARGIN = 4  # bucket size over P·α/β: latency is at most a quarter of the time


def optimal_chunks(exposed: float, overhead: float) -> int:
    """k* = √(t/o), rounded and at least 1: cutting a transfer into k chunks hides all but t/k and costs k·o."""
    return max(1, round(math.sqrt(exposed / overhead))) if overhead > 0 else 1


def chunked_time(chunks: int, exposed: float, overhead: float) -> float:
    """T(k) = k·o + t/k: the seconds that k chunks leave exposed, and their overhead."""
    return chunks * overhead + exposed / chunks


def minimum_bucket(alpha: float, beta: float) -> float:
    """n* = α/β: a smaller bucket is bound by latency."""
    return alpha / beta


def bucket_for(cluster: Cluster, ranks: int | np.ndarray) -> np.ndarray:
    """Gradient bucket for groups of `ranks`: `BUCKET_MARGIN` times P·α/β of the top level, in whole megabytes."""
    top = cluster.level_of_span(cluster.world)
    least = minimum_bucket(cluster.levels[top].link.alpha, 1 / cluster.device_bandwidth(top))
    return np.clip(1e6 * np.ceil(BUCKET_MARGIN * least * np.asarray(ranks, float) / 1e6), *BUCKETS)


def buckets(total: float, alpha: float, beta: float, window: float) -> int:
    """Best number of gradient buckets: the last one is never hidden, each costs α, and none is smaller than n*."""
    most = max(1, int(total * beta / alpha)) if alpha else 1 << 20
    return max(1, min(optimal_chunks(min(total * beta, window), alpha), most))


def overlap_ratio(communication: Array, computation: Array) -> Array:
    """R = T_comm / T_comp; communication can be hidden if R ≤ 1."""
    return communication / computation


def overlapped_step(compute: float, communication: float, hideable: float = 1.0) -> float:
    """max(T_comp, T_comm) if all compute can overlap; in general T_comp + max(0, T_comm − hideable·T_comp)."""
    return compute + max(0.0, communication - hideable * compute)


def minimum_stage_bandwidth(activation_bytes: float, compute_seconds: float) -> float:
    """Bytes/s between stages at which sends (one forward, one backward) take no longer than the compute of a micro-batch."""
    return 2 * activation_bytes / compute_seconds


def ring_buffer(seq: int, ranks: int, kv_width: int, dtype_bytes: float) -> float:
    """K and V blocks, one in use and one arriving: 4·(s/P)·width·bytes."""
    return 4 * seq / ranks * kv_width * dtype_bytes


def ring_step(
    seq: int,
    ranks: int,
    heads: int,
    head_dim: int,
    kv_heads: int,
    flops: float,
    bandwidth: float,
    dtype_bytes: float = 2,
    causal: bool = True,
) -> tuple[float, float]:
    """Seconds of attention on one block and of sending one K/V block; the transfer is hidden if the first is longer."""
    block = seq / ranks
    work = 4 * heads * head_dim * block * block * (0.5 if causal else 1.0)
    return work / flops, 2 * block * kv_heads * head_dim * dtype_bytes / bandwidth


def ring_free_block(
    heads: int, kv_heads: int, flops: float, bandwidth: float, dtype_bytes: float = 2, causal: bool = True
) -> float:
    """Smallest block of tokens per rank at which the transfers of ring attention are hidden: kv·bytes·F / (heads·c·B)."""
    return 2 * kv_heads * dtype_bytes * flops / (4 * heads * (0.5 if causal else 1.0) * bandwidth)


def accumulation(batch: int, microbatch: int, dp: int) -> int:
    """The number of micro-batches that a rank accumulates: batch = micro-batch × accumulation × dp."""
    return batch // (microbatch * dp)


def communication_share(compute: float, communication: float) -> tuple[float, float]:
    """Share of an unoverlapped step spent communicating, and the remaining efficiency; 80% efficiency needs a share below 20%."""
    share = communication / (compute + communication)
    return share, 1 - share


def compression_break_even(gradient_bytes: float, ratio: float, gamma_seconds: float, factor: float = 2.0) -> float:
    """Bandwidth below which compression by `ratio` is faster: sending the saved bytes must take longer than compressing."""
    return factor * gradient_bytes * (1 - 1 / ratio) / gamma_seconds


def topk_compression(share: float, value_bytes: float = 4, index_bytes: float = 8, ranks: int = 0) -> float:
    """Compression ratio of top-k: dense values over values and indices. With `ranks`: bytes sent by a dense ring all-reduce over bytes
    sent by a sparse all-gather.

    1% of fp32 values with int64 indices gives 33×. At P = 8 the bytes sent shrink only by 8.3×, since the all-gather grows with P.
    """
    dense = value_bytes * (2 * (ranks - 1) / ranks if ranks else 1)
    sparse = share * (value_bytes + index_bytes) * ((ranks - 1) if ranks else 1)
    return dense / sparse


def inference_latency(
    parameters: float,
    layers: int,
    hidden: int,
    tp: int,
    memory_bandwidth: float,
    alpha: float,
    beta: float,
) -> float:
    """Seconds per generated token of one 16-bit sequence: every weight is read once, plus two all-reduces of h numbers per layer.

    Tensor parallelism divides the reading time by tp. A pipeline does not: each token still reads all weights, stage after stage.
    """
    read = parameters * 2 / (tp * memory_bandwidth)
    if tp == 1:
        return read
    message = hidden * 2
    return read + 2 * layers * (2 * math.ceil(math.log2(tp)) * alpha + 2 * (tp - 1) / tp * message * beta)


def microbatches_for(schedule: str, ranks: int, virtual: int, efficiency: float) -> int | None:
    """The smallest number of micro-batches at which equal stages reach this pipeline efficiency (1 − bubble fraction); None: none up to
    16,384 does. 1F1B: M ≥ (P−1)·e/(1−e), so 80% of 4 stages needs 12."""
    counts = np.arange(1, 2**14 + 1)
    reached = _efficiency(schedule, ranks, counts, virtual) >= efficiency - 1e-9
    return int(counts[reached.argmax()]) if reached.any() else None


def stages_for(schedule: str, ranks: int, microbatches: int, virtual: int, efficiency: float) -> int:
    """The largest number of pipeline ranks, at most `ranks`, at which equal stages reach this efficiency with these micro-batches."""
    reached = [p for p in range(2, ranks + 1) if _efficiency(schedule, p, microbatches, virtual) >= efficiency - 1e-9]
    return max(reached, default=1)


def _efficiency(schedule: str, ranks: int, microbatches: int | np.ndarray, virtual: int) -> np.ndarray:
    return 1.0 - bubble_fraction(schedule, ranks, microbatches, virtual)
