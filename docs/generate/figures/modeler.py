"""The text Parallelism Bandwidth & Efficiency Modeler."""

import math

from figures.cases import GB, GIB, MB, MIB, boundary, calls, device, gpt_like, layer_flops, link, lowered, saved
from figures.figure import Figure, rows
from meshwright.cost import advice
from meshwright.cost.link import message_time
from meshwright.cost.memory import zero_state_bytes
from meshwright.describe.accelerator import DTYPE_BYTES
from meshwright.describe.plan import Plan
from meshwright.lower.program import scalar, sent
from meshwright.programs.collectives.formulas import terms
from meshwright.programs.pipelines import bubble_fraction, bubble_overhead, build, in_flight, makespan, walk

holds, bound, convention, wrong = rows("modeler")


def tool() -> list[Figure]:
    """The tool's own example: 4 stages of 20 layers, 8 micro-batches, 64 MB a boundary, 81.92 ms of compute."""
    program = lowered(gpt_like(8192, 80, 64), 4096, 8, pp=4)
    message = boundary(program)
    rate = advice.minimum_stage_bandwidth(message, 81.92e-3 / 8)
    walked = walk(build("1f1b", 4, 8))

    def efficiency(stages: int, microbatches: int) -> float:
        return 100 * (1 - float(bubble_fraction("1f1b", stages, microbatches)))

    # fmt: off
    return [
        holds("Tool", "64.00 MB a micro-batch", "64.00", message / MIB, "MiB", "4096 tokens of width 8192 in 16 bits"),
        holds("Tool", "20 layers a stage", "20", Plan(pp=4).stage_layers(80)[0], "layers"),
        holds("Tool", "4 stages × 8 micro-batches = 32 operations", "32", (build("1f1b", 4, 8).kind == 0).sum(), "forwards"),
        holds("Tool", "1.0000 GB transferred a step", "1.0000", 2 * 8 * message / GIB, "GiB", "one boundary, both ways; three boundaries have three"),
        convention("Tool", "inter-stage speed 97.66 Gbps", "97.66", rate * 8 / 1e9, "Gb/s", "G of 2³⁰, as in its MB and GB", rate * 8 / GIB),
        convention("Tool", "peak activation 512 MB", "512.0", float(in_flight("1f1b", 4, 8)) * message / MIB, "MiB",
                   "GPipe: all 8 micro-batches in flight, as its section on bubbles says", float(in_flight("gpipe", 4, 8)) * message / MIB,
                   "the 1F1B of its section 3 holds 4"),
        holds("Tool", "pipeline efficiency 72.7%", "72.7", 100 * (1 - walked.bubble_fraction), "%"),
        holds("Tool", "bubble ratio 27.3%", "27.3", 100 * walked.bubble_fraction, "%"),
        bound("Tool", "16 micro-batches lift it over 80%", "80+", efficiency(4, 16), "%"),
        bound("Tool", "3 stages lift it to 80%", "80+", efficiency(3, 8), "%"),
    ]
    # fmt: on


def sections() -> list[Figure]:
    gpt3 = lowered("gpt3-175b", 2048, tp=8)
    message = 2048 * 12288 * 2
    compute = (layer_flops(gpt3, "F") + layer_flops(gpt3, "F", kind="attention")) / (
        0.5 * device("h100-sxm").peak_for("bf16")
    )
    ring = 2 * terms("all-reduce", "ring", 8).time(message, link("ib-ndr").but(alpha=5e-6, efficiency=1.0))
    # fmt: off
    return [
        holds("1", "175B: ~350 GB of FP16 weights", "350", zero_state_bytes(175e9, 1, 0, grad=0, optimizer=0) / GB, "GB"),
        bound("1", "with gradients and optimizer over 1.2 TB", "1.2+", zero_state_bytes(175e9, 1, 0) / 1e12, "TB", "2.3 times the bound"),
        holds("2", "an all-reduce twice per layer", "2", calls(gpt3, "F"), "forward", "four with backward"),
        wrong("2", "TP volume 2 · BSH/TP · bytes", 2 * message / 8 / MB, float(sent("all_reduce", message, 8)) / MB, "MB",
              "2(T−1)/T · BSH · bytes; T = 8, GPT-3"),
        wrong("2", "TP over 400G: communication 10–20× the computation", "10–20", ring / compute, "×",
              "a GPT-3 layer forward, 8 H100 at half their peak over one NDR port each; 10× at a width of 2,000"),
        holds("3", "1F1B: (D−1)/M", 100 * 3 / 8, 100 * float(bubble_overhead("1f1b", 4, 8)), "%",
              "over busy time; it calls this a fraction, which is 27.3%"),
        holds("6", "FP8 halves the bytes of 16 bits", "2", DTYPE_BYTES["bf16"] / DTYPE_BYTES["fp8"], "×", "of what is sent in FP8"),
        wrong("6", "800 Gb/s NDR InfiniBand", "800", link("ib-ndr").bandwidth * 8 / 1e9, "Gb/s", "per port; 800 Gb/s per port is XDR"),
    ]
    # fmt: on


