"""Which of torch's kernels computes attention on a GPU: the fastest one, measured on the shapes of the run.

torch has several kernels behind `scaled_dot_product_attention`. Which one is fastest depends on the GPU, the width of a head and the
versions: on an H200 with heads of 128, cuDNN's kernel takes 1.7 ms where FlashAttention 2 takes 2.8. A trial of some milliseconds at the
start decides; the others remain as alternatives for calls that the first one does not support, such as masks.

The choice holds for the process: forward, and a recomputed forward in backward, must use the same kernel.
"""

import time
import warnings

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

KERNELS = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "FlashAttention": SDPBackend.FLASH_ATTENTION,
    "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
}
LONGEST = 8192  # tokens of a trial
WARMUP, REPEATS = 2, 5


def prefer_fastest(q: torch.Size, k: torch.Size, v: torch.Size, causal: bool, dtype: torch.dtype, device: str) -> str:
    """Measure each kernel on tensors of these shapes, [B, heads, S, width], and let this process use the fastest. Returns its name;
    empty if none of them supports the shapes."""
    seconds = {name: trial_s(kernel, (q, k, v), causal, dtype, device) for name, kernel in KERNELS.items()}
    order = sorted((name for name, s in seconds.items() if s is not None), key=lambda name: seconds[name] or 0.0)
    if not order:
        return ""
    others = [kernel for name, kernel in KERNELS.items() if name not in order]
    chosen = [*(KERNELS[name] for name in order), *others, SDPBackend.MATH]
    sdpa_kernel(chosen, set_priority=True).__enter__()  # until the process ends
    return order[0]


def trial_s(
    kernel: SDPBackend, shapes: tuple[torch.Size, ...], causal: bool, dtype: torch.dtype, device: str
) -> float | None:
    """Seconds of forward and backward; None if the kernel does not support the shapes."""
    q, k, v = (
        torch.randn(s[0], min(s[2], LONGEST), s[1], s[3], dtype=dtype, device=device).transpose(1, 2).requires_grad_()
        for s in shapes
    )
    with sdpa_kernel(kernel), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says at length why a kernel does not support the shapes
        for i in range(WARMUP + REPEATS):
            if i == WARMUP:
                torch.cuda.synchronize()
                began = time.perf_counter()
            try:
                y = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])
                y.sum().backward()
            except RuntimeError:  # "No available kernel"
                return None
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / REPEATS
