"""Patches that make a framework which asks for a GPU run on CPU processes with gloo: one file for each framework.

They are applied only when asked (`meshwright check record --on-cpu`). A file says which functions are called before or after a module of the
framework is imported: `BEFORE` and `AFTER`, by the module's name. The first line of each function's docstring says what it replaces.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

FILES = ("accelerate", "deepspeed", "megatron", "torchtitan")


class PatchOnImport(MetaPathFinder):
    """Calls the functions of the files when the modules that they wait for are imported."""

    def __init__(self) -> None:
        self.searching: set[str] = set()
        files = [importlib.import_module(f"{__name__}.{file}") for file in FILES]
        self.before: dict[str, Callable[[], None]] = {
            k: v for file in files for k, v in getattr(file, "BEFORE", {}).items()
        }
        self.after: dict[str, Callable[[Any], None]] = {
            k: v for file in files for k, v in getattr(file, "AFTER", {}).items()
        }

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name in self.searching or name not in {*self.before, *self.after}:
            return None
        self.searching.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.searching.remove(name)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_and_patch(module: ModuleType) -> None:
            if name in self.before:
                self.before[name]()
            run(module)
            if name in self.after:
                self.after[name](module)

        spec.loader.exec_module = run_and_patch  # type: ignore[method-assign]
        return spec


def install() -> None:
    """Patch each framework when it is imported, once."""
    finder = PatchOnImport()  # imports torch, after which the start-up hook may patch first
    if not any(isinstance(other, PatchOnImport) for other in sys.meta_path):
        sys.meta_path.insert(0, finder)


def patches_of(file: str) -> list[str]:
    """What the patches of a framework replace, in words."""
    module = importlib.import_module(f"{__name__}.{file}")
    functions = [*getattr(module, "BEFORE", {}).values(), *getattr(module, "AFTER", {}).values()]
    return [line for function in functions if (line := (function.__doc__ or "").partition("\n")[0])]
