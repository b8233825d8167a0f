"""`meshwright explain`: where the steps of anybody's training went."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Group

from meshwright.cli.options import described
from meshwright.cli.output import patient, writable
from meshwright.describe.files import write_text
from meshwright.describe.result import Prediction
from meshwright.errors import MeshwrightError
from meshwright.interop.files import configure
from meshwright.predict.prediction import predict
from meshwright.view.tables import present


@described
def command(
    files: list[Path] = [],
    plan: str = "",
    model: str = "",
    cluster: str = "",
    gpus: int = 0,
    set: list[str] = [],
    html: str = "",
    flight: str = "",
    as_json: bool = False,
) -> None:
    """Read the profiler traces of a training program, and say where its steps went.

    meshwright explain trace-0.json.gz trace-1.json.gz; meshwright explain FOLDER with a file per rank.
    With --plan, a plan file or the settings of a framework, beside the prediction; else beside that of the plan recognised in the trace.
    Memory snapshots of torch, alone or with the traces: what filled the devices at their peaks.
    With --flight: the flight records of a program that hangs, and the rank that is the cause."""
    writable(html)
    if flight and (files or plan or model):
        raise MeshwrightError(
            "MW-CLI-003", "--flight cannot be combined with traces, --plan or --model", fix=f"--flight {flight}"
        )
    if flight:
        flight_records(Path(flight), html, as_json)
        return
    if not files:
        raise MeshwrightError("MW-CLI-005", "no trace is given", fix="meshwright explain FILE… or --flight DIR")
    from meshwright.explain.beside import beside_plan
    from meshwright.explain.explanation import explain_traces
    from meshwright.explain.folder import plan_of_run, read_traces
    from meshwright.explain.memory_snapshot import is_snapshot, read_snapshot
    from meshwright.view.memory_snapshot import page as memory_page
    from meshwright.view.traces import as_dict, page
    from meshwright.view.traces import html as traces_html

    snapshot_files = [file for file in files if is_snapshot(file)]
    if len(snapshot_files) == len(files):
        wanted = configure(model, cluster, plan=plan or None, gpus=gpus, set=set) if plan or model else None
        snapshots(files, predict(wanted) if wanted else None, html, as_json)
        return
    with patient("reading traces", measurable=False):
        explanation = explain_traces(read_traces(file for file in files if file not in snapshot_files))
        beside = beside_plan(explanation, plan or plan_of_run(files), model, cluster, gpus, set)
        memory = [report for file in snapshot_files for report in read_snapshot(file)]
    if html:
        write_text(html, traces_html(explanation, beside, memory))
    predicted = None if isinstance(beside, MeshwrightError) else beside.estimate.prediction
    shown = [page(explanation, beside), *([memory_page(memory, predicted)] if memory else [])]
    devices = {"devices": [report.as_dict() for report in memory]} if memory else {}
    present(Group(*shown), as_dict(explanation, beside) | devices, as_json)


def flight_records(folder: Path, html: str, as_json: bool) -> None:
    """Say which rank hung a program, from the flight records in a folder."""
    from meshwright.explain.flight import explain_flight
    from meshwright.explain.flight_record import read_folder
    from meshwright.view.flight import page

    with patient("reading flight records", measurable=False):
        report = explain_flight(read_folder(folder))
    write_page(html, "Flight records", page(report))
    present(page(report), asdict(report), as_json)


def snapshots(files: list[Path], prediction: Prediction | None, html: str, as_json: bool) -> None:
    """Say what filled the devices at their peaks, from memory snapshots, beside the prediction of a plan."""
    from meshwright.explain.memory_snapshot import read_snapshot
    from meshwright.view.memory_snapshot import page

    with patient("reading memory snapshots", measurable=False):
        reports = [report for file in files for report in read_snapshot(file)]
    predicted = {"predicted_gib_by_stage": prediction.memory_by_stage} if prediction else {}
    write_page(html, "Memory at the peak", page(reports, prediction))
    present(page(reports, prediction), {"devices": [report.as_dict() for report in reports], **predicted}, as_json)


def write_page(html: str, title: str, shown: Any) -> None:
    """Write what the terminal shows to an HTML file, if one is named."""
    from meshwright.view.page.sheet import parts_of, sheet

    if html:
        write_text(html, sheet(title, [], parts_of(shown)))
