"""Bugs planted in the frameworks' own code are caught, and the comparison names the right phase, module and pattern (check_bugs.py)."""

import re
from pathlib import Path

import pytest
from check_bugs import BUGS, PlantedBug
from check_cases import PERTURBED
from recordings import Training, reference_of

from meshwright.check.compare import compare
from meshwright.check.folder import Recording

NAMED = {f"{bug.script}: {bug.bug} {bug.layout}": bug for bug in BUGS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recordings")


def reference(bug: PlantedBug, folder: Path) -> Recording:
    alone = Training(bug.script, f"--dtype {bug.dtype} {bug.words} {bug.alone}")
    return Recording.read(
        reference_of(alone, PERTURBED[bug.dtype], folder / re.sub(r"\W+", "-", f"{alone.script} {alone.words}"))
    )


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", NAMED)
def test_a_planted_bug_is_named(folder: Path, tmp_path: Path, name: str) -> None:
    bug = NAMED[name]
    one = reference(bug, folder)
    many = Recording.read(Training(bug.script, bug.candidate, bug.world).record(tmp_path / "many"))
    comparison = compare(one, many, one.perturbed())
    print(f"{bug.link}\n{comparison.diagnosis} [{comparison.diagnosis and comparison.diagnosis.tensor}]")
    assert comparison.verdict == "differs"
    found = comparison.diagnosis
    assert found is not None
    assert (found.phase, bool(re.search(bug.module, found.tensor))) == (bug.phase, True), (found, found.tensor)
    assert not bug.pattern or found.pattern.kind in bug.pattern.split("|") or bug.pattern.endswith("|"), found


def test_there_are_forty_bugs_and_ten_that_the_first_loss_hides() -> None:
    assert len(NAMED) == len(BUGS) >= 40
    assert sum(bug.quiet for bug in BUGS) >= 10
