"""A loop in user code: short, and it trains what `train` trains, under a plan with a pipeline and ZeRO too."""

import contextlib
import io
import os
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

import ranks
from meshwright.describe.config import Config, load

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "own_loop.py"
STEPS = 4


def code() -> str:
    """The example without its docstring."""
    return EXAMPLE.read_text("utf-8").rpartition('"""\n\n')[2]


def test_the_loop_is_shorter_than_twenty_lines_and_documented() -> None:
    lines = [line for line in code().splitlines() if line and not line.startswith(("import ", "from "))]
    assert len(lines) < 20
    assert code() in (ROOT / "docs" / "runs.md").read_text("utf-8")


def run_both(context: Any, file: str) -> tuple[str, list[tuple[float, float]]]:
    """What the example prints in a rank that is already in a process group, as Ray starts it; losses and norms of the trainer."""
    os.environ |= {"RANK": str(context.rank), "WORLD_SIZE": str(context.world), "LOCAL_RANK": str(context.rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    sys.argv = [str(EXAMPLE), file]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    from meshwright.parallel.apply import apply
    from meshwright.training.data.samples import training_samples
    from meshwright.training.loop import Trainer

    config = load(file)
    parallel = apply(config.model, config.plan, config.workload, context.rank)
    trainer = Trainer(parallel, training_samples(config, config.run.seed), config.optimizer)
    records = trainer.train(config.run.steps)
    return printed.getvalue(), [(record.loss, record.gradient_norm) for record in records]


@pytest.mark.parametrize(
    "plan", [pytest.param({"replicate": 2, "tp": 2}, marks=pytest.mark.slow), {"pp": 2, "shard": 2, "zero": 2}]
)
def test_it_trains_what_the_trainer_trains(plan: dict[str, int], tmp_path: Path) -> None:
    model = {"hidden": 32, "layers": 2, "heads": 2, "ffn": 64, "vocab": 256}
    workload = {"batch": 8, "seq": 16, "precision": "fp32"}
    kept = {"param_dtype": "fp32", "master": False, "microbatch": 2}
    config = Config.from_parts(model, "laptop", "gloo-cpu", workload, {**kept, **plan}, run={"steps": STEPS})
    file = tmp_path / "run.toml"
    file.write_text(config.to_toml())
    (printed, expected), (silent, _), *_ = ranks.run(4, run_both, str(file))
    found = [tuple(map(float, pair)) for pair in re.findall(r"loss ([\d.]+), gradient norm ([\d.]+)", printed)]
    assert len(found) == STEPS
    for (loss, norm), (other_loss, other_norm) in zip(found, expected, strict=True):
        assert loss == pytest.approx(other_loss, abs=1e-6)  # printed with six decimals
        assert norm == pytest.approx(other_norm, abs=1e-4)
    assert silent == ""