def pipelines() -> list[Figure]:
    gpt3 = lowered("gpt3-175b", 2048)
    f, b, m, p = 1.0, 2.0, 8, 4
    theirs = (f + b) * (m - 1) / m + f + b
    # fmt: off
    return [
        wrong("Bubbles", "T_step = (T_f+T_b)(M−1)/M + T_f + T_b + T_comm", theirs, float(makespan("1f1b", p, m, 1, f, b / 2, b / 2)), "T_f",
              "(M+P−1)(T_f+T_b) + T_comm; P = 4, M = 8, T_b = 2·T_f"),
        holds("Bubbles", "M = 4: overhead 3/4 = 75%", "75", 100 * float(bubble_overhead("gpipe", 4, 4)), "%",
              "(P−1)/M at P = 4; it derives it as (M−1)/M"),
        convention("Bubbles", "… reducing throughput by 42%", "42", 100 * float(bubble_fraction("gpipe", 4, 4)), "%", "digits cut off, not rounded",
                   math.floor(100 * float(bubble_fraction("gpipe", 4, 4))), "3/7"),
        wrong("Bubbles", "M = 32: 31/32 ≈ 3.1%", "3.1", 100 * float(bubble_overhead("1f1b", 4, 32)), "%", "(P−1)/M = 3/32 at P = 4; 31/32 is 97%"),
        wrong("Bubbles", "175B: a layer's activations ~4 MB a micro-batch", "4", saved(gpt3) / MB, "MB", "34·s·b·h; 2,869 MB with stored softmax"),
        holds("Bubbles", "32 × 96 × 4 MB = 12.3 GB", "12.3", 32 * 96 * 4e6 / GB, "GB", "the product; its 4 MB is wrong"),
        wrong("Bubbles", "12.3 GB is 38% of 80 GB", "38", 100 * 12.3 / 80, "%", "12.3 / 80"),
        wrong("Bubbles", "Adam's FP32 moments of 175B: 700 GB", "700", zero_state_bytes(175e9, 1, 0, 0, 0, 8) / GB, "GB", "700 GB is one of the two moments"),
    ]
    # fmt: on


def overlap() -> list[Figure]:
    whole = message_time(2 * 500e6, 0, 1 / (300 * GB))
    cut = 16 * (whole / 16 + 5e-6)
    inverted = min(1.0, 3.44e-3 / 200e-3)
    slower = message_time(1e9, 0, 1 / (0.6 * 300 * GB)) / message_time(1e9, 0, 1 / (0.9 * 300 * GB)) - 1
    # fmt: off
    return [
        wrong("Overlap", "η = min(1, T_comm / T_b)", inverted, min(1.0, 1 / advice.overlap_ratio(3.44e-3, 200e-3)), "",
              "inverted: min(1, T_b / T_comm)"),
        wrong("Overlap", "8 chunks cost ~10% more", "10", 100 * slower, "%",
              "by its own 90% → 60% of bandwidth from 1 GB to 128 MB, before launches"),
        wrong("Overlap", "optimal chunks 16", "16", advice.optimal_chunks(float(whole), 5e-6), "chunks", "√(3.33 ms / 5 µs), by its own model"),
        holds("Overlap", "31.25 MB × 2 / 300 GB/s ≈ 0.21 ms a chunk", "0.21", message_time(2 * 31.25e6, 0, 1 / (300 * GB)) * 1e3, "ms"),
        convention("Overlap", "total 16 × 0.215 = 3.44 ms", "3.44", cut * 1e3, "ms", "from its rounded 0.215 ms per chunk", 16 * 0.215),
        convention("Overlap", "3.44 / 200 = 1.72%", "1.72", 100 * advice.overlap_ratio(cut, 200e-3), "%", "from its rounded 3.44 ms",
                   100 * advice.overlap_ratio(3.44e-3, 200e-3)),
        holds("Overlap", "T_step = max(T_comp, T_comm)", "200", advice.overlapped_step(200, 3.44), "ms"),
    ]
    # fmt: on


def sequence() -> list[Figure]:
    k = 1024
    short, long = (2 * s * 8192 * 2 / (100 * GB) for s in (2048, 128 * k))
    rate = 0.5 * device("h100-sxm").peak_for("bf16")
    work, transfer = advice.ring_step(128 * k, 2, 64, 128, 64, rate, 100 * GB)
    ring = lowered(gpt_like(8192, 80, 64), 64 * k, cp=8)
    kv = next(op for op in ring.blocks["dense", "F"] if op.name == "ring-kv")
    free = advice.ring_free_block(64, 64, rate, 100 * GB, 1)
    # fmt: off
    return [
        holds("Sequence", "ring attention sends 2 · S/N · H a step", 2 * 64 * k / 8 * 8192 / 1e6, scalar(kv.message_bytes) / 2 / 1e6, "M elements",
              "K and V"),
        wrong("Sequence", "ring buffer 128K, N = 64, FP8: 32 MB", "32", advice.ring_buffer(128 * k, 64, 8192, 1) / MIB, "MiB", "double-buffered, as it says: K and V, each twice"),
        wrong("Sequence", "ring buffer 1M, N = 8: 2 GB", "2", advice.ring_buffer(k * k, 8, 8192, 1) / GIB, "GiB",
              "K and V, each twice; far below 80 GB in both cases"),
        holds("Sequence", "8 × 4 × 2 = 64 GPUs", "64", Plan(tp=8, pp=4, cp=2).world, "GPUs"),
        wrong("Sequence", "2·2048·8192·2 B at 100 GB/s = 0.67 µs", "0.67", short * 1e6, "µs", "0.67 ms"),
        wrong("Sequence", "at 128K tokens: 43 µs", "43", long * 1e6, "µs", "43 ms"),
        wrong("Sequence", "… 1–2% of the attention time", "1–2", 100 * transfer / work, "%",
              "a block's transfer over its attention: 64 heads, 2 ranks, half an H100's peak"),
        wrong("Sequence", "free up to 256K tokens at FP8", "262,144", 2 * free, "tokens",
              "free *from* here on: compute grows with the square of the block, transfer with the block"),
    ]
    # fmt: on


def table() -> list[Figure]:
    return [*tool(), *sections(), *pipelines(), *overlap(), *sequence()]
