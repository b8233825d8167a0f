"""Where a difference began: the outputs of the modules of both runs, matched row by row.

ModuleSamples of a run are stored whole or as sketches; a row is compared in the form that both have.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from meshwright.check.folder import RankStep
from meshwright.check.match import Match, by_rank, nearest, rows_of
from meshwright.proof.parts import RecordedValue, sketched
from meshwright.proof.patterns import ratio

KINDS = ("output", "output gradient")


@dataclass
class ModuleSamples:
    """The samples that a run computed in one module, in their order over calls: whole, or sketches of `elements` elements each."""

    rows: list[np.ndarray]
    elements: int = 0  # of a sample; 0: rows are whole

    def like(self, entry: RecordedValue) -> list[np.ndarray]:
        """In the form of an entry: whole, or as sketches; empty if a sketch is not of whole samples."""
        if entry.sketched is None:
            return [] if self.elements else self.rows
        if not self.elements:
            self.rows = [
                sketched(row, row.shape, (0,) * row.ndim, row.shape)
                for row in self.rows
                if row.size == elements_of(entry)
            ]
            self.elements = elements_of(entry)
        return self.rows if self.elements == elements_of(entry) else []


def elements_of(entry: RecordedValue) -> int:
    """Of a sample of a sketched activation."""
    assert entry.sketched is not None
    whole = int(np.prod(entry.sketched))
    return whole // len(entry.value) if entry.value.ndim == 2 else whole


@dataclass
class StepModules:
    """The outputs of modules of both runs; `rows[kind][name]` are (rank, match), in the order in which the reference computes them."""

    one: list[RankStep]
    many: list[RankStep]
    rename: Mapping[str, str]
    batch_dims: tuple[int, int]
    rows: dict[str, dict[str, list[tuple[int, Match]]]] = field(default_factory=lambda: {kind: {} for kind in KINDS})
    unmatched: list[str] = field(default_factory=list)
    cut: Mapping[int, set[str]] = field(default_factory=dict)  # by rank: modules of which other ranks have layers
    places: Mapping[int, Mapping[str, int]] = field(default_factory=dict)  # by rank: its place on every axis

    def __post_init__(self) -> None:
        self.samples = {kind: samples_of(self.one, kind, self.batch_dims[0]) for kind in KINDS}
        places: dict[tuple, Match] = {}
        self.found: dict[int, list[tuple[str, int, Match]]] = {step.rank: [] for step in self.many}
        for step in self.many:
            cut = self.cut.get(step.rank, set())
            for entry in (e for e in step.of("output") if e.name not in cut):
                for i, (key, match) in enumerate(self.match_rows(entry)):
                    places[step.rank, key, entry.call, entry.index, i] = match
                    self.found[step.rank].append((key, entry.call, match))
                    self.rows["output"].setdefault(key, []).append((step.rank, match))
        shared = self.independent_of_samples()
        scales: dict[object, float] = {}
        for step in sorted(self.many, key=lambda step: not step.of("loss")):  # stages of a pipeline after the last one
            pipeline = self.pipeline_of(step.rank)
            for entry in step.of("output gradient"):
                for i, row in enumerate(self.rows_of(entry)):
                    place = places.get((step.rank, self.key(entry), entry.call, entry.index, i))
                    block = self.same_block(entry, place, row)
                    if place is not None and block is not None and self.key(entry) not in shared:
                        scale = scales.setdefault(pipeline, ratio(row, block) or 1.0)
                        match = Match(row, block, place.sample, place.start, scale, place.parts)
                        self.rows["output gradient"].setdefault(self.key(entry), []).append((step.rank, match))
        for kind, rows in self.rows.items():
            self.rows[kind] = {key: rows[key] for key in self.samples[kind] if key in rows}

    def pipeline_of(self, rank: int) -> object:
        """The ranks that share one scale between the two runs' gradients before the reduction: the stages of one copy of the model."""
        place = self.places[rank] if self.places else {}
        return tuple(sorted((axis, at) for axis, at in place.items() if axis != "pp")) if "pp" in place else rank

    def independent_of_samples(self) -> set[str]:
        """Modules whose output is the same for other samples: positions, for instance. The gradient in it is a sum over the samples of a
        rank's call, so it is not one device's even where all is right."""
        out, seen = set[str](), dict[tuple, bytes]()
        for step in self.many:
            read = {e.call: e.value.tobytes() for e in reversed(step.of("input")) if e.index == 0}
            for key, call, match in self.found[step.rank]:
                samples = read.get(call, b"")
                if seen.setdefault((key, match.sample, match.start), samples) != samples:
                    out.add(key)
        return out

    def same_block(self, entry: RecordedValue, place: Match | None, row: np.ndarray) -> np.ndarray | None:
        """The block of the reference's gradient where the row of the output was found."""
        known = self.samples["output gradient"].get(self.key(entry))
        samples: Sequence[np.ndarray] = known.like(entry) if known is not None else ()
        if place is None or place.sample >= len(samples) or entry.partial:
            return None
        sample = by_rank(samples[place.sample], row.shape[-1], place.parts) if row.ndim else samples[place.sample]
        box = tuple(slice(a, a + n) for a, n in zip(place.start, row.shape, strict=False))
        return sample[box] if sample.ndim == row.ndim and sample[box].shape == row.shape else None

    def key(self, entry: RecordedValue) -> str:
        name = self.rename.get(entry.name, entry.name)
        return f"{name} [{entry.index}]" if entry.index else name

    def rows_of(self, entry: RecordedValue) -> Iterator[np.ndarray]:
        return rows_of(entry, self.batch_dims[1])

    def match_rows(self, entry: RecordedValue) -> Iterator[tuple[str, Match]]:
        key, hint = self.key(entry), None
        if entry.partial or entry.value.ndim == 0:  # a loss: each framework divides it in its own way
            return
        known = self.samples["output"].get(key)
        samples = known.like(entry) if known is not None else []
        for row in self.rows_of(entry):
            hint = nearest(row, samples, hint, 1.0)
            if hint is not None:
                yield key, hint
            elif key not in self.unmatched:
                self.unmatched.append(key)

    def errors(self) -> Iterator[tuple[str, float, float]]:
        """By module, in the order of forward: the largest error of its output, and of the gradient in it."""
        for name, rows in self.rows["output"].items():
            backward = [match.error for _, match in self.rows["output gradient"].get(name, [])]
            yield name, max(match.error for _, match in rows), max(backward, default=float("nan"))


