"""What a run measured, and how it differs from its prediction.

The measurement is the median step after warm-up, with the 10th and 90th percentile as its band; it has the same fields
as the prediction, so that the two subtract. After an interruption, and after a restart, it is that of the steps since then.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from math import isfinite
from pathlib import Path

import numpy as np

from meshwright.calibrate.machine import MachineMeasurement
from meshwright.calibrate.points import IDLE_SHARE
from meshwright.comm.bench.timing import ClockReading, busy_cores
from meshwright.describe.config import Config
from meshwright.describe.result import GIB, Difference, Measurement, Prediction
from meshwright.describe.run_folder import PROFILE, RUN, read_steps
from meshwright.describe.shown import Shown
from meshwright.predict.prediction import predict, samples_per_step, seconds_at_peak
from meshwright.training.folder import RunFolder
from meshwright.training.hooks import RankReport, StepRecord
from meshwright.training.measure import communication, timeline
from meshwright.training.measure.calibration import Interference, has_given_links, with_this_machine
from meshwright.training.measure.timeline import GroupTime
from meshwright.units import Json, format_flops, format_seconds
from meshwright.view.trace import both_steps

TRAFFIC_COUNTED = "traffic of one step: bytes that our backend sent; on gloo and NCCL what a bandwidth-optimal algorithm sends in the group of a call"


@dataclass(repr=False)
class Training(Shown):
    """The result of a run: its steps, its measurement and its prediction."""

    config: Config
    steps: list[StepRecord]
    measurement: Measurement
    prediction: Prediction
    device: str = "cpu"
    predicted_from: str = ""  # where the constants of a cluster that is not the catalog's come from
    interference: Interference | None = None  # unknown without a calibration of this machine
    communication: Json | None = None  # by rank; unknown after an interruption
    timeline: Json | None = None
    kernels: list[GroupTime] = field(default_factory=list)  # of profiled steps on a GPU
    asked_for: str = ""  # the user's plan, if the run has another one for the number of ranks that it has
    uncalibrated: str = ""  # why this machine could not be calibrated

    def __repr__(self) -> str:
        return f"Training({self.config.plan.title()}, {len(self.steps)} steps, {self.measurement.step_time_s:.4g} s per step)"

    @property
    def differences(self) -> list[Difference]:
        """Predicted and measured values. Where a router's capacity drops token copies, only the run knows which: the
        traffic is predicted again for the shares that were kept and sent to other ranks, so that both are of the same copies."""
        kept, crossing = self.measurement.kept_copies, self.measurement.crossing_copies
        routed = None if kept is None or crossing is None else routed_traffic(self.config, kept, crossing)
        return self.measurement.compare(self.prediction, routed)

    @property
    def diverged_at(self) -> int | None:
        """The first step whose loss is NaN or infinite."""
        return next((record.step for record in self.steps if not isfinite(record.loss)), None)

    @property
    def comparable(self) -> bool:
        """Whether the run used the kind of device that the prediction is for."""
        return self.device != "cpu" or self.config.cluster.accelerator.name == "cpu"

    def trace(self) -> Json:
        """A measured and the simulated step in the trace-event format, for Perfetto; without events if none was traced."""
        return both_steps(self.timeline, {"plan": self.config.plan.title()})

    def as_dict(self) -> Json:
        return {
            "plan": self.config.plan.title(),
            "asked_for": self.asked_for or self.config.plan.title(),
            "uncalibrated": self.uncalibrated or None,
            "not_run": list(self.config.model.not_run),
            "device": self.device,
            "diverged_at_step": self.diverged_at,
            "interference": {**asdict(self.interference), "busy": self.interference.busy}
            if self.interference
            else None,
            "kernels": [asdict(group) for group in self.kernels],  # of profiled steps on a GPU
            "router": self.steps[-1].router if self.steps else {},  # of the last step, for models with experts
            "measurement": self.measurement.as_dict(),
            "prediction": self.prediction.as_dict(),
            "difference": [{**asdict(d), "error": d.error if np.isfinite(d.error) else None} for d in self.differences],
        }


def file_of_links(config: Config) -> str:
    """The file that the links of the cluster come from, or the cluster's name."""
    origin = config.origin("cluster.levels.0.name")
    return re.sub(r":\d+$", "", origin) if ".toml" in origin else config.cluster.name


