"""Where the time of a step goes: exposed parts of the busiest rank in order, and what overlap hides of communication."""

from meshwright.describe.result import COMMUNICATION, part_name
from meshwright.lower.program import scalar
from meshwright.predict.estimate import Estimate, communication
from meshwright.units import Json, format_decimal_bytes, format_seconds
from meshwright.view.page.sheet import Part, part, piece, stats, view
from meshwright.view.page.subject import Subject

# The order of the bars: compute, then what interrupts it, then what closes the step.
ORDER = (
    "embedding", "attention", "linear", "ffn", "latent", "experts", "shared", "router", "extra", "norm", "head", "mtp", "copies",
    "recompute", "interference", "tp", "cp", "ep", "pp", "dp", "offload",
)  # fmt: skip
LAST = ("bubble", "host", "optimizer", "overhead")
COLOURED = ("recompute", "interference", *COMMUNICATION, "offload", *LAST)
GROUPS = ("compute", *COMMUNICATION, "bubble", "host", "optimizer", "overhead", "offload")


def data(subject: Subject) -> Part:
    """The waterfall, in which each bar begins where the one above it ends; the step by groups; and what overlap hides."""
    e, step = subject.estimate, subject.estimate.prediction.step_time_s
    exposed, (total, open_s) = e.prediction.exposed_s, communication(e.cost)
    texts, rows, start = part_formulas(e), list[Part](), 0.0
    for name in ordered(exposed):
        title, s = part_name(name), exposed[name]
        words, formula = f"{format_seconds(s)} · {s / step:.1%}", texts.get(name, texts["compute"])
        shown = piece(s, name if name in COLOURED else "compute", f"{title}: {words} of the step\n{formula}")
        rows.append({"label": title, "start": start, "text": words, "parts": [shown]})
        start += s
    whole = f"step = {' + '.join(format_seconds(exposed[name]) for name in ordered(exposed))} = {format_seconds(step)}"
    rows.append({"label": "step", "text": format_seconds(step), "parts": [piece(step, "quiet", whole)]})
    return {
        "bars": part("bars", rows=rows, x={"label": "time within the step", "unit": "s"}),
        "groups": [{"part": group, "s": s} for group, s in grouped(exposed).items()],
        **view(stats(
            ("Exposed communication", open_s, "s", {"detail": f"{open_s / step:.1%}", "tone": "warn" if open_s > 0.2 * step else ""}),
            ("Hidden communication", total - open_s, "s", {"detail": f"{1 - open_s / total:.0%} of all" if total else "none"}),
        )),
    }  # fmt: skip


def ordered(parts: dict[str, float]) -> list[str]:
    """The parts in the order of the bars; a part that the order does not name comes with compute."""
    middle = [part for part in parts if part not in ORDER and part not in LAST]
    return [part for part in (*middle, *ORDER, *LAST) if part in parts]


def grouped(parts: dict[str, float]) -> dict[str, float]:
    """Seconds of compute, of each axis's communication, bubble, host, optimizer and overhead."""
    out = dict.fromkeys(GROUPS, 0.0)
    for name, seconds in parts.items():
        out[name if name in GROUPS else "compute"] += seconds
    return {group: seconds for group, seconds in out.items() if seconds > 0}


def by_axis(e: Estimate) -> list[Json]:
    """Seconds of communication of each axis on the busiest rank: total, hidden behind compute, exposed."""
    out = []
    for axis in COMMUNICATION:
        exposed = e.prediction.exposed_s.get(axis, 0.0)
        total = e.prediction.busy_s.get(f"comm:{axis}", 0.0)
        if axis == "dp":
            total += scalar(e.cost.reduce)
        total = max(total, exposed)
        if total > 0:
            rows = [row for row in e.prediction.traffic_by_level if row["axis"] == axis]
            sent = ", ".join(f"{format_decimal_bytes(row['bytes'])} per step over {row['level']}" for row in rows)
            times = {"total_s": total, "exposed_s": exposed, "hidden_s": total - exposed}
            out.append({"axis": axis, "name": COMMUNICATION[axis], **times, "formula": f"sends {sent or 'nothing'}"})
    return out


def part_formulas(e: Estimate) -> dict[str, str]:
    """Return the formula of each part, with its numbers."""
    plan = e.plan
    m = plan.microbatches(e.workload)
    means = [sum(scalar(getattr(r, k)) for r in e.cost.ranks) / len(e.cost.ranks) for k in ("f", "i", "w")]
    out = {
        "compute": f"seconds of one micro-batch on the busiest rank × {m} micro-batches",
        "recompute": f"forward repeated in backward (recompute {plan.recompute}) × {m} micro-batches",
        "bubble": f"(P − 1) · (f + b) / V = {plan.pp - 1} · {format_seconds(sum(means))} / {plan.virtual} on equal stages, 1F1B",
        "host": "launches and collectives that the device waits for",
        "optimizer": "once per step: the update of all states on the rank",
        "overhead": f"once per step, by the stack {e.stack.name}: data, logging, loop",
        "interference": "compute is slower while communication runs at the same time",
    }
    for row in by_axis(e):
        total, hidden = (format_seconds(row[name]) for name in ("total_s", "hidden_s"))
        out[row["axis"]] = f"exposed = total − hidden = {total} − {hidden}; {row['formula']}"
    return out
