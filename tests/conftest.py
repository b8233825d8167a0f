"""What all tests share: hypothesis without deadlines, and the seconds each folder took against its budget.

The whole suite has 15 minutes on two cores. A folder over its budget is told in red at the end of the run; it does not fail
the run, since machines differ, but it is the next thing to make cheaper. Long checks are marked `slow` and run by `make soak`.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).parent
BUDGET_S = {
    "tests": 30, "describe": 60, "programs": 60, "lower": 40, "cost": 60, "docs": 30, "calibrate": 60, "planner": 60, "view": 30,
    "models": 40, "parallel": 170, "comm": 40, "training": 60, "proof": 400, "cli": 60, "web": 20, "gpu": 0,
}  # fmt: skip

# A busy machine draws slowly: that is no fault of a test. Examples are the same in every run; `soak` looks further.
slow = [HealthCheck.too_slow]
settings.register_profile("frugal", deadline=None, max_examples=100, derandomize=True, suppress_health_check=slow)
settings.register_profile("soak", deadline=None, max_examples=5000, print_blob=True, suppress_health_check=slow)
settings.load_profile("frugal")

spent: dict[str, float] = defaultdict(float)


def folder(path: str) -> str:
    """The room a test stands in; files directly under tests/ count as "tests"."""
    parts = Path(path).parts
    return parts[1] if len(parts) > 2 and parts[0] == "tests" else "tests"


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    spent[folder(report.nodeid.partition("::")[0])] += report.duration


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if not spent:
        return
    terminalreporter.section("seconds by folder, of its budget")
    for name in sorted(spent, key=spent.__getitem__, reverse=True):
        over = spent[name] > BUDGET_S.get(name, 0)
        terminalreporter.write_line(f"{name:<12}{spent[name]:7.1f} of {BUDGET_S.get(name, 0)}", red=over)
    terminalreporter.write_line(f"{'all':<12}{sum(spent.values()):7.1f} of {sum(BUDGET_S.values())}")
