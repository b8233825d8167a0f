"""What every worker needs, done once in the process from which workers are forked: imports, the catalog, and one configuration.

The first estimate of a process fills caches (tables of links, layouts, formulas) and takes several times longer than the next. Workers inherit
the caches of their parent, so the first change of an input is as fast as any other.
"""

import importlib

from meshwright.describe import catalog
from meshwright.view.page.presets import presets
from meshwright.view.page.registry import CHEAP, VIEWS
from meshwright.web import tasks, worker

for entry in VIEWS.values():
    importlib.import_module(entry.module)
for kind in catalog.KINDS:
    catalog.tables(kind)
state = presets()[0]["state"]
cheap = {"config": state, "views": [name for name, entry in VIEWS.items() if entry.kind == CHEAP]}
for task, body in {"views": cheap, "choices": state, "catalog": {}}.items():
    list(tasks.lines(task, body))
tasks.drop_subjects()

__all__ = ["worker"]
