"""`meshwright report`: one HTML page about training runs."""

from __future__ import annotations

from pathlib import Path

import typer


def command(
    runs: list[Path] = typer.Argument(..., help="Run folders that `train` wrote."),
    html: Path = typer.Option(Path("report.html"), "--html", help="The file to write."),
    title: str = typer.Option("", "--title", help="The heading of the page."),
    trace: Path | None = typer.Option(
        None, "--trace", help="Write the measured and the simulated step of one run as a trace for Perfetto."
    ),
) -> None:
    """Write one HTML page about training runs: the proof, the loss, and predicted and measured values by part."""
    from meshwright.cli.output import writable
    from meshwright.describe.files import write_text
    from meshwright.view.report import page, read_run, trace_of

    found = [read_run(folder) for folder in runs]
    text = page(found, title)
    writable(html, trace, make=True)
    if trace is not None:
        from meshwright.view.trace import write_trace

        write_trace(trace_of(found), trace)
    write_text(html, text)
    for file in (html, trace):
        if file is not None:
            print(f"written to {file}")
