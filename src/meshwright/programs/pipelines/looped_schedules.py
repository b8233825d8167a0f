"""Looped schedules: stage s is on rank s mod P. Two orders and two numbers define a schedule.

Divide the work of one rank into **slots**. Forward number k is in slot k. Backward number k is `ahead` slots later,
after the forward of that slot. If the backward is split, W number k is another `lag` slots later:

    slot        0    1    …    a          a+1          …    a+l
    forward     F₀   F₁   …    F_a        F_(a+1)           F_(a+l)
    backward                   I₀         I₁                I_l
    weights                                                 W₀

So a rank first runs `ahead` forwards (warm-up), then alternates one forward and one backward (steady state), then runs
the remaining backwards (cool-down). It never holds more than ahead + lag + 1 activations. With rank r of P, M
micro-batches and V stages per rank, n = M·V actions of each kind:

    schedule         ahead                  lag    why
    naive            0                      0      one micro-batch at a time: P−1 of P ranks idle
    gpipe            n                      0      bubble (P−1)/(M+P−1), M activations
    1f1b             P−1−r                  0      the same bubble, at most P−r activations
    interleaved      (V−1)g + 2(P−1−r)      0      Megatron's: a V times shorter bubble, V times as many messages
    looped-bfs       n                      0      breadth first: uses the weights of a stage without interruption
    interleaved-zb   (V−1)g + (P−1−r)       r      Ws fill the drain (with V = 1: zb-h1)
    zb-h1            P−1−r                  r      a third of 1F1B's bubble with the same memory
    zb-h2            2(P−1−r)               2r     no bubble if steps overlap, with twice the memory

Interleaved schedules process micro-batches in **rounds** of g: all micro-batches of a round pass the rank's first
stage, then its second, and so on. Megatron requires that P divides M (g = P). It is enough that a round has at least P
micro-batches, so any M is legal here: M < P is one short round; otherwise M is divided as evenly as possible into
⌊M/P⌋ rounds.
"""

import numpy as np

from meshwright.programs.pipelines.formulas import in_flight
from meshwright.programs.pipelines.program import B, F, I, PipelineProgram, W, looped
from meshwright.programs.pipelines.rules import require


def naive(ranks: int, microbatches: int, virtual: int = 1) -> PipelineProgram:
    """One micro-batch at a time, forward and back."""
    require("naive", ranks, microbatches, virtual)
    return _program("naive", ranks, _in_order(microbatches), ahead=0)


def gpipe(ranks: int, microbatches: int, virtual: int = 1) -> PipelineProgram:
    """All forwards, then all backwards (Huang et al. 2019)."""
    require("gpipe", ranks, microbatches, virtual)
    return _program("gpipe", ranks, _in_order(microbatches), ahead=microbatches)


def one_forward_one_backward(ranks: int, microbatches: int, virtual: int = 1) -> PipelineProgram:
    """1F1B (PipeDream-Flush, Narayanan et al. 2021): each backward runs as soon as possible."""
    require("1f1b", ranks, microbatches, virtual)
    return _program("1f1b", ranks, _in_order(microbatches), ahead=_to_last(ranks))


def interleaved(ranks: int, microbatches: int, virtual: int = 2) -> PipelineProgram:
    """Megatron's interleaved 1F1B (Narayanan et al. 2021): V stages per rank, depth first within rounds."""
    require("interleaved", ranks, microbatches, virtual)
    orders, widest = _in_rounds(ranks, microbatches, virtual)
    return _program("interleaved", ranks, orders, ahead=(virtual - 1) * widest + 2 * _to_last(ranks))


def looped_bfs(ranks: int, microbatches: int, virtual: int = 2) -> PipelineProgram:
    """Breadth first (Lamy-Poirier 2023): all micro-batches through one stage, then the next; backwards mirrored."""
    require("looped-bfs", ranks, microbatches, virtual)
    chunk = np.repeat(np.arange(virtual), microbatches)
    batch = np.tile(np.arange(microbatches), virtual)
    orders = (chunk, batch), (chunk[::-1], batch[::-1])
    return _program("looped-bfs", ranks, orders, ahead=microbatches * virtual)


