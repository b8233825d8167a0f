"""The guide, parts 5 and 6: the α-β model, crossovers, and the communication roofline."""

import math

from figures.cases import GB, KB, MB, MIB, TB, TERA, device, link, lowered, model
from figures.figure import Figure, rows
from meshwright.cost import roofline
from meshwright.cost.link import crossover, message_time
from meshwright.lower.program import scalar

holds, bound, convention, wrong = rows("guide")
BATCHES = {1: "3072.0", 4: "12288.0", 16: "49152.0", 64: "196608.0", 256: "786432.0"}


def alpha_beta() -> list[Figure]:
    def star(alpha_us: float, rate: float) -> float:
        return crossover(alpha_us * 1e-6, 1 / (rate * GB))

    decimal, printed = "KB of 1,000 bytes", "its code divides by 1,024 and prints our value"
    layer = model("gpt3-175b").blocks["dense"].parameters()
    message = next(
        op for phase, op in lowered("gpt3-175b", 4096, 32, microbatch=32, tp=8).ops("dense") if op.collective
    )
    resnet = model("resnet-50").total
    # fmt: off
    return [
        holds("5.1", "β at 450 GB/s = 2.22 ps/byte", "2.22", 1e12 / (450 * GB), "ps/B"),
        holds("5.1", "1 GB at 450 GB/s takes α + 2.2 ms", "2.2", message_time(1e9, 0, 1 / (450 * GB)) * 1e3, "ms"),
        convention("5.3", "printed: NVLink 4.0 n* = 450.0 KB", "450.0", star(1.0, 450) / 1024, "KiB", decimal, star(1.0, 450) / KB, printed),
        wrong("5.3", "printed: InfiniBand HDR n* = 300.0 KB", "300.0", star(1.5, link("ib-hdr").bandwidth / GB) / KB, "kB",
              "HDR is 25 GB/s per port; 300 kB needs the 200 GB/s that it assumes"),
        convention("5.3", "printed: 100GbE RoCE n* = 62.5 KB", "62.5", star(5.0, 12.5) / 1024, "KiB", decimal, star(5.0, 12.5) / KB, printed),
        convention("5.3", "printed: TCP/IP Ethernet n* = 625.0 KB", "625.0", star(50, 12.5) / 1024, "KiB", decimal, star(50, 12.5) / KB, printed),
        wrong("5.3", "drawn: NVLink n* ≈ 2–5 KB", "2–5", star(1.0, 450) / KB, "kB", "at the 1 µs and 450 GB/s of the text's code"),
        wrong("5.3", "drawn: IB HDR n* ≈ 200–500 KB", "200–500", star(1.5, link("ib-hdr").bandwidth / GB) / KB, "kB", "at 1.5 µs and 25 GB/s"),
        wrong("5.3", "drawn: 100GbE n* ≈ 5–10 MB", "5–10", star(50, 12.5) / MB, "MB", "at 50 µs; 0.06 MB at the RoCE latency it uses"),
        convention("5.4", "ResNet-50 has 25M parameters", "25", resnet / 1e6, "M", "digits cut off, not rounded", math.floor(resnet / 1e6)),
        holds("5.4", "ResNet-50 gradients ~100 MB", "100", resnet * 4 / MB, "MB", "fp32"),
        holds("5.4", "GPT-3 gradients ~350 GB (FP16)", "350", model("gpt3-175b").total * 2 / GB, "GB"),
        holds("5.4", "GPT-3 per layer 100 MB – 10 GB", "0.1–10", sum(layer.values()) * 2 / GB, "GB"),
        holds("5.4", "32 × 4096 × 12288 × 2 B = 3 GB per all-reduce", "3", scalar(message.message_bytes) / GB, "GB", "3.22"),
        wrong("5.6", "sizes 1024·2^i, i < 20: 1 KB to 1 GB", "1024", 1024 * 2**19 / MIB, "MiB", "range(20) ends at i = 19: 512 MiB"),
    ]
    # fmt: on