def routed_traffic(config: Config, kept: float, crossing: float) -> dict[str, float]:
    """Predicted traffic by axis if routers keep one share of the token copies and send another to other ranks. A capacity below 1 keeps at most
    itself, and of that an even routing sends 1 − 1/ep to other ranks."""

    def traffic(share: float) -> dict[str, float]:
        router = config.model.router.but(capacity=max(share, 1e-9))  # 0 is no limit
        return predict(config.but(model=config.model.but(router=router))).traffic_bytes

    ep = config.plan.ep
    return traffic(kept) | ({"ep": traffic(crossing / (1 - 1 / ep))["ep"]} if ep > 1 else {})


def routing_of_busiest(reports: list[RankReport]) -> tuple[float | None, float | None]:
    """The share of token copies kept by the pipeline stage that sends the most bytes to experts, and the share that its busiest rank sent to other
    ranks."""
    routed = [r for r in reports if r.routing is not None]
    if not routed:
        return None, None
    busiest = max(routed, key=lambda r: r.sent_bytes.get("ep", 0.0))
    kept = [r.routing[0] for r in routed if r.routing is not None and r.stage == busiest.stage]
    return float(np.mean(kept)), busiest.routing[1] if busiest.routing is not None else None


class LoadWatch:
    """The prediction of a run for the load on this machine before it, and the load during its steps. `predicted_from` says where the
    constants come from if the user gave the links; it is empty for those of the catalog and of this machine. `uncalibrated`: why there is
    no calibration, if it failed."""

    def __init__(self, config: Config, machine: MachineMeasurement | None, uncalibrated: str = "") -> None:
        self.plain, self.machine, self.uncalibrated, self.before = config, machine, uncalibrated, 0.0
        self.first: ClockReading | None = None
        self.last: ClockReading | None = None
        given = has_given_links(config.cluster)
        if machine is None:
            self.config, self.prediction = config, predict(config.but(assumed=(uncalibrated,) if uncalibrated else ()))
            self.predicted_from = file_of_links(config) if given else ""
            return
        still_idle = IDLE_SHARE * machine.cores
        idle, self.before = with_this_machine(config, machine), busy_cores(still_idle)
        self.idle_s = predict(idle).step_time_s
        busy = self.before if self.before > still_idle else 0.0
        self.config = with_this_machine(config, machine, busy) if busy else idle
        source = self.config.cluster.source
        self.predicted_from = f"the links of {file_of_links(config)} and the device of this machine" if given else ""
        assumed = [source if given else f"device, links and host times: {source}"]
        if busy:
            assumed.append(
                f"other processes keep using {busy:.1f} of {machine.cores:g} cores; idle: {format_seconds(self.idle_s)}"
            )
        self.prediction = predict(self.config.but(assumed=tuple(assumed)))

    def begin(self) -> None:
        """The first step has ended: from now on the load is measured."""
        self.first = self.last = ClockReading.read()

    def end(self) -> None:
        """The last step has ended."""
        self.last = ClockReading.read()

    def interference(self, reports: list[RankReport]) -> Interference | None:
        """Return the load of other processes; the load during the run is known only once all ranks have reported."""
        if self.machine is None:
            return None
        during = loaded = None
        if reports and self.first is not None and self.last is not None and self.last.wall > self.first.wall:
            during = self.last.busy_cores_since(self.first, sum(r.cpu_s for r in reports))
            loaded = predict(with_this_machine(self.plain, self.machine, during)).step_time_s
        return Interference(self.machine.cores, self.before, during, self.idle_s, loaded)


