"""Where the difference between two recordings began, and what pattern it has.

The first module whose output is not the reference's (forward), or the last one whose output has another gradient (backward), or none of them:
then the tensor that differs says it (reduction, clipping, update). Patterns and their usual causes are `verify`'s.
"""

from dataclasses import dataclass

from meshwright.check.pair import StepPair, TensorDifference
from meshwright.proof.diagnosis import Diagnosis
from meshwright.proof.first import first_that_reaches
from meshwright.proof.parts import Copy
from meshwright.proof.patterns import Pattern, pattern_of
from meshwright.proof.tolerance import Tolerance
from meshwright.units import counted

PHASES = {"gradient": "reduction", "norm": "clipping", "clipped gradient": "clipping"}
LINEAR = ("zero", "stale", "missing sum", "factor", "counted twice", "noise")  # patterns that sketches show too


@dataclass(frozen=True)
class StepDiagnosis:
    """What is wrong in a step of two runs."""

    pair: StepPair
    tolerance: Tolerance

    def named(self, first: TensorDifference) -> Diagnosis:
        if (unread := self.unread_samples()) is not None:
            return Diagnosis("forward", "inputs", unread, "samples")
        if (clipped := self.clipped_too_early()) is not None and first.kind in ("gradient", "norm"):
            return Diagnosis("clipping", first.name, clipped)
        if self.pair.single and first.kind == "gradient":
            for kind, phase, what in (
                ("output", "forward", "output"),
                ("output gradient", "backward", "gradient of the output"),
            ):
                if (place := self.first_module(kind)) is not None:
                    return Diagnosis(phase, place, self.pattern_of_rows(place, kind), what)
        phase = PHASES.get(first.kind, "update")
        if phase == "update" and (rate := self.other_learning_rate()) is not None:
            return Diagnosis(phase, first.name, rate)
        return Diagnosis(phase, first.name, self.pattern(list(self.pair.copies(first.kind, first.name))))

    def other_learning_rate(self) -> Pattern | None:
        one, *many = (
            {float(e.value[0]) for s in steps for e in s.of("learning rate")}
            for steps in (self.pair.one, *([s] for s in self.pair.many))
        )
        other = {rank: rates - one for rank, rates in enumerate(many) if rates - one}
        if not other or not one:
            return None
        rank, rates = next(iter(other.items()))
        return Pattern(
            "factor", f"learning rate × {max(rates) / max(one):.4g} on rank {rank}" if max(one) else "learning rate"
        )

    def clipped_too_early(self) -> Pattern | None:
        """Gradients that the candidate clips before its last backward, and the reference does not."""
        one, many = (max(len(step.of("early clipping")) for step in steps) for steps in (self.pair.one, self.pair.many))
        return Pattern("other", f"clipped {counted(many, 'time')} before the last micro-batch") if many > one else None

    def unread_samples(self) -> Pattern | None:
        """Samples of the reference that no rank reads; None if all are read, or ranks read parts of samples."""
        expected, got = self.pair.samples_read
        missing = [row for row in expected if row not in got]
        if not self.pair.alike or not missing or len(missing) == len(expected):
            return None
        return Pattern("part", f"{len(missing)} of {len(expected)} samples are read by no rank")

    def pattern(self, copies: list[Copy]) -> Pattern:
        micro_batches = max(1, *(len(step.of("loss")) for step in self.pair.many))
        pattern = pattern_of(copies, {**self.pair.axes, "micro-batches": micro_batches}, self.pair.axes)
        sketched = any(
            entry.sketched is not None for step in (*self.pair.one, *self.pair.many) for entry in step.entries
        )
        return (
            pattern
            if pattern.kind in LINEAR or not sketched
            else Pattern("other", "seen in sketches only: raise --limit for the pattern")
        )

    def first_module(self, kind: str) -> str | None:
        """The first module in the order of computation whose rows are not the reference's."""
        rows = self.pair.modules.rows[kind]
        seen = rows.keys() if kind == "output" else ()
        return first_that_reaches(rows, lambda name: self.is_off(kind, name), lambda name: name in seen)

    def is_off(self, kind: str, name: str) -> bool:
        bound = self.tolerance.bound(kind, self.pair.number, name)
        return any(not match.error <= bound for _, match in self.pair.modules.rows[kind][name])

    def pattern_of_rows(self, name: str, kind: str) -> Pattern:
        rows = self.pair.modules.rows[kind][name]
        return self.pattern(
            [
                Copy(self.pair.coordinates[r], (m.sample, *m.start), (m.got / m.scale)[None], m.expected[None])
                for r, m in rows
            ]
        )
