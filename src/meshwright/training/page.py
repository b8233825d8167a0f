"""The result of a training in the terminal: the measurement and the prediction. `view.watch` shows it while it runs."""

from math import isfinite

from rich.console import Group, RenderableType
from rich.text import Text

from meshwright.describe.result import COMMUNICATION, MEASURED_PARTS, Difference, part_label
from meshwright.predict.prediction import predict
from meshwright.training.measure.calibration import is_for_this_machine
from meshwright.training.measure.measurement import Training
from meshwright.units import format_decimal_bytes, format_seconds, format_value
from meshwright.view.live import expert_balance
from meshwright.view.tables import filled, heading, sparkline

PARTS = ("compute", *MEASURED_PARTS, "other")
COMPUTE_OR_IDLE = ("compute", "bubble", "waiting")
PART_NAMES = {axis: f"{axis}: {name}" for axis, name in COMMUNICATION.items()} | {
    "bubble": "bubble: waits for other stages",
    "waiting": "waiting: for slower ranks",
    "other": "other groups",
}


def page(training: Training, folder: str = "") -> RenderableType:
    """The result of a run: loss, step time, expert balance, and the table of predicted and measured values."""
    m, p = training.measurement, training.prediction
    low, high = format_seconds(m.step_time_low_s), format_seconds(m.step_time_high_s)
    fp8 = ", matrix products in fp8" if training.config.workload.precision == "fp8" else ""
    title = heading(training.config.plan.title(), f"{m.steps} steps, {m.warmup} of them warm-up{fp8}")
    loss = Text.assemble(("loss ", "dim"), f"{m.loss[0]:.3f} → {m.loss[-1]:.3f}  ", (sparkline(m.loss), "cyan"))
    step = Text.assemble(
        ("step ", "dim"),
        (format_seconds(m.step_time_s), "bold"),
        (f"  ({low} to {high})", "dim"),
        ("   predicted ", "dim"),
        format_seconds(p.step_time_s),
        (
            f"  ({format_seconds(p.step_time_low_s)} to {format_seconds(p.step_time_high_s)}; stack {training.config.stack.name})",
            "dim",
        ),
    )
    above = [Text(f"asked for: {training.asked_for}", "yellow")] if training.asked_for else []
    if training.config.model.resnet.stages:
        above.append(Text("batch norm by the statistics of a rank's micro-batch; running averages are not kept", "dim"))
    lines = [title, *above, *(Text(f"not run: {part}", "yellow") for part in training.config.model.not_run), loss, step]
    evaluated = [loss for _, loss in m.validation_loss]
    if evaluated:
        change = f"{evaluated[0]:.3f} → {evaluated[-1]:.3f}  "
        lines.insert(-1, Text.assemble(("validation loss ", "dim"), change, (sparkline(evaluated), "cyan")))
    if training.predicted_from:
        lines.append(Text(f"predicted from {training.predicted_from}", "dim"))
    lines += [Text(sentence, "dim") for sentence in compilation(training)]
    if training.diverged_at is not None:
        lines.append(Text(f"Loss is NaN or infinite from step {training.diverged_at} on", "bold red"))
    if training.interference is not None:
        lines += [Text(sentence, "yellow") for sentence in training.interference.sentences()]
    lines += [Text(sentence, "yellow") for sentence in not_measured(training)]
    routers = [record.row() for record in training.steps if record.router]
    if routers:
        entropy = sparkline([row["router_entropy"] for row in routers])
        lines += [
            Text.assemble(("first step ", "dim"), expert_balance(routers[0])),
            Text.assemble(("last step  ", "dim"), expert_balance(routers[-1]), "  ", (entropy, "cyan")),
        ]
    lines += compression_savings(training)
    tables = [difference_table(training.differences), *parts_table(training), *kernels_table(training)]
    return Group(*lines, *tables, *([Text(f"written to {folder}", "dim")] if folder else []))


def not_measured(training: Training) -> list[str]:
    """Return why the prediction may be wrong for the device that ran: another device, or a dtype in which its operations were not measured."""
    config, device = training.config, training.config.cluster.accelerator
    if not training.comparable:
        return [f"The prediction is for {device.name}, the run used CPU processes: times do not compare"]
    if device.name != "cpu":
        return []
    if config.workload.precision == "fp8":
        return ["Products in fp8 are emulated on a CPU: they take longer than predicted"]
    dtype, measured = config.plan.param_dtype, device.efficiency.measured_dtype
    if training.uncalibrated:
        return [training.uncalibrated]
    if is_for_this_machine(config):
        return ["This machine was not calibrated: the prediction has the constants of the catalog's CPU"]
    if measured in ("", dtype):  # "": rates that the user gave
        return []
    return [
        f"This machine was calibrated in {measured}, not in {dtype}: operations may take longer or shorter than predicted"
    ]


