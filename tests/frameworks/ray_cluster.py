"""A Ray cluster in a namespace: `ray start` once per node, each with an address of its own and 2 CPUs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

from isolated_hosts import ADDRESS, Hosts, poll

HEAD = f"{ADDRESS.format(1)}:6379"
START_S = 300
# Nothing outside the namespace reaches the cluster, so it needs no password. Ray gives a node 30 s to start and a worker 60 s to register,
# which importing takes on two cores that do other work too.
VARIABLES = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_raylet_start_wait_time_s": str(START_S),
    "RAY_worker_register_timeout_seconds": str(START_S),
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": str(START_S),
    "GLOO_SOCKET_IFNAME": "lo",
}


class Ray(Hosts):
    """Nodes n1 (the head), n2, …; `python` is the interpreter of an environment with Ray."""

    def __init__(self, folder: Path, count: int, python: str) -> None:
        super().__init__(folder, count)
        self.environment["PATH"] = f"{Path(python).parent}:{self.environment['PATH']}"
        self.environment |= VARIABLES

    def __enter__(self) -> Ray:
        super().__enter__()
        self.start_node(1, "--head", "--port=6379", "--dashboard-host=0.0.0.0")
        for number in range(2, self.count + 1):
            self.start_node(number, f"--address={HEAD}")
        return self

    def start_node(self, number: int, *words: str) -> None:
        """Start a node and wait for it. The next one starts after it: each starts about ten processes that import Ray."""
        options = ["--block", "--num-cpus=2", "--object-store-memory=200000000", f"--node-ip-address={ADDRESS.format(number)}"]  # fmt: skip
        log = self.folder / f"n{number}.log"
        node = self.start(log.name, "ray", "start", *words, *options, NODE=f"n{number}")
        poll(lambda: node.poll() is not None or "Ray runtime started" in log.read_text(), START_S, f"no node {number} of Ray")  # fmt: skip
        assert node.poll() is None, log.read_text()[-3000:]

    def workers(self, number: int) -> list[int]:
        """The processes of a node that train."""
        return [
            process
            for process in self.of_node(number)
            if "RayTrainWorker" in Path(f"/proc/{process}/cmdline").read_text()
        ]

    def of_node(self, number: int) -> list[int]:
        mark = f"NODE=n{number}".encode()
        return self.processes(lambda folder: mark in (folder / "environ").read_bytes().split(b"\0"))

    def lose_node(self, number: int) -> None:
        """Kill all processes of a node."""
        for process in self.of_node(number):
            os.kill(process, signal.SIGKILL)

    def words_of_job(self, folder: Path, variables: dict[str, str]) -> list[str]:
        """`ray job submit` as `launch` prints it, from the folder of the plan."""
        where = ["--address", f"http://{ADDRESS.format(1)}:8265"]
        environment = ["--runtime-env-json", json.dumps({"env_vars": variables})]
        submit = ["ray", "job", "submit", *where, *environment, "--working-dir", ".", "--", "python", "plan-ray.py"]
        return ["env", "-C", str(folder), *submit]

    def submit(self, folder: Path, **variables: str) -> str:
        """Run a job to its end; the last lines of its output."""
        return self.run(*self.words_of_job(folder, variables), check=False)[-6000:]

    def start_job(self, folder: Path, **variables: str) -> subprocess.Popen:
        return self.start("job.log", *self.words_of_job(folder, variables))