def interleaved_zb(ranks: int, microbatches: int, virtual: int = 2) -> PipelineProgram:
    """Interleaved with split backwards: rank r delays r Ws into the drain."""
    require("interleaved-zb", ranks, microbatches, virtual)
    orders, widest = _in_rounds(ranks, microbatches, virtual)
    ahead = (virtual - 1) * widest + _to_last(ranks)
    return _program("interleaved-zb", ranks, orders, ahead=ahead, lag=np.arange(ranks))


def zb_h1(ranks: int, microbatches: int, virtual: int = 1) -> PipelineProgram:
    """Zero bubble, first handmade schedule (Qi et al. 2024): 1F1B's memory, a third of its bubble."""
    require("zb-h1", ranks, microbatches, virtual)
    return _program("zb-h1", ranks, _in_order(microbatches), ahead=_to_last(ranks), lag=np.arange(ranks))


def zb_h2(ranks: int, microbatches: int, virtual: int = 1) -> PipelineProgram:
    """Zero bubble, second handmade schedule: enough forwards to fill the wait for the first backward."""
    require("zb-h2", ranks, microbatches, virtual)
    return _program("zb-h2", ranks, _in_order(microbatches), ahead=2 * _to_last(ranks), lag=2 * np.arange(ranks))


def rounds(ranks: int, microbatches: int) -> np.ndarray:
    """Return the sizes of the ⌊M/P⌋ (at least one) rounds of interleaved schedules, the larger ones first."""
    count = max(1, microbatches // ranks)
    size, larger = divmod(microbatches, count)
    return np.where(np.arange(count) < larger, size + 1, size)


Order = tuple[np.ndarray, np.ndarray]  # (chunk, micro-batch) of piece 0, 1, 2, …


def _to_last(ranks: int) -> np.ndarray:
    """Ranks between each rank and the last: P−1−r."""
    return np.arange(ranks - 1, -1, -1)


def _in_order(microbatches: int) -> tuple[Order, Order]:
    order = np.zeros(microbatches, int), np.arange(microbatches)
    return order, order


def _in_rounds(ranks: int, microbatches: int, virtual: int) -> tuple[tuple[Order, Order], int]:
    """Forward and backward orders of the interleaved schedules, and the size of the widest round."""
    sizes = rounds(ranks, microbatches)
    starts = np.cumsum(sizes) - sizes
    chunk = np.concatenate([np.repeat(np.arange(virtual), size) for size in sizes])
    batch = np.concatenate([np.tile(np.arange(a, a + size), virtual) for a, size in zip(starts, sizes, strict=True)])
    return ((chunk, batch), (virtual - 1 - chunk, batch)), int(sizes[0])


def _program(
    schedule: str,
    ranks: int,
    orders: tuple[Order, Order],
    ahead: int | np.ndarray,
    lag: np.ndarray | None = None,
) -> PipelineProgram:
    """Build all ranks at once: the sort key of an action is 3·slot, plus 0 for F, 1 for B or I, 2 for W."""
    (forward_chunk, forward_batch), (backward_chunk, backward_batch) = orders
    n = len(forward_chunk)
    piece = np.arange(n)
    ahead = np.broadcast_to(ahead, ranks)[:, None]
    keys = [np.broadcast_to(3 * piece, (ranks, n)), 3 * (ahead + piece) + 1]
    kinds, chunks, batches = [F, B], [forward_chunk, backward_chunk], [forward_batch, backward_batch]
    if lag is not None:
        keys.append(3 * (ahead + lag[:, None] + piece) + 2)
        kinds, chunks, batches = [F, I, W], [*chunks, backward_chunk], [*batches, backward_batch]
    order = np.argsort(np.concatenate(keys, axis=1), axis=1, kind="stable")
    stage = np.concatenate(chunks)[order] * ranks + np.arange(ranks)[:, None]
    virtual, microbatches = int(forward_chunk.max()) + 1, int(forward_batch.max()) + 1
    kind, batch = np.repeat(np.array(kinds, np.int8), n)[order].ravel(), np.concatenate(batches)[order].ravel()
    first, joined = np.arange(ranks + 1) * len(kinds) * n, np.zeros(order.size, bool)
    most, rank_of = in_flight(schedule, ranks, microbatches, virtual, np.arange(ranks)), looped(ranks, virtual)
    return PipelineProgram(schedule, microbatches, rank_of, kind, stage.ravel(), batch, first, joined, most)
