"""Failures: the share of time that a large cluster trains, and how often it should save.

**Time between failures.** If units fail independently at a constant rate, the system fails at the sum of the rates:

    M = M_unit / units              16,384 GPUs of 50,700 h each (5.8 years): one interruption every 3.1 h

**Checkpoint interval.** Work for τ seconds, save for δ, and after a failure lose what was done since the last save and R seconds of
detecting, restarting and loading. To first order the lost share is δ/τ + τ/2M + R/M; its minimum is Young's (1974)

    τ* = √(2·δ·M)

Daly (2006) takes the exact expectation with exponential failures, in which failures may also strike while saving or restarting:

    T_wall / T_work = (M/τ) · e^(R/M) · (e^((τ+δ)/M) − 1)
    τ* = √(2δM) · (1 + ⅓·√(δ/2M) + ⅑·δ/2M) − δ      for δ < 2M, else M

**Goodput** is the inverse, T_work / T_wall: the share of wall time that is useful training. Over weeks the effective MFU is
MFU × goodput. The curve is flat around its optimum: half or twice the best interval costs little, a tenth or ten times much.

A save that overlaps with training costs only the part that blocks it (the copy to host memory); pass that as δ, and remember that
work is safe only when the save is complete: τ cannot be shorter than the full save.

**Compared with** Llama 3 405B (Grattafiori et al. 2024): 419 unexpected interruptions in 54 days on 16,384 H100 with over 90% effective time.
"""

import math
from dataclasses import dataclass

import numpy as np

from meshwright.errors import MeshwrightError
from meshwright.units import parse_seconds

DAY = 86400.0
SAVE, RESTART = 10.0, 300.0  # default seconds: a checkpoint blocks for ten, a restart takes five minutes

# Grattafiori et al. 2024, "The Llama 3 Herd of Models", section 3.3.4.
LLAMA3_INTERRUPTIONS, LLAMA3_DAYS, LLAMA3_GPUS, LLAMA3_EFFECTIVE = 419, 54.0, 16_384, 0.90
GPU_MTBF = LLAMA3_DAYS * DAY * LLAMA3_GPUS / LLAMA3_INTERRUPTIONS  # seconds between interruptions of a run, per GPU


def system_mtbf(unit_mtbf: float, units: float) -> float:
    """Seconds between failures of a system of `units` parts: M_unit / units."""
    return _positive("unit_mtbf", unit_mtbf) / _positive("units", units)


def young_interval(save: float, mtbf: float) -> float:
    """τ* = √(2δM), to first order."""
    return math.sqrt(2 * _positive("save", save) * _positive("mtbf", mtbf))


def daly_interval(save: float, mtbf: float) -> float:
    """Daly's higher-order optimum of the time worked between saves."""
    if _positive("save", save) >= 2 * _positive("mtbf", mtbf):
        return mtbf
    ratio = save / (2 * mtbf)
    return math.sqrt(2 * save * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save


def goodput(interval: float, save: float, restart: float, mtbf: float) -> float:
    """Share of wall time spent on work that is not lost, by Daly's exact expectation; 0 if saves almost never complete between failures."""
    for name, value in (("interval", interval), ("mtbf", mtbf)):
        _positive(name, value)
    if save < 0 or restart < 0:
        raise MeshwrightError("MW-GOOD-001", "a negative checkpoint or restart time", valid=["0 or more seconds"])
    exponent = (restart + interval + save) / mtbf
    if exponent > 700:  # beyond the range of a float: no work is ever kept
        return 0.0
    return interval / mtbf / (math.exp(restart / mtbf) * math.expm1((interval + save) / mtbf))


def curve(save: float, restart: float, mtbf: float, points: int = 9, reach: float = 16.0) -> list[tuple[float, float]]:
    """Goodput by interval, around Daly's optimum: (seconds, share)."""
    best = daly_interval(save, mtbf)
    return [(float(t), goodput(float(t), save, restart, mtbf)) for t in best * np.geomspace(1 / reach, reach, points)]


def checkpoint_bytes(parameters: float, param: float = 2.0, master: float = 4.0, moments: float = 8.0) -> float:
    """Bytes of a checkpoint that training can resume from: weights, their fp32 copy and the optimizer's moments, 14 bytes per parameter."""
    return parameters * (param + master + moments)


@dataclass(frozen=True)
class Reliability:
    """Failures of a cluster: seconds between them, of a blocking checkpoint, and of a restart."""

    mtbf: float
    save: float
    restart: float

    assumed: tuple[str, ...] = ()

    @property
    def interval(self) -> float:
        return daly_interval(self.save, self.mtbf)

    @property
    def goodput(self) -> float:
        return goodput(self.interval, self.save, self.restart, self.mtbf)


def reliability(gpus: int, save: float, restart: float, gpu_mtbf: float = GPU_MTBF) -> Reliability:
    """The reliability of `gpus` devices; by default they fail as often as Llama 3's did."""
    return Reliability(system_mtbf(gpu_mtbf, gpus), save, restart)


def read_reliability(
    gpus: int, mtbf: str | float = "", checkpoint: str | float = "", restart: str | float = ""
) -> Reliability:
    """The reliability given as `"3h"`, `"60s"`, `"5min"`, completed by defaults."""
    assumed = []
    if not mtbf:
        assumed.append("time between failures: GPUs that fail as often as Llama 3's did")
    if not checkpoint:
        assumed.append(f"checkpoint: a save blocks for {SAVE:g} s")
    if not restart:
        assumed.append(f"restart: {RESTART / 60:g} minutes after a failure")
    between = parse_seconds(mtbf) if mtbf else system_mtbf(GPU_MTBF, gpus)
    save, back = (parse_seconds(text or usual) for text, usual in ((checkpoint, SAVE), (restart, RESTART)))
    return Reliability(_positive("mtbf", between), _positive("checkpoint", save), back, tuple(assumed))


def largest_restart(target: float, save: float, mtbf: float) -> float:
    """Longest restart that still reaches the goodput `target`; 0 if saving alone loses more."""
    best = daly_interval(save, mtbf)
    without = goodput(best, save, 0.0, mtbf)
    return mtbf * math.log(without / target) if without > target else 0.0


def _positive(name: str, value: float) -> float:
    if not (math.isfinite(value) and value > 0):
        raise MeshwrightError("MW-GOOD-001", f"{name} = {value!r} is not valid", valid=["a finite number above 0"])
    return value
