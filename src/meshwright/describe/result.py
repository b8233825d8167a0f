"""A prediction, a measurement, and the difference between them.

Both have the same fields, so a prediction can be subtracted from a measurement. A prediction always has a band, its assumptions and the
sources of its constants. A measurement has its number of steps, warm-up and spread; quantities that it could not observe are `None` or
empty. Field names are the JSON keys.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from math import isfinite

import numpy as np

from meshwright.units import Json

# --- How sure a plan is to fit: the chance that the measured peak memory stays below the memory of the device.
#
#     chance = F(capacity / predicted),    F: the distribution of measured / predicted peaks
#
# F comes from the published runs that report their memory, every source with the same weight (`QUANTILES`). Allocators fragment and libraries take
# workspaces, so it is not symmetric: one of twenty runs needs half as much again as predicted, almost none needs 10% less. Every
# command, the page and JSON say the same word:
#
#     fits             nine of ten such runs stay below the capacity
#     probably fits    5% of the memory is free, which `plan` demands of its winner: about six of ten
#     may not fit      the prediction is below the capacity, but not by 5%
#     does not fit     the prediction is above it

# Of measured / predicted. tests/calibrate/test_validate.py computes them from the published runs.
QUANTILES = {0.01: 0.85, 0.05: 0.93, 0.10: 0.95, 0.25: 1.00, 0.50: 1.02, 0.75: 1.08, 0.90: 1.22, 0.95: 1.50, 0.99: 1.66}
MEMORY_BAND = QUANTILES[0.05], QUANTILES[0.95]
USABLE_MEMORY = 0.95  # largest share of device memory that a safe plan uses
SURE = 0.90


def chance_to_fit(predicted: float, capacity: float) -> float:
    """Return the share of published runs whose measured peak would be within the capacity, from 1% to 99%."""
    if predicted <= 0:
        return 0.99
    return float(np.interp(capacity / predicted, list(QUANTILES.values()), list(QUANTILES)))


def fit_word(predicted: float, capacity: float) -> str:
    """Return "fits", "probably fits", "may not fit" or "does not fit"."""
    if predicted > capacity:
        return "does not fit"
    if chance_to_fit(predicted, capacity) >= SURE:
        return "fits"
    return "probably fits" if predicted <= USABLE_MEMORY * capacity else "may not fit"


def fit_words(predicted: float, capacity: float) -> str:
    """Return the word with its chance: "probably fits (62% chance)", "may not fit (40% chance that it does)", "does not fit (93% chance)"."""
    word, chance = fit_word(predicted, capacity), chance_to_fit(predicted, capacity)
    shown = {"may not fit": f"{chance:.0%} chance that it does", "does not fit": f"{1 - chance:.0%} chance"}
    return f"{word} ({shown.get(word, f'{chance:.0%} chance')})"


GIB = 2.0**30
AXES = ("tp", "cp", "ep", "pp", "dp")  # whose communication is a part of `exposed_s` each
MEASURED_PARTS = (*AXES, "bubble", "waiting", "optimizer")  # of `exposed_s`, which a run can tell apart
OVERHEAD = ("context", "slack")  # memory of the driver, the libraries and the allocator, without tensors


COMMUNICATION = {
    "tp": "tensor-parallel communication",
    "dp": "data-parallel communication",
    "cp": "context-parallel communication",
    "ep": "expert dispatch and combine",
    "pp": "pipeline messages",
}
# The parts of a step as every page, command and text names them; a part without an entry is named by its key.
PART_NAMES = {
    **COMMUNICATION,
    "bubble": "pipeline bubble of the busiest rank",
    "host": "waiting for the host",
    "interference": "slowed by overlap",
    "offload": "copies to and from the host",
    "copies": "copies of ZeRO-3 units",
    "overhead": "step overhead",
    "ffn": "FFN",
    "head": "head and loss",
    "linear": "linear mixers",
    "latent": "latent projections",
    "extra": "extra weights",
    "mtp": "multi-token prediction",
}
GROUPED_PARTS = (*COMMUNICATION, "bubble", "host", "optimizer", "overhead", "recompute", "interference", "offload")


def part_name(part: str) -> str:
    return PART_NAMES.get(part, part)


def part_label(part: str) -> str:
    """The name of a part of `exposed_s` in a list of differences."""
    return f"exposed {part}" if part in AXES else part


@dataclass(frozen=True)
class StepResult:
    """Step time and its parts, memory, traffic. `None` or empty means unknown.

    The parts are those of the busiest rank: `exposed_s["bubble"]` is its idle time, less than that of the other pipeline ranks, whose
    mean share of the schedule is the `bubble_fraction` of an estimate. `exposed_s` sums to `step_time_s`; `hidden_s` is communication by
    axis that ran behind compute. A prediction has compute by part; a measurement has `MEASURED_PARTS`, and all other time as `compute`."""

    step_time_s: float
    step_time_low_s: float
    step_time_high_s: float
    exposed_s: dict[str, float] = field(default_factory=dict)
    hidden_s: dict[str, float] = field(default_factory=dict)
    busy_s: dict[str, float] = field(default_factory=dict)
    memory_gib: float | None = None
    memory_by_stage: list[dict[str, float]] = field(default_factory=list)
    traffic_bytes: dict[str, float] = field(default_factory=dict)
    mfu: float | None = None
    hfu: float | None = None
    mfu_denominator: str = ""
    tokens_per_s: float | None = None
    bound_by: str = ""
    assumed: list[str] = field(default_factory=list)

    @property
    def tensors_gib(self) -> list[float]:
        """Peak memory of tensors on each pipeline rank; empty if memory is unknown. Process memory is not comparable: on
        a CPU it is mostly the interpreter and its libraries, on a GPU the driver's context is outside the allocator."""
        tensors = [stage.get("tensors") for stage in self.memory_by_stage]
        parts = [{p: x for p, x in stage.items() if p not in OVERHEAD} for stage in self.memory_by_stage]
        return [sum(p.values()) if t is None else t for t, p in zip(tensors, parts, strict=True)]

    @property
    def fullest_stage(self) -> int:
        """The stage that needs the most memory."""
        return max(range(len(self.memory_by_stage)), key=lambda s: sum(self.memory_by_stage[s].values()))

    @property
    def parts(self) -> dict[str, float]:
        """`exposed_s` in the parts that a measurement has; empty if unknown."""
        out: dict[str, float] = {"compute": 0.0} if self.exposed_s else {}
        for part, seconds in self.exposed_s.items():
            name = part if part in MEASURED_PARTS else "compute"
            out[name] = out.get(name, 0.0) + seconds
        return out

    def as_dict(self) -> Json:
        return asdict(self)


