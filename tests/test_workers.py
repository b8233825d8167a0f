"""The tests of a group run on one worker of `make test`: otherwise each worker computes what they share."""

import re
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

FILE = """
import pytest

@pytest.mark.parametrize("i", [pytest.param(i, id=f"{i} @ {'even' if i % 2 == 0 else 'odd'}") for i in range(6)])
def test_in_a_group(i):
    pass

def test_first():
    pass

def test_second():
    pass
"""


@pytest.mark.slow
def test_a_group_and_a_file_run_on_one_worker(tmp_path):
    pytest.importorskip("xdist")
    shutil.copy(Path(__file__).with_name("conftest.py"), tmp_path)
    for name in ("one", "two"):
        (tmp_path / f"test_{name}.py").write_text(FILE)
    command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadscope", "-v", "-p", "no:cacheprovider", "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=True)
    workers = defaultdict(set)
    for worker, file, test in re.findall(r"\[(gw\d)\].* PASSED (\S+?)::(.*?) *$", done.stdout, re.MULTILINE):
        workers[test.partition("@ ")[2] or file].add(worker)
    assert sorted(workers) == ["even]", "odd]", "test_one.py", "test_two.py"]
    assert all(len(which) == 1 for which in workers.values()), workers
    assert len(set.union(*workers.values())) == 2
