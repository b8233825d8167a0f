"""Groups of kernels and operators by their names: the one table that every reader of a profile uses.

    group       kernels
    products    cuBLAS, CUTLASS, grouped and fp8 products
    attention   FlashAttention, cuDNN
    loss        softmax over the vocabulary
    optimizer   update, norm of gradients
    other       norms, activations, rotations, quantisation, sums of gradients
    copies      between host and device
    comm        NCCL, RCCL, gloo

A trace of a CPU has operators in place of kernels, so their names are in the table too.
"""

NAMES: dict[str, tuple[str, ...]] = {  # parts of names in lower case; the first match decides
    "comm": ("nccl", "rccl", "gloo", "c10d"),
    "attention": ("sdpa", "flash", "fmha", "attention"),
    "products": (
        "nvjet", "gemm", "cutlass", "wgmma", "xmma", "cublas", "scaled_mm", "grouped_mm",
        "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::matmul", "aten::linear", "convolution", "mkldnn",
    ),
    "loss": ("loss_kernel", "cross_entropy", "softmax", "nll_loss"),
    "optimizer": ("adamw", "multi_tensor", "lpnorm", "norm_two"),
    "copies": ("memcpy", "memset"),
}  # fmt: skip
GROUPS = ("products", "attention", "loss", "optimizer", "other", "copies", "comm", "idle")


def group_of(name: str) -> str:
    lower = name.lower()
    return next((group for group, parts in NAMES.items() if any(part in lower for part in parts)), "other")
