"""The text Distributed Training Basics."""

from figures.cases import GB, MB, TB, TERA, compression_ratio, device, link, lowered, model, one, volume, walked
from figures.figure import Figure, rows
from meshwright.cost import advice
from meshwright.cost.memory import largest_model, zero_state_bytes
from meshwright.describe.accelerator import DTYPE_BYTES
from meshwright.describe.plan import Plan
from meshwright.describe.workload import Workload
from meshwright.lower.program import sent
from meshwright.programs.pipelines import bubble_overhead
from meshwright.units import parse_rate

holds, bound, convention, wrong = rows("basics")
YEAR = 365.25 * 86400


def sizes() -> list[Figure]:
    compute = 6 * model("gpt3-175b").total * 300e9
    split = next(op for op in lowered("gpt3-6.7b", 2048, tp=4).blocks["dense", "F"] if op.name == "ffn-up")
    # fmt: off
    return [
        bound("Why", "GPT-3 needs 500+ GB for weights, gradients and optimizer", "500+", zero_state_bytes(175e9, 1, 0) / GB, "GB",
              "5.6 times the bound"),
        holds("Why", "GPT-3 would take 355 years on a V100", "355", compute / (28 * TERA) / YEAR, "years", half=1.0,
              remark="at 28 TFLOP/s, as its source assumes; 80 years at the tensor cores' 125 peak"),
        wrong("Data parallelism", "models up to 7–10B fit one GPU", "7–10", largest_model(80e9) / 1e9, "B",
              "16 bytes per parameter in 80 GB; 10B needs all state in 16 bits. Also in its takeaways"),
        holds("Tensor parallelism", "4096×16384 in 4 parts is 4096×4096 each", "4096", one(split.shape[2]), "columns"),
        wrong("Strategy", "7B: ~84 GB, so 80 GB suffices", "84", zero_state_bytes(7e9, 1, 0) / GB, "GB",
              "12 bytes per parameter: the optimizer state alone; 84 GB does not fit into 80 GB either"),
        wrong("Strategy", "70B: ~840 GB", "840", zero_state_bytes(70e9, 1, 0) / GB, "GB", "12 bytes per parameter: the optimizer state alone"),
    ]
    # fmt: on


def traffic() -> list[Figure]:
    ten, twice = 10 * GB, "~2D, as the sentence before says"
    ring, root = walked("all-reduce", "ring", (8, ten, 0, 1e9)), walked("broadcast", "naive", (8, ten, 0, 1e9))
    gradients = 70e9 * 2
    seconds = float(sent("all_reduce", gradients, 1e6)) / (50 * GB)
    (slow, left), (slower, less) = (advice.communication_share(work, seconds) for work in (10, 3))
    fsdp = volume("tiny-gpt", zero=3, shard=1024) / volume("tiny-gpt", replicate=1024)
    hidden = advice.overlapped_step(1000, 200)
    # fmt: off
    return [
        holds("Ring", "2(N−1) steps", "14", ring.steps, "steps", "8 GPUs"),
        holds("Ring", "naive: 70 GB per GPU for 8 GPUs and 10 GB", "70", root.sent[0] / GB, "GB", "what the root sends to seven others"),
        convention("Ring", "ring: 20 GB per GPU", "20", ring.sent[0] / GB, "GB", twice, 2 * ten / GB, "2(N−1)/N · D"),
        convention("Ring", "3.5× improvement", "3.5", root.sent[0] / ring.sent[0], "×", twice, root.sent[0] / (2 * ten)),
        holds("Overlap", "without overlap 1200 ms", "1200", advice.overlapped_step(1000, 200, 0), "ms"),
        holds("Overlap", "with overlap 1000 ms", "1000", hidden, "ms"),
        holds("Overlap", "speedup 20%", "20", 100 * (1200 / hidden - 1), "%"),
        holds("Ratio", "70B: 140 GB of FP16 gradients", "140", gradients / GB, "GB"),
        holds("Ratio", "~5.6 s over 50 GB/s", "5.6", seconds, "s", "a ring moves each byte twice"),
        holds("Ratio", "10 s of compute: overhead 36%", "36", 100 * slow, "%"),
        holds("Ratio", "… efficiency 64%", "64", 100 * left, "%"),
        holds("Ratio", "3 s of compute: overhead 65%", "65", 100 * slower, "%"),
        holds("Ratio", "… efficiency 35%", "35", 100 * less, "%"),
        holds("Ratio", "above 80% efficiency needs communication below 20%", "80", 100 * advice.communication_share(80, 20)[1], "%"),
        wrong("Ratio", "FSDP instead of DDP improves the ratio", "<1", fsdp, "× DDP's bytes", "it moves 1.5 times the bytes; it saves memory"),
        holds("Accumulation", "batch = micro-batch × accumulation × GPUs", "8", advice.accumulation(1024, 4, 32), "micro-batches",
              "1024 = 4 × 8 × 32"),
    ]
    # fmt: on


