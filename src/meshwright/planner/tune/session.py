"""`tune`: propose, run, learn, until no run is expected to gain enough; everything in a log that a later call continues.

    FOLDER/tune.jsonl        a line for the question, then one for the start and one for the end of each run; lines are only appended
    FOLDER/run-N/            settings and output of run N
    FOLDER/best.toml         the fastest measured plan
    FOLDER/stack.toml        the stack adjusted to what was measured (`calibrate.runs.from_run`), for --stack of other commands

A run that was started and has no end was interrupted: it is run again, and counts as failed if that happens twice.
"""

import fcntl
import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.calibrate.runs.from_run import MeasuredRun, adjusted
from meshwright.describe.config import Config
from meshwright.describe.files import read_text, write_text
from meshwright.describe.plan import Plan
from meshwright.describe.result import GIB, Prediction
from meshwright.errors import MeshwrightError, cannot_write
from meshwright.planner.tune.belief import Belief, MemoryBelief
from meshwright.planner.tune.run import FAILED, MEASURED, NO_TIME, OUT_OF_MEMORY, Command, TuneRun
from meshwright.predict.prediction import predict
from meshwright.units import Json

LOG, BEST, STACK, VERSION, LIMIT = "tune.jsonl", "best.toml", "stack.toml", 1, 50_000_000
MOST_FAILURES = 3  # before the first measurement


@dataclass
class Tuning:
    """The candidates of a question, what is believed of them, and what was run."""

    config: Config
    plans: list[Plan]
    folder: Path
    trials: list[TuneRun] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.predictions: list[Prediction] = [predict(self.config.but(plan=plan)) for plan in self.plans]
        self.belief = Belief.of(self.predictions)
        sizes = np.array([(p.memory_gib or 0.0) * GIB for p in self.predictions])
        self.memory = MemoryBelief(sizes, self.config.cluster.accelerator.memory)
        self.tried: set[int] = set()
        earlier, self.trials = self.trials, []
        for trial in earlier:
            self.learn(trial)

    def learn(self, trial: TuneRun) -> None:
        """Take in what a run said."""
        self.trials.append(trial)
        self.tried.add(trial.candidate)
        if trial.outcome == MEASURED and trial.seconds:
            self.belief.learn(trial.candidate, trial.seconds, trial.spread or 0.0)
            self.memory.fits(trial.candidate)
            if trial.memory_gib:
                self.memory.measures(trial.candidate, trial.memory_gib * GIB)
        elif trial.outcome == OUT_OF_MEMORY:
            self.memory.fails(trial.candidate)

    def gains(self) -> np.ndarray:
        """The expected gain of each candidate that was not run."""
        gains = self.belief.gains(self.memory.chances())
        gains[list(self.tried)] = 0.0
        return gains

    def proposed(self) -> tuple[int, float] | None:
        """The candidate to run next and its expected gain; None if all were run."""
        left = [number for number in range(len(self.plans)) if number not in self.tried]
        if not left:
            return None
        gains = self.gains()
        number = max(left, key=lambda candidate: gains[candidate])
        return number, float(gains[number])

    @property
    def best(self) -> TuneRun | None:
        measured = [t for t in self.trials if t.outcome == MEASURED]
        return min(measured, key=lambda t: t.seconds or math.inf, default=None)

    @property
    def as_fast(self) -> list[TuneRun]:
        """The measured plans that the spread of the steps cannot tell from the best one, with 95% confidence."""
        best, noise = self.best, self.belief.noise
        if best is None or not best.seconds:
            return []
        return [
            t
            for t in self.trials
            if t.seconds
            and t.candidate != best.candidate
            and math.log(t.seconds / best.seconds) < 2 * math.hypot(noise[t.candidate], noise[best.candidate])
        ]

    def expected_s(self, candidate: int) -> tuple[float, float, float]:
        """Seconds that are expected of a candidate now, and the band of nine in ten."""
        mean, deviation = self.belief.posterior()
        edges = (mean[candidate] + z * deviation[candidate] for z in (0.0, -1.645, 1.645))
        middle, low, high = (float(np.exp(x)) for x in edges)
        return middle, low, high

    def as_dict(self) -> Json:
        mean, deviation = self.belief.posterior()
        gains = self.gains()
        rows = [
            {
                "plan": plan.as_dict(),
                "title": plan.title(),
                "predicted_s": p.step_time_s,
                "expected_s": float(np.exp(mean[i])),
                "expected_low_s": float(np.exp(mean[i] - 1.645 * deviation[i])),
                "expected_high_s": float(np.exp(mean[i] + 1.645 * deviation[i])),
                "expected_gain": float(gains[i]),
                "memory_gib": p.memory_gib,
            }
            for i, (plan, p) in enumerate(zip(self.plans, self.predictions, strict=True))
        ]
        best = self.best
        return {
            "best": None if best is None else {**rows[best.candidate], **best.as_dict()},
            "trials": [t.as_dict() | {"title": self.plans[t.candidate].title()} for t in self.trials],
            "candidates": rows,
            "memory_factor": self.memory.factor,
        }

    def write_results(self) -> None:
        """Write the fastest plan, and the stack adjusted to all measurements."""
        best = self.best
        if best is None:
            return
        write_text(self.folder / BEST, self.config.but(plan=self.plans[best.candidate]).to_toml())
        runs = [
            MeasuredRun(
                self.plans[t.candidate].title(),
                self.config.but(plan=self.plans[t.candidate]),
                t.seconds or 0.0,
                (t.memory_gib or 0.0) * GIB,
                "reserved",
            )
            for t in self.trials
            if t.outcome == MEASURED
        ]
        write_text(self.folder / STACK, adjusted(runs).to_toml())


