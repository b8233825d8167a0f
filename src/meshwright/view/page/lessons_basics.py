"""Lessons one to six: memory, ZeRO, number formats, all-reduce, latency, tensor parallelism."""

from __future__ import annotations

import numpy as np

from meshwright.cost.advice import communication_share, minimum_bucket
from meshwright.cost.memory import minimum_gpus, zero_state_bytes
from meshwright.describe import catalog
from meshwright.lower.op import sent
from meshwright.view.page.lesson import GB, MB, Lesson, largest, number


def state_memory() -> Lesson:
    state, gpus = zero_state_bytes(7e9, 1, 0), minimum_gpus(7e9, 80 * GB)
    return Lesson(
        "What fills the memory",
        (
            "Training in 16-bit mixed precision with Adam keeps, for each parameter, 2 bytes of weights, 2 of gradients, and 12 of fp32 master "
            "weights and two moments: 16 bytes. Activations come on top.",
        ),
        "memory",
        (
            number(
                "How many GB of weights, gradients and optimizer states does a model of 7 billion parameters need?",
                state / GB,
                "GB",
                f"16 bytes × 7 billion = {state / GB:.0f} GB",
            ),
            number(
                "How many GPUs of 80 GB hold this state, if it is divided evenly?",
                gpus,
                "GPUs",
                f"{state / GB:.0f} / 80, rounded up = {gpus}",
            ),
        ),
        "Look at the first three parts of each bar: these are the states.",
    )


def zero() -> Lesson:
    one, three = (zero_state_bytes(7e9, 8, stage) for stage in (1, 3))
    n, p = 14 * GB, 8.0
    ddp = float(np.asarray(sent("all_reduce", n, p)))
    fsdp = float(np.asarray(2 * sent("all_gather", n, p) + sent("reduce_scatter", n, p)))
    return Lesson(
        "ZeRO: shard instead of copy",
        (
            "DDP keeps a full copy of the model on every GPU and adds up gradients with one all-reduce. ZeRO divides optimizer states (stage 1), "
            "gradients (2) and weights (3, FSDP) over the data-parallel ranks. FSDP gathers the weights of a layer when it needs them, in forward "
            "and again in backward, and reduce-scatters its gradients.",
        ),
        "zero",
        (
            number(
                "7B parameters on 8 GPUs with ZeRO-1: GB of state on each?",
                one / GB,
                "GB",
                f"7 · (2 + 2 + 12/8) = {one / GB:.1f} GB",
            ),
            number("The same with ZeRO-3?", three / GB, "GB", f"7 · 16 / 8 = {three / GB:.1f} GB"),
            number(
                "FSDP sends how many times the bytes of DDP?",
                fsdp / ddp,
                "×",
                "two all-gathers and a reduce-scatter, (P−1)/P · n each, against an all-reduce of 2(P−1)/P · n: 3 against 2",
            ),
            largest(
                "What is the difference between DDP and FSDP?",
                (
                    ("FSDP keeps less on each GPU and sends more bytes", fsdp / ddp),
                    ("FSDP keeps less and sends fewer bytes", ddp / fsdp),
                ),
                f"FSDP: {three / GB:.0f} GB of state instead of {zero_state_bytes(7e9, 8, 0) / GB:.0f}, and {fsdp / ddp:.1f} times the bytes",
            ),
        ),
        "Watch how each stage cuts one more part of the bar.",
    )


def number_formats() -> Lesson:
    half = float(np.finfo(np.float16).max)
    wide = float(np.finfo(np.float32).max)
    return Lesson(
        "bf16, fp16, fp8",
        (
            "fp16 has 5 bits of exponent, bf16 has the 8 bits of fp32 and fewer bits of mantissa. Gradients that leave fp16's range become "
            "infinite or zero, so fp16 training scales its loss. bf16 needs no loss scaling. fp8 halves the bytes of what is sent in it.",
        ),
        "memory",
        (
            number("What is the largest finite number of fp16?", half, "", f"(2 − 2⁻¹⁰) · 2¹⁵ = {half:,.0f}"),
            largest(
                "Why is bf16 preferred over fp16 for training?",
                (
                    ("its range is that of fp32, so no loss scaling is needed", wide),
                    ("it is more precise", half),
                    ("it takes fewer bytes", 0.0),
                ),
                f"fp16 ends at {half:,.0f}, bf16 near {wide:.1e}; both take 2 bytes, and fp16 has more bits of mantissa",
            ),
        ),
        "Set the dtype of gradients to bf16 under “Dtypes” and watch the bar.",
        {"plan.grad_dtype": "bf16"},
    )


