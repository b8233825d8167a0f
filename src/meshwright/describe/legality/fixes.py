"""Fixes that are legal themselves.

A rule proposes changes, the likeliest first. Each is tried alone, then completed: the data-parallel degree takes the devices that are left, ep
and the micro-batch shrink to what then divides, sp is dropped where the sequence no longer divides. The first result that breaks no rule is
offered; where none is legal, no fix is offered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import islice
from typing import Any

import numpy as np

from meshwright.describe.legality.case import Case, Flag

MOST_TRIED = 48
Settings = Mapping[str, Any]


def legal_fix(case: Case, candidates: Iterable[Settings], legal: Callable[[Case], Flag]) -> str:
    """Return the first candidate change (completed where needed) that makes the plan legal, as `--set` options; "" if none does."""
    for settings in islice(candidates, MOST_TRIED):
        for trial in (settings, completed(case, settings)):
            changed = {path: value for path, value in trial.items() if case.setting(path) != value}
            if changed and bool(legal(case.with_settings(changed))):
                return written(changed)
    return ""


def completed(case: Case, settings: Settings) -> dict[str, Any]:
    """Add the settings that must follow so that degrees, experts, sequence and batch still divide."""
    out, now = dict(settings), case.with_settings(settings)
    for repair in (_data_parallel, _sequence, _experts, _microbatch):
        found = repair(now)
        if any(now.setting(path) != value for path, value in found.items()):
            now = now.with_settings(found)
        out |= found
    return out


def _data_parallel(case: Case) -> dict[str, Any]:
    if "cluster" not in case.given or case.cluster.world % case.rest:
        return {}
    dp = case.cluster.world // case.rest
    return {f"plan.{k}": v for k, v in data_parallel(case.zero, case.replicate, case.shard, dp).items()}


def _sequence(case: Case) -> dict[str, Any]:
    divides = "workload" not in case.given or case.workload.seq % (case.tp * case.cp) == 0
    return {} if divides or not case.sp else {"plan.sp": False}


def _experts(case: Case) -> dict[str, Any]:
    if "model" not in case.given or not case.model.experts:
        return {}
    out = {} if case.tp % case.etp == 0 else {"plan.expert_tp": 0}
    ranks = case.with_settings(out).expert_ranks
    legal = [ep for ep in divisors(case.model.experts) if ranks % ep == 0 and ep <= case.ep]
    return out | {"plan.ep": max(legal)}


def _microbatch(case: Case) -> dict[str, Any]:
    if "workload" not in case.given:
        return {}
    size = fitting_microbatch(case.workload.batch, case.dp, case.microbatch)
    return {"plan.microbatch": size} if size else {}


def data_parallel(zero: int, replicate: int, shard: int, dp: int) -> dict[str, int]:
    """`replicate` and `shard` for another data-parallel degree: replicated, sharded, or hybrid as before."""
    if zero == 0:
        return {"replicate": dp, "shard": 1}
    if replicate == 1:
        return {"replicate": 1, "shard": dp}
    shard = math.gcd(shard, dp)
    return {"replicate": dp // shard, "shard": shard}


def fitting_microbatch(batch: int, dp: int, most: int) -> int:
    """Return the largest micro-batch up to `most` that divides the batch of one data-parallel rank; 0 if none does."""
    return max((d for d in divisors(batch // dp) if d <= most), default=0) if dp and batch % dp == 0 else 0


def values(path: str, legal: Iterable[int], now: int) -> Iterator[dict[str, int]]:
    """Yield one field at each legal value, the nearest to its present value first; the larger of two equally near."""
    for value in sorted(legal, key=lambda v: (abs(v - now), -v)):
        yield {path: value}


def written(settings: Settings) -> str:
    """Settings as options of the command line."""
    return " ".join(f"--set {_quoted(f'{path}={_value(value)}')}" for path, value in settings.items())


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return "[" + ",".join(f'"{v}"' if isinstance(v, str) else str(v) for v in value) + "]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _quoted(word: str) -> str:
    return f"'{word}'" if '"' in word else word


def divisors(n: int) -> list[int]:
    """All divisors in order, by trial division up to √n; a number beyond 2⁴⁴ has only 1, which bounds the time."""
    return list(_divisors(n))


@lru_cache(maxsize=4096)
def _divisors(n: int) -> tuple[int, ...]:
    if n > 2**44:
        return (1,)
    tried = np.arange(1, min(math.isqrt(max(n, 0)), 1 << 20) + 1)
    small = tried[n % tried == 0].tolist()
    return tuple(sorted({*small, *(n // d for d in small)}))
