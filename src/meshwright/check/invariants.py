"""What must hold between the ranks of a training, whatever its framework: a table of invariants, judged from the notes of the ranks.

A rank's note of a checked step is plain data:

    place           its index on every axis that cuts the model: tensor, context, pipeline
    parts, hashes   the parts of parameters that it holds, "name at place", and a hash of the bits of each
    norm, samples, tokens, random, calls, counts    one value each; None where there is nothing to compare
    unchanged, without_gradient     names of trained parameters, as far as this rank can tell

Ranks with the same place are data-parallel ranks; the n-th ranks of several places read the same samples.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from math import isclose
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.units import counted

RankNote = dict[str, Any]
Finding = tuple[str, list[int]]  # what is wrong, on which ranks
CLOSE = 1e-4  # two groups may sum their norms in another order
SHOWN_NAMES = 3
TENSOR = ("tp", "tensor", "tensor_parallel")


def ranks_text(ranks: Iterable[int]) -> str:
    ranks = sorted(ranks)
    shown = ", ".join(map(str, ranks[:8]))
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{', …' if len(ranks) > 8 else ''}"


def names_text(names: Sequence[str]) -> str:
    more = len(names) - SHOWN_NAMES
    return ", ".join(names[:SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")


# Groups of ranks


def all_ranks(notes: list[RankNote]) -> Iterator[list[RankNote]]:
    yield notes


def grouped(notes: list[RankNote], key: Callable[[RankNote], object]) -> Iterator[list[RankNote]]:
    groups = defaultdict(list)
    for note in notes:
        groups[key(note)].append(note)
    yield from groups.values()


def data_parallel(notes: list[RankNote]) -> Iterator[list[RankNote]]:
    """Ranks that hold the same part of the model, or shards of it, and train it on other samples."""
    yield from grouped(notes, lambda note: tuple(sorted(note["place"].items())))


def tensor_parallel(notes: list[RankNote]) -> Iterator[list[RankNote]]:
    """Ranks that compute parts of the same layers on the same samples."""
    index = {note["rank"]: at for group in data_parallel(notes) for at, note in enumerate(group)}
    yield from grouped(
        [note for note in notes if set(TENSOR) & set(note["place"])],
        lambda note: (index[note["rank"]], *sorted(place for place in note["place"].items() if place[0] not in TENSOR)),
    )


def stage(notes: list[RankNote]) -> Iterator[list[RankNote]]:
    """Ranks that run the same schedule."""
    yield from grouped(notes, lambda note: note["place"].get("pp"))


# Relations


def equal(values: dict[int, Any]) -> Finding | None:
    """Values that are equal on all ranks; of floats, up to the order of sums."""
    first = next(iter(values.values()))
    other = {r: v for r, v in values.items() if not (same_float(v, first) if isinstance(v, float) else v == first)}
    if not other:
        return None
    value = next(iter(other.values()))
    wrong = [rank for rank in other if other[rank] == value]
    numbers = "" if isinstance(value, str) else f": {value} against {first}"
    return f"{ranks_text(wrong)} against rank {next(iter(values))}{numbers}", wrong


def same_float(one: float, other: float) -> bool:
    return isclose(one, other, rel_tol=CLOSE) or (one != one and other != other)


def different(values: dict[int, Any]) -> Finding | None:
    """Values that are on each rank another one."""
    ranks_of = defaultdict(list)
    for rank, value in values.items():
        ranks_of[value].append(rank)
    several = [ranks for ranks in ranks_of.values() if len(ranks) > 1]
    return (ranks_text(several[0]), several[0]) if several else None


Relation = Callable[[dict[int, Any]], Finding | None]
Groups = Callable[[list[RankNote]], Iterator[list[RankNote]]]


@dataclass(frozen=True)
class Invariant:
    """What must hold. `find` looks at the notes of all ranks at once; otherwise `value` is compared within `groups`."""

    name: str
    code: str
    broken: str  # what is wrong if it does not hold
    why: str
    causes: str
    fix: str
    value: str = ""
    groups: Groups = all_ranks
    relation: Relation = equal
    find: Callable[[list[RankNote]], Finding | None] | None = None
    unless: str = ""  # a framework in which it need not hold

    def violation(self, notes: list[RankNote]) -> Finding | None:
        if self.find is not None:
            return self.find(notes)
        for group in self.groups(notes):
            values = self.values(group)
            if len(values) > 1 and (finding := self.relation(values)):
                return finding
        return None

    def values(self, notes: list[RankNote]) -> dict[int, Any]:
        return {
            n["rank"]: v for n in notes if (v := n.get(self.value)) is not None and n.get("framework") != self.unless
        }

    def seen(self, notes: list[RankNote]) -> bool:
        """Whether there is anything to compare."""
        if self.find is replicas_differ:
            return has_replicas(notes)
        return bool(self.find) or any(len(self.values(group)) > 1 for group in self.groups(notes))


# Invariants of parameters


def by_part(notes: list[RankNote]) -> dict[str, dict[int, int]]:
    """The hash of every part, by rank."""
    out: dict[str, dict[int, int]] = defaultdict(dict)
    for note in notes:
        for part, value in zip(note["parts"], note["hashes"], strict=True):
            out[part][note["rank"]] = value
    return out


def has_replicas(notes: list[RankNote]) -> bool:
    return any(len(ranks) > 1 for ranks in by_part(notes).values())


def replicas_differ(notes: list[RankNote]) -> Finding | None:
    wrong = {part: values for part, values in by_part(notes).items() if len(set(values.values())) > 1}
    if not wrong:
        return None
    values = next(iter(wrong.values()))
    first = next(iter(values.values()))
    other = [rank for rank, value in values.items() if value != first]
    same = [rank for rank in values if rank not in other]
    names = list(dict.fromkeys(part.rpartition(" at ")[0] for part in wrong))
    return f"{names_text(names)}: {ranks_text(other)} against {ranks_text(same)}", other


def on_all_holders(field: str) -> Callable[[list[RankNote]], Finding | None]:
    """Names that are listed by every rank that holds a part of them."""

    def find(notes: list[RankNote]) -> Finding | None:
        holders, listed = defaultdict(set), defaultdict(set)
        for note in notes:
            for part in note["parts"]:
                holders[part.rpartition(" at ")[0]].add(note["rank"])
            for name in note[field]:
                listed[name].add(note["rank"])
        names = [name for name, ranks in listed.items() if ranks >= holders[name]]
        return (names_text(names), sorted(set().union(*(listed[n] for n in names)))) if names else None

    return find


INVARIANTS = (
    Invariant("replicas", "MW-WATCH-001", "copies of parameters differ", "Ranks that hold the same part of a parameter must hold the same bits",
              "gradients that are not reduced over all copies, weights that were not broadcast, an update on one rank only, another learning rate",
              "compare a step with one device: `meshwright check record` and `check compare`", find=replicas_differ),
    Invariant("norm", "MW-WATCH-002", "the gradient norm is not the same on all ranks", "Ranks that clip by other factors move apart",
              "a norm of this rank's gradients only, a missing group in its sum", "take the norm over all ranks, as the framework's clipping does",
              value="norm"),
    Invariant("dropout on data-parallel ranks", "MW-WATCH-003", "data-parallel ranks draw the same random numbers",
              "Their dropout masks are the same, so a batch has fewer different masks than samples", "one seed for all ranks",
              "add the data-parallel rank to the seed after the model is built", value="random", groups=data_parallel, relation=different,
              unless="megatron-core"),  # which does so by design, unless --data-parallel-random-init
    Invariant("dropout on tensor-parallel ranks", "MW-WATCH-004", "tensor-parallel ranks draw other random numbers",
              "They drop other elements of the same activations", "the global rank in the seed",
              "give tensor-parallel ranks the same seed for what they compute on the same activations", value="random", groups=tensor_parallel),
    Invariant("samples of data-parallel ranks", "MW-WATCH-005", "data-parallel ranks read the same samples",
              "The batch is then smaller than it seems, and samples are left out or repeated", "a sampler that does not know rank or world",
              "DistributedSampler, or its arguments num_replicas and rank", value="samples", groups=data_parallel, relation=different),
    Invariant("samples of tensor-parallel ranks", "MW-WATCH-006", "tensor-parallel ranks read other samples",
              "They add parts of layers that were computed of other samples", "a sampler with the global rank in place of the data-parallel one",
              "give the sampler the data-parallel rank and size", value="tokens", groups=tensor_parallel),
    Invariant("calls per update", "MW-WATCH-007", "ranks update after another number of calls of the model",
              "A rank skips an update or a micro-batch that others do not skip", "an overflow or NaN that only one rank sees, an uneven data loader",
              "decide on all ranks together whether a step is skipped", value="calls", groups=stage),
    Invariant("optimizer steps", "MW-WATCH-008", "optimizers have done another number of steps", "Adam's bias correction and schedules then differ",
              "optimizer states of another checkpoint on one rank, an update that one rank skipped", "load one checkpoint on all ranks",
              value="counts", groups=stage),
    Invariant("parameters change", "MW-WATCH-009", "a parameter never changes", "It has a gradient in no step, or its update is lost",
              "a parameter that the optimizer was not given, or from before a wrapper replaced it; updates below one unit in the last place of bf16",
              "give it to the optimizer, keep fp32 weights, or freeze it with requires_grad_(False)", find=on_all_holders("unchanged")),
    Invariant("gradients", "MW-WATCH-010", "the gradient of a parameter is always zero or None", "The loss does not depend on it",
              "a detach, a part of the model that is not called, an expert that gets no token",
              "freeze it with requires_grad_(False) if that is meant", find=on_all_holders("without_gradient")),
)  # fmt: skip


@dataclass(frozen=True)
class Violation:
    """An invariant that does not hold: since which checked step, on which ranks."""

    step: int
    invariant: str
    code: str
    what: str
    why: str
    causes: str
    fix: str
    ranks: list[int]

    def error(self) -> MeshwrightError:
        why = f"{self.why}. Usual causes: {self.causes}"
        return MeshwrightError(self.code, f"step {self.step}: {self.what}", why=why, fix=self.fix, exit_code=1)


class Judge:
    """Judges the notes of checked steps; each invariant is reported once."""

    def __init__(self, without: Sequence[str] = ()) -> None:
        codes = [i.code for i in INVARIANTS]
        for code in without:
            if code not in codes:
                raise MeshwrightError("MW-CLI-005", f"no invariant has the code '{code}'", valid=codes)
        self.invariants = [i for i in INVARIANTS if i.code not in without]
        self.violations: list[Violation] = []
        self.seen: set[str] = set()
        self.checks = self.ranks = 0

    def judge(self, notes: list[RankNote], late: Sequence[int] = ()) -> list[Violation]:
        """The violations that are new. `late`: ranks that did not come to this step."""
        self.checks, self.ranks = self.checks + 1, max(self.ranks, len(notes))
        new = []
        for invariant in self.invariants:
            self.seen |= {invariant.name} if invariant.seen(notes) else set()
            finding = invariant.violation(notes)
            if late and invariant.value == "counts":
                finding = f"{ranks_text(late)} did not come to step {notes[0]['step']}", list(late)
            if finding and invariant.code not in {v.code for v in self.violations}:
                i, (detail, ranks) = invariant, finding
                new.append(
                    Violation(notes[0]["step"], i.name, i.code, f"{i.broken}: {detail}", i.why, i.causes, i.fix, ranks)
                )
        self.violations += new
        return new

    def as_dict(self) -> dict[str, Any]:
        broken = {violation.invariant for violation in self.violations}
        names = [i.name for i in self.invariants]
        return {
            "checks": self.checks,
            "ranks": self.ranks,
            "held": [name for name in names if name in self.seen - broken],
            "not_seen": [name for name in names if name not in self.seen | broken],
            "violations": [asdict(violation) for violation in self.violations],
        }


def summary_of(about: dict[str, Any]) -> str:
    """A report in a few lines."""
    text = f"watched {counted(about['ranks'], 'rank')} in {counted(about['checks'], 'check')}, {about['share_of_time']:.1%} of the time"
    parts = [f"held: {', '.join(about['held'])}"] if about["held"] else []
    parts += [f"nothing to compare: {', '.join(about['not_seen'])}"] if about["not_seen"] else []
    parts += [f"violated: {', '.join(v['invariant'] for v in about['violations'])}"] if about["violations"] else []
    return "\n  ".join([text, *parts])
