"""Host time in which the shard of one parameter on one rank is copied out of the buffer of a gather (`Stack.shard_copy`).

nanotron's ZeRO-1 gathers all updated parameters in one call: it slices each parameter into the shards of all ranks, joins the slices of a rank into a
buffer, gathers into these buffers, and copies every slice back. So a step has parameters × ranks slices and copies, without autograd. Here the same
operations run on one GPU without the gather, for Llama shapes of 1 to 8 billion parameters: python benchmarks/gpu/shard_copies.py

The device waits for the host, so the time is the host's: 9 to 12 µs on the host of one H200, 20 to 23 µs on that of another one, for any shape and
number of ranks.
"""

import time

import torch
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

SHAPES = {"1B": (2048, 8192, 16, 2), "3B": (3072, 8192, 28, 4), "8B": (4096, 14336, 32, 8)}  # hidden, FFN, layers, tp
RANKS = (8, 16, 32, 64, 128)
VOCABULARY = 131072
REPEATS = 4


def parameters(hidden: int, ffn: int, layers: int, tp: int, device: str) -> list[torch.Tensor]:
    """The flat parameters of one tensor-parallel rank: fused projections, norms, and the ends of the model."""
    sizes = [VOCABULARY * hidden // tp] * 2 + [hidden]
    sizes += [3 * hidden**2 // tp, hidden**2 // tp, 2 * hidden * ffn // tp, hidden * ffn // tp, hidden, hidden] * layers
    return [torch.zeros(size, dtype=torch.bfloat16, device=device) for size in sizes]


def copy_shards(tensors: list[torch.Tensor], ranks: int) -> None:
    """Slice, join and copy back the shards of all ranks."""
    shards = [[t[r * (t.numel() // ranks) : (r + 1) * (t.numel() // ranks)] for r in range(ranks)] for t in tensors]
    of_rank = [[parts[rank] for parts in shards] for rank in range(ranks)]
    buffers = [_flatten_dense_tensors(parts) for parts in of_rank]
    for parts, buffer in zip(of_rank, buffers, strict=True):
        for part, gathered in zip(parts, _unflatten_dense_tensors(buffer, parts), strict=True):
            part.copy_(gathered)


def main() -> None:
    """Print the microseconds of one parameter on one rank for each shape and number of ranks."""
    for name, (hidden, ffn, layers, tp) in SHAPES.items():
        tensors = parameters(hidden, ffn, layers, tp, "cuda")
        for ranks in RANKS:
            seconds = []
            for _ in range(REPEATS):
                torch.cuda.synchronize()
                start = time.perf_counter()
                copy_shards(tensors, ranks)
                torch.cuda.synchronize()
                seconds.append(time.perf_counter() - start)
            each = sorted(seconds)[REPEATS // 2] / len(tensors) / ranks
            print(f"{name}, tp {tp}, {ranks} ranks, {len(tensors)} parameters: {1e6 * each:.1f} µs each")


if __name__ == "__main__":
    main()
