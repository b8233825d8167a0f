"""The guide, parts 9 to 11: tensor, pipeline, three-dimensional and expert parallelism."""

from figures.cases import GB, MB, boundary, calls, layer_bytes, lowered, model, one, saved, traffic
from figures.figure import Figure, rows
from meshwright.describe.layout import Layout
from meshwright.describe.plan import Plan
from meshwright.lower.program import StepProgram
from meshwright.programs.pipelines import bubble_fraction, bubble_overhead, build, looped, walk

holds, _, convention, wrong = rows("guide")


def tensor() -> list[Figure]:
    program = lowered("gpt3-175b", 2048, tp=8)
    bare, sequence = (lowered("gpt3-175b", 2048, tp=t, sp=t > 1) for t in (1, 8))
    activation = 2048 * 12288
    formula = 4 * 2 * 7 / 8 * activation * 2

    def norms(which: StepProgram) -> float:
        return one(which.saved["dense"]["norm"])

    # fmt: off
    return [
        holds("9.1", "one all-reduce per MLP block", "1", calls(program, "F", part="ffn"), "forward"),
        holds("9.2", "one all-reduce per attention block", "1", calls(program, "F", part="attention"), "forward"),
        holds("9.4", "2 all-reduces per layer", "2", calls(program, "F"), "forward", "4 with backward"),
        holds("9.5", "4 · 2(T−1)/T · B·S·H per layer", formula / MB, layer_bytes(program, "tp") / MB, "MB", "GPT-3, one sequence, T = 8, 16 bits"),
        wrong("9.5", "printed: ~175 MB per layer", "175", layer_bytes(program, "tp") / MB, "MB", "its own code computes our value; forward alone is 176 MB"),
        wrong("9.5", "96 layers: ~16.8 GB", "16.8", 96 * layer_bytes(program, "tp") / GB, "GB", "96 times the figure above; forward alone is 16.9 GB"),
        holds("9.6", "sequence parallelism: norms keep B·S·H/TP", "8", norms(bare) / norms(sequence), "× less"),
        holds("9.6", "all of a layer is sharded 8×", "8", saved(bare) / saved(sequence), "× less", "every saved tensor"),
    ]
    # fmt: on


def pipeline() -> list[Figure]:
    naive, gpipe, one_f, looping = (
        walk(build(*case)) for case in (("naive", 4, 1), ("gpipe", 4, 4), ("1f1b", 4, 8), ("interleaved", 4, 8, 2))
    )
    plain, virtual = (
        lowered("gpt3-175b", 2048, 8, pp=4, virtual=v, schedule=s) for v, s in ((1, "1f1b"), (2, "interleaved"))
    )
    idle = float(bubble_overhead("interleaved", 4, 8, 2) / bubble_overhead("1f1b", 4, 8))
    # fmt: off
    return [
        holds("10.1", "naive bubble (P−1)/P = 75% with 4 stages", "75", 100 * naive.bubble_fraction, "%"),
        wrong("10.1", "each GPU is active 2/P of the time", "50", 100 * (1 - naive.bubble_fraction), "%",
              "1/P, by its own bubble of (P−1)/P"),
        holds("10.2", "GPipe (P−1)/(M+P−1) ≈ 43% with P = 4, M = 4", "43", 100 * gpipe.bubble_fraction, "%"),
        holds("10.2", "GPipe keeps M micro-batches", "4", gpipe.peak_in_flight.max(), "in flight"),
        holds("10.3", "1F1B keeps at most P", "4", one_f.peak_in_flight.max(), "in flight", "P = 4, M = 8"),
        holds("10.3", "1F1B has GPipe's bubble", 100 * float(bubble_fraction("gpipe", 4, 8)), 100 * one_f.bubble_fraction, "%"),
        holds("10.4", "interleaved (P−1)/(M·V+P−1)", 100 * 3 / 19, 100 * looping.bubble_fraction, "%", "P = 4, M = 8, V = 2"),
        holds("10.4", "V = 2 halves the bubble", "0.5", idle, "×", "idle over busy"),
        wrong("10.4", "V = 2 also reduces the message size", "<1", boundary(virtual) / boundary(plain), "×",
              "messages have the same size, and there are V times as many"),
        wrong("10.4", "V = 2: layers 13–15 on GPU 3", "3", looped(4, 2)[4], "GPU",
              "interleaved stages are not consecutive, as it says itself: 0 1 2 3 0 1 2 3; the drawn 0 1 2 3 3 2 1 0 is V-shaped"),
        wrong("10.5", "a message is B × S × H bytes", 1.0, boundary(plain) / (2048 * 12288), "B an element", "B × S × H elements of two bytes, as its own 10.6 says"),
        holds("10.6", "2 · B · S · H · bytes per micro-batch and boundary", 2 * 2048 * 12288 * 2 / MB, 2 * boundary(plain) / MB, "MB"),
        holds("10.6", "8 stages, 32 micro-batches: efficiency ~82%", "82", 100 * (1 - float(bubble_fraction("1f1b", 8, 32))), "%"),
    ]
    # fmt: on


