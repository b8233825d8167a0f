"""What hooks add to the steps of a run: metrics in the record, rows in the run folder, traces of torch's profiler."""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import ranks
from meshwright.describe.config import Config
from meshwright.describe.run_folder import read_events, read_steps
from meshwright.predict.prediction import predict
from meshwright.training.folder import RunFolder, StepWriter
from meshwright.training.hooks import StepRecord
from trace_format import problems

STEPS = 6


def configuration() -> Config:
    model = {"hidden": 32, "layers": 2, "heads": 2, "ffn": 64, "vocab": 256}
    workload = {"batch": 8, "seq": 16, "precision": "fp32"}
    plan = {"param_dtype": "fp32", "master": False, "replicate": 2, "tp": 2}
    return Config.from_parts(model, "laptop", "gloo-cpu", workload, plan)


def train(context: Any, config: Config, path: str) -> list[StepRecord]:
    """A few steps with all hooks, as a worker of `train` has them."""
    from meshwright.parallel.apply import apply
    from meshwright.training.data.samples import training_samples
    from meshwright.training.loop import Trainer
    from meshwright.training.measure.profile import Profiler
    from meshwright.training.measure.record_comm import CommRecorder
    from meshwright.training.measure.reports import Metrics

    folder = RunFolder.create(Path(path), config, predict(config), steps=STEPS) if context.rank == 0 else None
    if folder is not None:
        folder.begin_attempt(world=context.world, plan=config.plan.title())
    parallel = apply(config.model, config.plan, config.workload, context.rank)
    trainer = Trainer(parallel, training_samples(config, 0))
    with CommRecorder(trainer) as recorder:
        trainer.hooks += [Profiler(Path(path), 2, STEPS, folder), Metrics(config, recorder)]
        trainer.hooks += [StepWriter(folder)] if folder is not None else []
        return trainer.train(STEPS)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[StepRecord]]]:
    path = tmp_path_factory.mktemp("run")
    return path, ranks.run(4, train, configuration(), str(path))


def test_a_record_has_mfu_memory_and_exposed_communication(trained: tuple[Path, list[list[StepRecord]]]) -> None:
    path, records = trained
    p = predict(configuration())
    for record in records[0]:
        assert record.mfu == pytest.approx(p.mfu * p.step_time_s / record.seconds)
        assert record.memory_gib > 0.01
        assert set(record.exposed_s) == {"tp", "dp"}
        assert 0 < sum(record.exposed_s.values()) < record.seconds
    rates = [record.learning_rate for record in records[0]]
    assert rates == sorted(rates)  # warm-up
    assert rates[0] > 0
    assert [StepRecord.of_row(row) for row in read_steps(path)] == records[0]
    assert abs(read_steps(path)[-1]["time"] - time.time()) < 600


def test_profiles_are_traces_in_the_format_of_simulate(trained: tuple[Path, list[list[StepRecord]]]) -> None:
    """Of all four ranks, of which two are read. Steps 3 and 4, after three warm ones."""
    path, _ = trained
    assert sorted(file.name for file in (path / "profile").iterdir()) == [f"rank-{r}.json" for r in range(4)]
    for rank in (0, 1):
        trace = json.loads((path / "profile" / f"rank-{rank}.json").read_text())
        assert problems(trace) == []
        assert trace["otherData"]["steps"] == [3, 4]
        spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
        assert {event["pid"] for event in spans} == {rank}
        names = [event["name"] for event in spans]
        assert [name for name in names if name.startswith("step ")] == ["step 3", "step 4"]
        assert names.count("forward and backward") == names.count("norm and update") == 2
        assert "aten::mm" in names
        assert any(event["cat"] == "comm" for event in spans)
        streams = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
        assert "host" in streams
    (event,) = [event for event in read_events(path) if event["kind"] == "profile"]
    assert (event["step"], event["first_step"]) == (4, 3)


def test_skipped_and_evaluated_steps_are_events(tmp_path: Path) -> None:
    config = configuration()
    folder = RunFolder.create(tmp_path, config, predict(config))
    writer, record = StepWriter(folder), StepRecord(0, 5.0, 1.0, 128, 0.1)
    for one in (record, replace(record, step=1, updated=False), replace(record, step=2, validation_loss=4.5)):
        writer.after_step(None, one)
    assert [(event["kind"], event["step"]) for event in read_events(tmp_path)] == [("skipped", 1), ("evaluation", 2)]
