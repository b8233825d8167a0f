"""`meshwright web`: the page in a browser."""

from meshwright.cli.options import described


@described
def command(
    port: int = 8765,
    open_page: bool = False,
    runs: str = "runs",
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
