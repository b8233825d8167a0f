"""The values that the search may choose for each field, and the constraints of the command line that narrow them.

A numeric field (tp, cp, pp, shard, …) has a minimum and a maximum. A field of words (schedule, recompute, dtypes, …) has a list. A constraint
narrows them:

    --fix tp=8           --max pp=4          --min microbatch=2         --without zero3
    --allow grad_dtype=bf16,fp32             adds to a list that has one entry by default: dtypes, overlap and compression

Defaults: the dtypes of the base plan, the overlap of the stack, and at most 16 virtual stages per rank, which divide the layers evenly if any
number does. Constraints that contradict each other (`--fix tp=8 --max tp=4`) raise an error here. Constraints that contradict the model or
the cluster leave an empty space, and `planner.advice.infeasible` names the constraint to drop.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from meshwright.describe.base import MOST
from meshwright.describe.draft import parse_value
from meshwright.describe.plan import AXES, Plan
from meshwright.describe.plan_fields import CP_KINDS, ORDERS, OVERLAP_AXES
from meshwright.describe.plan_fields import DTYPES as PLAN_DTYPES
from meshwright.describe.schedules import SCHEDULES
from meshwright.describe.stack import Stack
from meshwright.describe.variants import COMPRESSIONS
from meshwright.errors import MeshwrightError, unknown
from meshwright.lower.batch import RECOMPUTE

NUMBERS = ("dp", "replicate", "shard", "tp", "cp", "pp", "virtual", "ep", "expert_tp", "microbatch", "zero")
DTYPES = ("param_dtype", "grad_dtype", "state_dtype", "comm_dtype")
MOST_VIRTUAL = 16
DEGREES = ("tp", "cp", "pp", "ep", "expert_tp")
SEARCHED = (*NUMBERS, "sp", "cp_kind", "schedule", "recompute", "reshard", "reduce", "order", "overlap", *DTYPES)


@dataclass(frozen=True)
class Constraint:
    """One constraint: the text of the command-line option, and its parsed form."""

    option: str
    kind: str  # fix | max | min | without | allow
    field: str
    value: Any


@dataclass(frozen=True)
class Choices:
    """The allowed values of every searched field."""

    words: dict[str, tuple[Any, ...]]
    least: dict[str, int] = field(default_factory=dict)
    most: dict[str, int] = field(default_factory=dict)
    hybrid: bool = True  # allow sharding inside groups with replicas between them
    uneven: bool = True  # allow stages with different numbers of layers
    offload: bool = True  # search offload where nothing else fits or only much slower plans do
    constraints: tuple[Constraint, ...] = ()
    writable: Callable[[Plan], bool] = lambda plan: (
        True
    )  # whether the settings of the question's framework can state a plan

    def numbers(self, name: str, candidates: Iterable[int]) -> list[int]:
        low, high = self.least.get(name, 0), self.most.get(name, MOST)
        return [c for c in candidates if low <= c <= high]

    def allows(self, name: str, value: int) -> bool:
        return self.least.get(name, 0) <= value <= self.most.get(name, MOST)

    @property
    def dtypes(self) -> list[tuple[str | None, ...]]:
        """Every allowed combination of parameter, gradient, state and communication dtype."""
        p, g, s, c = (self.words[name] for name in DTYPES)
        return [(a, b, d, e) for a in p for b in g for d in s for e in c]


def free(base: Plan) -> Choices:
    """All choices, without constraints. Dtypes and overlap are those of the base plan."""
    return Choices(
        words={
            "zero": (0, 1, 2, 3),
            "sp": (False, True),
            "cp_kind": CP_KINDS,
            "recompute": RECOMPUTE,
            "schedule": SCHEDULES.having("paths", "in_flight"),
            "reshard": (True, False),
            "reduce": ("auto", "step"),
            "order": ORDERS,
            "overlap": (base.overlap,),
            "compression": (base.compression,),
            **{name: (getattr(base, name),) for name in DTYPES},
        },
        most={"virtual": MOST_VIRTUAL},
    )


# Values of --without, besides the schedules: axes, ZeRO stages and features, and the names of kinds of recompute and of context parallelism.
WITHOUT: dict[str, tuple[str, str, Any]] = {
    **{axis: ("max", axis, 1) for axis in ("tp", "cp", "pp", "ep", "dp", "virtual")},
    "zero": ("max", "zero", 0), "fsdp": ("drop", "zero", 3), **{f"zero{k}": ("drop", "zero", k) for k in (1, 2, 3)},
    "hsdp": ("flag", "hybrid", False), "uneven": ("flag", "uneven", False), "offload": ("flag", "offload", False), "sp": ("words", "sp", (False,)),
    "recompute": ("words", "recompute", ("none",)), "expert_tp": ("max", "expert_tp", 1),
    "reorder": ("words", "order", ()),
    **{word: ("drop", "recompute", word) for word in RECOMPUTE[1:]},
    **{word: ("drop", "cp_kind", word) for word in CP_KINDS},
}  # fmt: skip


def without() -> dict[str, tuple[str, str, Any]]:
    """All values of --without."""
    return WITHOUT | {name: ("drop", "schedule", name) for name in SCHEDULES.having("paths", "in_flight")}


def choices(base: Plan, constraints: Sequence[Constraint], stack_order: tuple[str, ...]) -> Choices:
    """The free choices narrowed by each constraint in turn."""
    out = replace(free(base), constraints=tuple(constraints))
    for constraint in constraints:
        out = narrowed(out, constraint, stack_order)
        for name in set(out.least) & set(out.most):
            if out.least[name] > out.most[name]:
                raise_contradiction(out, name)
        if not out.numbers("zero", out.words["zero"]):
            raise_contradiction(out, "zero")
        for name, words in out.words.items():
            if not words:
                raise_contradiction(out, name)
    return out


def raise_contradiction(out: Choices, name: str) -> None:
    """Raise the error for constraints that leave no value of a field."""
    options = [c.option for c in out.constraints if c.field == name]
    what = f"{' and '.join(options)} leave{'s' * (len(options) == 1)} no value of {name}"
    raise MeshwrightError(
        "MW-PLANNER-003", what, why="The constraints contradict each other, or the plan", fix=f"drop {options[-1]}"
    )


def narrowed(c: Choices, one: Constraint, stack_order: tuple[str, ...]) -> Choices:
    name, value = one.field, one.value
    match one.kind:
        case "max":
            return replace(c, most={**c.most, name: min(value, c.most.get(name, MOST))})
        case "min":
            raised = {**c.most, name: MOST} if name == "virtual" and value > MOST_VIRTUAL else c.most
            return replace(c, least={**c.least, name: max(value, c.least.get(name, 0))}, most=raised)
        case "fix" if name in NUMBERS:
            most = value if name == "virtual" else min(value, c.most.get(name, MOST))
            return replace(c, least={**c.least, name: max(value, c.least.get(name, 0))}, most={**c.most, name: most})
        case "fix" if (name, value) == ("recompute", "auto"):
            return c  # the search itself finds the recompute that fits
        case "fix":
            free_words = name in DTYPES or name == "overlap" or value == "auto"
            return replace(c, words={**c.words, name: (value,) if free_words or value in c.words[name] else ()})
        case "allow":
            return replace(c, words={**c.words, name: tuple(dict.fromkeys((*c.words[name], *value)))})
    kind, _, what = without()[value]
    if kind == "max":
        return replace(c, most={**c.most, name: min(what, c.most.get(name, MOST))})
    if kind == "flag":
        return replace(c, **{name: what})
    if kind == "words":
        allowed = tuple(w for w in c.words[name] if w in what) if what else (stack_order,)
        return replace(c, words={**c.words, name: allowed})
    return replace(c, words={**c.words, name: tuple(w for w in c.words[name] if w != what)})


# Reading


def read(
    fix: Sequence[str] = (),
    most: Sequence[str] = (),
    least: Sequence[str] = (),
    without: Sequence[str] = (),
    allow: Sequence[str] = (),
) -> list[Constraint]:
    """Parse the constraints of the command line."""
    out = [_without(word) for words in without for word in words.strip(", ").split(",")]
    out += [_bound("--max", word, "max") for word in most] + [_bound("--min", word, "min") for word in least]
    out += [_allowed(word) for word in allow]
    return out + [_fixed(word) for word in fix]


def _without(word: str) -> Constraint:
    name = word.strip().lower().replace("-", "") if word.strip().lower().startswith("zero-") else word.strip().lower()
    known = without()
    if name not in known:
        raise unknown("MW-PLANNER-002", "--without", word.strip(), known, "--without {}")
    return Constraint(f"--without {name}", "without", known[name][1], name)


def _split(option: str, word: str, names: Sequence[str]) -> tuple[str, str]:
    name, sign, text = word.partition("=")
    name = name.strip().removeprefix("plan.")
    if not sign or not text.strip():
        raise MeshwrightError(
            "MW-PLANNER-001", f"'{option} {word[:60]}' is not a field, '=' and a value", valid=[f"{option} tp=8"]
        )
    if name not in names:
        raise unknown("MW-PLANNER-002", f"{option}: field", name, names, f"{option} {{}}={text.strip()[:20]}")
    return name, text.strip()


def _bound(option: str, word: str, kind: str) -> Constraint:
    name, text = _split(option, word, NUMBERS)
    return Constraint(f"{option} {name}={text}", kind, name, _number(option, name, text))


def _number(option: str, name: str, text: str) -> int:
    if not text.isdecimal() or int(text) > MOST:
        raise MeshwrightError(
            "MW-PLANNER-001", f"{option} {name}={text[:40]}: a whole number is needed", valid=[f"{option} {name}=4"]
        )
    if int(text) == 0 and name != "zero":
        raise MeshwrightError("MW-PLANNER-001", f"{option} {name}=0: the minimum is 1", fix=f"{option} {name}=1")
    return int(text)


def _fixed(word: str) -> Constraint:
    name, text = _split("--fix", word, SEARCHED)
    option = f"--fix {name}={text}"
    if name in NUMBERS:
        return Constraint(option, "fix", name, _number("--fix", name, text))
    return Constraint(option, "fix", name, _word(name, text))


def _word(name: str, text: str) -> Any:
    """Parse the value of a non-numeric field; `Plan` validates it."""
    if name in ("order", "overlap"):
        value: Any = tuple(w.strip(" \"'") for w in text.strip("[]()").replace("+", ",").split(",") if w.strip(" \"'"))
        valid = AXES if name == "order" else OVERLAP_AXES
        for axis in value:
            if axis not in valid:
                raise unknown("MW-PLANNER-002", f"{name}: axis", axis, valid, f"{name}={{}}")
    else:
        value = parse_value(text, name)
    return getattr(Plan(**{name: value}), name)


def _allowed(word: str) -> Constraint:
    name, text = _split("--allow", word, (*DTYPES, "overlap", "schedule", "compression"))
    words = text.split(",") if name != "overlap" else text.split(",") if "+" in text else [text]
    for each in words:
        if name in DTYPES and each.strip() not in PLAN_DTYPES:
            raise unknown("MW-PLANNER-002", f"--allow {name}", each.strip(), PLAN_DTYPES, f"--allow {name}={{}}")
        if name == "compression" and each.strip() not in COMPRESSIONS:
            raise unknown("MW-PLANNER-002", f"--allow {name}", each.strip(), COMPRESSIONS, f"--allow {name}={{}}")
    return Constraint(f"--allow {name}={text}", "allow", name, tuple(_word(name, each.strip()) for each in words))


# What a training framework leaves of the choices: those that the stack's `can` says it runs


def limited(choices: Choices, stack: Stack) -> Choices:
    """The choices that the framework of a stack can run; all of them if the stack names no limits."""
    can = stack.can
    words, most = dict(choices.words), dict(choices.most)
    wanted: dict[str, tuple[Any, ...]] = {
        "schedule": can.schedules,
        "zero": can.zero,
        "cp_kind": can.cp_kinds,
        "recompute": can.recomputes,
    }
    for word in can.without:
        if word in DEGREES:
            most[word] = min(1, most.get(word, MOST))
        elif word == "order":
            wanted["order"] = (tuple(stack.order),)
        elif word not in ("hsdp", "recompute_layers", "tp_with_cp"):
            wanted[word] = {"sp": (False,), "reshard": (True,), "reduce": ("auto",)}[word]
    for name, allowed in wanted.items():
        if allowed:
            words[name] = _kept(choices, name, allowed, stack)
    for name in DEGREES:
        if choices.least.get(name, 0) > most.get(name, MOST):
            raise _refused(choices, name, stack)
    hybrid = choices.hybrid and "hsdp" not in can.without
    uneven = choices.uneven and not can.even_stages
    return replace(choices, words=words, most=most, hybrid=hybrid, uneven=uneven)


def _kept(choices: Choices, name: str, allowed: tuple[Any, ...], stack: Stack) -> tuple[Any, ...]:
    words = tuple(word for word in choices.words[name] if word in allowed)
    if not words:
        raise _refused(choices, name, stack)
    return words


def _refused(choices: Choices, name: str, stack: Stack) -> MeshwrightError:
    options = [c.option for c in choices.constraints if c.field == name]
    named = " and ".join(options) or f"{name}={', '.join(map(str, choices.words.get(name, ())))}"
    what = f"{named}: {stack.can.framework or stack.name} does not run it"
    return MeshwrightError("MW-PLANNER-003", what, why=stack.can.source, fix=f"drop {options[-1]}" if options else "")
