"""Plug-ins: Python files that register variants (docs/extending.md), and how they reach every process.

A plan file names them (`plugins = ["my_attention.py"]`, relative to the file), or a command (`--plugin my_attention.py`); a name without
`.py` is a module that Python can import. They are loaded before the names in a plan are checked. A written plan file records them, and
ranks load them again before they start. A plug-in is a program: load those that you trust.
"""

import importlib
import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from meshwright.errors import MeshwrightError

LOADED: list[str] = []  # absolute paths and names of modules, in the order in which this process loaded them


def load(names: Any, folder: Path = Path()) -> None:
    """Load plug-ins that this process has not loaded yet; paths are relative to `folder`."""
    if not isinstance(names, Iterable) or isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise MeshwrightError("MW-VARI-003", "plugins is not a list of files", fix='plugins = ["my_attention.py"]')
    for name in names:
        key = str((folder / name).resolve()) if name.endswith(".py") else name
        if key not in LOADED:
            _load(name, key)
            LOADED.append(key)


def _load(name: str, key: str) -> None:
    try:
        if name.endswith(".py"):
            _run_file(key)
        else:
            importlib.import_module(name)
    except Exception as error:
        what = f"the plug-in '{name}' cannot be loaded"
        if isinstance(error, MeshwrightError):
            raise error.but(what=f"{what}: {error.what}") from None
        raise MeshwrightError("MW-VARI-003", what, why=f"{type(error).__name__}: {error}") from error


def _run_file(path: str) -> None:
    if not Path(path).is_file():
        raise MeshwrightError("MW-VARI-003", f"there is no file '{path}'")
    spec = importlib.util.spec_from_file_location(f"meshwright_plugin_{Path(path).stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickles look their module up
    spec.loader.exec_module(module)
