"""What the rules read: the fields of one plan as integers, or of a batch of plans as arrays, and what it is checked against."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import compress, islice, product
from typing import Any

import numpy as np

from meshwright.describe.cluster import Cluster
from meshwright.describe.model import Model
from meshwright.describe.plan_fields import Flag, Number, PlanArrays, PlanFields, decode, encode, encoded
from meshwright.describe.stack import Stack
from meshwright.describe.workload import Workload

__all__ = ["Case", "Flag", "lookup"]


class Case(PlanArrays):
    """The fields of one plan, or of a batch of plans as arrays; the numbers that follow from them; and the objects they are checked against."""

    def __init__(
        self,
        plan: PlanFields | Mapping[str, Number],
        model: Model | None = None,
        workload: Workload | None = None,
        cluster: Cluster | None = None,
        stack: Stack | None = None,
        trainer: bool = False,
        dtypes: bool = False,
        framework: bool = False,
    ) -> None:
        super().__init__(**(encoded(plan) if isinstance(plan, PlanFields) else plan))
        # None where it is not known: only rules that need it read it, and those do not apply.
        self.model: Model = model  # type: ignore[assignment]
        self.workload: Workload = workload  # type: ignore[assignment]
        self.cluster: Cluster = cluster  # type: ignore[assignment]
        self.stack: Stack = stack  # type: ignore[assignment]
        self.trainer, self.dtypes, self.framework = trainer, dtypes, framework
        # What the plan is checked against: rules that need more do not apply.
        self.given = _given(
            model is not None, workload is not None, cluster is not None, stack is not None, trainer, dtypes, framework
        )
        self.tried: dict[str, bool] = {}  # changes, and whether the plan is legal with them
        self.rest = self.tp * self.cp * self.pp  # devices of one data-parallel rank
        self.world = self.dp * self.rest
        self.stage_entries, self.stage_sum = (per_plan(count, self.layers_per_stage) for count in (len, sum))
        # Ranks over which experts are spread: those of one stage, without the tensor parallelism inside experts.
        self.expert_ranks = self.tp // self.etp * self.cp * self.dp
        self.unit = self.microbatch * self.dp  # sequences of one micro-batch over all data-parallel ranks
        self.microbatches = workload.batch // self.unit if workload is not None else 1

    def __getattr__(self, name: str) -> Number:
        """For type checkers: a field is an integer in a case of one plan, an array in a batch."""
        raise AttributeError(name)

    def with_settings(self, settings: Mapping[str, Any]) -> Case:
        """The case with some settings changed, named as `--set` names them: {"plan.tp": 8, "workload.batch": 64}."""
        columns, workload = dict[str, Any](), self.workload
        for path, value in settings.items():
            section, _, name = path.partition(".")
            if section == "workload" and workload is not None:
                workload = workload.but(**{name: value})
            else:
                columns[name] = encode(name, value)
        if not columns and workload is self.workload:
            return self
        return self.with_columns(columns, workload)

    def with_columns(self, columns: Mapping[str, Number], workload: Workload | None = None) -> Case:
        """The case with some fields as arrays: a batch of plans."""
        fields, flags = {**self.columns, **columns}, (self.trainer, self.dtypes, self.framework)
        return Case(fields, self.model, workload or self.workload, self.cluster, self.stack, *flags)

    def differing(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Those settings that are not what they are now."""
        return {path: value for path, value in settings.items() if self.setting(path) != value}

    def allows(self, settings: Mapping[str, Any], legal: Callable[[Case], Flag]) -> bool:
        """Whether one plan is legal with some settings changed; what several values of a field lead to is tried once."""
        changes = self.differing(settings)
        key = repr(sorted(changes.items()))
        if key not in self.tried:
            self.tried[key] = bool(legal(self.with_settings(changes)))
        return self.tried[key]

    def setting(self, path: str) -> Any:
        """The value of a setting now, as a person writes it."""
        section, _, name = path.partition(".")
        return getattr(self.workload, name) if section == "workload" else self.word(name)

    def word(self, name: str) -> Any:
        """The value of a field of one plan, as a person writes it."""
        return decode(name, self.columns[name])

    @property
    def is_one_plan(self) -> bool:
        """Whether no field is an array: the case is one plan, not a batch of them."""
        return np.ndarray not in map(type, self.columns.values())


@cache
def _given(*flags: bool) -> frozenset[str]:
    return frozenset(compress(("model", "workload", "cluster", "stack", "trainer", "dtypes", "framework"), flags))


def per_plan(function: Callable[[tuple[int, ...]], int], values: Any) -> Number:
    """A function of a tuple, of one plan or of each plan of a batch."""
    return np.array([function(x) for x in values], int) if isinstance(values, np.ndarray) else function(values)


def lookup(table: np.ndarray, codes: Number) -> Number:
    """Entries of a table by code: a Python value for one plan, so that integers stay exact."""
    return table[codes] if isinstance(codes, np.ndarray) else table[codes].item()


# --- The shape of a rule and of its explanation.


@dataclass(frozen=True)
class Problem:
    """The explanation of a broken rule: what is wrong, why, the valid values, and changes to try, the likeliest first."""

    what: str
    why: str = ""
    valid: Iterable[object] = ()
    fixes: Iterable[Mapping[str, Any]] = ()


