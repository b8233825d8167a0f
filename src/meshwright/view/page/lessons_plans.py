"""Lessons seven to twelve: the bubble, better schedules, recompute, long sequences, experts, the whole plan."""

from __future__ import annotations

import numpy as np

from meshwright.cost.advice import microbatches_for, ring_buffer
from meshwright.describe import catalog
from meshwright.lower.op import sent
from meshwright.planner.goodput import young_interval
from meshwright.programs.pipelines.formulas import bubble_fraction, bubble_overhead, in_flight
from meshwright.view.page.lesson import GB, MB, MIB, Lesson, largest, number


def pipeline_bubble() -> Lesson:
    bubble = float(bubble_fraction("1f1b", 4, 8))
    enough = microbatches_for("1f1b", 4, 1, 0.8) or 0
    gpipe, one = (float(bubble_fraction(s, 4, 8)) for s in ("gpipe", "1f1b"))
    held = [float(in_flight(s, 4, 8)) for s in ("gpipe", "1f1b")]
    return Lesson(
        "The pipeline bubble",
        (
            "A stage waits until its first micro-batch arrives, and again at the end. With P equal stages and M micro-batches the idle share is "
            "(P−1)/(M+P−1). 1F1B starts a backward as soon as it can: it holds at most P micro-batches, where GPipe holds all M.",
        ),
        "modeler",
        (
            number(
                "4 stages, 8 micro-batches: bubble, in percent of the step?",
                100 * bubble,
                "%",
                f"3 / 11 = {bubble:.1%}",
            ),
            number(
                "How many micro-batches lift 4 stages to 80% efficiency?",
                enough,
                "micro-batches",
                f"M / (M + 3) ≥ 0.8 from M = {enough} on",
            ),
            largest(
                "Which has the larger bubble with equal stages?",
                (("GPipe", gpipe), ("1F1B", one)),
                "both fill and drain in the same way; 1F1B saves memory",
                equal="they are equal",
            ),
            number(
                "64 MiB per micro-batch: MiB that the first of 4 stages holds under 1F1B?",
                held[1] * 64,
                "MiB",
                f"{held[1]:.0f} in flight × 64; GPipe: {held[0]:.0f} × 64 = {held[0] * 64:.0f}",
            ),
        ),
        "Move the number of micro-batches and watch the white triangles.",
    )


def better_schedules() -> Lesson:
    plain, looped, zero_bubble = (
        float(bubble_fraction(s, 4, 8, v)) for s, v in (("1f1b", 1), ("interleaved", 2), ("zb-h1", 1))
    )
    return Lesson(
        "Schedules with a smaller bubble",
        (
            "Interleaving gives each rank V shorter stages: the bubble shrinks V times, and messages multiply by V. Zero-bubble schedules split "
            "backward into the gradient of the inputs, which others wait for, and of the weights, which fills the gaps.",
        ),
        "timeline",
        (
            number(
                "4 ranks, 8 micro-batches, interleaved with V = 2: bubble in percent?",
                100 * looped,
                "%",
                f"3 / (2·8 + 3) = {looped:.1%}",
            ),
            largest(
                "Which has the smallest bubble here?",
                (("1F1B", -plain), ("interleaved, V = 2", -looped), ("ZB-H1", -zero_bubble)),
                f"1F1B {plain:.1%}, interleaved {looped:.1%}, ZB-H1 {zero_bubble:.1%}",
            ),
            number(
                "Bubble overhead of 1F1B, 4 stages, 32 micro-batches, in percent of busy time?",
                100 * float(bubble_overhead("1f1b", 4, 32)),
                "%",
                "3 / 32 = 9.4%",
            ),
        ),
        "Compare the schedules side by side.",
    )


