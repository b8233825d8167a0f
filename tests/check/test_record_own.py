"""Our own trainer under the recorder: its pieces say what a rank holds, and its step program which collectives there must be."""

from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import ranks
from meshwright.check.compare import compare
from meshwright.check.expected import against_plan, between_members
from meshwright.check.folder import Recording
from meshwright.check.page import findings_page
from meshwright.check.recorder import StepRecorder
from meshwright.describe.config import Config, configure
from meshwright.parallel.apply import apply
from meshwright.training.data.samples import RandomSamples
from meshwright.training.loop import Trainer
from ranks import soak

SHAPE = {"name": "toy", "layers": 4, "hidden": 32, "heads": 4, "ffn": 64, "vocab": 96, "tied": False}
WIDE = {"param_dtype": "fp64", "grad_dtype": "fp64", "state_dtype": "fp64", "master": False}
EXPERTS = {"experts": 4, "top_k": 2}


def config_of(plan: dict[str, Any], **model: Any) -> Config:
    workload = {"batch": 8, "seq": 16, "precision": "fp64"}
    return configure(SHAPE | model, "laptop", stack="meshwright", workload=workload, plan=WIDE | plan)


def recorded(context: Any, out: Path, config: Config) -> None:
    import torch

    parallel = apply(config.model, config.plan, config.workload, context.rank, dtype=torch.float64)
    recorder = StepRecorder(str(out))
    recorder.attach()
    Trainer(parallel, RandomSamples(config.model, config.workload.seq, 1)).train(2)
    recorder.close()


def record(out: Path, config: Config) -> Recording:
    ranks.run(config.plan.world, recorded, out, config, backend="gloo")
    return Recording.read(out)


PLANS = [
    {"shard": 2, "zero": 3, "microbatch": 2},
    *soak(
        [
            {"replicate": 2, "tp": 2, "sp": True, "microbatch": 2}, {"shard": 2, "zero": 1, "tp": 2, "microbatch": 2}, {"pp": 2, "microbatch": 2},
            {"pp": 2, "replicate": 2, "schedule": "interleaved", "virtual": 2, "microbatch": 1}, {"cp": 2, "microbatch": 4},
        ]
    ),
]  # fmt: skip


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_our_trainer_equals_one_device(tmp_path: Path, plan: dict[str, Any]) -> None:
    config = config_of(plan)
    one, many = record(tmp_path / "one", config_of({"microbatch": 2})), record(tmp_path / "many", config)
    comparison = compare(one, many)
    assert comparison.verdict == "equal within rounding", (comparison.differences[:3], comparison.diagnosis)
    assert comparison.compared["gradient"] == comparison.compared["parameter"] == 2 * 39
    assert comparison.compared["state exp_avg"] == 2 * 39
    assert not comparison.unmapped, comparison.unmapped
    steps = many.step(1)
    assert list(between_members(many, steps)) == []
    assert [f for f in against_plan(many, steps, config) if f.kind != "note"] == []
    for settings, verdict in (("", "the ranks issue the same"), ("plan.toml", "the collectives that must be there")):
        printed = Console(width=200, record=True, file=StringIO())
        printed.print(findings_page(many, 1, [], settings))
        shown = printed.export_text()
        assert f"✓ {verdict}" in shown
        assert ("no rank issues" in shown) == (not settings)
