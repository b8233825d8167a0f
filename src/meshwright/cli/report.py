"""`meshwright report`: runs as one page, predicted against measured."""

from __future__ import annotations

from pathlib import Path

import typer


def command(
    runs: list[Path] = typer.Argument(..., help="Run folders that `train` wrote."),
    html: Path = typer.Option(Path("report.html"), "--html", help="The page to write."),
    title: str = typer.Option("Planned, proved, trained, compared", "--title", help="Its heading."),
) -> None:
    """Runs as one page: the proof, the loss, and predicted against measured."""
    from meshwright.cli.output import writable
    from meshwright.describe.files import write_text
    from meshwright.view.report import page, read_run

    text = page([read_run(folder) for folder in runs], title)
    writable(html, make=True)
    write_text(html, text)
    print(f"written to {html}")
