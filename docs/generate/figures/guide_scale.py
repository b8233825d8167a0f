"""The guide, part 1: growth, the memory wall, and the hardware it quotes."""

import math

from figures.cases import GB, GIB, STORED, TB, TERA, device, gpt_like, link, lowered, model, saved
from figures.figure import Figure, rows
from meshwright.cost.memory import minimum_gpus, zero_state_bytes
from meshwright.describe import catalog
from meshwright.units import parse_rate

holds, _, convention, wrong = rows("guide")
GPT2_PRINTED = 1.542  # billions: Radford et al. 2019, table 2
GROWTH = (
    1e12 / 65e6
)  # from the base Transformer (Vaswani et al. 2017) to the order of magnitude commonly assumed for GPT-4
LOSS_EXPONENT = 0.076  # loss ∝ N^−0.076: Kaplan et al. 2020, equation 1.1


def growth() -> list[Figure]:
    bert = model("bert-large").total + 1_049_600 + 2_048
    # fmt: off
    return [
        convention("1.1", "~10,000× growth in 6 years", "10,000", GROWTH, "×",
                   "the nearest power of ten", 10.0 ** round(math.log10(GROWTH)), "65M to ~1T"),
        wrong("1.1", "to halve the loss, 2^(1/0.076) ≈ 8000× the size", "8000", 2 ** (1 / LOSS_EXPONENT), "×",
              "1/0.076 is 13.16; 2^13 is 8,192"),
        holds("1.1", "BERT-Large 340M", "340", bert / 1e6, "M", "our count with the pooler and the token types it leaves out"),
        convention("1.1", "GPT-2 1.5B", "1.5", model("gpt2-xl").total / 1e9, "B", "the size in its paper, 1,542M", GPT2_PRINTED,
                   "the published weights hold 1,558M"),
        holds("1.1", "GPT-3 175B", "175", model("gpt3-175b").total / 1e9, "B"),
        holds("1.1", "MT-NLG 530B", "530", model("mt-nlg-530b").total / 1e9, "B"),
        holds("1.1", "PaLM 540B", "540", model("palm-540b").total / 1e9, "B"),
    ]
    # fmt: on


def memory_wall() -> list[Figure]:
    def state(parameters: float) -> float:
        return zero_state_bytes(parameters, 1, 0)

    gpt3 = lowered("gpt3-175b", 2048, stack=STORED)
    seven = lowered(gpt_like(4096, 32, 32), 2048, batch=4, microbatch=4, stack=STORED)
    # fmt: off
    return [
        holds("1.2", "2N + 2N + 4N + 4N + 4N = 16N bytes", "16", state(1), "B"),
        holds("1.2", "LLaMA-7B: 112 GB of state", "112", state(7e9) / GB, "GB"),
        holds("1.2", "LLaMA-13B: 208 GB", "208", state(13e9) / GB, "GB"),
        holds("1.2", "LLaMA-65B: 1.04 TB", "1.04", state(65e9) / TB, "TB"),
        holds("1.2", "GPT-3: 2.8 TB", "2.8", state(175e9) / TB, "TB"),
        holds("1.2", "PaLM: 8.6 TB", "8.6", state(540e9) / TB, "TB"),
        holds("1.2", "LLaMA-7B: 2+ A100 80GB", "2", minimum_gpus(7e9, 80e9), "GPUs", "state alone"),
        holds("1.2", "LLaMA-13B: 3+", "3", minimum_gpus(13e9, 80e9), "GPUs"),
        holds("1.2", "LLaMA-65B: 13+", "13", minimum_gpus(65e9, 80e9), "GPUs"),
        holds("1.2", "GPT-3: 35+", "35", minimum_gpus(175e9, 80e9), "GPUs"),
        holds("1.2", "PaLM: 108+", "108", minimum_gpus(540e9, 80e9), "GPUs"),
        holds("1.2", "activations sbh(34 + 5as/h)L ≈ 275 GB for one sequence of GPT-3", "275", 96 * saved(gpt3) / GB, "GB",
              "with stored softmax and dropout masks; flash attention keeps 82 GB"),
        holds("1.2", "7B: parameters 14 GB", "14", zero_state_bytes(7e9, 1, 0, grad=0, optimizer=0) / GB, "GB"),
        holds("1.2", "7B: gradients 14 GB", "14", zero_state_bytes(7e9, 1, 0, param=0, optimizer=0) / GB, "GB"),
        holds("1.2", "7B: momentum, variance and master weights 28 GB each", "28", zero_state_bytes(7e9, 1, 0, 0, 0, 4) / GB, "GB"),
        holds("1.2", "7B: optimizer state alone 84 GB", "84", zero_state_bytes(7e9, 1, 0, 0, 0) / GB, "GB"),
        holds("1.2", "7B: activations ~50–200 GB, varying with batch and sequence", "50–200", 32 * saved(seven) / GB, "GB",
              "four sequences of 2,048 with stored softmax, 32 layers of 4,096"),
    ]
    # fmt: on


