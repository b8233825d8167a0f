"""Settings of all tests: hypothesis without deadlines, the division of tests over two workers, seconds by folder.

`make test` runs two workers (pytest-xdist) and has a budget of 8 minutes on two idle cores. The tests of a file run on one
worker, since they share computed results; the matrix defines smaller groups, one per set of processes. At the end of a run the
seconds of each folder are printed with their budget, in red if they exceed it. This does not fail the run, since machines differ,
but that folder should be made cheaper next. Long checks are marked `slow` and run by `make soak`.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

BUDGET_S = {
    "tests": 30, "describe": 60, "programs": 60, "lower": 40, "cost": 60, "docs": 30, "calibrate": 60, "planner": 80, "view": 30,
    "models": 40, "parallel": 200, "comm": 40, "training": 60, "proof": 300, "cli": 60, "web": 20, "gpu": 0,
}  # fmt: skip

# A slow draw on a busy machine is not the test's fault. Examples are the same in every run; `soak` draws other ones.
slow = [HealthCheck.too_slow]
settings.register_profile("frugal", deadline=None, max_examples=60, derandomize=True, suppress_health_check=slow)
settings.register_profile("soak", deadline=None, max_examples=5000, print_blob=True, suppress_health_check=slow)
settings.load_profile("frugal")

spent: dict[str, float] = defaultdict(float)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run all tests of a file on one worker, unless a test defines another group."""
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))


def folder(path: str) -> str:
    """The folder of a test under tests/; files directly under tests/ count as "tests"."""
    parts = Path(path).parts
    return parts[1] if len(parts) > 2 and parts[0] == "tests" else "tests"


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    spent[folder(report.nodeid.partition("::")[0])] += report.duration


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if not spent:
        return
    terminalreporter.section("seconds by folder and its budget")
    for name in sorted(spent, key=spent.__getitem__, reverse=True):
        over = spent[name] > BUDGET_S.get(name, 0)
        terminalreporter.write_line(f"{name:<12}{spent[name]:7.1f} of {BUDGET_S.get(name, 0)}", red=over)
    terminalreporter.write_line(f"{'all':<12}{sum(spent.values()):7.1f} of {sum(BUDGET_S.values())}")
