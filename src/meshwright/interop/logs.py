"""Step times and memory in what a training prints.

    ours, any program    a line of JSON with "step_time_s", and "memory_gib" if it is known
    torchtitan           tps: tokens per second and device; memory: …GiB
    Megatron-LM          elapsed time per iteration (ms): …; max allocated: … (MiB)
    DeepSpeed            CurrSamplesPerSec=… of all devices
    Transformers         {'train_samples_per_second': …} of the whole run
    NeMo                 train_step_timing in s: …

A pattern of the user has the number in a group, named after its unit: `(?P<s>…)`, `ms`, `tokens_per_s`, `samples_per_s` (of all devices) or
`tokens_per_s_per_gpu`; a group without a name has seconds. The first lines are warm-up.
"""

import json
import math
import re
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from meshwright.describe.config import Config
from meshwright.errors import MeshwrightError

WARMUP = 3  # steps that are not counted, of a longer log
NUMBER = r"([0-9][0-9,]*\.?[0-9]*(?:[eE][-+]?[0-9]+)?)"
STEPS = {
    "tokens_per_s_per_gpu": rf"\btps:\s*{NUMBER}",
    "ms": rf"elapsed time per iteration \(ms\):\s*{NUMBER}",
    "samples_per_s": rf"CurrSamplesPerSec={NUMBER}",
    "whole_samples_per_s": rf"'train_samples_per_second':\s*'?{NUMBER}",
    "s": rf"train_step_timing in s:\s*{NUMBER}",
}
UNITS = ("s", "ms", "tokens_per_s", "samples_per_s", "tokens_per_s_per_gpu")
TITAN_MEMORY = re.compile(rf"\bmemory:\s*{NUMBER}GiB")
MEGABYTES = re.compile(rf"max allocated:\s*{NUMBER}.*?max reserved:\s*{NUMBER}")
COLORS = re.compile(r"\x1b\[[0-9;]*m")


class LoggedSteps(NamedTuple):
    """Seconds of the steps after the warm-up, and the peak of memory in GiB if the log has it."""

    seconds: list[float]
    allocated_gib: float | None = None
    reserved_gib: float | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        return (max(self.seconds) - min(self.seconds)) / self.median


def steps_in(text: str, config: Config, pattern: str = "") -> LoggedSteps:
    """What a log says; no seconds if it says nothing."""
    text = COLORS.sub("", text)
    if pattern:
        regex = compiled(pattern)
        (unit,) = regex.groupindex
        seconds = [seconds_of(unit, match[unit], config) for match in regex.finditer(text)]
        return LoggedSteps(without_warmup(seconds), *memory_in(text))
    if (known := json_line(text)) is not None:
        return known
    for unit, words in STEPS.items():
        found = [seconds_of(unit.removeprefix("whole_"), value, config) for value in re.findall(words, text)]
        if seconds := without_warmup(found, 0 if unit.startswith("whole_") else WARMUP):
            return LoggedSteps(seconds, *memory_in(text))
    return LoggedSteps([], *memory_in(text))


def compiled(pattern: str) -> re.Pattern[str]:
    """The pattern of the user, checked."""
    example = r"--time 'step time: (?P<ms>[0-9.]+)'"
    try:
        regex = re.compile(pattern)
    except re.error as error:
        raise MeshwrightError("MW-TUNE-006", f"--time is not a regular expression: {error}", fix=example) from None
    if regex.groups != 1 or not set(regex.groupindex) & set(UNITS):
        raise MeshwrightError(
            "MW-TUNE-006", "--time needs one group, around the number, named after its unit", valid=UNITS, fix=example
        )
    return regex


def seconds_of(unit: str, text: str | None, config: Config) -> float:
    """Seconds of a step from a number in a log; nan if it says nothing. A group that is optional may match nothing."""
    try:
        value = float((text or "").replace(",", ""))
    except ValueError:
        return math.nan
    work = config.workload
    if value <= 0 or not math.isfinite(value):
        return math.nan
    if unit in ("s", "ms"):
        return value / (1e3 if unit == "ms" else 1)
    per_step = work.batch if unit == "samples_per_s" else work.tokens_per_step
    return per_step / value / (config.plan.world if unit == "tokens_per_s_per_gpu" else 1)


def without_warmup(seconds: Sequence[float], warmup: int = WARMUP) -> list[float]:
    seconds = [s for s in seconds if math.isfinite(s)]
    return seconds[min(warmup, len(seconds) // 2) :]


def memory_in(text: str) -> tuple[float | None, float | None]:
    """Allocated and reserved GiB at the peak."""
    pairs = [(value_of(a) / 1024, value_of(b) / 1024) for a, b in MEGABYTES.findall(text)]
    if pairs:
        return max(pairs)
    in_gib = [value_of(x) for x in TITAN_MEMORY.findall(text)]
    return (None, max(in_gib)) if in_gib else (None, None)


def value_of(text: str) -> float:
    return float(text.replace(",", ""))


def json_line(text: str) -> LoggedSteps | None:
    """The last line of JSON with a step time."""
    for line in reversed(text.splitlines()):
        if not line.startswith("{") or '"step_time_s"' not in line:
            continue
        try:
            table = json.loads(line)
        except (ValueError, RecursionError):
            continue
        seconds, memory = table.get("step_time_s"), table.get("memory_gib")
        if isinstance(seconds, int | float) and math.isfinite(seconds) and seconds > 0:
            whole = isinstance(memory, int | float) and math.isfinite(memory) and memory > 0
            return LoggedSteps([float(seconds)], None, float(memory) if whole else None)
    return None