def hardware() -> list[Figure]:
    h100, a100 = device("h100-sxm"), device("a100-80gb")
    nv3, nv4, ndr = link("nvlink3"), link("nvlink4"), link("ib-ndr")
    dgx = catalog.load("clusters", "dgx-h100")
    cards = dgx.levels[1].ports or dgx.node_size
    paper, sheet = "NVIDIA H100 white paper", "NVIDIA A100 datasheet"
    sparse, dense = (
        "with 2:1 sparsity, as NVIDIA's data sheet prints it",
        "training runs dense; the text does not say so",
    )
    both = "both directions; one is 450 GB/s"
    # fmt: off
    return [
        holds("1.5", "H100: 80 GB", "80", h100.memory / GIB, "GiB", "79.1 of the label's 80 can be allocated", half=1.0),
        holds("1.5", "H100: 3.35 TB/s of memory bandwidth", "3.35", h100.memory_bandwidth / TB, "TB/s", paper),
        convention("1.5", "H100: 989 TFLOPS TF32", "989", h100.peak_for("tf32") / TERA, "TFLOP/s", sparse, 2 * h100.peak_for("tf32") / TERA, dense),
        convention("1.5", "H100: 1979 TFLOPS FP16/BF16", "1979", h100.peak_for("bf16") / TERA, "TFLOP/s", sparse, 2 * h100.peak_for("bf16") / TERA, dense),
        holds("1.3, 1.5", "H100: 900 GB/s NVLink", "900", 2 * nv4.bandwidth / GB, "GB/s", both),
        holds("1.5", "A100: 2.0 TB/s of memory bandwidth", "2.0", a100.memory_bandwidth / TB, "TB/s", sheet),
        convention("1.5", "A100: 312 TFLOPS TF32", "312", a100.peak_for("tf32") / TERA, "TFLOP/s", sparse, 2 * a100.peak_for("tf32") / TERA, dense),
        convention("1.5", "A100: 624 TFLOPS FP16/BF16", "624", a100.peak_for("bf16") / TERA, "TFLOP/s", sparse, 2 * a100.peak_for("bf16") / TERA, dense),
        holds("1.5", "A100: 600 GB/s NVLink", "600", 2 * nv3.bandwidth / GB, "GB/s", "both directions; one is 300 GB/s"),
        holds("1.3, 1.5", "InfiniBand NDR: 400 Gb/s is 50 GB/s per direction", "50", ndr.bandwidth / GB, "GB/s"),
        holds("1.5", "8 ports per DGX node", "8", cards, "ports"),
        holds("1.3", "8 NICs make 400 GB/s", "400", cards * ndr.bandwidth / GB, "GB/s"),
        holds("1.3", "inter-node bandwidth is 2–18× lower", "2–18", nv4.bandwidth / ndr.bandwidth, "×",
              "like for like it is 9×, for a GPU and for a node; 18 sets both directions of NVLink against one of InfiniBand"),
        holds("5.1", "NVLink 4.0 is 450 GB/s", "450", nv4.bandwidth / GB, "GB/s", "one direction"),
        holds("5.3", "100GbE is 12.5 GB/s", "12.5", parse_rate("100Gb/s") / GB, "GB/s"),
        wrong("5.3, 6.4", "InfiniBand HDR is 200 GB/s", "200", link("ib-hdr").bandwidth / GB, "GB/s", "200 Gb/s per port; the eight ports of a node together make 200 GB/s"),
        holds("9.4", "NVLink 600–900 GB/s on H100", "600–900", 2 * nv4.bandwidth / GB, "GB/s", "900, both directions; 600 is the A100's"),
    ]
    # fmt: on


def table() -> list[Figure]:
    return [*growth(), *memory_wall(), *hardware()]
