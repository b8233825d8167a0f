"""A stack adjusted to measured runs of the user: what is known of the stack is the prior of Bayes' rule.

    prior        the stack's numbers in another source (`stack_fit`): wide for the typical stack, narrower for one with published runs; for a
                 stack file of an earlier calibration its own distribution, so that runs can be added one at a time
    likelihood   the measured step times, with the noise and the robust weights of `stack_fit`; its posterior averages over how far the source is
                 from its stack and how noisy its runs are, so one run moves little and several that agree move more
    memory       the allocator's slack moves by half of what the measured peak differs, within its limits

The result is a stack with the posterior means and their covariance. Every command accepts its file as --stack FILE. Its predictions have the band of
calibrated stacks from `ENOUGH` runs on, the number from which that band was computed (`accuracy.bands`); until then the
band that the stack had before.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.calibrate.runs.left_out import SEEN
from meshwright.calibrate.runs.normal import Normal
from meshwright.calibrate.runs.stack_fit import (
    BETWEEN_SOURCES,
    BETWEEN_STACKS,
    LEAST_LAUNCH,
    NOISES,
    NUMBERS,
    SCALES,
    Response,
    doubt_of,
    fields_of,
    grid,
    numbers_of,
    posterior,
    step_times,
)
from meshwright.describe import catalog
from meshwright.describe.config import Config, configure, load
from meshwright.describe.result import GIB, OVERHEAD
from meshwright.describe.run_folder import is_run, present_plan, read_about, read_json
from meshwright.describe.stack import Stack
from meshwright.errors import MeshwrightError
from meshwright.predict.prediction import predict, seconds_at_peak
from meshwright.units import format_bytes, parse_bytes

LEAST_SLACK, MOST_SLACK = 0.0, 0.5
ENOUGH = SEEN[-1]  # runs
ONE_DEVICE_NOISE = 0.4
FAR = 2.0  # a factor between prediction and measurement: such a run does not count


@dataclass(frozen=True)
class MeasuredRun:
    """One run of the user: its configuration, its step time in seconds, and its peak memory in bytes if known."""

    name: str
    config: Config
    step_time: float
    memory: float = 0.0
    # Of memory: "reserved" by torch's allocator, or "used" with the driver's context, as nvidia-smi shows
    quantity: str = "used"


@dataclass(frozen=True)
class Adjusted:
    """The stack before and after, and each run with its predictions by both."""

    before: Stack
    after: Stack
    runs: tuple[MeasuredRun, ...]
    predicted_before: tuple[float, ...]
    predicted_after: tuple[float, ...]

    @property
    def far_off(self) -> list[str]:
        """The runs whose measured time is still far from the prediction."""
        runs = zip(self.runs, self.predicted_after, strict=True)
        return [run.name for run, seconds in runs if not 1 / FAR < run.step_time / seconds < FAR]

    def to_toml(self) -> str:
        import tomli_w

        return tomli_w.dumps({"stack": self.after.as_dict()})

    def as_dict(self) -> dict[str, Any]:
        runs = zip(self.runs, self.predicted_before, self.predicted_after, strict=True)
        out = [
            {"run": run.name, "measured_s": run.step_time, "before_s": old, "after_s": new} for run, old, new in runs
        ]
        for row, run in zip(out, self.runs, strict=True):
            if run.memory:
                before, after = self.memory_of(run)
                row |= {"measured_gib": run.memory / GIB, "before_gib": before, "after_gib": after}
        return {"stack": self.after.as_dict(), "runs": out}

    def memory_of(self, run: MeasuredRun) -> tuple[float, float]:
        """The predicted memory of a run in GiB, by the stack before and after."""
        c = run.config
        before, after = (predict(c.but(stack=s)) for s in (self.before, self.after))
        return before.memory_as(run.quantity), after.memory_as(run.quantity)


def measured_runs(
    paths: Sequence[str], tokens_per_s: Sequence[str], memory: Sequence[str], stack: str
) -> list[MeasuredRun]:
    """The runs of run folders and of plan files with typed measurements, in the given order."""
    typed, sizes, runs = list(tokens_per_s), list(memory), []
    for path in paths:
        folder = Path(path)
        if folder.is_dir():
            runs.append(_of_folder(folder, stack))
            continue
        if not typed:
            what = f"'{path}' is not a run folder, and no --tokens-per-s is given for it"
            why = "A plan file says what ran, not how fast"
            raise MeshwrightError("MW-CALIB-003", what, why=why, fix=f"--from-run {path} --tokens-per-s 41000")
        config = configure(folder, stack=stack).check()
        rate = _positive(typed.pop(0), "--tokens-per-s")
        size = float(parse_bytes(sizes.pop(0))) if sizes else 0.0
        runs.append(_possible(MeasuredRun(folder.name, config, config.workload.tokens_per_step / rate, size)))
    if typed or sizes:
        what = "there are more measurements than plan files"
        why = "Each --tokens-per-s and --memory belongs to one --from-run PLAN.toml"
        raise MeshwrightError("MW-CALIB-003", what, why=why, fix="give one --from-run for each")
    return runs


def _of_folder(folder: Path, stack: str) -> MeasuredRun:
    """The run of a folder that `meshwright train` wrote."""
    measurement = folder / "measurement.json"
    if not is_run(folder) or not measurement.is_file():
        what = f"'{folder}' has no measurement.json"
        why = "Only a finished run folder of `meshwright train` has a measured step time"
        raise MeshwrightError("MW-CALIB-003", what, why=why, fix="--from-run runs/NAME of a finished run")
    table = read_json(measurement)
    seconds = table.get("step_time_s") if isinstance(table, dict) else None
    if not isinstance(seconds, int | float) or not math.isfinite(seconds) or seconds <= 0:
        raise MeshwrightError("MW-CALIB-003", f"measurement.json of '{folder}' has no step_time_s")
    config = configure(present_plan(folder), stack=stack) if stack else load(present_plan(folder))
    on_cpu = config.cluster.accelerator.name == "cpu"
    if read_about(folder).get("device") == "cpu" and not on_cpu:
        what = f"the run of '{folder}' used CPUs, and its plan is for {config.cluster.accelerator.name}"
        raise MeshwrightError("MW-CALIB-003", what, why="Its step time says nothing of the stack on that device")
    reserved = table.get("memory_gib") if not on_cpu else None  # of a CPU it is the resident memory of the process
    size = GIB * reserved if isinstance(reserved, int | float) and math.isfinite(reserved) else 0.0
    return MeasuredRun(folder.name, config, float(seconds), size, "reserved")


def _possible(run: MeasuredRun) -> MeasuredRun:
    """The run of typed measurements, if its devices can be as fast and hold as much as was measured."""
    c = run.config
    device, least = c.cluster.accelerator, seconds_at_peak(c)
    if run.step_time < least:
        most = c.workload.tokens_per_step / least
        raise MeshwrightError(
            "MW-CALIB-003",
            f"{run.name}: {c.workload.tokens_per_step / run.step_time:,.3g} tokens/s are {least / run.step_time:.3g} times what the devices can do",
            why=f"At their peak rate, {c.plan.world} × {device.name} do {most:,.3g} tokens/s of this model",
        )
    parts = predict(c).memory_by_stage
    parameters = GIB * max(stage["parameters"] for stage in parts)
    if run.memory and not parameters <= run.memory <= device.memory:
        what = f"{run.name}: a peak of {format_bytes(run.memory)} per device is not possible"
        why = (
            f"{device.name} has {format_bytes(device.memory)}, and the parameters alone take {format_bytes(parameters)}"
        )
        raise MeshwrightError("MW-CALIB-003", what, why=why, fix="--memory 61GiB")
    return run


def _positive(text: str, option: str) -> float:
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value <= 0:
        raise MeshwrightError("MW-CALIB-003", f"{option} {text} is not a positive number", fix=f"{option} 41000")
    return value


def prior_of(stack: Stack) -> Normal:
    """Return the prior of a stack: its numbers before any run is seen."""
    spread = BETWEEN_SOURCES if stack.evidence == "published" else BETWEEN_SOURCES + BETWEEN_STACKS
    if stack.covariance:
        spread = _covariance(stack)
    return Normal.of(numbers_of(stack), spread)


def _covariance(stack: Stack) -> np.ndarray:
    """The covariance of an earlier calibration."""
    size = len(NUMBERS)
    covariance = np.array(stack.covariance)
    if (
        len(covariance) != size**2
        or not np.isfinite(covariance).all()
        or np.linalg.eigvalsh(covariance.reshape(size, size)).min() <= 0
    ):
        raise MeshwrightError(
            "MW-CALIB-003",
            f"stack.covariance of {stack.name} is not a covariance of {size} numbers",
            why=f"It has {len(covariance)} numbers; {size**2} are needed, of a positive definite matrix",
            fix="use a file of `meshwright calibrate --from-run` as it was written",
        )
    return covariance.reshape(size, size)


def adjusted(runs: Sequence[MeasuredRun], name: str = "", one_device: bool = False) -> Adjusted:
    """The stack of the runs, adjusted to them. `one_device`: they are measurements of one device, which no network and no other rank disturbs:
    the stack follows them with the whole width of its prior, and their noise is `ONE_DEVICE_NOISE` of that of runs."""
    stack = runs[0].config.stack
    stack = stack.but(collective_operators=stack.collective_launch / max(stack.launch, LEAST_LAUNCH))  # as measured
    other = next((run for run in runs if run.config.stack.name != stack.name), None)
    if other is not None:
        what = f"the runs have different stacks: {stack.name} and {other.config.stack.name}"
        raise MeshwrightError("MW-CALIB-004", what, why="A calibration adjusts one stack", fix=f"--stack {stack.name}")
    points = grid()
    response = Response.of([_times(run, stack, points) for run in runs], [_doubt(run, stack) for run in runs])
    measured = np.log([run.step_time for run in runs])
    scales = (1.0,) if stack.covariance or one_device else SCALES
    updated = posterior(response, measured, prior_of(stack), scales, (ONE_DEVICE_NOISE,) if one_device else NOISES)
    fields = {key: float(f"{float(value):.4g}") for key, value in fields_of(updated.mean, stack).items()}
    after = stack.but(
        **fields,
        name=name or (stack.name if stack.covariance else f"{stack.name}-calibrated"),
        covariance=tuple(float(f"{x:.6g}") for x in updated.covariance.ravel()),
        allocator_slack=_slack(runs, stack),
    )
    before, new = ([float(_times(run, s, numbers_of(s)[None])[0]) for run in runs] for s in (stack, after))
    return _counted(Adjusted(stack, after, tuple(runs), tuple(before), tuple(new)))


def _counted(result: Adjusted) -> Adjusted:
    """The result whose stack says how many runs it is adjusted to, without those that it does not explain, and what is known of it."""
    stack = result.before
    count = stack.measured_runs + len(result.runs) - len(result.far_off)
    base = stack.name.removesuffix("-calibrated")
    known = base in catalog.names("stacks") and base != "default"  # its switches
    level = "calibrated" if known else "calibrated-typical"
    after = result.after.but(
        evidence=level if count >= ENOUGH else stack.evidence,
        measured_runs=count,
        source=f"{stack.name.removesuffix('-calibrated')}, adjusted to {count} measured run{'s' * (count != 1)}",
    )
    return replace(result, after=after)


def _doubt(run: MeasuredRun, stack: Stack) -> float:
    c = run.config
    return doubt_of(predict(c.but(stack=stack)), c.cluster)


def _times(run: MeasuredRun, stack: Stack, x: np.ndarray) -> np.ndarray:
    c = run.config
    return step_times(c.model, c.cluster, [c.plan] * len(x), c.workload, stack, x)


def _slack(runs: Sequence[MeasuredRun], stack: Stack) -> float:
    """The allocator's slack, moved half of the way to what the measured peaks show."""
    slacks = []
    for run in runs:
        if run.memory:
            c = run.config
            parts = predict(c.but(stack=stack)).memory_by_stage
            fullest = max(parts, key=lambda stage: sum(stage.values()))
            live = sum(fullest[part] for part in ("activations", "gathered", "working"))
            without = ("slack",) if run.quantity == "used" else OVERHEAD
            excess = run.memory / GIB - sum(x for part, x in fullest.items() if part not in without)
            slacks.append(excess / live if live else stack.allocator_slack)
    if not slacks:
        return stack.allocator_slack
    middle = (stack.allocator_slack + float(np.median(slacks))) / 2
    return float(f"{min(max(middle, LEAST_SLACK), MOST_SLACK):.4g}")