def recompute() -> Lesson:
    model = catalog.load("models", "llama2-7b")
    flops = sum(model.flops(4096).values())
    extra = flops / model.model_flops(4096)
    saved, kept = sum(model.activations(4096).values()), model.layers * 4096 * model.hidden * 2
    return Lesson(
        "Recompute: memory for time",
        (
            "Backward needs the activations of forward. Full recompute keeps only the input of each layer and runs forward a second time; "
            "selective recompute repeats only what is large and cheap.",
        ),
        "waterfall",
        (
            number(
                "How many percent more compute does full recompute cost?",
                100 * extra,
                "%",
                "forward is one third of forward and backward: one more third",
            ),
            number(
                "Llama 2 7B at 4,096 tokens: by how many percent do kept activations shrink, if only the inputs of layers are kept?",
                100 * (1 - kept / saved),
                "%",
                f"{saved / GB:.1f} GB become {kept / GB:.2f} GB, and one layer at a time is rebuilt",
            ),
        ),
        "Set recompute to full: the hatched bar appears, and memory falls.",
        {"plan.recompute": "full"},
    )


def long_sequences() -> Lesson:
    buffer = ring_buffer(131072, 64, 8192, 1)
    return Lesson(
        "Long sequences",
        (
            "Context parallelism divides the sequence. In ring attention each rank sends its keys and values around while it computes on the "
            "block that arrived before: double buffering. It is free while the compute of a block takes longer than its transfer.",
        ),
        "overlap",
        (
            number(
                "128K tokens over 64 ranks, width 8,192, 1 byte each: MiB of double buffers for K and V?",
                buffer / MIB,
                "MiB",
                f"4 · (131072 / 64) · 8192 bytes = {buffer / MIB:.0f} MiB",
            ),
            number(
                "1M tokens (2²⁰) over 8 ranks: GiB?",
                ring_buffer(2**20, 8, 8192, 1) / 2**30,
                "GiB",
                "4 · 131072 · 8192 bytes",
            ),
        ),
        "Compare the step with and without overlap.",
    )


def experts() -> Lesson:
    model = catalog.load("models", "mixtral-8x7b")
    share = model.active / model.total
    tokens, p = 4096.0, 8.0
    moved = float(np.asarray(sent("all_to_all", tokens * model.top_k * model.hidden * 2, p)))
    return Lesson(
        "Mixture of experts",
        (
            "A router sends each token to top-k of E experts, so a token uses a part of the parameters. Expert parallelism puts experts on "
            "different GPUs; two all-to-alls per layer move the token copies there and back.",
        ),
        "ranks",
        (
            number(
                "Mixtral 8x7B: percent of its parameters that one token uses?",
                100 * share,
                "%",
                f"{model.active / 1e9:.1f}B of {model.total / 1e9:.1f}B",
            ),
            number(
                "4,096 tokens, top 2, hidden 4,096, 16 bits, ep = 8: MB that a GPU sends in one all-to-all?",
                moved / MB,
                "MB",
                f"7/8 · 4096 · 2 · 4096 · 2 bytes = {moved / MB:.1f} MB",
            ),
        ),
        "Choose a rank and see its groups light up.",
    )


def whole_plan(step_time_s: float, tokens_per_s: float) -> Lesson:
    interval = young_interval(60.0, 24 * 3600.0)
    return Lesson(
        "The whole plan, and failures",
        (
            "The fastest plan that fits puts tp inside a node, pipeline stages across nodes, and data parallelism around them, and hides what it "
            "can behind compute. Long runs fail: checkpoints cost time, and so does lost work. The best interval is about √(2 · save · MTBF).",
        ),
        "goodput",
        (
            number(
                "Your present plan: how many days does it take for 1T tokens?",
                1e12 / tokens_per_s / 86400,
                "days",
                f"10¹² tokens / {tokens_per_s:,.0f} tokens/s / 86,400 s (a step takes {step_time_s:.3g} s)",
            ),
            number(
                "A checkpoint takes 60 s, a failure comes every day. Best interval of checkpoints, in minutes?",
                interval / 60,
                "minutes",
                f"√(2 · 60 s · 86,400 s) = {interval:,.0f} s",
            ),
        ),
        "Press “Find the best”, then compare it with your plan.",
    )
