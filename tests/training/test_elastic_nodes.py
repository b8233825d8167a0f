"""Elastic jobs of real torchrun agents on the loopback interface: a node joins, a node is lost, the rendezvous is lost."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshwright.describe.config import Config
from meshwright.describe.run_folder import read_about, read_steps

MODEL = {"hidden": 16, "layers": 2, "heads": 2, "ffn": 32, "vocab": 256}
WORKLOAD = {"batch": 4, "seq": 8, "precision": "fp32"}
FP32 = {"param_dtype": "fp32", "master": False}
LIMIT_S = 150.0


class Job:
    """Agents of one job, started one by one; all processes are ended with the block."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run, self.agents = folder, folder / "run", []
        config = Config.from_parts(MODEL, "laptop", "gloo-cpu", WORKLOAD, FP32, checkpoint={"every": 50})
        (folder / "run.toml").write_text(config.to_toml())
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            self.port = listener.getsockname()[1]

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *_: object) -> None:
        for agent in self.agents:
            kill(agent)
            agent.wait()

    def start(self) -> subprocess.Popen:
        number = len(self.agents)
        job = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3", "--local-addr", "127.0.0.1"]
        meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{self.port}", "--rdzv-id", "job"]
        meet += ["--rdzv-conf", f"last_call_timeout=1,is_host={int(number == 0)}"]
        train = ["-m", "meshwright", "train", str(self.folder / "run.toml"), "--steps", "1000000"]
        train += ["--out", str(self.run), "--no-calibrate"]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
            "GLOO_SOCKET_IFNAME": "lo",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        with (self.folder / f"agent-{number}.txt").open("w") as output:
            command = [sys.executable, "-m", "torch.distributed.run", *job, *meet, *train]
            self.agents.append(subprocess.Popen(command, stdout=output, stderr=output, env=environment))
        return self.agents[-1]

    def attempts(self) -> list[dict]:
        return read_about(self.run).get("attempts", []) if (self.run / "run.json").exists() else []

    def trains_on(self, world: int, attempt: int) -> None:
        """Wait until an attempt on this number of ranks has done some steps."""
        until(lambda: len(self.attempts()) > attempt and self.attempts()[-1]["world"] == world)
        done = len(read_steps(self.run))
        until(lambda: len(read_steps(self.run)) > done + 10)


def until(condition) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def kill(agent: subprocess.Popen) -> None:
    """End an agent and its ranks at once, as if the node had lost its power."""
    if agent.poll() is not None:
        return
    ranks = [
        int(pid)
        for task in Path(f"/proc/{agent.pid}/task").iterdir()
        for pid in (task / "children").read_text().split()
    ]
    for pid in (agent.pid, *ranks):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
@pytest.mark.parametrize("lost", ["node", "rendezvous"])
def test_a_node_joins_and_one_is_lost(tmp_path, lost):
    """The run continues on two ranks, and on one again. If the node that serves the rendezvous is lost, the other one ends soon."""
    with Job(tmp_path) as job:
        first = job.start()
        job.trains_on(1, 0)
        second = job.start()
        job.trains_on(2, 1)
        kill(second if lost == "node" else first)
        if lost == "node":
            job.trains_on(1, 2)
        else:
            until(lambda: second.poll() is not None)
            assert second.returncode != 0
            assert "RendezvousConnectionError" in (tmp_path / "agent-1.txt").read_text()
    steps = [row["step"] for row in read_steps(job.run)]
    assert steps == list(range(len(steps)))
    _, joined, *_ = job.attempts()
    assert joined["resumed_from"] > 0