def warmup_of(records: list[StepRecord]) -> int:
    """The number of first steps that are not measured."""
    return min(10, len(records) // 4)


def measure(
    config: Config,
    records: list[StepRecord],
    reports: list[RankReport],
    steps: int,
    ranks: Sequence[communication.RankParts] = (),
    earlier: int = 0,
) -> Measurement:
    """The measurement of a run of `steps` steps. After an interruption there are fewer records and no reports, and so
    no memory, no traffic and no parts. The parts have the shares of the mean step, and sum to the median one. The first `earlier`
    records are those of earlier attempts, which may have had another number of ranks: their times do not count. Of a run too short for
    warm-up, the first step counts without the seconds of the compiler, which no later step would have."""
    warmup = earlier + warmup_of(records[earlier:])
    seconds = np.array([r.seconds_without_compilation for r in records[warmup:]])
    low, middle, high = np.percentile(seconds, (10, 50, 90))
    peak = config.cluster.accelerator.peak_for(config.workload.precision)
    by_stage = []
    for stage in sorted({report.stage for report in reports}):
        sizes = [(r.tensor_bytes, r.process_bytes) for r in reports if r.stage == stage]
        tensors, process = (max(side) / GIB for side in zip(*sizes, strict=True))
        by_stage.append({"tensors": tensors, "process": process})
    axes = dict.fromkeys(axis for report in reports for axis in report.sent_bytes)
    assumed = [TRAFFIC_COUNTED]
    exposed_s, hidden_s = {}, {}
    if ranks:
        busiest = communication.busiest(ranks)
        scale = float(middle) / busiest.step_s
        exposed_s, hidden_s = ({p: s * scale for p, s in of.items()} for of in (busiest.exposed_s, busiest.hidden_s))
    if compiled := sum(r.compile_s or 0.0 for r in records[warmup:]):
        assumed.append(f"without {format_seconds(compiled)} of compilation in the first step")
    if len(records) < steps:
        assumed.append(f"interrupted after {len(records)} of {steps} steps")
    kept, crossing = routing_of_busiest(reports)
    return Measurement(
        step_time_s=float(middle),
        step_time_low_s=float(low),
        step_time_high_s=float(high),
        exposed_s=exposed_s,
        hidden_s=hidden_s,
        memory_gib=max((stage["process"] for stage in by_stage), default=None),
        memory_by_stage=by_stage,
        traffic_bytes={axis: max(r.sent_bytes.get(axis, 0.0) for r in reports) for axis in axes},
        mfu=seconds_at_peak(config) / float(middle),
        mfu_denominator=f"{config.plan.world} × {format_flops(peak)} of {config.cluster.accelerator.name}",
        tokens_per_s=samples_per_step(config) / float(middle),
        steps=len(records),
        warmup=warmup,
        spread=float((high - low) / middle),
        loss=[r.loss for r in records],
        validation_loss=[(r.step, r.validation_loss) for r in records if r.validation_loss is not None],
        kept_copies=kept,
        crossing_copies=crossing,
        assumed=assumed,
    )


def conclude(
    config: Config, folder: RunFolder, reports: list[RankReport], steps: int, device: str, watch: LoadWatch
) -> Training:
    """The result of a run, from the rows of its folder and the reports of its ranks (none if it was stopped); written to the folder."""
    rows = folder.rows()
    records = [StepRecord.of_row(row) for row in rows]
    attempt = max((row.get("attempt", 0) for row in rows), default=0)
    earlier = sum(row.get("attempt", 0) < attempt for row in rows)
    first = records[earlier].step + warmup_of(records[earlier:]) if records else 0
    ranks = communication.by_rank(config, reports, first)
    training = Training(
        config,
        records,
        measure(config, records, reports, steps, ranks, earlier),
        watch.prediction,
        device.partition(":")[0],
        watch.predicted_from,
        watch.interference(reports),
        communication.as_json(ranks, watch.prediction, len(reports[0].recorded)) if ranks else None,
        timeline.both_steps(config, reports),
        profiled_kernels(config, folder.path, device),
        folder.aim,
        watch.uncalibrated,
    )
    contents = training.as_dict() | {"communication": training.communication, "timeline": training.timeline}
    for name in ("measurement", "difference", "interference", "communication", "timeline", "kernels"):
        content = contents[name]
        if content is not None and (content or name != "kernels"):
            folder.save(name, content, indent=None if name == "timeline" else 2)
    return training


def profiled_kernels(config: Config, folder: Path, device: str) -> list[GroupTime]:
    """Time by group of kernels in the profiled steps of rank 0, on a GPU."""
    trace = folder / PROFILE / "rank-0.json"
    if not device.startswith("cuda") or not trace.is_file():
        return []
    seconds = timeline.of_trace(json.loads(trace.read_text("utf-8")))
    return timeline.compare(config, seconds) if seconds else []


def conclude_interrupted(path: Path, config: Config, steps: int, device: str, watch: LoadWatch, cause: str) -> None:
    """Measure the steps until a run was stopped or failed for the last time, unless rank 0 has done it."""
    if not (path / RUN).is_file() or (path / "measurement.json").is_file():
        return
    folder = RunFolder.reopen(path, config, watch.prediction)
    try:
        if read_steps(path):
            conclude(config, folder, [], steps, device, watch)
        folder.end_attempt(cause)
    finally:
        folder.close()
