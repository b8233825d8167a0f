"""Gradient compression: fewer bytes to send, for memory passes (γ) on the device and a part of the gradient.

    fp16, bf16    a cast; summed in 16 bits (`schemes`)                    2× of fp32
    int8, int4    x ≈ q·s, s = max|x| / 127 or 7; and fp8 (E4M3)           4×, 8×, 4×
    top-k         the k largest values and their indices        1% with 4-byte indices: 50×, with 8-byte: 33×
    random-k      k values at indices that are equal on all ranks: not sent 1%: 100×
    threshold     the values above τ times the root mean square            τ = 2 of normal ones: 4.6%, 11×
    absolute-threshold   the values above τ                                 as many as there are
    powersgd      two factors of rank r for each matrix (`powersgd`)       m·n / r(m + n)

The ratio is not the gain. A ring all-reduce sends 2(P−1)/P·n from each rank. What can be summed on its way (casts,
random-k, PowerSGD's factors) keeps that form. Sparse values cannot be summed: every rank must receive every other
rank's, (P−1)·k, so the 33× of top-1% is 8.3× at P = 8 and a loss from P = 67 on. Integers would overflow: they go in two
rounds (`Quantised`), which together send what a ring does.

Under ZeRO a rank needs only its own 1/P of the sum, so no all-gather follows: casts and random-k are reduce-scattered,
quantised and sparse values go to their owner in one all-to-all (`Compressor.scatter`), whose sum is exact in full precision. The
alternative, an all-reduce of which each rank takes its shard, would send twice as much and round the sum once more.
PowerSGD has no such form: its factors belong to whole matrices, so all ranks receive them, and each computes its own
rows of their product.

Compressing pays below the bandwidth at which the bytes saved take as long as γ does
(`cost.advice.compression_break_even`); `benchmarks/compress.py` measures both, and the effect on convergence.
"""

import torch

from meshwright.describe.plan import Plan
from meshwright.describe.variants import COMPRESSIONS
from meshwright.errors import MeshwrightError
from meshwright.parallel.numerics.compress.base import Compressor
from meshwright.parallel.numerics.compress.powersgd import PowerSGD
from meshwright.parallel.numerics.compress.schemes import Cast, Quantised, RandomK, Threshold, TopK


def compressor_of(plan: Plan) -> Compressor | None:
    """A new compressor of the kind the plan names; None where gradients are sent as they are."""
    return make_compressor(
        plan.wire, ratio=plan.compression_ratio, rank=plan.compression_rank, threshold=plan.compression_threshold
    )


def make_compressor(
    name: str, *, ratio: float = 0.01, rank: int = 4, threshold: float = 2.0, seed: int = 0
) -> Compressor | None:
    """A compressor by name; None for `none`."""
    if name not in COMPRESSIONS:
        raise MeshwrightError("MW-COMP-001", f"no compression is called '{name}'", valid=list(COMPRESSIONS))
    if not (0 < ratio <= 1 and rank >= 1 and threshold > 0):
        raise MeshwrightError(
            "MW-COMP-002",
            f"ratio={ratio:g}, rank={rank}, threshold={threshold:g}",
            valid=["0 < ratio <= 1", "rank >= 1", "threshold > 0"],
        )
    make = COMPRESSIONS.part(name, "make")
    compressor: Compressor | None = make(ratio=ratio, rank=rank, threshold=threshold, seed=seed)
    return compressor


COMPRESSIONS.provide("none", make=lambda **options: None)
COMPRESSIONS.provide("fp16", make=lambda **options: Cast(torch.float16))
COMPRESSIONS.provide("bf16", make=lambda **options: Cast(torch.bfloat16))
COMPRESSIONS.provide("int8", make=lambda **options: Quantised("int8"))
COMPRESSIONS.provide("int4", make=lambda **options: Quantised("int4"))
COMPRESSIONS.provide("fp8", make=lambda **options: Quantised("fp8"))
COMPRESSIONS.provide("top-k", make=lambda ratio, **options: TopK(ratio))
COMPRESSIONS.provide("random-k", make=lambda ratio, seed, **options: RandomK(ratio, seed))
COMPRESSIONS.provide("threshold", make=lambda threshold, **options: Threshold(threshold))
COMPRESSIONS.provide("absolute-threshold", make=lambda threshold, **options: Threshold(threshold, absolute=True))
COMPRESSIONS.provide("powersgd", make=lambda rank, seed, **options: PowerSGD(rank, seed))
