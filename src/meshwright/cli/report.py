"""`meshwright report`: one HTML page about training runs."""

from pathlib import Path

from meshwright.cli.options import described
from meshwright.cli.output import writable
from meshwright.describe.files import write_text
from meshwright.view.trace import write_trace


@described
def command(
    runs: list[Path],
    html: Path = Path("report.html"),
    title: str = "",
    trace: Path | None = None,
) -> None:
    """Write one HTML page about training runs: curves, the proof, and predicted and measured values by part."""
    from meshwright.view.report import page, trace_of

    text = page(runs, title)
    traced = trace_of(runs) if trace is not None else {}
    writable(html, trace, make=True)
    if trace is not None:
        write_trace(traced, trace)
    write_text(html, text)
    for file in (html, trace):
        if file is not None:
            print(f"written to {file}")
