"""Meshwright: plan, prove, run and check distributed training.

    import meshwright as mw
    result = mw.plan("llama3-70b", "dgx-h100", nodes=8)
    result.plan                                      # the fastest; result.to_toml() is a plan file
    model = mw.parallelize(module, result.plan)      # on a module of your own, in every rank

The functions are those of `meshwright.api`; `mw.check` records and watches any training, `mw.formulas` has the
closed forms on your own numbers. They are imported at first use, so
`import meshwright` loads no numpy, pydantic or torch.
"""

from typing import TYPE_CHECKING, Any

from meshwright.describe.shown import Form, Shown
from meshwright.version import VERSION

if TYPE_CHECKING:
    from meshwright import check, formulas
    from meshwright.api import decode, estimate, load, parallelize, plan, simulate, train, verify

__version__ = VERSION
__all__ = [
    "__version__",
    "check",
    "decode",
    "estimate",
    "formulas",
    "load",
    "parallelize",
    "plan",
    "simulate",
    "train",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'meshwright' has no attribute '{name}'")
    from importlib import import_module

    whole = name in ("check", "formulas")
    value = import_module(f"meshwright.{name}") if whole else getattr(import_module("meshwright.api"), name)
    globals()[name] = value
    return value


def _show_as(result: Any, form: Form) -> Any:
    from meshwright import pages

    return pages.show_as(result, form)


Shown.show_as = _show_as


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
