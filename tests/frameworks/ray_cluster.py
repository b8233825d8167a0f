"""A Ray cluster in a namespace: `ray start` once per node, each with an address of its own and 2 CPUs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

from isolated_hosts import ADDRESS, Hosts, poll

HEAD = f"{ADDRESS.format(1)}:6379"


class Ray(Hosts):
    """Nodes n1 (the head), n2, …; `python` is the interpreter of an environment with Ray."""

    def __init__(self, folder: Path, count: int, python: str) -> None:
        super().__init__(folder, count)
        self.environment["PATH"] = f"{Path(python).parent}:{self.environment['PATH']}"
        # Nothing outside the namespace reaches the cluster, so it needs no password.
        self.environment |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "GLOO_SOCKET_IFNAME": "lo"}

    def __enter__(self) -> Ray:
        super().__enter__()
        self.start_node(1, "--head", "--port=6379", "--dashboard-host=0.0.0.0")
        poll(lambda: self.cpus() == 2, 180, "no head of Ray")
        for number in range(2, self.count + 1):
            self.start_node(number, f"--address={HEAD}")
        poll(lambda: self.cpus() == 2 * self.count, 180, "no nodes of Ray")
        return self

    def start_node(self, number: int, *words: str) -> None:
        address = f"--node-ip-address={ADDRESS.format(number)}"
        self.start(f"n{number}.log", "ray", "start", *words, "--block", "--num-cpus=2", address, NODE=f"n{number}")

    def cpus(self) -> float:
        """The CPUs of all nodes, by `ray status`."""
        lines = self.run("ray", "status", "--address", HEAD, check=False).splitlines()
        counts = [line.split()[0].partition("/")[2] for line in lines if line.strip().endswith("CPU")]
        return float(counts[0]) if counts else 0

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