@dataclass(frozen=True)
class Prediction(StepResult):
    """The result of the cost model. `exposed_s` sums exactly to `step_time_s`."""

    traffic_by_level: list[Json] = field(default_factory=list)  # rows with axis, level, ranks and bytes
    fits: bool = True
    memory_limit_gib: float = 0.0
    checkpoint_gib: dict[str, float] = field(default_factory=dict)  # at a save and a load (`cost.checkpoint`)

    @property
    def fit_word(self) -> str:
        return fit_word(self.memory_gib or 0.0, self.memory_limit_gib)

    @property
    def memory_fit(self) -> str:
        """Whether the plan fits, with its chance: "probably fits (62% chance)"."""
        return fit_words(self.memory_gib or 0.0, self.memory_limit_gib)

    def as_dict(self) -> Json:
        chance = chance_to_fit(self.memory_gib or 0.0, self.memory_limit_gib)
        return super().as_dict() | {"memory_fit": self.fit_word, "fit_chance": chance}

    def memory_as(self, quantity: str, stage: int | None = None) -> float:
        """Peak memory in GiB, as a tool reports it: `allocated` (torch's live tensors), `reserved` (with what the allocator holds in
        fragments), or `used` (with the driver's context and the libraries, as nvidia-smi shows). `stage`: 0 is the first pipeline stage, −1
        the last; default: the fullest."""
        hidden = {"allocated": OVERHEAD, "reserved": ("context",), "used": ()}[quantity]
        sizes = [sum(x for part, x in parts.items() if part not in hidden) for parts in self.memory_by_stage]
        return max(sizes) if stage is None else sizes[stage]

    calibrated: str = "uncalibrated"
    sources: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Measurement(StepResult):
    """The result of a run: the median of `steps` after `warmup`; low and high are the 10th and 90th percentiles."""

    steps: int = 0
    warmup: int = 0
    spread: float = 0.0
    loss: list[float] = field(default_factory=list)
    validation_loss: list[tuple[int, float]] = field(default_factory=list)  # (step, loss) of each evaluation
    kept_copies: float | None = None  # share of token copies that the routers' capacity kept; None if it drops none
    crossing_copies: float | None = None  # share of them that the rank with the most traffic exchanged with other ranks

    def as_dict(self) -> Json:
        """All fields; a loss that is NaN or infinite becomes null, because JSON cannot represent it."""
        return super().as_dict() | {
            "loss": [loss if isfinite(loss) else None for loss in self.loss],
            "validation_loss": [[step, loss if isfinite(loss) else None] for step, loss in self.validation_loss],
        }

    def __sub__(self, prediction: Prediction) -> list[Difference]:
        """Predicted and measured values of every quantity that both results have."""
        return self.compare(prediction)

    def compare(self, prediction: Prediction, routed_traffic: dict[str, float] | None = None) -> list[Difference]:
        """As `self - prediction`. `routed_traffic` is the predicted traffic for the shares of token copies that the run's
        routers kept and sent to other ranks; rows that it changes say so."""
        rows = [Difference("step time", "s", prediction.step_time_s, self.step_time_s)]
        predicted_parts, measured_parts = prediction.parts, self.parts
        for part in dict.fromkeys((*predicted_parts, *measured_parts)) if predicted_parts and measured_parts else ():
            seconds = predicted_parts.get(part, 0.0), measured_parts.get(part, 0.0)
            if any(seconds):
                rows.append(Difference(part_label(part), "s", *seconds))
        if self.tensors_gib and prediction.tensors_gib:
            rows.append(Difference("peak memory of tensors", "GiB", max(prediction.tensors_gib), max(self.tensors_gib)))
        if self.tokens_per_s is not None and prediction.tokens_per_s is not None:
            rows.append(Difference("throughput", "tokens/s", prediction.tokens_per_s, self.tokens_per_s))
        if self.mfu is not None and prediction.mfu is not None:
            rows.append(Difference("MFU", "%", 100 * prediction.mfu, 100 * self.mfu))
        for axis in sorted(set(self.traffic_bytes) | set(prediction.traffic_bytes)):
            predicted, measured = prediction.traffic_bytes.get(axis, 0.0), self.traffic_bytes.get(axis, 0.0)
            what = f"traffic {axis}"
            if routed_traffic is not None and self.kept_copies is not None and routed_traffic.get(axis) != predicted:
                predicted = routed_traffic.get(axis, 0.0)
                crossing = f", {self.crossing_copies:.0%} to other ranks" if axis == "ep" else ""
                what += f" ({self.kept_copies:.0%} of token copies kept{crossing})"
            if predicted or measured:
                rows.append(Difference(what, "bytes", predicted, measured))
        return rows


@dataclass(frozen=True)
class Difference:
    """One quantity, predicted and measured."""

    what: str
    unit: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Signed error of the prediction relative to the measurement; 0 if both are 0."""
        if self.measured == 0:
            return 0.0 if self.predicted == 0 else float("inf")
        return self.predicted / self.measured - 1


def values_of(result: object, *names: str) -> Json:
    """Some attributes of a result by their names, as keys of JSON."""
    return {name: getattr(result, name) for name in names}
