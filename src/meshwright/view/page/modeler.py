"""A pipeline by its few numbers: stages, micro-batches, layers, message size and compute rate, as a published tool models it.

The tool prints, for 4 stages × 8 micro-batches of 64 MB, 72.7% efficiency, 27.3% bubble, 81.92 ms of compute, 97.66 Gb/s and 512 MB. Its compute
rate is not stated; 0.512 ms per layer and micro-batch gives its 81.92 ms, and is an input here. Two of its numbers need a correction: 97.66
counts Gibit/s (104.86 Gb/s), and 512 MB are all micro-batches, as under GPipe (1F1B holds as many as there are stages, 256 MB).

`model` computes everything from the inputs alone; `meshwright show modeler` prints it, and the page draws it.
"""

from typing import Any, NamedTuple

from meshwright.cost.advice import chunked_time, microbatches_for, minimum_stage_bandwidth, optimal_chunks, stages_for
from meshwright.cost.closed_forms import tensor_parallel_bytes
from meshwright.describe.accelerator import DTYPE_BYTES
from meshwright.describe.model import Model
from meshwright.errors import MeshwrightError
from meshwright.programs import pipelines
from meshwright.programs.pipelines.formulas import bubble_fraction, in_flight, makespan
from meshwright.units import Json, counted, format_decimal_bytes, format_rate, format_seconds
from meshwright.view.page.subject import Subject
from meshwright.view.page.verdict import PIPELINE_TARGET

MIB, GIB = 2**20, 2**30
SCHEDULES = ("1f1b", "gpipe", "zb-h1")
PRECISIONS = ("fp32", "bf16", "fp8")
CHUNK_OVERHEAD = 5e-6  # seconds of one more collective: the tool's text
LIMITS = {"stages": 64, "microbatches": 512, "layers": 200, "tokens": 1 << 20, "hidden": 1 << 16, "tp": 64}


class Inputs(NamedTuple):
    """The inputs, with those of the published tool. Times in ms and rates in Gb/s, as a person types them."""

    stages: int = 4
    microbatches: int = 8
    layers: int = 20
    tokens: int = 4096
    hidden: int = 8192
    tp: int = 1
    layer_ms: float = 0.512
    link_gbps: float = 400.0  # between stages, per direction
    schedule: str = "1f1b"
    precision: str = "bf16"
    chunk_mb: float = 500.0  # bytes that are reduced in chunks behind backward
    chunk_gbps: float = 2400.0  # the rate of that reduction: 300 GB/s
    overhead_us: float = CHUNK_OVERHEAD * 1e6

    @property
    def message(self) -> float:
        """Bytes of the activations of one micro-batch."""
        return DTYPE_BYTES[self.precision] * self.tokens * self.hidden


def data(subject: Subject) -> Json:
    """The model of the page's inputs."""
    d = Inputs()
    values: Json = {name: int(subject.option(name, getattr(d, name), most=most)) or 1 for name, most in LIMITS.items()}
    for name in ("layer_ms", "link_gbps", "chunk_mb", "chunk_gbps", "overhead_us"):
        values[name] = subject.option(name, getattr(d, name), most=1e7) or 1e-6
    for name, valid in (("schedule", SCHEDULES), ("precision", PRECISIONS)):
        values[name] = str(subject.option(name, getattr(d, name), valid))
    return model(Inputs(**values))


def checked(**values: Any) -> Inputs:
    """The inputs of a command; a number that is zero or too large raises."""
    inputs = Inputs(**values)
    for name, value in inputs._asdict().items():
        if name in LIMITS and not 1 <= value <= LIMITS[name]:
            why = f"It must be a whole number from 1 to {LIMITS[name]:,}"
            raise MeshwrightError("MW-SHOW-003", f"{name} = {value} is not valid", why=why)
        if isinstance(value, float) and not 0 < value < float("inf"):
            raise MeshwrightError("MW-SHOW-003", f"{name} = {value:g} is not valid", why="It must be above zero")
    for name, value, valid in (("schedule", inputs.schedule, SCHEDULES), ("precision", inputs.precision, PRECISIONS)):
        if value not in valid:
            raise MeshwrightError("MW-SHOW-003", f"{name} = {value} is not valid", valid=valid)
    return inputs


def model(i: Inputs) -> Json:
    """What each stage holds, each number as the tool has it and corrected, the timeline of the schedule, and advice below 80%."""
    layer_s = i.layer_ms / 1e3
    stage_s = i.layers * layer_s
    return {
        "inputs": i._asdict(),
        "schedules": list(SCHEDULES),
        "precisions": list(PRECISIONS),
        "message_bytes": i.message,
        "held": [peak_microbatches(i.schedule, i.stages, i.microbatches, s) for s in range(min(i.stages, 16))],
        "rows": rows(i, stage_s),
        "chunks": chunks(i),
        "rate": rate(i, layer_s),
        "advice": advice(i.schedule, i.stages, i.microbatches),
        "timeline": timeline(i.schedule, i.stages, i.microbatches, stage_s),
    }


def peak_microbatches(schedule: str, p: int, m: int, rank: int) -> int:
    """Micro-batches that a stage holds at its peak."""
    return int(in_flight(schedule, p, m, 1, rank))


