"""The result of `explain`: the traced ranks, the parts of their steps, products by shape, and causes of lost time."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from meshwright.describe.accelerator import Accelerator
from meshwright.describe.catalog import accelerator_of, load
from meshwright.describe.result import values_of
from meshwright.explain.attribution import COMPUTE, UNATTRIBUTED, Part, StepAttribution, attribute
from meshwright.explain.causes import LostTime, lost_time, mean_parts
from meshwright.explain.collectives import groups_by_axis
from meshwright.explain.products import TracedProduct, traced_products
from meshwright.explain.ranks import RankInGroup, TracedRun, traced_run
from meshwright.explain.recognise import RecognisedTrace
from meshwright.explain.trace import RankTrace
from meshwright.units import Json

VERSION = 1
MOST_NOTES = 24  # on single ranks
MOST_SHAPES = 12  # of products, in JSON and on pages


@dataclass(frozen=True)
class TraceExplanation:
    """What the traces of a run say about its steps."""

    run: TracedRun
    steps: dict[int, list[StepAttribution]]  # by rank
    products: dict[int, list[TracedProduct]]

    @cached_property
    def parts(self) -> dict[int, dict[Part, float]]:
        """Seconds by part in the mean step of each rank."""
        return {rank: mean_parts(steps) for rank, steps in self.steps.items()}

    @cached_property
    def busiest_rank(self) -> int:
        """The rank with the most compute: that of a prediction."""
        parts = self.parts
        return max(parts, key=lambda rank: (sum(s for (kind, _), s in parts[rank].items() if kind == COMPUTE), -rank))

    @cached_property
    def causes(self) -> list[LostTime]:
        return lost_time(self.run, self.steps, self.products)

    @cached_property
    def step_s(self) -> float:
        """Seconds of the mean step of the slowest rank."""
        return max(sum(parts.values()) for parts in self.parts.values())

    @property
    def attributed(self) -> float:
        """Share of all traced steps that has a cause."""
        every = [step for steps in self.steps.values() for step in steps]
        return 1 - sum(s.total(UNATTRIBUTED) for s in every) / max(sum(s.duration for s in every), 1)

    @property
    def notes(self) -> list[str]:
        """What was not read or is assumed."""
        ranks = self.run.ranks
        by_rank = [(r.rank, note) for r in ranks for note in (*r.found.trace.notes, *r.found.doubts)]
        out = [f"rank {rank}: {note}" for rank, note in by_rank[:MOST_NOTES]] + list(self.run.notes)
        if len(by_rank) > MOST_NOTES:
            out.append(f"{len(by_rank) - MOST_NOTES} further notes on single ranks")
        if missing := self.run.world - len(ranks):
            out.append(
                f"{len(ranks)} of {self.run.world} ranks were traced: the waiting of the others is not known, nor is that for {missing} of them"
            )
        without = [str(r.rank) for r in ranks if not any(detail.dims for detail in r.found.events.details)]
        if without:
            out.append(
                f"no shapes in the trace of rank {', '.join(without[:8])}: record_shapes=True would name products and bytes"
            )
        return out

    def as_dict(self) -> Json:
        return {
            "version": VERSION,
            "step_time_s": self.step_s,
            "attributed": self.attributed,
            "causes": [cause.as_dict() for cause in self.causes],
            "ranks": [self.rank_as_dict(rank) for rank in self.steps],
            "late_ranks": [
                {**values_of(x, "rank", "share", "late_s", "constant"), "by_step_s": x.by_step} for x in self.run.late
            ],
            "notes": self.notes,
        }

    def rank_as_dict(self, rank: int) -> Json:
        traced = self.run.rank(rank)
        found = traced.found
        return {
            "rank": rank,
            "file": found.trace.file,
            "events": len(found.events),
            "microbatches": found.microbatches,
            "stage": stage_of(traced),
            "layers": len(found.layers),
            "forward_by_layer_s": found.layer_seconds,
            "phases_s": found.phases,
            "collectives": len(traced.collectives),
            "parts_s": {f"{kind}: {name}": seconds for (kind, name), seconds in self.parts[rank].items()},
            "steps": [
                {
                    "step": s.step,
                    "seconds": s.duration / 1e9,
                    "parts_ns": {f"{kind}: {name}": ns for (kind, name), ns in s.parts.items()},
                    "hidden_ns": s.hidden,
                }
                for s in self.steps[rank]
            ],
            "products": [
                {**values_of(p, "shape", "dtype", "count", "seconds", "usual_s"), "tflops": p.flops / p.seconds / 1e12}
                for p in self.products.get(rank, [])[:MOST_SHAPES]
            ],
        }


def explain_traces(traces: Sequence[RankTrace]) -> TraceExplanation:
    """Recognise and attribute the steps of all ranks. Usual rates are those of the catalog's device with the name in the traces."""
    run = traced_run([RecognisedTrace(trace) for trace in traces])
    device = device_of(traces)
    steps = {r.rank: attribute(r) for r in run.ranks}
    return TraceExplanation(run, steps, {r.rank: traced_products(r.found, device) for r in run.ranks})


def device_of(traces: Sequence[RankTrace]) -> Accelerator | None:
    """The catalog's accelerator of the devices that the traces name."""
    names = [str(properties.get("name", "")) for trace in traces for properties in trace.devices]
    card = accelerator_of(names[0]) if names else None
    return load("accelerators", card) if card else None


def stage_of(rank: RankInGroup) -> int | None:
    """The pipeline stage of a rank: its place in the group of its messages."""
    group = groups_by_axis(rank.found, rank.collectives).get("pp", ())
    return group.index(rank.rank) if group else None
