"""The scripts of docs/found.md, which need no Meshwright, print what the page says: the bugs are still there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from environments import ROOT, python_of

TEXT = (ROOT / "docs" / "found.md").read_text("utf-8")
SCRIPTS = re.findall(r"```python\n(# torchrun --nproc-per-node 2 (\w+)\.py.*?)```\n+```text\n(.*?)```", TEXT, re.DOTALL)
ENVIRONMENTS = {"zero_bubble": "", "dropped": "accelerate"}


@pytest.mark.timeout(200)
@pytest.mark.parametrize(("script", "name", "printed"), SCRIPTS, ids=[name for _, name, _ in SCRIPTS])
def test_the_script_prints_what_the_page_says(tmp_path: Path, script: str, name: str, printed: str) -> None:
    environment = ENVIRONMENTS[name]
    python, missing = python_of(environment) if environment else (sys.executable, "")
    if missing:
        pytest.skip(missing)
    file = tmp_path / f"{name}.py"
    file.write_text(script)
    words = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(file)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == printed.splitlines()


def test_every_script_of_the_page_is_run() -> None:
    assert {name for _, name, _ in SCRIPTS} == ENVIRONMENTS.keys()
