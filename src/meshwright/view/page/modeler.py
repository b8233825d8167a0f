"""A pipeline by its few numbers: stages, micro-batches, layers, message size and compute rate, as a published tool models it.

The tool prints, for 4 stages × 8 micro-batches of 64 MB, 72.7% efficiency, 27.3% bubble, 81.92 ms of compute, 97.66 Gb/s and 512 MB. Its compute
rate is not stated; 0.512 ms per layer and micro-batch gives its 81.92 ms, and is an input here. Two of its numbers need a correction: 97.66
counts Gibit/s (104.86 Gb/s), and 512 MB are all micro-batches, as under GPipe (1F1B holds as many as there are stages, 256 MB).
"""

from meshwright.cost.advice import microbatches_for, minimum_stage_bandwidth, stages_for
from meshwright.describe.model import Model
from meshwright.programs import pipelines
from meshwright.programs.pipelines.formulas import bubble_fraction, in_flight, makespan
from meshwright.units import Json
from meshwright.view.page.subject import Subject
from meshwright.view.page.verdict import PIPELINE_TARGET

MIB, GIB = 2**20, 2**30
SCHEDULES = ("1f1b", "gpipe", "zb-h1")


def data(subject: Subject) -> Json:
    """Cards of the stages, each number as the tool has it and corrected, the timeline of the schedule, and advice below 80%."""
    p = int(subject.option("stages", 4, most=64)) or 1
    m = int(subject.option("microbatches", 8, most=512)) or 1
    layers = int(subject.option("layers", 20, most=200)) or 1
    tokens = int(subject.option("tokens", 4096, most=1 << 20)) or 1
    hidden = int(subject.option("hidden", 8192, most=1 << 16)) or 1
    layer_s = subject.option("layer_ms", 0.512, most=1e4) / 1e3 or 1e-9
    schedule = str(subject.option("schedule", "1f1b", SCHEDULES))
    message, stage_s = 2 * tokens * hidden, layers * layer_s
    return {
        "inputs": {"stages": p, "microbatches": m, "layers": layers, "tokens": tokens, "hidden": hidden}
        | {"layer_ms": 1e3 * layer_s, "schedule": schedule},
        "schedules": list(SCHEDULES),
        "message_bytes": message,
        "cards": [
            {"stage": s + 1, "layers": layers, "message_bytes": message, "held": peak_microbatches(schedule, p, m, s)}
            for s in range(min(p, 16))
        ],
        "rows": rows(schedule, p, m, layers, message, stage_s),
        "rate": rate(hidden, tokens, layer_s),
        "advice": advice(schedule, p, m),
        "timeline": timeline(schedule, p, m, stage_s),
    }


def peak_microbatches(schedule: str, p: int, m: int, rank: int) -> int:
    """Micro-batches that a stage holds at its peak."""
    return int(in_flight(schedule, p, m, 1, rank))


def rows(schedule: str, p: int, m: int, layers: int, message: int, stage_s: float) -> list[Json]:
    """Each number of the tool: as it computes it, ours, and why they differ."""
    bubble = float(bubble_fraction(schedule, p, m))
    speed, third = minimum_stage_bandwidth(message, stage_s), stage_s / 3
    step = float(makespan(schedule, p, m, 1, third, third, third))
    most, all_held = peak_microbatches(schedule, p, m, 0), peak_microbatches("gpipe", p, m, 0)
    theirs, sent = (p - 1) / (m + p - 1), 2 * m * message
    by = "" if schedule in ("1f1b", "gpipe") else f" for 1F1B; the closed form of {schedule} gives less"
    size, layer_ms, stage_ms = f"{message / MIB:.4g} MiB", f"{1e3 * stage_s / layers:.4g} ms", f"{1e3 * stage_s:.4g} ms"
    of_1f1b, usual = "the tool has the bubble of 1F1B and GPipe", "for 1F1B and GPipe"
    gibibits, all_kept = "the tool divides by 2³⁰ and calls it Gb", "the tool counts all micro-batches, as GPipe does"
    bandwidth = f"2 · message / (layers · t) = 2 · {message * 8 / 1e9:.4g} Gb / {stage_ms}"
    flight = f"micro-batches in flight × message = {most} · {size} ({schedule})"
    busy = m * stage_s
    table = (
        ("Pipeline efficiency", 1 - theirs, 1 - bubble, "share", f"1 − bubble = M / (M + P − 1) = {m} / {m + p - 1}{by}", of_1f1b),
        ("Bubble", theirs, bubble, "share", f"(P − 1) / (M + P − 1) = {p - 1} / {m + p - 1}{by}", of_1f1b),
        ("Compute per step", busy, busy, "s", f"M · layers · t = {m} · {layers} · {layer_ms}", ""),
        ("Step, with the bubble", None, step, "s", f"(M + P − 1) · layers · t = {m + p - 1} · {stage_ms} {usual}", ""),
        ("Inter-stage speed needed", speed * 8 / GIB * 1e9, speed * 8, "bit/s", bandwidth, gibibits),
        ("Peak activations of a stage", all_held * message, most * message, "MiB", flight, all_kept),
        ("Transfer per boundary and step", sent, sent, "GiB", f"2 · M · message = 2 · {m} · {size}", ""),
        ("Transfer over all boundaries", None, sent * (p - 1), "GiB", f"the same × (P − 1) = × {p - 1}", ""),
    )  # fmt: skip
    out = []
    for row in table:
        one = dict(zip(("name", "tool", "ours", "unit", "formula", "why"), row, strict=True))
        one["same"] = row[1] is None or abs(row[1] - row[2]) <= 1e-9 * abs(row[2])
        out.append(one | ({"why": ""} if one["same"] else {}))
    return out


def rate(hidden: int, tokens: int, layer_s: float) -> Json:
    """Explain the compute rate for a transformer layer of this width: FLOPs of forward and backward over the stated time."""
    heads = next(h for h in (64, 32, 16, 8, 4, 2, 1) if hidden % h == 0)
    model = Model(layers=1, hidden=hidden, heads=heads, ffn=4 * hidden, activation="gelu", vocab=1)
    flops = model.model_flops(tokens) * tokens
    return {"flops": flops, "flops_per_s": flops / layer_s, "layers_per_s": 1 / layer_s}


def advice(schedule: str, p: int, m: int) -> Json:
    """Below 80%: the tool doubles the micro-batches and removes one stage; ours are the fewest micro-batches and most stages that reach it."""
    efficiency = 1 - float(bubble_fraction(schedule, p, m))
    low = efficiency < PIPELINE_TARGET - 1e-9
    return {
        "low": low,
        "efficiency_share": efficiency,
        "tool": {"microbatches": 2 * m, "stages": max(1, p - 1)},
        "ours": {"microbatches": microbatches_for(schedule, p, 1, PIPELINE_TARGET),
                 "stages": stages_for(schedule, p, m, 1, PIPELINE_TARGET)},
    }  # fmt: skip


def timeline(schedule: str, p: int, m: int, stage_s: float) -> Json | None:
    """The walked schedule as [rank, kind, micro-batch, start, end]; None where it would be too dense to see."""
    if p * m > 512:
        return None
    third = stage_s / 3
    walked = pipelines.walk(pipelines.build(schedule, p, m), pipelines.Durations.of(p, third, third, third))
    program = walked.program
    actions = [
        [int(r), "FBIW"[k], int(b), float(s), float(e)]
        for r, k, b, s, e in zip(program.rank, program.kind, program.microbatch, walked.start, walked.end, strict=True)
    ]
    return {"ranks": p, "makespan_s": walked.makespan, "actions": actions}
