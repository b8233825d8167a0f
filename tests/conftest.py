"""Settings of all tests: hypothesis without deadlines, the division of tests over two workers, seconds by folder.

`make test` runs two workers (pytest-xdist) and takes about 10 minutes on two idle cores; 8 is the aim. The tests of a file run on one
worker, since they share computed results; tests whose id ends with "@ GROUP" run on the worker of their group (the matrix: one
group per set of processes). The option `--dist loadgroup` of pytest-xdist 3.8 would do the same, but has no effect with pytest 9.2.
At the end of a run the seconds of each folder are printed with their budget, in red if they exceed it. This does not fail the
run, since machines differ, but that folder should be made cheaper next. Long checks are marked `slow` and run by `make soak`.
"""

import gc
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

BUDGET_S = {
    "tests": 18, "describe": 32, "programs": 22, "lower": 20, "cost": 24, "docs": 16, "calibrate": 32, "planner": 75, "interop": 6, "view": 20,
    "models": 22, "parallel": 112, "comm": 55, "training": 140, "proof": 205, "check": 20, "cli": 40, "web": 15, "gpu": 0, "explain": 30,
    "formulas": 6,
}  # fmt: skip

# A slow draw on a busy machine is not the test's fault. Examples are the same in every run; `soak` draws other ones.
slow = [HealthCheck.too_slow]
settings.register_profile("frugal", deadline=None, max_examples=25, derandomize=True, suppress_health_check=slow)
settings.register_profile("soak", deadline=None, max_examples=5000, print_blob=True, suppress_health_check=slow)
settings.load_profile("frugal")

spent: dict[str, float] = defaultdict(float)

gc.disable()  # while modules are imported and tests collected, which are never freed: see `pytest_collection_finish`


def pytest_collection_finish() -> None:
    """Collect garbage of tests only, not what was imported before them: a full collection over that takes 0.3 s."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Divide the tests over the workers by group, in the order of the files: the last ones are short."""
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    config.option.loadscopereorder = False
    return ByGroup(config, log)


def group_of(nodeid: str) -> str:
    """The group of a test: what its id says after "@ ", else its file."""
    _, found, group = nodeid.removesuffix("]").rpartition("@ ")
    return group if found else nodeid.partition("::")[0]


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