def three_d() -> list[Figure]:
    plan = Plan(tp=8, pp=4, replicate=4)
    small = Layout(Plan(tp=2, pp=2, replicate=2))
    gpt3 = model("gpt3-175b")
    program = lowered("gpt3-175b", 2048, 4, tp=8, pp=4, replicate=4)
    claimed = 2 * gpt3.total / 4 * 2 * 3 / 4
    ours = traffic("dp", "gpt3-175b", 2048, 4, tp=8, pp=4, replicate=4, grad_dtype="bf16")
    # fmt: off
    return [
        holds("11.1", "8 × 4 × 4 = 128 GPUs", "128", plan.world, "GPUs"),
        holds("11.2", "TP=2, PP=2, DP=2: GPUs 0,1 and 2,3 are TP groups", "4", len(small.groups("tp")), "groups", "{0,1} {2,3} {4,5} {6,7}"),
        holds("11.2", "GPUs 4,5 replicate 0,1", "4", small.group_of("dp", 0)[1], "rank"),
        holds("11.3", "TP: 4 · L · B·S·H · 2(T−1)/T", 4 * 96 * 2048 * 12288 * 1.75 / 1e9, 96 * layer_bytes(program, "tp") / 2e9, "G elements"),
        holds("11.3", "PP: 2 · M · (P−1) · B/M · S·H", 2 * 3 * 2048 * 12288 / 1e6, 2 * 3 * boundary(program) / 2e6, "M elements",
              "one sequence, 4 stages"),
        wrong("11.3", "DP: 2 · N/P · 2(D−1)/D", claimed / GB, ours / GB, "GB",
              "N/(P·T): tensor parallelism shards the gradients too. GPT-3 at 8 × 4 × 4"),
    ]
    # fmt: on


def experts() -> list[Figure]:
    mixtral = model("mixtral-8x7b")
    program = lowered("mixtral-8x7b", 4096, 8, ep=8, replicate=8)
    half = lowered("mixtral-8x7b", 4096, 8, ep=4, replicate=8)
    switch = lowered(mixtral.but(top_k=1), 4096, 8, ep=8, replicate=8)
    element = 2 * 4096 * mixtral.hidden
    world = Plan(replicate=8, pp=8, tp=8, ep=8).world
    expert = mixtral.parameters()["experts"] / 8
    dense = mixtral.flops(4096)["experts"] / (2 * expert / mixtral.layers) / mixtral.layers
    # fmt: off
    return [
        convention("11.5, 12.6", "4 · B·S·H · (E−1)/E per MoE layer", 4 * 7 / 8, layer_bytes(program, "ep", "moe") / element, "B·S·H",
                   "top-1 routing", layer_bytes(switch, "ep", "moe") / element, "top-2, which 11.4 also allows, sends twice that"),
        convention("11.5", "(E−1)/E of it leaves a rank", 7 / 8, layer_bytes(half, "ep", "moe", "F") / (2 * 2 * element), "",
                   "one expert per rank, as drawn", layer_bytes(program, "ep", "moe", "F") / (2 * 2 * element),
                   "in general (ep−1)/ep; ours is for 8 experts on 4 ranks"),
        convention("11.8", "DP 8 × PP 8 × TP 8 × EP 8 = 4096 GPUs", "4096", world, "GPUs",
                   "DP counts copies of the whole model, experts included", Plan(replicate=64, pp=8, tp=8, ep=8).world,
                   "the dense layers then have 64 data-parallel ranks; usually EP divides the data-parallel ranks and adds none"),
        holds("11.8", "8× the parameters", "8", mixtral.parameters()["experts"] / expert, "×", "of the FFN; the whole model 6.4× (46.7 over 7.2B)"),
        holds("11.8", "with only 2× the compute (top-2)", "2", dense, "×", "of the FFN; the whole model 1.8×"),
    ]
    # fmt: on


def table() -> list[Figure]:
    return [*tensor(), *pipeline(), *three_d(), *experts()]
