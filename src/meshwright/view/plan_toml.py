"""The best plan as a plan file that every command reads, with the reasons as comments."""

from __future__ import annotations

import re

from meshwright.planner.advice.explain import memory_words
from meshwright.planner.result import Result
from meshwright.units import format_seconds
from meshwright.view.estimate import own_trainer_words

KEY = re.compile(r"^(\w+) =", re.ASCII)
COMMENT_COLUMN = 28  # column of the comments, if the line is shorter


def toml(r: Result) -> str:
    """Return model, cluster, stack, workload and plan as TOML, with the reasons as comments."""
    return (
        "".join(f"# {line}\n" if line else "#\n" for line in opening(r))
        + "\n"
        + commented(r.config.to_toml(), r.explanation.reasons)
    )


def opening(r: Result) -> list[str]:
    p, x = r.prediction, r.explanation
    lines = [
        f"{r.plan.title()}",
        f"By `meshwright plan`: {r.chosen_from}.",
        f"For {r.runs_in}.",
        *([f"It is {r.choice}."] if r.choice else []),
        f"step {format_seconds(p.step_time_s)} ({format_seconds(p.step_time_low_s)} to {format_seconds(p.step_time_high_s)}), "
        f"MFU {100 * (p.mfu or 0):.1f}%, memory {memory_words(p)}",
        *([f"{own_trainer_words(r.estimate.own_trainer)}"] if r.estimate.own_trainer else []),
        f"bound by {x.bound}",
        f"constants: {x.calibrated}",
    ]
    lines += [f"assumed: {item}" for item in x.assumed]
    lost = [
        f"{w.strategy}: {100 * w.slower:+.1f}%, {w.words}" if w.fits else f"{w.strategy}: {w.words}"
        for w in x.why_not[:6]
    ]
    return [*lines, "", "Why not …", *lost] if lost else lines


def commented(text: str, reasons: dict[str, str]) -> str:
    """Return the TOML text with the reasons as comments after their keys in [plan]."""
    out, inside = [], False
    for line in text.splitlines():
        inside = line.startswith("[plan") if line.startswith("[") else inside
        key = KEY.match(line)
        reason = reasons.get(key[1], "") if inside and key else ""
        out.append(f"{line:<{COMMENT_COLUMN}}  # {reason}" if reason else line)
    return "\n".join(out) + "\n"
