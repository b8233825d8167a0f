"""`meshwright web`: the page in a browser."""

from __future__ import annotations

import typer

DEFAULT_PORT = 8765


def command(
    port: int = typer.Option(DEFAULT_PORT, "--port", help="Port on 127.0.0.1; 0 takes a free one.", min=0, max=65535),
    open_page: bool = typer.Option(False, "--open", help="Open the page in the default browser."),
    runs: str = typer.Option("runs", "--runs", metavar="DIR", help="Folder whose run folders are shown."),
) -> None:
    """Serve the page on this machine: plans, predictions, timelines and runs, live. Ctrl-C stops it."""
    from pathlib import Path

    from meshwright.web.serve import serve

    def ready(address: str) -> None:
        print(f"Meshwright is at {address}   (Ctrl-C stops it)", flush=True)
        if open_page:
            import webbrowser

            webbrowser.open(address)

    serve(port, Path(runs), ready)