def all_reduce() -> Lesson:
    ring = float(np.asarray(sent("all_reduce", 10 * GB, 8.0)))
    return Lesson(
        "All-reduce: adding up gradients",
        (
            "A ring all-reduce sends each chunk around the ring twice: once to add, once to distribute. Each rank sends 2(P−1)/P of the buffer, "
            "which stays below twice the buffer for any number of ranks.",
        ),
        "collectives",
        (
            number(
                "8 GPUs reduce 10 GB with a ring. How many GB does each send?",
                ring / GB,
                "GB",
                f"2 · 7/8 · 10 = {ring / GB:.1f} GB",
            ),
            largest(
                "What happens to the bytes each rank sends when the ring grows from 8 to 1,024 ranks?",
                (
                    ("they almost stay: at most twice the buffer", 2 * 10 * GB / ring),
                    ("they grow 128 times", 0.0),
                    ("they shrink", 0.0),
                ),
                f"2 · 1023/1024 · 10 = {float(np.asarray(sent('all_reduce', 10 * GB, 1024.0))) / GB:.2f} GB",
            ),
        ),
        "Play the ring step by step.",
    )


def latency() -> Lesson:
    link = catalog.load("links", "ib-ndr")
    size = minimum_bucket(link.alpha, link.beta)
    return Lesson(
        "Latency and bandwidth",
        (
            "A message of n bytes takes α + n·β seconds: a start-up time and the bytes over the bandwidth. Below n* = α/β latency dominates, "
            "above it bandwidth does. So gradients are reduced in buckets much larger than n*.",
        ),
        "roofline",
        (
            number(
                f"NDR InfiniBand: α = {1e6 * link.alpha:g} µs and {1e-9 / link.beta:g} GB/s. At how many kB are the terms equal?",
                size / 1e3,
                "kB",
                f"n* = α/β = {1e6 * link.alpha:g} µs × {1e-9 / link.beta:g} GB/s = {size / 1e3:.4g} kB",
            ),
            number(
                "A step computes for 80 ms and exposes 20 ms of communication. What share of the step is communication, in percent?",
                100 * communication_share(80e-3, 20e-3)[0],
                "%",
                "20 / (80 + 20)",
            ),
        ),
        "Collectives left of a ceiling’s corner are bound by latency.",
    )


def tensor_parallel() -> Lesson:
    message = 2048 * 12288 * 2
    volume = float(np.asarray(sent("all_reduce", message, 8.0)))
    return Lesson(
        "Tensor parallelism",
        (
            "Each matrix product is divided over tp GPUs: first by columns, then by rows, and the row-parallel outputs are added up. Attention and "
            "FFN each end with one all-reduce in forward and one in backward. These cannot wait, so tp belongs inside a node.",
        ),
        "heatmap",
        (
            number(
                "GPT-3 (hidden 12,288), 2,048 tokens in 16 bits, tp = 8: MB that one GPU sends for one all-reduce?",
                volume / MB,
                "MB",
                f"2 · 7/8 · 2048 · 12288 · 2 bytes = {volume / MB:.2f} MB",
            ),
            largest(
                "Where should tp run?",
                (
                    ("inside a node, over NVLink", 1 / catalog.load("links", "nvlink4").beta),
                    ("between nodes, over InfiniBand", 1 / catalog.load("links", "ib-ndr").beta),
                ),
                "NVLink carries about ten times the bytes per second, and tp communicates in every layer",
            ),
        ),
        "Follow a row to the right: beyond 8 GPUs tp crosses nodes.",
    )
