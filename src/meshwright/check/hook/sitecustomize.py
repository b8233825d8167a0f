"""Python imports this file at start when its folder is on PYTHONPATH (`meshwright check record` and `check watch` put it there): it waits for
torch to be imported, and then attaches the recorder or the watch. The script itself is not changed; another sitecustomize of the user's is run
as well."""

import importlib.abc
import importlib.util
import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
SETTINGS = "MESHWRIGHT_CHECK"


def load_meshwright() -> None:
    """Import the `meshwright` that this file belongs to, also where it is not installed, without opening its folder to other imports."""
    if "meshwright" not in sys.modules:
        package = HERE.parents[1]
        spec = importlib.util.spec_from_file_location(
            "meshwright", package / "__init__.py", submodule_search_locations=[str(package)]
        )
        assert spec is not None
        assert spec.loader is not None
        sys.modules["meshwright"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


class AfterTorch(importlib.abc.MetaPathFinder):
    """Attaches the recorder when torch has been imported."""

    def find_spec(self, name, path, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_and_attach(module):
            run(module)
            load_meshwright()
            importlib.import_module("meshwright.check.start").attach_from_environment()

        spec.loader.exec_module = run_and_attach  # type: ignore[method-assign]
        return spec


def run_the_users_own() -> None:
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != HERE]
    this = sys.modules.pop("sitecustomize", None)
    if importlib.util.find_spec("sitecustomize") is not None:
        import sitecustomize  # noqa: F401
    elif this is not None:
        sys.modules["sitecustomize"] = this


run_the_users_own()
if SETTINGS in os.environ:
    sys.meta_path.insert(0, AfterTorch())
