"""The kernel of fused AdamW (`make`): one program updates a block of a parameter, in float32."""

from math import sqrt

import triton
import triton.language as tl
from torch import Tensor

from meshwright.units import Json

BLOCK = 2048  # elements of one program


@triton.jit
def adamw_kernel(  # type: ignore[no-untyped-def]
    weight, gradient, first, second, rounded, factor, count,
    decay, beta_1, beta_2, rate, correction_2, epsilon,
    rounds: tl.constexpr, clips: tl.constexpr, guarded: tl.constexpr, size: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * size + tl.arange(0, size)
    inside = i < count
    if clips:
        scale = tl.load(factor)
        if guarded:
            inside = inside & (scale > 0)  # false for NaN too
    g = tl.load(gradient + i, mask=inside).to(tl.float32)
    if clips:
        g = g * scale.to(tl.float32)
    w = tl.load(weight + i, mask=inside) * decay
    m = tl.load(first + i, mask=inside)
    v = tl.load(second + i, mask=inside)
    m = m + (1 - beta_1) * (g - m)
    v = beta_2 * v + (1 - beta_2) * g * g
    w = w - rate * m / (tl.sqrt(v) / correction_2 + epsilon)
    tl.store(weight + i, w, mask=inside)
    tl.store(first + i, m, mask=inside)
    tl.store(second + i, v, mask=inside)
    if rounds:
        tl.store(rounded + i, w, mask=inside)


def update(
    weight: Tensor,
    gradient: Tensor,
    moments: tuple[Tensor, Tensor],
    rounded: Tensor | None,
    factor: Tensor | None,
    guarded: bool,
    step: int,
    group: Json,
) -> None:
    """One step of AdamW, in place; if `guarded`, none where the factor is 0 or NaN. `group` has torch's options."""
    gradient = gradient.contiguous()
    assert weight.is_contiguous()
    assert rounded is None or rounded.is_contiguous()
    (beta_1, beta_2), rate = group["betas"], float(group["lr"])
    count = weight.numel()
    if not count:
        return
    adamw_kernel[(triton.cdiv(count, BLOCK),)](
        weight, gradient, *moments,
        weight if rounded is None else rounded,
        weight if factor is None else factor,
        count,
        1 - rate * group["weight_decay"], beta_1, beta_2, rate / (1 - beta_1**step), sqrt(1 - beta_2**step), group["eps"],
        rounds=rounded is not None, clips=factor is not None, guarded=guarded, size=BLOCK,
    )  # fmt: skip
