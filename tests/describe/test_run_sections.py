"""The sections [optimizer], [checkpoint] and [run]: defaults, round trip, options that have no effect, schedules of a known length."""

import pytest

from meshwright.describe.config import Config, configure, load
from meshwright.describe.optimizer import Optimizer
from meshwright.describe.run import Run
from meshwright.errors import MeshwrightError

RUN_FILE = """
model = "nano"
cluster = "laptop"
[optimizer]
learning_rate = 3e-4
schedule = "wsd"
betas = [0.9, 0.99]
on_nan = "skip"
[checkpoint]
every = 50
asynchronous = false
[run]
steps = 1_000
seed = 7
hang_s = "2min"
loggers = ["tensorboard"]
"""


def test_the_sections_are_read_and_written(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(RUN_FILE)
    config = load(path, ["run.spike=3", "checkpoint.keep=5"])
    assert config.optimizer == Optimizer(learning_rate=3e-4, schedule="wsd", betas=(0.9, 0.99), on_nan="skip")
    assert (config.checkpoint.every, config.checkpoint.keep, config.checkpoint.asynchronous) == (50, 5, False)
    assert config.run == Run(steps=1000, seed=7, hang_s=120.0, loggers=("tensorboard",), spike=3.0)
    path.write_text(config.to_toml())
    assert load(path) == configure(config) == config
    assert config.origin("run.spike") == "--set"


def test_a_plan_file_without_the_sections_has_defaults():
    config = Config.from_parts("nano", "laptop")
    assert (config.optimizer, config.run.steps, config.checkpoint.every) == (Optimizer(), 100, 0)
    assert not {"optimizer", "checkpoint", "run"} & set(config.to_toml().replace("[", "\n").split("]"))


def refused(**parts) -> MeshwrightError:
    with pytest.raises(MeshwrightError) as error:
        Config.from_parts("nano", "laptop", **parts)
    return error.value


@pytest.mark.parametrize(
    ("parts", "code", "fix"),
    [
        ({"optimizer": {"learning_rat": 1.0}}, "MW-CONF-001", "learning_rate"),
        ({"checkpoint": {"evry": 1}}, "MW-CONF-001", "every"),
        ({"run": {"step": 1}}, "MW-CONF-001", "steps"),
        ({"run": {"loggers": ["tensorbord"]}}, "MW-CONF-003", "tensorboard"),
        ({"run": {"spike": 0.5}}, "MW-CONF-003", "run.spike=3"),
        ({"optimizer": {"schedule": "cosin"}}, "MW-CONF-003", "cosine"),
        ({"optimizer": {"betas": [0.9, 1.0]}}, "MW-CONF-003", ""),
        ({"optimizer": {"decay_steps": 10}}, "MW-OPT-001", "schedule=cosine"),
        ({"optimizer": {"schedule": "cosine", "decay_start": 10}}, "MW-OPT-001", "schedule=wsd"),
        ({"optimizer": {"most_skips": 3}}, "MW-OPT-001", "on_nan=skip"),
    ],
)
def test_an_option_that_is_wrong_or_has_no_effect_is_refused(parts, code, fix):
    error = refused(**parts)
    assert error.code == code
    assert fix in error.fix


def test_a_schedule_keeps_its_length_when_the_run_becomes_longer():
    cosine = Optimizer(schedule="cosine", warmup=10).with_steps(100)
    assert cosine.decay_steps == 90
    assert cosine.with_steps(500) == cosine
    wsd = Optimizer(schedule="wsd", warmup=10).with_steps(200)
    assert (wsd.decay_start, wsd.decay_steps) == (180, 20)
    assert wsd.with_steps(500) == wsd
    assert Optimizer().with_steps(100) == Optimizer()
    assert Optimizer(schedule="wsd", warmup=10).with_steps(1).decay_start == 10  # a run shorter than its warm-up
