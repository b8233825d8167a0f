"""The text Lecture 08: Parallelism 2."""

import numpy as np

from figures.cases import GB, TB, device, link, lowered, model, one, walked
from figures.figure import Figure, rows
from meshwright.describe.plan import Plan
from meshwright.describe.workload import Workload
from meshwright.lower.program import sent
from meshwright.programs.collectives import build
from meshwright.programs.collectives.arrays import run_on_arrays

holds, bound, _, wrong = rows("lecture")


def hardware() -> list[Figure]:
    lanes, transfers, flit = 16, 128e9, 242 / 256
    # fmt: off
    return [
        holds("Hardware", "PCIe 7.0, 16 lanes: 242 GB/s", "242", lanes * transfers / 8 * flit / GB, "GB/s",
              "128 GT/s, 242 of 256 bytes of a flit carry data; PCI-SIG"),
        holds("Hardware", "H100: 18 NVLink 4.0 links, 900 GB/s", "900", 2 * link("nvlink4").bandwidth / GB, "GB/s", "18 × 25 GB/s, both directions"),
        wrong("Hardware", "HBM of the H100: 3.9 TB/s", "3.9", device("h100-sxm").memory_bandwidth / TB, "TB/s", "3.9 is the H100 NVL, which has no 900 GB/s of NVLink"),
    ]
    # fmt: on


def collectives() -> list[Figure]:
    ranks = 4
    inputs = [np.arange(4.0) + r for r in range(ranks)]
    summed = run_on_arrays(build("all-reduce", "ring", ranks, 4), inputs)
    shards = run_on_arrays(build("reduce-scatter", "ring", ranks, 4), inputs)
    gathered = run_on_arrays(build("all-gather", "ring", ranks, 4), shards)
    expected = [6.0, 10.0, 14.0, 18.0]
    n = 100e6 * 4
    # The text divides 2n (or n) bytes by P times the duration.
    lasted = {"all_reduce": 2 * n / (ranks * 277 * GB), "reduce_scatter": n / (ranks * 75 * GB)}
    bus = {name: float(sent(name, n, ranks)) / seconds for name, seconds in lasted.items()}
    ratio = 2 * walked("reduce-scatter", "ring").makespan / walked("all-reduce", "ring").makespan
    both = walked("reduce-scatter", "ring").makespan + walked("all-gather", "ring").makespan
    # fmt: off
    return [
        holds("Examples", "all-reduce gives [6, 10, 14, 18] on all ranks", "4", sum(np.array_equal(x, expected) for x in summed), "ranks"),
        holds("Examples", "reduce-scatter: rank 0 gets 6", "6", shards[0][0], ""),
        holds("Examples", "reduce-scatter: rank 1 gets 10", "10", shards[1][0], ""),
        holds("Examples", "all-gather gives [6, 10, 14, 18]", "4", sum(np.array_equal(x, expected) for x in gathered), "ranks"),
        holds("Examples", "all-reduce = reduce-scatter + all-gather", both * 1e3, walked("all-reduce", "ring").makespan * 1e3, "ms",
              "80 MB on 8 ranks"),
        wrong("Benchmark", "all-reduce of 100M elements on 4 GPUs, 2n/(P·t): ~277 GB/s", "<450", bus["all_reduce"] / GB, "GB/s",
              "the rate at which a rank would send; NVLink carries 450, so 277 was not computed as described. It is plausible as bus bandwidth"),
        bound("Benchmark", "reduce-scatter, n/(P·t): ~75 GB/s", "<450", bus["reduce_scatter"] / GB, "GB/s", "the rate at which a rank then sends; NVLink carries 450"),
        wrong("Benchmark", "277 against 75 shows hardware acceleration of all-reduce", 277 / 75, ratio, "×",
              "a ring's all-reduce takes twice the time of its reduce-scatter, so 2n/t and n/t are equal: the two rates count bytes differently"),
    ]
    # fmt: on


def training() -> list[Figure]:
    mlp = model("lecture-mlp")
    split = lowered(mlp, 1, 128, precision="fp32", tp=4, microbatch=128)
    product = next(op for op in split.blocks["dense", "F"] if op.kind == "gemm")
    work = Workload(batch=128, seq=1)
    # fmt: off
    return [
        holds("DDP", "batch 128 on 4 ranks: 32 each", "32", work.batch / Plan(replicate=4).dp, "samples"),
        holds("Tensor", "1024 / 4 = 256 columns each", "256", one(product.shape[2]), "columns"),
        holds("Tensor", "one all-gather a layer", "1", sum(one(op.count) for op in split.blocks["dense", "F"] if op.collective), "all-gathers"),
        holds("Pipeline", "two layers each", "2", Plan(pp=2).stage_layers(mlp.layers)[0], "layers"),
        holds("Pipeline", "micro-batches of 32", "4", Plan(pp=2, microbatch=32).microbatches(work), "micro-batches"),
    ]
    # fmt: on


def table() -> list[Figure]:
    return [*hardware(), *collectives(), *training()]
