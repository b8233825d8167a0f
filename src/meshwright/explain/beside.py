"""A trace beside the prediction of its plan: predicted and measured seconds by part and by operator, and a reason for the largest differences.

The measured side is the mean step of the rank that computes longest, the predicted side that of the busiest rank. Parts of each side sum to its
step, so differences of parts sum to the difference of the steps. Products are also compared by shape: the three sizes of a product are the same for
forward and both gradients, in another order.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from meshwright.describe.config import Config, is_plan_file
from meshwright.describe.result import AXES, values_of
from meshwright.errors import MeshwrightError
from meshwright.explain.attribution import BUBBLE, COMMUNICATION, COMPUTE, DATA, HOST, UNATTRIBUTED, WAITING
from meshwright.explain.causes import after_backward
from meshwright.explain.collectives import UNNAMED
from meshwright.explain.expected import ShapeKey, expected, expected_products, shape_key
from meshwright.explain.explanation import TraceExplanation
from meshwright.explain.products import TracedProduct
from meshwright.explain.recognised_plan import config_of_trace
from meshwright.interop.files import configure
from meshwright.planner.advice.changes import Change, first_changes
from meshwright.predict.estimate import Estimate, estimate
from meshwright.units import Json, format_seconds

MOST = 5
GROUPS = ("products", "attention", "loss", "optimizer", "other", "copies")
GROUP_NAMES = {"other": "elementwise and norms", "copies": "copies"}
RECOGNISED = "recognised in the trace"
NOT_PREDICTED = "the prediction assumes none"
MOST_PARTS = 8  # into which a product may be divided
SLOWER = 1.15  # times the predicted seconds at which a rate is called lower


@dataclass(frozen=True)
class PartDifference:
    """Predicted and measured seconds of one part or operator of a step, and why they differ."""

    name: str
    predicted_s: float
    measured_s: float
    reason: str = ""

    @property
    def difference_s(self) -> float:
        return self.measured_s - self.predicted_s

    def as_dict(self) -> Json:
        return values_of(self, "name", "predicted_s", "measured_s", "difference_s", "reason")


@dataclass(frozen=True)
class TraceBesidePlan:
    """A traced run and the prediction of its plan."""

    explanation: TraceExplanation
    config: Config
    source: str  # where the plan comes from, in words

    @cached_property
    def estimate(self) -> Estimate:
        return estimate(self.config)

    @property
    def rank(self) -> int:
        return self.explanation.busiest_rank

    @cached_property
    def rows(self) -> list[PartDifference]:
        """All parts, in the order of the step; both columns sum to their step."""
        measured, e = self.explanation.parts[self.rank], self.estimate
        exposed, groups = e.prediction.exposed_s, expected(e.config)
        rows = []
        for group in GROUPS:
            expectation, seconds = groups.get(group, (0.0, 0.0))[0], measured.get((COMPUTE, group), 0.0)
            reason = self.compute_reason(group, expectation, seconds)
            rows.append(PartDifference(GROUP_NAMES.get(group, group), expectation, seconds, reason))
        unnamed = measured.get((COMMUNICATION, UNNAMED), 0.0)
        apart = [axis for axis in AXES if not unnamed or measured.get((COMMUNICATION, axis))]
        for axis in apart:
            seconds = measured.get((COMMUNICATION, axis), 0.0)
            rows.append(PartDifference(f"exposed {axis}", exposed.get(axis, 0.0), seconds, self.axis_reason(axis)))
        together = sum(exposed.get(axis, 0.0) for axis in AXES if axis not in apart)
        rows.append(
            PartDifference("exposed, all other axes", together, unnamed, "the trace does not tell these groups apart")
        )
        total = {
            kind: sum(s for (of, _), s in measured.items() if of == kind)
            for kind in (WAITING, BUBBLE, DATA, HOST, UNATTRIBUTED)
        }
        host = exposed.get("host", 0.0) + exposed.get("overhead", 0.0)
        slower_host = "launches are on the critical path: the host is slower than the device, or waited for it"
        host_reason = slower_host if total[HOST] > host else "the host launches faster than predicted"
        waits = "stages wait longer for messages than their schedule says"
        for name, predicted, seconds, reason in (
            ("bubble", exposed.get("bubble", 0.0), total[BUBBLE], waits),
            ("waiting for slower ranks", 0.0, total[WAITING], NOT_PREDICTED),
            ("data loader", 0.0, total[DATA], NOT_PREDICTED),
            ("host", host, total[HOST], host_reason),
        ):
            rows.append(PartDifference(name, predicted, seconds, reason))
        rest = e.prediction.step_time_s - sum(row.predicted_s for row in rows)
        unknown = sum(measured.values()) - sum(row.measured_s for row in rows)
        reason = "kernels beside communication run slower"
        rows.append(PartDifference("slowed by overlap, and the rest", rest, unknown, reason))
        return [row for row in rows if abs(row.predicted_s) + abs(row.measured_s) > 1e-9]

    @cached_property
    def operators(self) -> list[PartDifference]:
        """Products by family of shapes, those that differ most first."""
        steps = len(self.explanation.steps[self.rank])
        predicted, by_shape = expected_products(self.estimate.config), defaultdict[ShapeKey, list[TracedProduct]](list)
        for p in self.explanation.products[self.rank]:
            by_shape[shape_key(p.batch, p.m, p.n, p.k)].append(p)
        rows = []
        for family in families(set(predicted), set(by_shape)):
            expectations = [predicted[key] for key in family if key in predicted]
            products = [p for key in family for p in by_shape.get(key, [])]
            seconds, flops = sum(e[0] for e in expectations), sum(e[1] for e in expectations)
            measured, run = sum(p.seconds for p in products) / steps, sum(p.flops for p in products) / steps
            names = ", ".join(dict.fromkeys(forward(name) for e in expectations for name in e[2].split(", ")))
            largest = max(family, key=lambda key: prod(key[1]))
            name = f"{names or 'products that the plan does not have'} ({' · '.join(map(str, largest[1]))})"
            rows.append(
                PartDifference(name, seconds, measured, product_reason(products, seconds, measured, flops, run))
            )
        return sorted(rows, key=lambda row: -abs(row.difference_s))

    @cached_property
    def largest(self) -> list[PartDifference]:
        """The five largest differences; products by shape, where the trace has shapes."""
        parts = [row for row in self.rows if row.name != "products" or not self.explanation.products[self.rank]]
        operators = self.operators if self.explanation.products[self.rank] else []
        return sorted([*parts, *operators], key=lambda row: -abs(row.difference_s))[:MOST]

    @cached_property
    def changes(self) -> list[Change]:
        """What `plan` would change in this plan, with the seconds that the same costs give."""
        return first_changes(self.estimate.config)[:3]

    def compute_reason(self, group: str, predicted: float, measured: float) -> str:
        more, stack = measured > predicted, self.config.stack
        kernel = f"{'a slower' if more else 'a faster'} attention kernel than the predicted one ({stack.attention or stack.name})"
        wide, narrow = (
            "the update is not fused, or its states are wider",
            "the states of the optimizer are narrower, or fewer",
        )
        passes, fused = "the loss is computed in more passes over the vocabulary", "the loss is fused into fewer passes"
        reasons = {
            "other": f"stack {stack.name} fuses {'more' if more else 'fewer'} of these kernels than this program",
            "attention": f"{kernel}, or other masks",
            "optimizer": wide if more else narrow,
            "loss": passes if more else fused,
            "copies": NOT_PREDICTED,
            "products": "see the products by shape",
        }
        return reasons.get(group, "")

    def axis_reason(self, axis: str) -> str:
        """Slower than the link, or not overlapped: busy seconds of the axis beside the predicted ones."""
        e = self.estimate
        steps = self.explanation.steps[self.rank]
        hidden = sum(s.hidden.get(axis, 0) for s in steps) / 1e9 / len(steps)
        busy = hidden + self.explanation.parts[self.rank].get((COMMUNICATION, axis), 0.0)
        exposed = e.prediction.exposed_s.get(axis, 0.0)
        if self.explanation.parts[self.rank].get((COMMUNICATION, axis), 0.0) < exposed:
            return "less of it is exposed than predicted"
        predicted = exposed + e.prediction.hidden_s.get(axis, 0.0)
        if predicted and busy > SLOWER * predicted:
            level = e.cost.network.level(axis)
            link = e.cluster.levels[level].name
            return f"its collectives take {busy / predicted:.1f} times the predicted {format_seconds(predicted)}: slower than the link ({link})"
        rank = self.explanation.run.rank(self.rank)
        late, _, count = after_backward(rank, steps)
        planned = e.prediction.hidden_s.get(axis, 0.0)
        if planned > 1.2 * hidden and count:
            return f"{format_seconds(planned)} should run behind compute, {format_seconds(hidden)} did: {late:.0%} of the bytes start after backward"
        return "communication as predicted, overlapped differently"

    def as_dict(self) -> Json:
        p = self.estimate.prediction
        return {
            "plan": self.config.plan.as_dict(),
            "source": self.source,
            "predicted_step_time_s": p.step_time_s,
            **values_of(p, "step_time_low_s", "step_time_high_s"),
            "measured_step_time_s": self.explanation.step_s,
            "rank": self.rank,
            "predicted_memory_gib": p.memory_gib,
            "parts": [row.as_dict() for row in self.rows],
            "operators": [row.as_dict() for row in self.operators[:20]],
            "largest_differences": [row.as_dict() for row in self.largest],
            "changes": [change.as_dict() for change in self.changes],
            "assumed": p.assumed,
        }


def beside_plan(
    explanation: TraceExplanation,
    plan: str = "",
    model: str = "",
    cluster: str = "",
    gpus: int = 0,
    overrides: Sequence[str] = (),
) -> TraceBesidePlan | MeshwrightError:
    """The trace beside the plan of a file, or else beside the plan that is recognised in it; the error says why there is none."""
    if plan or model:
        world = gpus or (0 if is_plan_file(plan) else explanation.run.world)
        return TraceBesidePlan(
            explanation, configure(model, cluster, plan=plan or None, gpus=world, set=list(overrides)), plan or model
        )
    try:
        return TraceBesidePlan(explanation, config_of_trace(explanation.run, cluster), RECOGNISED)
    except MeshwrightError as error:
        return error


def families(predicted: set[ShapeKey], measured: set[ShapeKey]) -> list[list[ShapeKey]]:
    """Shapes that belong together. A shape that only one side has may be a part of another one, or contain it: gate and up as one product of
    twice the size. It joins the shapes with which it shares two sizes and whose third size divides its own, or the other way round."""
    group = {key: [key] for key in sorted(predicted | measured)}
    for key in sorted(predicted ^ measured):
        for relative in parts_and_multiples(key):
            if relative in group and group[relative] is not group[key]:
                small, large = sorted((group[key], group[relative]), key=len)
                large += small
                group |= dict.fromkeys(small, large)
    return [sorted(members) for members in {id(members): members for members in group.values()}.values()]


def parts_and_multiples(key: ShapeKey) -> Iterator[ShapeKey]:
    """The shapes of which one size is a small multiple of this one's, or a part of it."""
    batch, sizes = key
    for at, size in enumerate(sizes):
        for factor in range(2, MOST_PARTS + 1):
            others = [size * factor, size // factor] if size % factor == 0 else [size * factor]
            for other in others if size > 1 else ():
                if other > 1:
                    yield batch, tuple(sorted((*sizes[:at], other, *sizes[at + 1 :])))


def forward(name: str) -> str:
    """The operation of forward that a product belongs to."""
    return name.removesuffix("-dgrad").removesuffix("-wgrad")


def product_reason(products: list[TracedProduct], predicted: float, measured: float, flops: float, run: float) -> str:
    """More products than predicted, a slow shape, or another rate."""
    if not predicted or not measured:
        return "only in the prediction" if predicted else "only in the trace"
    worst = max(products, key=lambda p: p.seconds)
    if abs(run - flops) > 0.05 * flops:
        why = worst.reason if worst.excess_s else "at its usual rate"
        return f"the program multiplies {run / flops:.2f} times the FLOPs of the prediction; {why}"
    rates = f"{run / measured / 1e12:.3g} TFLOP/s, {flops / predicted / 1e12:.3g} predicted"
    return f"{rates}: {worst.reason}" if measured > SLOWER * predicted else rates
