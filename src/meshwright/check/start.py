"""Start a training script with the recorder in the environment of its processes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from meshwright.errors import MeshwrightError

HOOK = Path(__file__).parent / "hook"
SETTINGS = "MESHWRIGHT_CHECK"  # JSON of the arguments of `recorder.StepRecorder`


def record(words: Sequence[str], out: Path, steps: int, perturbed: int) -> int:
    """Run a command and record into a folder, then as often as asked with perturbed weights; the exit code of the first that fails."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise MeshwrightError(
            "MW-CHECK-010", f"{out} is not empty", why="A recording is never overwritten", fix="--out another-folder"
        )
    if not words or shutil.which(words[0]) is None:
        raise MeshwrightError(
            "MW-CHECK-011", f"there is no command {words[0] if words else ''}".rstrip(),
            fix="meshwright check record --out DIR -- torchrun --nproc-per-node 2 train.py",
        )  # fmt: skip
    for run in range(perturbed + 1):
        folder = out / f"perturbed-{run}" if run else out
        code = run_recorded(words, folder, steps, run)
        if code:
            return code
        if not any(folder.glob("rank-*/rank.json")):
            raise MeshwrightError(
                "MW-CHECK-012", "nothing was recorded", why="The command ended without an update of a torch optimizer",
                fix="let it run for a step",
            )  # fmt: skip
    return 0


def run_recorded(words: Sequence[str], folder: Path, steps: int, perturb: int) -> int:
    settings = {"out": str(folder.resolve()), "steps": steps, "perturb": perturb}
    path = os.pathsep.join(filter(None, (str(HOOK), os.environ.get("PYTHONPATH", ""))))
    environment = {**os.environ, "PYTHONPATH": path, SETTINGS: json.dumps(settings), "TORCHDYNAMO_DISABLE": "1"}
    process = subprocess.Popen(list(words), env=environment)
    try:
        return process.wait()
    except BaseException:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
        raise
    finally:
        sys.stdout.flush()
