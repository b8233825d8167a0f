"""What passes between a training's ranks and their parent: plain data, no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field


@dataclass(frozen=True)
class StepRecord:
    step: int
    loss: float
    gradient_norm: float
    tokens: int
    seconds: float
    router: dict[str, float] = field(default_factory=dict)  # how evenly experts are used, in the worst layer
    taken: bool = True  # not where gradients overflowed and the step was skipped

    def row(self) -> dict[str, float]:
        """One number a column; of a model with experts their entropy, peak, idle and dropped share as well."""
        plain = {name: value for name, value in asdict(self).items() if name != "router"}
        return {**plain, **{f"router_{name}": value for name, value in self.router.items()}}


@dataclass
class Observed:
    """By (axis, operation): how many and how many bytes of n. `unknown` lists operators the witness cannot read."""

    collectives: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    peak_bytes: int = 0
    unknown: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class RankReport:
    """What a rank knows after a training: its stage, the most memory its tensors and it as a process took, the bytes it
    sends a step by axis."""

    rank: int
    stage: int
    tensor_bytes: int
    process_bytes: int
    sent_bytes: dict[str, float]


@dataclass(frozen=True)
class Settings:
    """Of the optimizer: what a plan does not say."""

    learning_rate: float = 1e-3
    warmup: int = 10
    betas: tuple[float, float] = (0.9, 0.95)
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    momentum: float = 0.9
    clip: float = 1.0