def digest_of(config: Config, command: Command) -> str:
    """What makes two calls the same question: model, cluster, stack, workload, and the command. The plan is what is looked for."""
    parts = (config.model, config.cluster, config.stack, config.workload)
    described = [part.model_dump(mode="json") for part in parts]
    text = json.dumps([described, command.words], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Hold the folder for one call: two would measure each other, and mix their runs in one log. The lock ends with the process and with the run that
    it has started (`Command.execute`): one whose `tune` was killed still uses the devices."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        directory = os.open(folder, os.O_RDONLY)
        os.set_inheritable(directory, True)
    except OSError as error:
        raise cannot_write(folder, error) from error
    try:
        try:
            fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise MeshwrightError(
                "MW-TUNE-009",
                f"another `meshwright tune`, or a run that it has started, uses '{folder}'",
                why="Two would measure at the same time and mix their runs in one log",
                fix="--out ANOTHER-FOLDER, or wait for its end",
            ) from None
        except OSError:  # a disk without locks
            pass
        yield
        with suppress(OSError):
            fcntl.flock(directory, fcntl.LOCK_UN)  # also where a run has left a process behind
    finally:
        os.close(directory)


def begun(folder: Path) -> bool:
    return (folder / LOG).exists()


def begin(config: Config, plans: Sequence[Plan], folder: Path, command: Command) -> Tuning:
    """A new log."""
    question = {"kind": "question", "version": VERSION, "digest": digest_of(config, command), "command": command.words,
                "candidates": [plan.as_dict() for plan in plans]}  # fmt: skip
    append(folder, question)
    return Tuning(config, list(plans), folder)


def resume(config: Config, folder: Path, command: Command) -> tuple[Tuning, list[int]]:
    """The tuning of a log, and the candidates whose runs were interrupted."""
    lines = list(log_lines(folder))
    if not lines or lines[0].get("kind") != "question" or lines[0].get("version") != VERSION:
        raise damaged(folder, "its first line is not a question of this version")
    if lines[0].get("digest") != digest_of(config, command):
        raise MeshwrightError(
            "MW-TUNE-004",
            f"'{folder}' has the log of another question",
            why="The model, cluster, stack, workload or command differ: its times say nothing of this one",
            fix="--out ANOTHER-FOLDER, or the arguments of the first call",
        )
    names = {f.name for f in fields(TuneRun)}
    trials: list[TuneRun] = []
    open_runs: Counter[int] = Counter()
    try:
        plans = [Plan(**plan) for plan in lines[0]["candidates"]]
        for line in lines[1:]:
            number = int(line["candidate"])
            if not 0 <= number < len(plans):
                raise ValueError(f"there is no candidate {number}")
            if line["kind"] == "start":
                open_runs[number] += 1
            elif line["kind"] == "void":
                del open_runs[number]
            elif line["kind"] == "end":
                del open_runs[number]
                trials.append(checked(TuneRun(**{k: v for k, v in line.items() if k in names})))
    except (KeyError, TypeError, ValueError) as error:
        raise damaged(folder, f"{type(error).__name__}: {error}") from None
    lost = [number for number, starts in open_runs.items() if starts > 1]
    trials += [TuneRun(number, FAILED, why="it was interrupted twice") for number in lost]
    return Tuning(config, plans, folder, trials), [number for number in open_runs if number not in lost]


def checked(trial: TuneRun) -> TuneRun:
    numbers = [x for x in (trial.spread, trial.memory_gib) if x]
    numbers += [trial.seconds or 0.0] if trial.outcome == MEASURED else []
    if not all(isinstance(x, int | float) and 0 < x < math.inf for x in numbers):
        raise ValueError("the seconds, the spread or the memory of a run are not positive")
    if type(trial.candidate) is not int or not isinstance(trial.why, str) or not isinstance(trial.outcome, str):
        raise ValueError("the candidate, the outcome or the reason of a run is of another kind")
    return trial


def damaged(folder: Path, why: str) -> MeshwrightError:
    return MeshwrightError(
        "MW-TUNE-007", f"'{folder / LOG}' is not a log of tune, or is damaged", why=why, fix="--out ANOTHER-FOLDER"
    )


def log_lines(folder: Path) -> Iterator[Json]:
    """The lines of the log; one without its end was being written when the process was ended."""
    text = read_text(folder / LOG, LIMIT)
    for line in text.split("\n")[:-1]:
        if not line.strip():
            continue
        try:
            table = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise damaged(folder, f"a line is not JSON: {error}") from None
        if not isinstance(table, dict):
            raise damaged(folder, "a line is not a table")
        yield table


def append(folder: Path, row: dict[str, Any]) -> None:
    """Append a line to the log. A line that was cut off is ended first: it is not read."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / LOG).open("a+b") as stream:
            if stream.tell():
                stream.seek(-1, 2)
                if stream.read(1) != b"\n":
                    truncate_to_line(stream)
            stream.write(json.dumps(row).encode() + b"\n")
            stream.flush()
    except OSError as error:
        raise cannot_write(folder / LOG, error) from error


def truncate_to_line(stream: Any) -> None:
    stream.seek(0)
    stream.truncate(stream.read().rfind(b"\n") + 1)


def step(tuning: Tuning, command: Command, candidate: int, gain: float) -> TuneRun:
    """Run one candidate, and learn from it."""
    known = gain if tuning.best else None  # before a measurement there is nothing to gain on
    append(tuning.folder, {"kind": "start", "candidate": candidate, "expected_gain": known, "steps": command.steps})
    number = next(n for n in count(len(tuning.trials) + 1) if not (tuning.folder / f"run-{n}").exists())
    folder = tuning.folder / f"run-{number}"
    trial = command.run(candidate, tuning.config.but(plan=tuning.plans[candidate]), folder)
    if trial.why == NO_TIME and tuning.best is None:
        append(tuning.folder, {"kind": "void", "candidate": candidate})
        raise MeshwrightError(
            "MW-TUNE-003",
            "the run printed no step time",
            why=f"Its output is in {folder}; read are torchtitan, Megatron-LM, DeepSpeed, Transformers, NeMo, a run folder of ours, and "
            'lines of JSON with "step_time_s"',
            fix=r"--time 'step time: (?P<ms>[0-9.]+)'",
        )
    append(tuning.folder, {"kind": "end", **trial.as_dict()})
    tuning.learn(trial)
    only_crashes = all(t.outcome == FAILED for t in tuning.trials)
    if only_crashes and len(tuning.trials) >= MOST_FAILURES:
        raise MeshwrightError(
            "MW-TUNE-008",
            f"the first {len(tuning.trials)} runs failed",
            why=f"The last one: {trial.why}; outputs are in {tuning.folder}/run-N",
            fix="run the command by hand with the settings of run-1",
        )
    return trial
