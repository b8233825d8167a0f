"""One run of a candidate: the command with its placeholders filled in, a limit on its time, and what it says.

    {settings}    the file with the settings of the candidate      {arguments}   its settings as words, for programs that take flags
    {steps}       steps to run                                     {folder}      a folder for this run
    {world}       number of ranks

The command is a list of words and no shell reads it. All processes that it starts are ended when it ends, or at its limit. A run is

    measured        its output, or a run folder of ours in {folder}/run, has a step time
    out of memory   it failed and says so: no plan that needs more will be tried
    failed          it ended with an error
    timed out       it ran longer than the limit
"""

import json
import os
import re
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from meshwright.describe.config import Config
from meshwright.describe.files import write_text
from meshwright.describe.run_folder import read_json
from meshwright.errors import MeshwrightError
from meshwright.host import deferred_signals
from meshwright.interop.keys import Framework
from meshwright.interop.logs import steps_in
from meshwright.interop.write import flag_words, settings_of, write_file

PLACEHOLDERS = ("settings", "arguments", "steps", "folder", "world")
NAMED = re.compile(r"\{(\w+)\}")
NO_MEMORY = re.compile(
    r"out of memory|OutOfMemory|CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation|DefaultCPUAllocator: can't allocate|MW-\w+-\d+: .*does not fit",
    re.IGNORECASE,
)
ENDINGS = {"toml": ".toml", "json": ".json", "yaml": ".yaml", "python": ".py", "args": ".sh"}
MEASUREMENT = Path("run") / "measurement.json"
OUTPUT, LARGEST_OUTPUT = "output.log", 20_000_000
NOT_FOUND, KILLED_BY_SYSTEM = 127, -signal.SIGKILL
NO_TIME = "it printed no step time"
MEASURED, OUT_OF_MEMORY, FAILED, TIMED_OUT = "measured", "out of memory", "failed", "timed out"


@dataclass(frozen=True)
class TuneRun:
    """What one run of a candidate said."""

    candidate: int
    outcome: str
    seconds: float | None = None
    spread: float | None = None
    memory_gib: float | None = None
    why: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Command:
    """How a candidate is run."""

    words: tuple[str, ...]
    framework: Framework | None  # whose settings are written; None: plan files of ours
    steps: int
    timeout_s: float
    pattern: str = ""

    def checked(self) -> "Command":
        """The command, if it can be started and depends on the candidate."""
        import shutil

        if shutil.which(self.words[0]) is None:
            raise MeshwrightError(
                "MW-TUNE-001",
                f"the command '{self.words[0]}' does not exist",
                why="It is neither a program on the PATH nor an executable file",
                fix="meshwright tune PLAN.toml -- torchrun train.py --config {settings} --steps {steps}",
            )
        used = {name for word in self.words for name in NAMED.findall(word)}
        if not used & {"settings", "arguments"} or used - set(PLACEHOLDERS):
            wrong = sorted(used - set(PLACEHOLDERS))
            raise MeshwrightError(
                "MW-TUNE-002",
                f"the command has the unknown placeholder {{{wrong[0]}}}"
                if wrong
                else "the command does not take the settings",
                why="" if wrong else "Every candidate would run the same",
                valid=[f"{{{name}}}" for name in PLACEHOLDERS],
                fix="name the file as {settings}, or {arguments} for flags",
            )
        return self

    def run(self, number: int, config: Config, folder: Path) -> TuneRun:
        """Run a candidate in a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        words = self.filled(config, folder)
        code = self.execute(words, folder / OUTPUT)
        text = readable(tail(folder / OUTPUT))
        if code is None:
            return TuneRun(number, TIMED_OUT, why=f"ended after {self.timeout_s:.0f} s")
        measured = self.measured(number, config, folder, text)
        if measured and (
            code == 0 or (code == 1 and (folder / MEASUREMENT).is_file())
        ):  # 1: a loss of our trainer is NaN
            return measured
        if NO_MEMORY.search(text) or code == KILLED_BY_SYSTEM:
            return TuneRun(number, OUT_OF_MEMORY, why=last_line(text, NO_MEMORY))
        if code:
            return TuneRun(number, FAILED, why=f"exit code {code}: {last_line(text)}")
        return TuneRun(number, FAILED, why=NO_TIME)

    def filled(self, config: Config, folder: Path) -> list[str]:
        """The words of the command for a candidate; writes its settings."""
        if self.framework:
            file = folder / f"settings{ENDINGS[self.framework.form]}"
            written = write_file(config, self.framework, file)
            flags = settings_of(config, self.framework).settings if written else {}
            arguments = [w for name, value in flags.items() for w in flag_words(self.framework, name, value)]
        else:
            file, arguments = folder / "plan.toml", []
            write_text(file, config.to_toml())
        values = {
            "settings": str(file.absolute()),
            "steps": str(self.steps),
            "folder": str(folder.absolute()),
            "world": str(config.plan.world),
        }
        out: list[str] = []
        for word in self.words:
            if word == "{arguments}":
                out += arguments
            else:
                out.append(NAMED.sub(lambda match: values.get(match[1], match[0]), word))
        return out

    def execute(self, words: Sequence[str], output: Path) -> int | None:
        """The exit code of the words; None if they were ended at the limit."""
        child = None
        with output.open("wb") as log:
            try:
                with deferred_signals():
                    child = subprocess.Popen(  # inherits the lock of the folder
                        words,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                        close_fds=False,
                    )
                return child.wait(self.timeout_s)
            except OSError as error:
                log.write(f"{words[0]}: {error.strerror}\n".encode())
                return NOT_FOUND
            except subprocess.TimeoutExpired:
                return None
            finally:
                if child is not None:
                    end_group(child)

    def measured(self, number: int, config: Config, folder: Path, text: str) -> TuneRun | None:
        """The step time in a run folder, else in the output."""
        file = folder / MEASUREMENT
        if not self.pattern and file.is_file():
            table = read_json(file)
            seconds = table.get("step_time_s") if isinstance(table, dict) else None
            if isinstance(seconds, int | float) and seconds > 0:
                on_cpu = config.cluster.accelerator.name.startswith("cpu")  # there it is the size of the process
                memory = None if on_cpu else table.get("memory_gib")
                return TuneRun(number, MEASURED, float(seconds), table.get("spread"), memory)
        found = steps_in(text, config, self.pattern)
        if not found.seconds:
            return None
        return TuneRun(number, MEASURED, found.median, found.spread, found.reserved_gib)


def end_group(child: "subprocess.Popen[bytes]") -> None:
    """End all processes that the command started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(child.pid, number)
        except (ProcessLookupError, PermissionError):
            break
        try:
            child.wait(5)
        except subprocess.TimeoutExpired:
            continue
    child.wait()


def tail(file: Path) -> str:
    """The end of an output."""
    with file.open("rb") as stream:
        stream.seek(max(0, file.stat().st_size - LARGEST_OUTPUT))
        return stream.read().decode("utf-8", "replace")


def readable(text: str) -> str:
    """An output with the errors of our own commands, which they print as JSON, in one line of words."""
    return "\n".join(error_line(line) if line.startswith('{"error"') else line for line in text.splitlines())


def error_line(line: str) -> str:
    try:
        error = json.loads(line)["error"]
        return f"{error['code']}: {error['what']}"
    except (ValueError, KeyError, TypeError):
        return line


def last_line(text: str, wanted: re.Pattern[str] | None = None) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip() and (not wanted or wanted.search(line))]
    return lines[-1][:300] if lines else ""