def rows(i: Inputs, stage_s: float) -> list[Json]:
    """Each number of the tool: as it computes it, ours, and why they differ."""
    p, m, schedule, message, t = i.stages, i.microbatches, i.schedule, i.message, i.tp
    bubble = float(bubble_fraction(schedule, p, m))
    speed, third = minimum_stage_bandwidth(message, stage_s), stage_s / 3
    step = float(makespan(schedule, p, m, 1, third, third, third))
    most, all_held = peak_microbatches(schedule, p, m, 0), peak_microbatches("gpipe", p, m, 0)
    theirs, sent = (p - 1) / (m + p - 1), 2 * m * message
    by = "" if schedule in ("1f1b", "gpipe") else f" for 1F1B; the closed form of {schedule} gives less"
    size, layer_ms, stage_ms = f"{message / MIB:.4g} MiB", f"{i.layer_ms:.4g} ms", f"{1e3 * stage_s:.4g} ms"
    of_1f1b, usual = "the tool has the bubble of 1F1B and GPipe", "for 1F1B and GPipe"
    gibibits, all_kept = "the tool divides by 2³⁰ and calls it Gb", "the tool counts all micro-batches, as GPipe does"
    bandwidth = f"2 · message / (layers · t) = 2 · {message * 8 / 1e9:.4g} Gb / {stage_ms}"
    flight = f"micro-batches in flight × message = {most} · {size} ({schedule})"
    busy, link = m * stage_s, i.link_gbps * 1e9 / 8
    transfer = 2 * message / link
    hidden = "hidden behind compute" if transfer <= stage_s else "not hidden: longer than the compute of a stage"
    reduced = tensor_parallel_bytes(1, i.tokens, i.hidden, t, DTYPE_BYTES[i.precision])
    theirs_tp = 4 * 2 * message / t if t > 1 else None
    ring = "a ring sends 2(T−1)/T of the buffer in each of the 4 all-reduces, whatever the shards"
    table = (
        ("Pipeline efficiency", 1 - theirs, 1 - bubble, "share", f"1 − bubble = M / (M + P − 1) = {m} / {m + p - 1}{by}", of_1f1b),
        ("Bubble", theirs, bubble, "share", f"(P − 1) / (M + P − 1) = {p - 1} / {m + p - 1}{by}", of_1f1b),
        ("Compute per step", busy, busy, "s", f"M · layers · t = {m} · {i.layers} · {layer_ms}", ""),
        ("Step, with the bubble", None, step, "s", f"(M + P − 1) · layers · t = {m + p - 1} · {stage_ms} {usual}", ""),
        ("Inter-stage speed needed", speed * 8 / GIB * 1e9, speed * 8, "bit/s", bandwidth, gibibits),
        ("Transfers of a micro-batch", None, transfer, "s", f"2 · {size} / {i.link_gbps:g} Gb/s; {hidden}", ""),
        ("Peak activations of a stage", all_held * message, most * message, "MiB", flight, all_kept),
        ("Transfer per boundary and step", sent, sent, "GiB", f"2 · M · message = 2 · {m} · {size}", ""),
        ("Transfer over all boundaries", None, sent * (p - 1), "GiB", f"the same × (P − 1) = × {p - 1}", ""),
        ("Tensor-parallel traffic of a layer", theirs_tp, reduced, "MiB", f"4 · 2(T − 1)/T · {size}, T = {t}", ring),
    )  # fmt: skip
    out = []
    for row in table:
        one = dict(zip(("name", "tool", "ours", "unit", "formula", "why"), row, strict=True))
        one["same"] = row[1] is None or abs(row[1] - row[2]) <= 1e-9 * abs(row[2])
        out.append(one | ({"why": ""} if one["same"] else {}))
    return out


def chunks(i: Inputs) -> Json:
    """The best number of chunks of a reduction behind backward: k* = √(t/o)."""
    bytes_, rate, overhead = i.chunk_mb * 1e6, i.chunk_gbps * 1e9 / 8, i.overhead_us * 1e-6
    seconds = 2 * bytes_ / rate  # two passes: reduce-scatter and all-gather
    best = optimal_chunks(seconds, overhead)
    left = chunked_time(best, seconds, overhead)
    words = f"t = 2 · {format_decimal_bytes(bytes_)} / {format_rate(rate)} = {format_seconds(seconds)}"
    return {
        "bytes": bytes_,
        "rate": rate,
        "seconds": seconds,
        "best": best,
        "exposed_s": left,
        "formula": f"{words}; k* = √(t / {format_seconds(overhead)}) = {counted(best, 'chunk')}, which leave {format_seconds(left)} exposed",
    }


def rate(i: Inputs, layer_s: float) -> Json:
    """Explain the compute rate for a transformer layer of this width: FLOPs of forward and backward of one GPU over the stated time."""
    heads = next(h for h in (64, 32, 16, 8, 4, 2, 1) if i.hidden % h == 0)
    layer = Model(layers=1, hidden=i.hidden, heads=heads, ffn=4 * i.hidden, activation="gelu", vocab=1)
    flops = layer.model_flops(i.tokens) * i.tokens / i.tp
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
