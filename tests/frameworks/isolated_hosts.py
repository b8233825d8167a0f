"""Hosts for schedulers on this machine: a namespace with its own network, process numbers and /etc/hosts.

Its only interface is the loopback device, which has one address per host: nothing in it is reached from outside or reaches out. All its
processes end with the namespace, and it ends with the tests, also if they are killed. It needs root, `unshare` and `nsenter`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ADDRESS = "10.77.0.{}"
ROOT = Path(__file__).parents[2]


def missing(*programs: str) -> str:
    """Why these programs cannot run in a namespace; empty if they can."""
    absent = [name for name in ("setpriv", "unshare", "nsenter", "ip", *programs) if program(name) is None]
    if absent:
        return f"not installed: {', '.join(absent)}"
    return "" if os.geteuid() == 0 else "namespaces need root"


def program(name: str) -> str | None:
    """The path of a program; daemons are often not on a user's PATH."""
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


def poll(ready: Callable[[], object], timeout_s: float, what: str) -> None:
    """Wait until `ready` returns a true value."""
    until = time.monotonic() + timeout_s
    while not ready():
        assert time.monotonic() < until, f"{what} within {timeout_s:.0f} s"
        time.sleep(0.2)


class Hosts:
    """A namespace with hosts n1, n2, …; `with Hosts(folder, 3) as hosts` ends all its processes with the block."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder, self.count = folder, count
        self.environment = {
            **{name: os.environ[name] for name in ("LANG", "PYTHONPATH", "OMP_NUM_THREADS") if name in os.environ},
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin:/sbin",
            "HOME": str(folder),
            "OMP_NUM_THREADS": "1",
        }

    def __enter__(self) -> Hosts:
        own = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sleep", "infinity"]
        self.process = subprocess.Popen(["setpriv", "--pdeathsig", "KILL", *own])
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        poll(lambda: children.read_text().strip(), 20, "no namespace")
        self.pid = children.read_text().strip()
        poll(lambda: Path(f"/proc/{self.pid}/comm").read_text().strip() == "sleep", 20, "no namespace")
        names = [f"{ADDRESS.format(n)} n{n}" for n in range(1, self.count + 1)]
        (self.folder / "hosts").write_text("\n".join((f"127.0.0.1 localhost {os.uname().nodename}", *names, "")))
        self.run("ip", "link", "set", "lo", "up")
        for n in range(1, self.count + 1):
            self.run("ip", "addr", "add", f"{ADDRESS.format(n)}/24", "dev", "lo")
        self.run("mount", "--bind", str(self.folder / "hosts"), "/etc/hosts")
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    def words(self, *command: str) -> list[str]:
        enter = ["nsenter", "--target", self.pid, "--net", "--mount", "--pid"]
        return [*enter, "env", "-C", str(self.folder), *command]

    def run(self, *command: str, timeout: float = 600, check: bool = True, **variables: str) -> str:
        """Run a command in the namespace; what it printed."""
        done = subprocess.run(
            self.words(*command),
            env={**self.environment, **variables},
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        assert done.returncode == 0 or not check, f"{command}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
        return done.stdout + done.stderr

    def start(self, log: str, *command: str, **variables: str) -> subprocess.Popen:
        """Start a command in the namespace, its output in a file of the folder."""
        with (self.folder / log).open("w") as stream:
            environment = {**self.environment, **variables}
            return subprocess.Popen(self.words(*command), env=environment, stdout=stream, stderr=stream)

    def processes(self, condition: Callable[[Path], bool]) -> list[int]:
        """Numbers (outside the namespace) of its processes that fulfil a condition on their folder in /proc."""
        own = os.stat(f"/proc/{self.pid}/ns/pid").st_ino
        numbers = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if os.stat(folder / "ns/pid").st_ino == own and condition(folder):
                    numbers.append(int(folder.name))
            except OSError:  # it has ended
                continue
        return numbers


PLAN = """\
model = "nano"
cluster = "laptop"
stack = "gloo-cpu"
[workload]
batch = 8
seq = 16
precision = "fp32"
[plan]
replicate = 2
tp = {tp}
microbatch = 2
param_dtype = "fp32"
master = false
[run]
steps = 8
"""
STEPS = 8


def write_plan(folder: Path, ranks: int, faults: list[dict] | None = None) -> dict[str, str]:
    """Write plan.toml and the faults of its run into a folder; the variables that inject them."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.toml").write_text(PLAN.format(tp=ranks // 2))
    if not faults:
        return {}
    (folder / "faults.json").write_text(json.dumps(faults))
    return {"MESHWRIGHT_FAULTS": str(folder / "faults.json")}


def launch(folder: Path, *words: str, run: str = "run", framework: str = "meshwright") -> str:
    """`meshwright launch` of the folder's plan as a user types it; what it printed."""
    command = [sys.executable, "-m", "meshwright", "launch", "plan.toml", "--for", framework, "--run", run]
    done = subprocess.run(
        [*command, "--save-every", "2", *words], cwd=folder, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses(run: Path) -> list[float]:
    """The loss of every step of a run."""
    file = run / "steps.jsonl"
    return [json.loads(line)["loss"] for line in file.read_text().splitlines()] if file.is_file() else []


def resumed(run: Path) -> list[int]:
    """The steps of the checkpoints from which later attempts of a run began."""
    return [attempt["resumed_from"] for attempt in json.loads((run / "run.json").read_text())["attempts"]][1:]