def hierarchy() -> list[Figure]:
    h100, nv4, ndr = device("h100-sxm"), link("nvlink4").bandwidth, link("ib-ndr").bandwidth
    ethernet = parse_rate("100Gb/s")
    # fmt: off
    return [
        holds("Hierarchy", "HBM: 3 TB/s", "3", h100.memory_bandwidth / TB, "TB/s", "H100: 3.35"),
        holds("Hierarchy", "NVLink: 900 GB/s", "900", 2 * nv4 / GB, "GB/s", "both directions"),
        convention("Hierarchy", "NVLink 3× slower than HBM", "3", h100.memory_bandwidth / (2 * nv4), "×", "from its own rounded 3 TB/s", 3 * TB / (2 * nv4)),
        holds("Hierarchy", "InfiniBand: 50 GB/s", "50", ndr / GB, "GB/s", "one NDR port, one direction"),
        wrong("Hierarchy", "InfiniBand 18× slower than NVLink", "18", nv4 / ndr, "×", "it divides both directions of NVLink by one direction"),
        holds("Hierarchy", "Ethernet: 12 GB/s", "12", ethernet / GB, "GB/s", "100 Gb/s"),
        wrong("Hierarchy", "Ethernet 75× slower than NVLink", "75", nv4 / ethernet, "×", "it divides both directions of NVLink by one direction"),
    ]
    # fmt: on


def plans() -> list[Figure]:
    work = Workload(batch=64)
    # fmt: off
    return [
        holds("Pipeline", "4 stages, 16 micro-batches: 19% overhead", "19", 100 * float(bubble_overhead("1f1b", 4, 16)), "%",
              "over busy time; a fraction of 16%"),
        holds("Anti-patterns", "16 stages, 4 micro-batches: 15/4 = 375%", "375", 100 * float(bubble_overhead("gpipe", 16, 4)), "%"),
        holds("Anti-patterns", "batch 64 on 128 GPUs: 0.5 a GPU", "0.5", work.batch / Plan(replicate=128).dp, "samples"),
        holds("Topology", "TP 8 × DP 16 = 128 GPUs", "128", Plan(tp=8, replicate=16).world, "GPUs"),
        holds("Configurations", "TP 8 × DP 64 = 512", "512", Plan(tp=8, replicate=64).world, "GPUs"),
        holds("Configurations", "TP 8 × PP 16 × DP 16 = 2048", "2048", Plan(tp=8, pp=16, replicate=16).world, "GPUs"),
        holds("Configurations", "64 experts on 64 GPUs, TP 4: 256", "256", Plan(tp=4, replicate=64, ep=64).world, "GPUs"),
        holds("Configurations", "SP 4 × TP 8 × DP 8 = 256", "256", Plan(cp=4, tp=8, replicate=8).world, "GPUs"),
        holds("Compression", "FP32 → FP16: 2×", "2", DTYPE_BYTES["fp32"] / DTYPE_BYTES["fp16"], "×"),
        holds("Compression", "FP32 → INT8: 4×", "4", DTYPE_BYTES["fp32"] / DTYPE_BYTES["int8"], "×", "less its scales"),
        holds("Compression", "PowerSGD: 10–50×", "10–50", compression_ratio("powersgd", 4096, 64), "×",
              "4096² at rank 64; 512× at rank 4"),
        holds("Compression", "buckets of ~25 MB", "25", Plan().bucket / MB, "MB", "PyTorch's default is 25 MiB"),
    ]
    # fmt: on


def table() -> list[Figure]:
    return [*sizes(), *traffic(), *hierarchy(), *plans()]