def cut_modules(parameters: Sequence[Sequence[str]]) -> dict[int, set[str]]:
    """By rank, the modules that stages of a pipeline share: those of whose parameters another rank has some and this one has not. Their output
    is one device's on the last of these stages only. Experts, of which each rank has some, do not count."""
    dense = [{name for name in names if "local_experts" not in name} for names in parameters]
    everything = set[str]().union(*dense)
    out: dict[int, set[str]] = {}
    for rank, own in enumerate(dense):
        paths = [name.split(".") for name in everything - own]
        out[rank] = {".".join(path[:i]) for path in paths for i in range(len(path))}
    return out


def samples_of(steps: list[RankStep], kind: str, batch_dim: int) -> dict[str, ModuleSamples]:
    out: dict[str, dict[tuple[int, int], RecordedValue]] = {}
    for step in steps:
        for entry in step.of(kind):
            key = f"{entry.name} [{entry.index}]" if entry.index else entry.name
            out.setdefault(key, {})[entry.call, step.rank] = entry
    return {key: join_calls([entry for _, entry in sorted(calls.items())], batch_dim) for key, calls in out.items()}


def join_calls(entries: list[RecordedValue], batch_dim: int) -> ModuleSamples:
    """The rows of all calls; if some are sketched, of these only."""
    some = [entry for entry in entries if entry.sketched is not None] or entries
    rows = [row for entry in some for row in rows_of(entry, batch_dim)]
    return ModuleSamples(rows, elements_of(some[0]) if some[0].sketched is not None else 0)
