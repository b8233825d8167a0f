"""Imports that every worker needs, done once in the process from which workers are forked; also those of every view."""

import importlib

from meshwright.describe import catalog
from meshwright.view.page.registry import VIEWS
from meshwright.web import worker

for entry in VIEWS.values():
    importlib.import_module(entry.module)
for kind in catalog.KINDS:
    catalog.tables(kind)  # parsed once, for all workers

__all__ = ["worker"]
