"""Long sequences on one GPU: the work of one rank of a context-parallel group, compared with attention to the full sequence.

    python benchmarks/context.py [--ranks 8] [--sequences 131072 262144 1048576]

Attention of one layer with the heads of Llama-3-8B (32 of width 128, 8 KV heads), causal, in bf16: forward and backward of
the zigzag share of one rank, with the keys and values of all ranks in the order of the ring (nothing is sent on one GPU).
For comparison, torch's kernel on the full sequence, if it fits; its time divided by the number of ranks is the optimum.
Without a GPU a short sequence runs on the CPU, which says nothing about speed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from meshwright.parallel.context.blocks import AttentionPattern, BlockAttention, BlockGradients
from meshwright.parallel.context.sequence import runs_of

HEADS, KV_HEADS, WIDTH = 32, 8, 128


def drawn(heads: int, length: int, device: str) -> torch.Tensor:
    return torch.randn(1, heads, length, WIDTH, device=device, dtype=torch.bfloat16)


def one_rank(seq: int, ranks: int, device: str) -> Callable[[], None]:
    """Forward and backward of rank 0; the shares of all ranks have the same size."""
    runs, pattern = runs_of(seq, ranks, True), AttentionPattern(True)
    q, grad_output = (drawn(HEADS, seq // ranks, device) for _ in range(2))
    k, v = (drawn(KV_HEADS, seq // ranks, device) for _ in range(2))

    def step() -> None:
        attended = BlockAttention(q, runs[0], pattern)
        for theirs in runs:
            attended.attend_block(k, v, theirs)
        assert attended.output_BNSD is not None
        output = attended.output_BNSD.to(q.dtype)
        total = attended.lse_BNS
        del attended
        gradients = BlockGradients(grad_output, q, output, total, runs[0], pattern)
        for theirs in runs:
            dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=device) for x in (k, v))
            gradients.attend_block(k, v, theirs, dk, dv)

    return step


def whole(seq: int, device: str) -> Callable[[], None]:
    q = drawn(HEADS, seq, device).requires_grad_()
    k, v = (drawn(KV_HEADS, seq, device).requires_grad_() for _ in range(2))
    grad_output = torch.ones_like(q)

    def step() -> None:
        q.grad = k.grad = v.grad = None
        torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).backward(grad_output)

    return step


def measured(make: Callable[[], Callable[[], None]], device: str) -> tuple[float, float]:
    """Median seconds of three runs, and peak bytes; NaN if it does not fit."""
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        step = make()
        times = []
        for _ in range(4):
            started = time.perf_counter()
            step()
            if device == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - started)
    except torch.cuda.OutOfMemoryError:
        return float("nan"), float("nan")
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else float("nan")
    return float(np.median(times[1:])), float(peak)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--sequences", type=int, nargs="*")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sequences = options.sequences or ([131072, 262144, 524288, 1048576] if device == "cuda" else [512])
    print(
        f"{'sequence':>9}  {'one rank of ' + str(options.ranks):>16} {'TFLOP/s':>8} {'peak GiB':>9}   "
        f"{'whole':>9} {'TFLOP/s':>8} {'peak GiB':>9}   rank × ranks / whole"
    )
    for seq in sequences:
        flops = 3.5 * 4 * HEADS * WIDTH * seq * seq / 2  # backward is 2.5 × forward, because it recomputes the scores
        seconds, peak = measured(partial(one_rank, seq, options.ranks, device), device)
        all_seconds, all_peak = measured(partial(whole, seq, device), device)
        print(
            f"{seq:>9}  {1e3 * seconds:>13.1f} ms {flops / options.ranks / seconds / 1e12:>8.0f} {peak / 2**30:>9.2f}   "
            f"{1e3 * all_seconds:>6.1f} ms {flops / all_seconds / 1e12:>8.0f} {all_peak / 2**30:>9.2f}   "
            f"{options.ranks * seconds / all_seconds:.3f}"
        )


if __name__ == "__main__":
    main()
