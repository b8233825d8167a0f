"""How much communication hides behind compute: shares, ratios, chunks, buckets, ring attention."""

from typing import NamedTuple

from meshwright.cost import advice
from meshwright.formulas import arguments
from meshwright.formulas.arguments import Quantity


class ChunkChoice(NamedTuple):
    """The best number of chunks, and the seconds that remain exposed with it, including their overhead."""

    chunks: int
    seconds: float


def communication_share(compute: Quantity, communication: Quantity) -> float:
    """The share of an unoverlapped step that is communication: T_comm / (T_comp + T_comm)."""
    return advice.communication_share(
        arguments.seconds("compute", compute), arguments.latency("communication", communication)
    )[0]


def overlap_ratio(communication: Quantity, computation: Quantity) -> float:
    """R = T_comm / T_comp: communication can be hidden fully if R ≤ 1."""
    return float(
        advice.overlap_ratio(
            arguments.latency("communication", communication), arguments.seconds("computation", computation)
        )
    )


def overlapped_step(compute: Quantity, communication: Quantity, hideable: float = 1.0) -> float:
    """Seconds of a step: T_comp + max(0, T_comm − hideable·T_comp); with all compute hideable this is max(T_comp, T_comm)."""
    times = arguments.seconds("compute", compute), arguments.latency("communication", communication)
    if not 0 <= hideable <= 1:
        raise arguments.refused("hideable", hideable, "It is the share of the compute that can overlap, from 0 to 1")
    return advice.overlapped_step(*times, hideable)


def chunked_time(chunks: int, exposed: Quantity, overhead: Quantity) -> float:
    """T(k) = k·o + t/k: seconds that k chunks of a transfer of t seconds leave, with o seconds of overhead each."""
    times = arguments.seconds("exposed", exposed), arguments.latency("overhead", overhead)
    return advice.chunked_time(arguments.whole("chunks", chunks), *times)


def optimal_chunks(exposed: Quantity, overhead: Quantity) -> ChunkChoice:
    """k* = √(t/o): the number of chunks with the smallest T(k)."""
    times = arguments.seconds("exposed", exposed), arguments.seconds("overhead", overhead)
    chunks = advice.optimal_chunks(*times)
    return ChunkChoice(chunks, advice.chunked_time(chunks, *times))


def bucket_count(gradients: Quantity, latency: Quantity, bandwidth: Quantity, backward: Quantity) -> int:
    """The best number of gradient buckets behind `backward` seconds: the last one is never hidden, each costs α, none is below n* = α/β."""
    alpha, beta = arguments.latency("latency", latency), 1 / arguments.rate("bandwidth", bandwidth)
    return advice.buckets(arguments.size("gradients", gradients), alpha, beta, arguments.seconds("backward", backward))


def smallest_bucket(latency: Quantity, bandwidth: Quantity, ranks: int = 1) -> float:
    """Bytes of the smallest bucket that is not bound by latency: P·α/β in a ring of P ranks, α/β for one message."""
    beta = 1 / arguments.rate("bandwidth", bandwidth)
    return arguments.whole("ranks", ranks) * advice.minimum_bucket(arguments.latency("latency", latency), beta)


def ring_attention_step(
    seq: int,
    ranks: int,
    heads: int,
    head_dim: int,
    kv_heads: int,
    flops: Quantity,
    bandwidth: Quantity,
    dtype_bytes: float = 2,
    causal: bool = True,
) -> tuple[float, float]:
    """Seconds of attention on one block, and of sending one block of K and V; with double buffers the longer of the two remains."""
    names = {"seq": seq, "ranks": ranks, "heads": heads, "head_dim": head_dim, "kv_heads": kv_heads}
    sizes = [arguments.whole(name, value) for name, value in names.items()]
    rates = arguments.flop_rate("flops", flops), arguments.rate("bandwidth", bandwidth)
    return advice.ring_step(*sizes, *rates, arguments.above_zero("dtype_bytes", dtype_bytes), causal)  # type: ignore[call-arg, arg-type]
