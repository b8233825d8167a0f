"""A training from its parent: start the ranks, hear the steps, measure, and hold the measurement to the prediction.

The measurement is the median step after warm-up, with the 10th and 90th percentile as its band; it has the prediction's
shape, so that the two subtract. Into the run folder go `measurement.json`, `prediction.json`, `difference.json`,
`steps.csv`, `plan.toml` and each rank's log.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.cost.predict import predict
from meshwright.cost.recompute import resolve_recompute
from meshwright.describe.config import Config
from meshwright.describe.result import GIB, Difference, Measurement, Prediction
from meshwright.errors import MeshwrightError
from meshwright.parallel.supported import check_supported
from meshwright.training import launch
from meshwright.training.records import RankReport, Settings, StepRecord
from meshwright.units import format_flops

TARGET = "meshwright.training.work:work"
SILENCE_S = 600.0
RUNNABLE = ("fp32", "fp64", "bf16", "fp16")


@dataclass
class Training:
    """What a run left: its steps, what it measured, what had been predicted."""

    config: Config
    steps: list[StepRecord]
    measurement: Measurement
    prediction: Prediction

    @property
    def differences(self) -> list[Difference]:
        return self.measurement - self.prediction

    def as_dict(self) -> dict[str, Any]:
        return {
            "plan": self.config.plan.title(),
            "not_run": list(self.config.model.not_run),
            "router": self.steps[-1].router if self.steps else {},  # of models with experts, at the end
            "measurement": self.measurement.as_dict(),
            "prediction": self.prediction.as_dict(),
            "difference": [{**asdict(d), "error": d.error if np.isfinite(d.error) else None} for d in self.differences],
        }


def run_training(
    config: Config,
    steps: int,
    *,
    seed: int = 0,
    settings: Settings | None = None,
    device: str = "cpu",
    folder: Path | None = None,
    listen: Callable[[StepRecord], None] | None = None,
) -> Training:
    check(config, steps)
    memory = config.cluster.accelerator.memory
    config = replace(config, plan=resolve_recompute(config.model, config.plan, config.workload, config.stack, memory))
    records: list[StepRecord] = []

    def hear(rank: int, message: dict[str, Any]) -> None:
        records.append(StepRecord(**message))
        if listen is not None:
            listen(records[-1])

    reports = launch.run(
        TARGET,
        config.plan.world,
        config,
        steps,
        seed,
        settings or Settings(),
        silence=SILENCE_S,
        group_timeout=SILENCE_S,
        folder=folder,
        listen=hear,
        device=device,
    )
    training = Training(config, records, measure(config, records, reports), predicted(config))
    if folder is not None:
        save(training, folder)
    return training


def check(config: Config, steps: int) -> None:
    if config.plan.param_dtype not in RUNNABLE:
        raise MeshwrightError(
            "MW-TRAIN-001",
            f"plan.param_dtype={config.plan.param_dtype} is planned and costed, not run",
            valid=RUNNABLE,
            fix="--set plan.param_dtype=fp32 --set plan.master=false",
        )
    dtype, precision = config.plan.param_dtype, config.workload.precision
    products = (dtype, "fp8", *(["tf32"] if dtype == "fp32" else []))
    if precision not in products:
        raise MeshwrightError(
            "MW-TRAIN-001",
            f"workload.precision={precision} with plan.param_dtype={dtype} is planned and costed, not run",
            why="Products are made in the parameters' dtype, or in fp8",
            valid=products,
            fix=f"--set workload.precision={dtype}",
        )
    check_supported(config.model, config.plan)
    config.check()


def predicted(config: Config) -> Prediction:
    return predict(config.model, config.cluster, config.plan, config.workload, config.stack)


def measure(config: Config, records: list[StepRecord], reports: list[RankReport]) -> Measurement:
    warmup = min(10, len(records) // 4)
    seconds = np.array([r.seconds for r in records[warmup:]])
    low, middle, high = np.percentile(seconds, (10, 50, 90))
    model, workload = config.model, config.workload
    samples = workload.tokens_per_step if model.kind == "transformer" else workload.batch
    peak = config.cluster.accelerator.peak_for(workload.precision)
    stages = sorted({report.stage for report in reports})
    by_stage = [
        {
            "tensors": max(r.tensor_bytes for r in reports if r.stage == s) / GIB,
            "process": max(r.process_bytes for r in reports if r.stage == s) / GIB,
        }
        for s in stages
    ]
    axes = dict.fromkeys(axis for report in reports for axis in report.sent_bytes)
    return Measurement(
        step_time_s=float(middle),
        step_time_low_s=float(low),
        step_time_high_s=float(high),
        memory_gib=max(stage["process"] for stage in by_stage),
        memory_by_stage=by_stage,
        traffic_bytes={axis: max(r.sent_bytes.get(axis, 0.0) for r in reports) for axis in axes},
        mfu=model.model_flops(workload.seq) * samples / (float(middle) * config.plan.world * peak),
        mfu_denominator=f"{config.plan.world} × {format_flops(peak)} of {config.cluster.accelerator.name}",
        tokens_per_s=samples / float(middle),
        steps=len(records),
        warmup=warmup,
        spread=float((high - low) / middle),
        loss=[r.loss for r in records],
        assumed=[
            "memory is the whole process's, libraries included",
            "traffic is what the step's collectives must send",
        ],
    )


def save(training: Training, folder: Path) -> None:
    told = training.as_dict()
    for name in ("measurement", "prediction", "difference"):
        (folder / f"{name}.json").write_text(json.dumps(told[name], indent=2), "utf-8")
    (folder / "plan.toml").write_text(training.config.to_toml(), "utf-8")
    with (folder / "steps.csv").open("w", newline="", encoding="utf-8") as file:
        rows = [record.row() for record in training.steps]
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
