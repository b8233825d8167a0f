"""Plan files written by earlier versions still load: every key keeps its name."""

import tomllib
from pathlib import Path

import pytest

from meshwright.describe.config import load

HERE = Path(__file__).parent / "written_before"
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("path", sorted(HERE.glob("*.toml")), ids=lambda path: path.name)
def test_an_old_plan_file_loads_with_the_same_values(path) -> None:
    config, written = load(path).check(), tomllib.loads(path.read_text("utf-8"))
    for name, value in written["plan"].items():
        now = getattr(config.plan, name)
        assert (list(now) if isinstance(now, tuple) else now) == value, name
    for section in ("workload", "stack", "model"):
        table = written[section] if isinstance(written[section], dict) else {}
        for name, value in table.items():
            if not isinstance(value, dict) and name != "extends":
                assert getattr(getattr(config, section), name) == value, name


def test_an_old_plan_file_round_trips_through_the_current_format(tmp_path) -> None:
    for path in HERE.glob("*.toml"):
        config = load(path)
        (tmp_path / path.name).write_text(config.to_toml(), "utf-8")
        assert load(tmp_path / path.name) == config


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.name)
def test_examples_load(path) -> None:
    load(path).check()