Reading = Iterator[Any]


@dataclass(frozen=True)
class LegalityRule:
    """An error code, what the rule `needs` to apply, and a generator of two values: whether one plan, or each of a batch, breaks the rule, and the
    `Problem` of one plan that breaks it. A rule that has nothing to say of a case yields nothing.

    It needs some of model, workload, cluster, stack, trainer, dtypes, framework.
    """

    code: str
    needs: tuple[str, ...]
    read: Callable[[Case], Reading]

    def broken(self, p: Case) -> Flag:
        return next(self.read(p), False)

    def explain(self, p: Case) -> Problem:
        reading = self.read(p)
        next(reading)
        return next(reading)


RULES: list[LegalityRule] = []


def rule(code: str, *needs: str) -> Callable[[Callable[[Case], Reading]], LegalityRule]:
    """Register a rule."""

    def register(read: Callable[[Case], Reading]) -> LegalityRule:
        RULES.append(LegalityRule(code, needs, read))
        return RULES[-1]

    return register


# --- Fixes that are legal themselves.
#
# A rule proposes changes, the likeliest first. Each is tried alone, then completed: the data-parallel degree takes the devices that are left, ep
# and the micro-batch shrink to what then divides, sp is dropped where the sequence no longer divides. The first result that breaks no rule is
# offered; where none is legal, no fix is offered.

MOST_TRIED = 48
Settings = Mapping[str, Any]


def legal_fix(case: Case, candidates: Iterable[Settings], legal: Callable[[Case], Flag]) -> str:
    """Return the first candidate change (completed where needed) that makes the plan legal, as `--set` options; "" if none does."""
    for settings in islice(candidates, MOST_TRIED):
        for trial in (settings, completed(case, settings)):
            changed = case.differing(trial)
            if changed and case.allows(changed, legal):
                return written(changed)
    return ""


def completed(case: Case, settings: Settings) -> dict[str, Any]:
    """Add the settings that must follow so that degrees, experts, sequence and batch still divide."""
    out, now = dict(settings), case.with_settings(settings)
    for repair in (_data_parallel, _sequence, _experts, _microbatch):
        fixed = repair(now)
        if any(now.setting(path) != value for path, value in fixed.items()):
            now = now.with_settings(fixed)
        out |= fixed
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


# --- The nearest legal plan after the model, the cluster or the workload changed.
#
# A person who picks another model, or moves the number of GPUs, expects the plan to follow: the data-parallel degree takes the devices that are left
# (`fixes.completed`); where that is not enough, tensor, context and pipeline degrees move to other values, the nearest first.

MOST_MENDS = 240
MOST_DEGREE = 64  # of tensor and pipeline parallelism, if the plan has no larger one
PLAIN = {"plan.virtual": 1, "plan.schedule": "1f1b", "plan.layers_per_stage": ()}  # a pipeline without special needs


def mended(case: Case, legal: Callable[[Case], Flag]) -> dict[str, Any] | None:
    """Return the changes that make the plan legal here: {} if it is legal, None if no such change was found."""
    if bool(legal(case)):
        return {}
    for settings in islice(_candidates(case), MOST_MENDS):
        trial = completed(case, settings)
        if case.allows(trial, legal):
            changed = {
                path: value
                for path, value in trial.items()
                if path == "plan.layers_per_stage" or case.setting(path) != value
            }
            if not case.stage_entries:
                changed.pop("plan.layers_per_stage", None)
            return changed
    return None


def _candidates(case: Case) -> Iterator[dict[str, Any]]:
    """Settings to try: the plan as it is, then other degrees, the smallest total change first; at each, also the plain pipeline. A model that is not
    divided takes data parallelism alone."""
    if "model" in case.given and case.model.kind == "counts":
        undivided = dict.fromkeys(("plan.tp", "plan.pp", "plan.cp", "plan.ep"), 1) | PLAIN | {"plan.sp": False}
        yield undivided
        yield undivided | {"plan.recompute": "none"}
        return
    world = case.cluster.world if "cluster" in case.given else case.world
    cut = [d for d in divisors(world) if d <= MOST_DEGREE or d in (case.tp, case.pp, case.cp)]
    degrees = [(tp, pp, cp) for tp, pp, cp in product(cut, cut, {1, int(case.cp)}) if world % (tp * pp * cp) == 0]
    for tp, pp, cp in sorted(degrees, key=lambda d: _distance(case, *d)):
        chosen: dict[str, Any] = {"plan.tp": tp, "plan.pp": pp, "plan.cp": cp}
        if tp == 1:
            chosen["plan.sp"] = False
        if pp > 1:
            yield chosen
        yield chosen | PLAIN
        if case.expert_tp or case.ep > 1:
            yield chosen | PLAIN | {"plan.ep": 1, "plan.expert_tp": 0}


def _distance(case: Case, tp: int, pp: int, cp: int) -> tuple[float, int]:
    moved = (abs(math.log2(new / old)) for new, old in ((tp, case.tp), (pp, case.pp), (cp, case.cp)))
    return sum(moved), tp * pp * cp