def ccr() -> list[Figure]:
    gpt3 = model("gpt3-175b")
    per_token = gpt3.model_flops(2048, halve_causal=False) / gpt3.total
    # fmt: off
    return [
        holds("6.2", "FLOPs ≈ 6·N per token", "6", per_token, "FLOP", "with attention's quadratic part: 6.2"),
        *(holds("6.2", f"printed: batch {b}: CCR = {text} FLOPS/byte", text, roofline.ccr_data_parallel(175e9, b * 2048), "FLOP/B")
          for b, text in BATCHES.items()),
    ]
    # fmt: on


def ridges() -> list[Figure]:
    h100, a100 = device("h100-sxm").peak_for("bf16"), device("a100-80gb").peak_for("bf16")
    nv3, nv4, ndr = (link(name).bandwidth for name in ("nvlink3", "nvlink4", "ib-ndr"))
    ours = roofline.ridge(h100, nv4)
    sample = 6 * 175e9 * 2048
    literal = 3072 * 900 * GB / (1979 * TERA / sample)

    def sequences(ridge: float, gpus: int) -> float:
        """Sequences of 2,048 for 90% under data parallelism: the text's own CCR, 3,072 a sequence."""
        return gpus * 0.9 * ridge / roofline.ccr_data_parallel(175e9, 2048)

    ninety = "from its own CCR of 3,072 per sequence of 2,048"
    both = "both directions of NVLink, as NVIDIA prints it"
    # fmt: off
    return [
        holds("6.3", "CCR* e.g. 312 TFLOPS / 900 GB/s ≈ 350", "350", roofline.ridge(312 * TERA, 900 * GB), "FLOP/B",
              "the quotient; no machine has both: 312 is the A100's peak, 900 the H100's NVLink"),
        convention("6.3, 6.7", "8 × H100: 15.8 PFLOPS", "15.8", 8 * h100 / 1e15, "PFLOP/s", "with 2:1 sparsity, as in 1.5", 16 * h100 / 1e15,
                   "training runs dense; the A100's row of the same table is dense"),
        convention("6.3, 6.7", "8 × H100: 7.2 TB/s of NVLink", "7.2", 8 * nv4 / TB, "TB/s", both, 16 * nv4 / TB,
                   "CCR counts the bytes sent, which use one direction"),
        holds("6.3, 6.7", "H100 on NVLink: CCR* ≈ 2,200", "2,200", ours, "FLOP/B", "it divides twice the dense peak by twice the bandwidth of one direction"),
        wrong("6.7", "multi-node H100: CCR* ~40,000", "40,000", roofline.ridge(8 * h100, 8 * ndr), "FLOP/B",
              "it divides the sparse peak by one direction of InfiniBand; CCR counts dense FLOPs"),
        holds("6.7", "8 × A100: 2,496 TFLOPS", "2,496", 8 * a100 / TERA, "TFLOP/s", "dense, unlike the H100's in the same table"),
        convention("6.7", "8 × A100: 4.8 TB/s, CCR* ~520", "520", roofline.ridge(a100, nv3), "FLOP/B", both, roofline.ridge(a100, 2 * nv3),
                   "the bytes of CCR use one direction, 300 GB/s"),
        bound("6.7", "cloud, Ethernet: CCR* ~200,000+", "200,000+", roofline.ridge(8 * a100, 12.5 * GB), "FLOP/B",
              "eight A100 behind 100 Gb/s; 800,000 behind 25"),
        wrong("6.5", "efficiency = CCR·BW / (peak / FLOPs per sample)", literal, roofline.efficiency(3072, ours), "",
              "the units do not cancel; CCR·BW / peak, at most 1. Here GPT-3, one sequence"),
        wrong("6.7", "single H100: batch for 90% ~16–32", "16–32", sequences(ours, 1), "sequences", f"{ninety}; 6N·T / 4N does not depend on the model: 1,320 tokens per GPU are enough"),
        wrong("6.7", "8 × H100: ~128–256", "128–256", sequences(ours, 8), "sequences", ninety),
        wrong("6.7", "multi-node H100: ~2,000+ a node", "2,000+", sequences(roofline.ridge(h100, ndr), 8), "sequences", ninety),
        wrong("6.7", "8 × A100: ~64–128", "64–128", sequences(roofline.ridge(a100, nv3), 8), "sequences", ninety),
    ]
    # fmt: on


def table() -> list[Figure]:
    return [*alpha_beta(), *ccr(), *ridges()]
