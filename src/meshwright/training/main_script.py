"""Start processes from a user's script that has no `if __name__ == "__main__":` guard.

`multiprocessing` also runs the script in every process that it starts, so that functions of the script can be called there. A script
without the guard would then start processes in every process. Ours import what they call from a module, so the script is hidden from them.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def main_hidden(unless: bool = False) -> Iterator[None]:
    """Processes that are started meanwhile do not run the caller's script: they import their target by name and do not need it."""
    main = sys.modules["__main__"]
    names = () if unless else ("__file__", "__spec__")
    hidden = {name: getattr(main, name) for name in names if hasattr(main, name)}
    for name in hidden:
        setattr(main, name, None)
    try:
        yield
    finally:
        for name, value in hidden.items():
            setattr(main, name, value)
