"""Start a training script with the recorder in the environment of its processes."""

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from meshwright.check.folder import LIMIT, read_json
from meshwright.check.invariants import Judge
from meshwright.check.names import read_table
from meshwright.errors import MeshwrightError
from meshwright.units import counted, format_bytes

HOOK = Path(__file__).parent / "hook"
SETTINGS = "MESHWRIGHT_CHECK"  # JSON: what is attached, its arguments, whether frameworks are patched for a CPU
UNITS = {"bfloat16": 2.0**-7, "float16": 2.0**-10}  # of numbers in the last place
GRACE_S = 10.0  # for a script to end by itself when all is recorded


def record(
    words: Sequence[str],
    out: Path,
    steps: int,
    perturbed: int = 0,
    limit: float = LIMIT,
    go_on: bool = False,
    on_cpu: bool = False,
) -> int:
    """Run a command and record into a folder, then as often as asked with perturbed weights; the exit code of the first that fails."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise MeshwrightError(
            "MW-CHECK-010", f"{out} is not empty", why="A recording is never overwritten", fix="--out another-folder"
        )
    check_command(words, "record --out DIR")
    unit = 0.0
    for run in range(perturbed + 1):
        folder = out / f"perturbed-{run}" if run else out
        settings = {"out": str(folder.resolve()), "steps": steps, "limit": limit, "perturb": run, "unit": unit}
        code = run_recorded(words, folder, settings, go_on, on_cpu)
        if not any(folder.glob("rank-*/rank.json")) and not code:
            raise MeshwrightError(
                "MW-CHECK-012", "nothing was recorded", why="The command ended without an update of a torch optimizer, or its ranks could not write",
                fix="let it run for a step; what the ranks print says more",
            )  # fmt: skip
        if code:
            return code
        unit = unit or unit_of(folder)
    return 0


def check_command(words: Sequence[str], command: str) -> None:
    if not words or shutil.which(words[0]) is None:
        raise MeshwrightError(
            "MW-CHECK-011", f"there is no command {words[0] if words else ''}".rstrip(),
            fix=f"meshwright check {command} -- torchrun --nproc-per-node 2 train.py",
        )  # fmt: skip


def hooked(attached: str, on_cpu: bool, arguments: dict[str, Any]) -> dict[str, str]:
    """The environment in which the hook finds what it attaches: "record" or "watch", with its arguments."""
    path = os.pathsep.join(filter(None, (str(HOOK), os.environ.get("PYTHONPATH", ""))))
    settings = {"attached": attached, "on_cpu": on_cpu, "arguments": arguments}
    return {**os.environ, "PYTHONPATH": path, SETTINGS: json.dumps(settings)}


def attach_from_environment() -> None:
    """In a process that `meshwright check record` or `check watch` started."""
    from meshwright.check import cpu
    from meshwright.check.live import LiveWatch
    from meshwright.check.recorder import StepRecorder

    settings = json.loads(os.environ[SETTINGS])
    if settings["on_cpu"]:
        cpu.install()
    kind = StepRecorder if settings["attached"] == "record" else LiveWatch
    kind(**settings["arguments"]).attach()


def watch(
    words: Sequence[str],
    out: Path,
    every: int,
    stop: bool,
    without: Sequence[str],
    table: Path | None = None,
    on_cpu: bool = False,
) -> int:
    """Run a command whose ranks are watched; its exit code, or 1 if it was to stop at a violation and there is one."""
    check_command(words, "watch")
    Judge(without)  # raises at a code that does not exist
    file = out / "watch.json"
    file.unlink(missing_ok=True)
    settings = {"out": str(out.resolve()), "every": every, "stop": stop, "without": list(without)}
    if table is not None:
        read_table(table)
        settings["table"] = str(table.resolve())
    process = subprocess.Popen(list(words), env=hooked("watch", on_cpu, settings))
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    while True:
        try:
            code = process.wait()
            break
        except KeyboardInterrupt:  # the command has got it too
            continue
    if not file.exists():
        if code:
            return code
        raise MeshwrightError(
            "MW-WATCH-011", "nothing was watched", why="The command ended before its second update of a torch optimizer",
            fix="let it run for more steps",
        )  # fmt: skip
    return 1 if stop and read_json(file)["violations"] else code


def run_recorded(words: Sequence[str], folder: Path, settings: dict[str, Any], go_on: bool, on_cpu: bool) -> int:
    """The exit code of the command. When all ranks have recorded their steps it is ended, unless it shall go on."""
    environment = {**hooked("record", on_cpu, settings), "TORCHDYNAMO_DISABLE": "1"}  # compiled graphs call no hooks
    process = subprocess.Popen(list(words), env=environment, start_new_session=True)
    try:
        while process.poll() is None:
            time.sleep(0.2)
            if not go_on and is_complete(folder, settings["steps"]):
                try:
                    return process.wait(GRACE_S)
                except subprocess.TimeoutExpired:
                    end(process)
                    return 0
        return process.returncode
    finally:
        end(process)


def is_complete(folder: Path, steps: int) -> bool:
    files = sorted(folder.glob("rank-*/rank.json"))
    ranks = [read_json(file) for file in files[:1]]
    return bool(ranks) and len(files) >= ranks[0]["world"] and all(read_json(file)["steps"] >= steps for file in files)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a command and what it started."""
    for sign, patience in ((signal.SIGTERM, 15.0), (signal.SIGKILL, 5.0)):
        if process.poll() is None:
            os.killpg(process.pid, sign)
            try:
                process.wait(patience)
            except subprocess.TimeoutExpired:
                continue


def unit_of(folder: Path) -> float:
    """One unit in the last place of the narrowest numbers that modules compute: weights may be wider than these."""
    rows = read_json(sorted(folder.glob("rank-*/step-000.json"))[0])["entries"]
    return max((UNITS.get(row.get("dtype", ""), 0.0) for row in rows), default=0.0)


def summary(out: Path) -> str:
    """What was recorded, and what that cost; of a script that died, how far it came."""
    files = sorted(out.glob("rank-*/rank.json"))
    ranks = [read_json(file) for file in files]
    if not ranks:
        return f"nothing was recorded in {out}"
    first, size = ranks[0], format_bytes(sum(rank["bytes"] for rank in ranks))
    steps, world = counted(min(rank["steps"] for rank in ranks), "step"), counted(len(ranks), "rank")
    text = f"recorded {steps} on {world} ({first['framework']}: {first['layout']}), {size}, in {out}"
    if ended := sorted({rank["ended"] for rank in ranks if rank["ended"]}):
        return f"{text}\n{ended[0]} (step {first['steps']}); the steps before it are complete"
    written = [read_json(path) for path in sorted(files[0].parent.glob("step-*.json"))]
    spent, whole = (median(step[key] for step in written) for key in ("recording_seconds", "seconds"))
    return f"{text}\na step took {whole:.3g} s, {spent:.3g} s of it for recording"
