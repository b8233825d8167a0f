"""`meshwright report`: one HTML page about training runs."""

from __future__ import annotations

from pathlib import Path

import typer


def command(
    runs: list[Path] = typer.Argument(..., help="Run folders that `train` wrote."),
    html: Path = typer.Option(Path("report.html"), "--html", help="The file to write."),
    title: str = typer.Option("", "--title", help="The heading of the page."),
) -> None:
    """Write one HTML page about training runs: the proof, the loss, and predicted and measured values."""
    from meshwright.cli.output import writable
    from meshwright.describe.files import write_text
    from meshwright.view.report import page, read_run

    text = page([read_run(folder) for folder in runs], title)
    writable(html, make=True)
    write_text(html, text)
    print(f"written to {html}")
