"""Where a step went: its nanoseconds by part. Parts sum exactly to the step, because each nanosecond is given to one part.

compute        kernels (or operators of a CPU) by group: products, attention, elementwise, …
communication  exposed, by axis or group: a collective runs and nothing is computed
waiting        part of a collective before its last rank arrived
bubble         a pipeline stage waits for a message of another stage
data           the loader has no batch ready
host           the device is idle while the host launches, or waits in a synchronising call
other          none of these; it is named, and should stay below 5%
"""

from dataclasses import dataclass, field

COMPUTE, COMMUNICATION, WAITING, BUBBLE, DATA, HOST, UNATTRIBUTED = (
    "compute", "communication", "waiting", "bubble", "data", "host", "other",
)  # fmt: skip
KINDS = (COMPUTE, COMMUNICATION, WAITING, BUBBLE, DATA, HOST, UNATTRIBUTED)


@dataclass(frozen=True)
class StepAttribution:
    """The parts of one step on one rank, in nanoseconds."""

    rank: int
    step: str
    start: int
    duration: int
    parts: dict[
        tuple[str, str], int
    ]  # (kind, name), such as ("compute", "products") or ("communication", "dp") → exposed
    hidden: dict[str, int] = field(
        default_factory=dict
    )  # by axis or group: communication behind compute; not in the sum

    def __post_init__(self) -> None:
        if sum(self.parts.values()) != self.duration:
            raise AssertionError(f"parts of step {self.step} sum to {sum(self.parts.values())} ns, not {self.duration}")

    def total(self, kind: str) -> int:
        return sum(ns for (of, _), ns in self.parts.items() if of == kind)

    @property
    def attributed(self) -> float:
        """Share of the step that has a cause."""
        return 1 - self.total(UNATTRIBUTED) / self.duration if self.duration else 1.0
