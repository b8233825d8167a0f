"""What commands share beside their answer: files refused before the work, not after it, and a bar for who waits.

Bars go to stderr and only to a terminal: an answer can be piped, and `--json` stays one document.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from meshwright.errors import MeshwrightError, cannot_write

PATIENCE_S = 2.0  # what takes longer shows how far it is


def writable(*paths: str | Path | None, make: bool = False) -> None:
    """Refuse what could not be written; what was not asked for is nothing. `make`: missing folders are made."""
    for path in paths:
        if not path:
            continue
        file = Path(path)
        try:
            if make:
                file.parent.mkdir(parents=True, exist_ok=True)
            new = not file.exists()
            file.open("a").close()
            if new:
                file.unlink()
        except OSError as error:
            if not make and not file.parent.exists():
                why = f"The folder '{file.parent}' does not exist"
                raise MeshwrightError("MW-CLI-004", f"cannot write '{path}'", why=why, fix=file.name) from error
            raise cannot_write(path, error) from error


@contextmanager
def patient(doing: str, told: bool = True) -> Iterator[Callable[[float], None]]:
    """A bar once two seconds have passed, that is told the share done; it only moves where nobody can say (`told`)."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    err = Console(stderr=True)
    bar = Progress(
        TextColumn(doing), BarColumn(), TimeElapsedColumn(), console=err, transient=True, disable=not err.is_terminal
    )
    task, start = bar.add_task("", total=1.0 if told else None), time.monotonic()

    def tell(share: float) -> None:
        if not bar.live.is_started and time.monotonic() - start > PATIENCE_S:
            bar.start()
        bar.update(task, completed=share)

    try:
        if not told:
            bar.start()
        yield tell
    finally:
        bar.stop()
