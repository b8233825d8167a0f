"""Files a command will write: refused before the work, not after it."""

from __future__ import annotations

from pathlib import Path

from meshwright.errors import MeshwrightError


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
            folder = not file.is_dir() and not file.parent.is_dir()
            why = f"There is no folder '{file.parent}'" if folder else error.strerror or str(error)
            raise MeshwrightError("MW-CLI-004", f"cannot write '{path}'", why=why, fix=file.name or "a file") from error