def compilation(training: Training) -> list[str]:
    """The time of the compiler in the first step, and whether the measured step is without it."""
    first = next((record for record in training.steps if record.compile_s), None)
    if first is None or not first.compile_s:
        return []
    measured = first.step >= training.steps[0].step + training.measurement.warmup
    note = ", left out above: no later step compiles" if measured else ""
    seconds = format_seconds(first.seconds), format_seconds(first.compile_s)
    return [f"first step {seconds[0]}, of which compilation {seconds[1]}{note}"]


def compression_savings(training: Training) -> list[Text]:
    """Bytes that gradient compression saves on the data-parallel links. `benchmarks/compress.py` measures its time."""
    plan, sent = training.config.plan, training.measurement.traffic_bytes.get("dp", 0.0)
    if not plan.lossy or not sent:
        return []
    exact = predict(training.config.but(plan=plan.but(compression="none", comm_dtype=None)))
    uncompressed = exact.traffic_bytes["dp"]
    words = (
        f"{format_decimal_bytes(sent)} per step over dp, {format_decimal_bytes(uncompressed)} without {plan.wire}: "
        f"{uncompressed / sent:.3g}× fewer"
    )
    return [Text.assemble(("sent ", "dim"), words)]


def parts_table(training: Training) -> list[RenderableType]:
    """The step of the busiest rank by part: exposed seconds sum to the step; hidden communication ran behind compute."""
    m, p = training.measurement, training.prediction
    if not m.exposed_s:
        return []
    predicted_parts, parts = p.parts, m.parts
    cells: list[list[object]] = []
    for part in PARTS:
        row = [predicted_parts.get(part, 0.0), parts.get(part, 0.0)]
        behind = [result.hidden_s.get(part, 0.0) for result in (p, m)]
        if any((*row, *behind)):
            share = f"{parts.get(part, 0.0) / m.step_time_s:.0%}"
            hidden = [format_seconds(s) if s else "" for s in behind] if part in COMMUNICATION else ["", ""]
            cells.append([PART_NAMES.get(part, part), *(format_seconds(s) if s else "–" for s in row), share, *hidden])
    total = Text(format_seconds(sum(predicted_parts.values())), "bold"), Text(format_seconds(m.step_time_s), "bold")
    cells.append([Text("step", "bold"), *total, "", "", ""])
    columns = ("", ">predicted", ">measured", ">of the step", ">hidden, predicted", ">hidden, measured")
    return [filled(columns, cells, title="Step of the busiest rank by part"), *shared_cores(training)]


def shared_cores(training: Training) -> list[RenderableType]:
    """Explain how to compare compute if ranks share cores: the system decides which of them computes and which waits."""
    world, found = training.config.plan.world, training.interference
    if found is None or world <= found.cores:
        return []
    both = (
        sum(r.parts.get(part, 0.0) for part in COMPUTE_OR_IDLE) for r in (training.prediction, training.measurement)
    )
    predicted_s, measured_s = map(format_seconds, both)
    words = (
        f"{world} ranks share {found.cores:g} cores. Predicted compute includes the time in which other ranks have the core; a "
        f"measured rank spends part of it in bubble and waiting. The three together: predicted {predicted_s}, measured {measured_s}"
    )
    return [Text(words, "dim")]


def kernels_table(training: Training) -> list[RenderableType]:
    """A profiled step on a GPU by group of kernels: measured, predicted, and the time at the device's best rates."""
    if not training.kernels:
        return []
    total = sum(group.measured_s for group in training.kernels)
    cells: list[list[object]] = []
    for group in training.kernels:
        known = [format_seconds(s) if s else "" for s in (group.predicted_s, group.floor_s)]
        reached = f"{group.floor_s / group.measured_s:.0%}" if group.floor_s and group.measured_s else ""
        cells.append(
            [group.group, format_seconds(group.measured_s), f"{group.measured_s / total:.0%}", *known, reached]
        )
    columns = ("kernels", ">measured", ">of the step", ">predicted", ">floor", ">floor / measured")
    return [filled(columns, cells, title="A profiled step by group of kernels")]


def difference_table(rows: list[Difference]) -> RenderableType:
    """All rows except those of the parts, which have a table to themselves."""
    parts = {part_label(part) for part in PARTS}
    cells = []
    for row in rows:
        if row.what in parts:
            continue
        error = Text(percent(row.error), "green" if abs(row.error) <= 0.2 else "yellow")
        cells.append([row.what, format_value(row.predicted, row.unit), format_value(row.measured, row.unit), error])
    return filled(("", ">predicted", ">measured", ">error"), cells, title="Prediction and measurement")


def percent(error: float) -> str:
    """A signed percentage; "—" if there is none, because the measured value is zero."""
    if not isfinite(error):
        return "—"
    return f"{100 * error:+.0f}%" if abs(error) >= 0.005 else "0%"
