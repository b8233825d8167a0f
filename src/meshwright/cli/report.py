"""`meshwright report`: one HTML page about training runs."""

from __future__ import annotations

from pathlib import Path

import typer


def command(
    runs: list[Path] = typer.Argument(..., help="Run folders that `train` wrote, or writes at the moment."),
    html: Path = typer.Option(Path("report.html"), "--html", help="The file to write."),
    title: str = typer.Option("", "--title", help="The heading of the page."),
    trace: Path | None = typer.Option(
        None,
        "--trace",
        help="Write the profiled or measured and the simulated step of one run as a trace for Perfetto.",
    ),
) -> None:
    """Write one HTML page about training runs: curves, the proof, and predicted and measured values by part."""
    from meshwright.cli.output import writable
    from meshwright.describe.files import write_text
    from meshwright.view.report import page, trace_of
    from meshwright.view.trace import write_trace

    text = page(runs, title)
    traced = trace_of(runs) if trace is not None else {}
    writable(html, trace, make=True)
    if trace is not None:
        write_trace(traced, trace)
    write_text(html, text)
    for file in (html, trace):
        if file is not None:
            print(f"written to {file}")
