"""Runs of real frameworks on this machine: start the ranks of a real framework with the settings that Meshwright wrote, collect what each rank saw.

A rank is a process of the framework's environment with the variables that torchrun sets; accelerate's ranks are started by `accelerate launch`.
Runs of one environment and number of ranks share their processes: importing a framework takes longer than two steps of a small model. If
a run fails, those after it are started again in new processes.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import tempfile
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from cases import Case, Offer, expected, offer_of
from environments import HERE, ROOT, VERSIONS, python_of

from meshwright.describe.config import Config

SECONDS = 600.0  # for one group of processes
ONE_BY_ONE = ("accelerate", "trainer")  # drivers whose settings are read when the processes start
RUN_FOLDER = "/shared/runs/plan"  # in the words of `launch`


@dataclass(frozen=True)
class Run:
    """One training: the environment, its driver (drivers/run_X.py) and the question to the planner."""

    environment: str
    driver: str
    case: Case
    widths: tuple[tuple[str, int], ...] = ()  # of the model that is trained, where settings cannot state a small one

    @property
    def offer(self) -> Offer:
        return offer_of(self.case, VERSIONS[self.environment]["writes"])

    @property
    def config(self) -> Config:
        """What is trained: the plan's configuration, with small widths of the model."""
        config = self.offer.config
        return config.but(model=config.model.but(**dict(self.widths))) if self.widths else config

    @property
    def alone(self) -> Run:
        """The same model, batch and micro-batch on one process."""
        microbatch = tuple(word for word in self.case.fix if word.startswith("microbatch="))
        return replace(self, case=replace(self.case, gpus=1, fix=microbatch))


def job_of(run: Run, folder: Path, number: int) -> dict[str, Any]:
    """What a driver reads: the words of `launch`, with the settings file in a folder of this machine, and the sizes of plan and model."""
    offer = run.offer
    place = folder / str(number)
    place.mkdir()
    words = [word.replace(RUN_FOLDER, str(place)) for word in offer.words]
    if offer.file_name:
        (place / offer.file_name).write_text(offer.file.replace(RUN_FOLDER, str(place)))
    config = run.config
    variables = {name: value.replace(RUN_FOLDER, str(place)) for name, value in offer.variables}
    return {
        **expected(config), "words": words, "folder": str(place), "variables": variables,
        "tied": config.model.tied,
    }  # fmt: skip


@cache
def outcomes(runs: tuple[Run, ...]) -> dict[Run, list[dict[str, Any]]]:
    """The answers of every rank of every run. Runs that can share processes do."""
    groups: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        shared = () if run.driver not in ONE_BY_ONE else (run.case,)
        groups.setdefault((run.environment, run.driver, run.case.gpus, *shared), []).append(run)
    out: dict[Run, list[dict[str, Any]]] = {}
    for group in groups.values():
        answers = execute({str(number): run for number, run in enumerate(group)})
        out |= {run: answers[str(number)] for number, run in enumerate(group)}
    return out


def execute(runs: dict[str, Run]) -> dict[str, list[dict[str, Any]]]:
    """The answers of every rank of every run, by name. The runs have one environment, driver and number of ranks."""
    out: dict[str, list[dict[str, Any]]] = {}
    while len(out) < len(runs):
        waiting = {name: run for name, run in runs.items() if name not in out}
        out |= start(waiting)
    return out


def start(runs: dict[str, Run]) -> dict[str, list[dict[str, Any]]]:
    """Start one group of processes; the answers up to the first run that failed, of which the reason is the answer."""
    first = next(iter(runs.values()))
    python, missing = python_of(first.environment)
    if missing:
        return {name: [{"missing": missing}] for name in runs}
    ranks = first.case.gpus
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "jobs.json"
        jobs = {name: job_of(run, Path(folder), number) for number, (name, run) in enumerate(runs.items())}
        file.write_text(json.dumps(jobs))
        variables = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTEST_CURRENT_TEST")}
        variables["PYTHONPATH"] = str(ROOT / "src")
        variables |= {"RUN_JOBS": str(file), "RUN_SECONDS": str(SECONDS), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}  # fmt: skip
        variables |= next(iter(jobs.values()))["variables"]
        driver = str(HERE / "drivers" / f"run_{first.driver}.py")
        errors = supervise(commands(python, driver, next(iter(jobs.values())), ranks, first.driver), variables, ranks)
        answers = [json.loads(p.read_text()) if (p := Path(f"{file}.{rank}")).is_file() else {} for rank in range(ranks)]  # fmt: skip
    out: dict[str, list[dict[str, Any]]] = {}
    for name in runs:
        of_ranks = [answer.get(name, {}) for answer in answers]
        failed = [answer for answer in of_ranks if "losses" not in answer]
        reasons = [answer["refused"] for answer in failed if "refused" in answer]
        out[name] = of_ranks if not failed else [{"refused": "\n".join(reasons) or errors}]
        if failed:
            break
    return out


def commands(python: str, driver: str, job: dict[str, Any], ranks: int, name: str) -> list[list[str]]:
    """The command of each process that is started: one per rank, or one that starts the ranks."""
    if name == "accelerate":
        file = next(Path(job["folder"]).iterdir())
        options = ["--config_file", str(file), "--num_machines", "1", "--num_processes", str(ranks), "--main_process_port", "0"]  # fmt: skip
        return [[python, "-m", "accelerate.commands.launch", *options, driver]]
    return [[python, driver]] * ranks


def supervise(all_commands: list[list[str]], variables: dict[str, str], ranks: int) -> str:
    """Run processes to their end or the time limit; what they wrote to their errors."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}  # fmt: skip
    processes = []
    with tempfile.TemporaryFile("w+") as errors:
        for rank, words in enumerate(all_commands):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), **meeting} if len(all_commands) == ranks else {}
            processes.append(
                subprocess.Popen(words, env=variables | place, stdout=errors, stderr=errors, start_new_session=True)
            )
        for process in processes:
            try:
                process.wait(SECONDS + 30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        errors.seek(0)
        return errors.read()[-4000:]


def free_port() -> int:
    """A port on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
