"""What happens around the steps of a training: metrics, evaluation, checkpoints, profiling, faults and proofs are hooks of the trainer.

    start            before the first step of `Trainer.until`
      before_step    the step has not begun; its seconds do not count this
      after_gradients  gradients are complete: reduced over all ranks, not yet unscaled or clipped
      after_step     the update is done, and `trainer.step` is the next step; may return the record with more in it
    finish           after the last step. Not called if a step raised

Every rank calls its hooks in the same order, so a hook may communicate. The first hook of the list is the nearest to the
step: its `before_step` is called last, its `after_step` first. So a recorder of communication in front does not see what the hooks
behind it send, and a hook that reports the record runs after the hooks that add to it.

A hook ends the training after the current step with `trainer.stopped = True`, on all ranks in the same step.

The records that ranks send to their parent process: plain data, no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import nan
from typing import Any, NamedTuple

from meshwright.units import Json

BYTE_VALUES = 256  # the vocabulary of a corpus of bytes


@dataclass(frozen=True)
class StepRecord:
    """One finished training step."""

    step: int
    loss: float
    gradient_norm: float
    tokens: int
    seconds: float
    router: dict[str, float] = field(default_factory=dict)  # balance of the experts in the layer that is worst balanced
    updated: bool = True  # False if the update was skipped: gradients that are not finite, or an overflow in fp16
    validation_loss: float | None = None  # of the validation data after this step; None if they were not evaluated
    learning_rate: float | None = None  # of this step, before the factors of parameter groups
    mfu: float | None = None
    memory_gib: float | None = None  # peak of the process of rank 0 so far; on a GPU, of its allocator
    exposed_s: dict[str, float] | None = None  # by part: seconds that rank 0 was blocked in communication
    compile_s: float | None = None  # seconds of this step that rank 0 spent in the compiler; None: it compiled nothing

    @property
    def seconds_without_compilation(self) -> float:
        return self.seconds - (self.compile_s or 0.0)

    def row(self) -> Json:
        """The row of `steps.jsonl`; values that were not measured are left out. A model with experts adds entropy, peak, idle and
        dropped shares of its router."""
        row: Json = {
            "step": self.step,
            "loss": self.loss,
            "grad_norm": self.gradient_norm,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "tokens_per_s": self.tokens / self.seconds if self.seconds else None,
        }
        row |= {name: value for name in MEASURED if (value := getattr(self, name)) is not None}
        row |= {} if self.updated else {"skipped": True}
        return row | {f"{ROUTER}{name}": value for name, value in self.router.items()}

    @classmethod
    def of_row(cls, row: Json) -> StepRecord:
        """The record of a row of `steps.jsonl`; null is NaN."""
        loss, norm = (nan if row.get(name) is None else float(row[name]) for name in ("loss", "grad_norm"))
        router = {name.removeprefix(ROUTER): value for name, value in row.items() if name.startswith(ROUTER)}
        measured = {name: row.get(name) for name in MEASURED}
        updated = not row.get("skipped")
        return cls(row["step"], loss, norm, row["tokens"], row["seconds"], router, updated, **measured)


ROUTER = "router_"  # begins the keys of a router's balance
# Keys of a row that may be missing
MEASURED = ("learning_rate", "mfu", "memory_gib", "exposed_s", "validation_loss", "compile_s")


@dataclass
class Observed:
    """Observations of one step. `collectives`: by (axis, operation), their number and the sum of n in bytes.
    `unknown`: operators of the c10d namespace that it cannot read. `sent`: bytes that the rank sent, by axis."""

    collectives: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    peak_bytes: int = 0
    unknown: list[str] = field(default_factory=list)
    sent: dict[str, float] = field(default_factory=dict)


class CommEvent(NamedTuple):
    """One collective, send or receive of a rank. Times are seconds of a clock that all ranks of a host share.

    The rank is blocked from `issued` to `returned`, and from `waited` to `resumed` (equal if it never waited). `done` is
    when the operation was complete, NaN where the backend does not say it."""

    axis: str  # of the mesh, as `observe.axes_by_group` names it
    operation: str  # all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, …, send, receive
    bytes: int  # n, the full unsharded buffer
    peer: int  # of a send or receive: the other rank's index in the group; else -1
    issued: float
    returned: float
    waited: float
    resumed: float
    done: float


class RecordedStep(NamedTuple):
    """The communication of one step of a rank; `gradients`: when they were complete, before the norm and the update."""

    step: int
    began: float
    gradients: float
    ended: float
    events: list[CommEvent]


class Interval(NamedTuple):
    """Compute of a traced step: an action of the pipeline (kind F, B, I or W), or a block of the model inside one."""

    name: str  # kind of an action; embedding, dense, moe or head
    stage: int
    microbatch: int
    start: float
    end: float


class TracedStep(NamedTuple):
    """One step with its actions and blocks; `updated`: when the optimizer had updated the parameters."""

    recorded: RecordedStep
    actions: list[Interval]
    blocks: list[Interval]
    updated: float


@dataclass(frozen=True)
class RankReport:
    """One rank's report after training: its pipeline stage, the peak memory of its tensors and of its process, the
    bytes it sends per step by axis, the shares of its token copies that a router's capacity kept and that went to other
    ranks (None if none can be dropped), the seconds that its threads computed during the steps after the first, the communication of the last
    timed steps, and the traced steps."""

    rank: int
    stage: int
    tensor_bytes: int
    process_bytes: int
    sent_bytes: dict[str, float]
    routing: tuple[float, float] | None = None
    cpu_s: float = 0.0
    recorded: tuple[RecordedStep, ...] = ()
    traced: tuple[TracedStep, ...] = ()


class Hook:
    """Overwrite the methods that are needed. `trainer` is a `loop.Trainer`, which imports this file."""

    def start(self, trainer: Any) -> None:
        """Before the first step."""

    def before_step(self, trainer: Any) -> None:
        """Before step `trainer.step`."""

    def after_gradients(self, trainer: Any) -> None:
        """After backward and reduction of gradients, before the norm and the update."""

    def after_step(self, trainer: Any, record: StepRecord) -> StepRecord | None:
        """After the update. The record that is returned goes to the next hook and to the caller; None keeps it."""
        return None

    def finish(self, trainer: Any) -> None:
        """After the last step."""
