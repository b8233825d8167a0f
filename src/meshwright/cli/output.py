"""What commands share: output paths are checked before the work starts, and a progress bar appears after two seconds.

Progress bars go to stderr, and only if it is a terminal: the result can be piped, and `--json` prints one document.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from meshwright.errors import MeshwrightError, cannot_write

PATIENCE_S = 2.0  # work that takes longer shows a progress bar


def writable(*paths: str | Path | None, make: bool = False) -> None:
    """Raise if one of these files cannot be written; empty paths are skipped. `make`: create missing folders."""
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
        except ValueError:
            raise MeshwrightError("MW-CLI-004", f"cannot write '{path}'", why="The name has a null byte") from None
        except OSError as error:
            if not make and not file.parent.exists():
                why = f"The folder '{file.parent}' does not exist"
                raise MeshwrightError("MW-CLI-004", f"cannot write '{path}'", why=why, fix=file.name) from error
            raise cannot_write(path, error) from error


@contextmanager
def patient(
    doing: str, measurable: bool = True, at_once: bool = False, visible: bool = True
) -> Iterator[Callable[..., None]]:
    """A progress bar with the time left. The value is called with the share done, and what is being done if that changes; the bar appears once
    two seconds have passed, or `at_once`. If the work cannot be measured, the bar shows from the start that something runs."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    err = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    bar = Progress(
        *columns[: 4 if measurable else 3], console=err, transient=True, disable=not (visible and err.is_terminal)
    )
    task, start = bar.add_task(doing, total=1.0 if measurable else None), time.monotonic()

    def set_share(share: float, now: str = doing) -> None:
        if not bar.live.is_started and time.monotonic() - start > PATIENCE_S:
            bar.start()
        bar.update(task, completed=share, description=now)

    try:
        if at_once or not measurable:
            bar.start()
        yield set_share
    finally:
        bar.stop()
