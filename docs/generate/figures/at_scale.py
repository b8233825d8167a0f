"""The text Distributed Training at Scale."""

import numpy as np

from figures.cases import GB, calls, gpt_like, layer_flops, link, lowered, model, one, saved, volume
from figures.figure import Figure, rows
from meshwright.cost.memory import zero_state_bytes
from meshwright.describe.accelerator import DTYPE_BYTES
from meshwright.describe.plan import Plan
from meshwright.lower.program import sent
from meshwright.programs.pipelines import bubble_fraction, build, walk
from meshwright.units import parse_rate

holds, bound, convention, wrong = rows("at-scale")


def strategies() -> list[Figure]:
    megatron = lowered("gpt3-175b", 2048, tp=2)
    column = lowered(model("lecture-mlp"), 1, 2, tp=2, microbatch=2)
    product = next(op for op in column.blocks["dense", "F"] if op.kind == "gemm")
    whole = next(
        op for op in lowered(model("lecture-mlp"), 1, 2, microbatch=2).blocks["dense", "F"] if op.kind == "gemm"
    )
    ratio = float(bubble_fraction("1f1b", 4, 8)) / walk(build("naive", 4, 1)).bubble_fraction
    forward = megatron.blocks["dense", "F"]
    collectives = [bool(op.collective) for op in forward]
    up, down = (next(i for i, op in enumerate(forward) if op.name == name) for name in ("ffn-up", "ffn-down"))
    # fmt: off
    return [
        holds("Big picture", "70B: over 140 GB of FP16 parameters", "140", zero_state_bytes(70e9, 1, 0, grad=0, optimizer=0) / GB, "GB"),
        holds("1", "ring all-reduce sends 2(P−1)/P of the tensor", 2 * 7 / 8, sent("all_reduce", 1.0, 8), "n", "P = 8"),
        holds("3", "7B with AdamW: ~112 GB per GPU", "112", zero_state_bytes(7e9, 1, 0) / GB, "GB"),
        holds("3", "each parameter is communicated 3 times", "3", volume("tiny-gpt", zero=3, shard=1024), "N elements"),
        holds("4", "two GPUs: each does half the work", "0.5", one(product.flops) / one(whole.flops), "×"),
        convention("4", "concatenating column-parallel outputs needs no communication", "0", calls(column, "F"), "all-gathers",
                   "the first linear layer of the FFN, which it names: a row-parallel layer takes the shards", collectives[up:down].count(True),
                   "a column-parallel layer alone needs an all-gather"),
        holds("4", "MLP block: one all-reduce forward", "1", calls(megatron, "F", part="ffn"), "all-reduces"),
        holds("4", "… and one backward", "1", calls(megatron, "I", part="ffn"), "all-reduces"),
        holds("5", "layers 0–15 on GPU 0, 16–31 on GPU 1", "16", Plan(pp=2).stage_layers(32)[0], "layers"),
        bound("5, Q3", "1F1B has a smaller bubble than the naive pipeline", "<1", ratio, "× naive",
              "P = 4, M = 8; the micro-batches do it: GPipe has the same bubble, and 1F1B saves memory"),
        holds("8", "8 × 8 × 8 = 512 GPUs", "512", Plan(tp=8, pp=8, replicate=8).world, "GPUs"),
        wrong("Note", "NVLink 600 GB/s on H100", "600", 2 * link("nvlink4").bandwidth / GB, "GB/s", "both directions; 600 GB/s is the A100"),
        holds("Note", "InfiniBand 400 Gb/s", "50", parse_rate("400Gb/s") / GB, "GB/s"),
    ]
    # fmt: on


def precision() -> list[Figure]:
    half, single = np.finfo(np.float16), np.finfo(np.float32)
    fp8 = zero_state_bytes(1, 1, 0) / zero_state_bytes(1, 1, 0, param=DTYPE_BYTES["fp8"])
    # fmt: off
    return [
        holds("6, Q2", "FP32 and BF16: 8 exponent bits", "8", single.nexp, "bits"),
        holds("6, Q2", "FP32: 23 mantissa bits", "23", single.nmant, "bits"),
        holds("6, Q2", "FP16: 5 exponent bits", "5", half.nexp, "bits"),
        holds("6, Q2", "BF16: 7 mantissa bits", "7", 8 * DTYPE_BYTES["bf16"] - 1 - single.nexp, "bits"),
        holds("6", "DeepSeek-V3: 671B parameters", "671", model("deepseek-v3").total / 1e9, "B"),
        wrong("6", "FP8 training roughly halves memory", "2", fp8, "× less",
              "of model state: masters, moments and gradients stay wide; activations are mostly kept in 16 bits"),
    ]
    # fmt: on


def checkpointing() -> list[Figure]:
    shape = gpt_like(4096, 32, 32)
    plain = lowered(shape, 2048, 8, microbatch=8)
    kept = lowered(shape, 2048, 8, microbatch=8, recompute="full")
    without, layer, inputs = 32 * saved(plain), saved(plain), 32 * saved(kept)
    extra = layer_flops(kept, "R") / layer_flops(kept, "FIW")
    # fmt: off
    return [
        holds("7, Q4", "~33% more compute", "33", 100 * extra, "%"),
        wrong("7", "printed: 4.3 GB without checkpointing", "4.3", without / GB, "GB",
              "a layer keeps 34·s·b·h bytes; it counts one tensor per layer. 8 × 2048 tokens, 32 layers of 4096"),
        wrong("7", "printed: 0.13 GB with checkpointing", "0.13", (inputs + layer) / GB, "GB",
              "every layer's input (4.3 GB) and one recomputed layer (2.3 GB); it counts one input"),
        wrong("7", "printed: 97% saved", "97", 100 * (1 - (inputs + layer) / without), "%", "from the two figures above"),
        bound("7, Q4", "saves often 90%+", "90+", 100 * (1 - (inputs + layer) / without), "%"),
    ]
    # fmt: on


def table() -> list[Figure]:
    return [*strategies(), *precision(), *checkpointing()]
