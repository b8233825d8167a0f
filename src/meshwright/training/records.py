"""The records that ranks send to their parent process: plain data, no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

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
    updated: bool = True  # False if gradients overflowed in fp16 and the update was skipped

    def row(self) -> dict[str, float]:
        """One number per column; a model with experts adds entropy, peak, idle and dropped shares of its router."""
        plain = {name: value for name, value in asdict(self).items() if name != "router"}
        return {**plain, **{f"router_{name}": value for name, value in self.router.items()}}


@dataclass
class Observed:
    """What `Observer` saw in one step. `collectives`: by (axis, operation), their number and the sum of n in bytes.
    `unknown`: operators of the c10d namespace that it cannot read."""

    collectives: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    peak_bytes: int = 0
    unknown: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class RankReport:
    """What a rank reports after training: its pipeline stage, the peak memory of its tensors and of its process, the
    bytes it sends per step by axis, the share of its token copies that a router's capacity kept (None if none can
    be dropped), and the seconds that its threads computed during the steps after the first."""

    rank: int
    stage: int
    tensor_bytes: int
    process_bytes: int
    sent_bytes: dict[str, float]
    kept_copies: float | None = None
    cpu_s: float = 0.0


@dataclass(frozen=True)
class Settings:
    """Hyperparameters of the optimizer, which a plan does not contain."""

    learning_rate: float = 1e-3
    warmup: int = 10
    betas: tuple[float, float] = (0.9, 0.95)
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    momentum: float = 0.9
    clip: float = 1.0
