"""The view of a comparison, for `check compare --html` and for recordings that are dropped on the page: the network as a strip of modules with the
first difference marked, above what the terminal shows.

Three lanes, each in the order in which it is computed: outputs (forward), gradients of outputs (backward) and gradients of parameters
(reduction). A cell is one module with its error and its bound.
"""

from collections.abc import Mapping, Sequence
from math import isnan
from pathlib import Path

from meshwright.check.compare import RunComparison, compare
from meshwright.check.expected import between_members
from meshwright.check.folder import Recording
from meshwright.check.page import findings_page, page
from meshwright.check.pair import ErrorAndBound
from meshwright.units import Json
from meshwright.view.page.bundle import written_view
from meshwright.view.page.sheet import parts_of

LANES = ("forward: outputs", "backward: gradients of outputs", "reduction: gradients of parameters")
MOST = 1e300  # JSON has no infinity
INPUTS = "inputs"  # the place that `diagnose` names for samples
PHASE_LANES = {"forward": 0, "backward": 1, "reduction": 2}


def document(one: Recording, many: Recording, comparison: RunComparison) -> str:
    shown = data(one, many, comparison)
    return written_view("checked", shown["title"], shown)


def data(one: Recording, many: Recording, comparison: RunComparison, called: Mapping[Path, str] = {}) -> Json:
    """The view's data: the lanes, the first difference, and the parts of the terminal's page. `called`: other names of the folders."""
    reference, candidate = (called.get(recording.folder, recording.folder.name) for recording in (one, many))
    names = [name for name, *_ in comparison.modules]
    lanes = [[cell(row[1]) for row in comparison.modules], [cell(row[2]) for row in comparison.modules]]
    lanes.append([cell(of_parameters(comparison, name)) for name in names])
    return {
        "title": f"{comparison.verdict}: {candidate} against {reference}",
        "reference": reference,
        "lanes": [{"name": name, "cells": cells} for name, cells in zip(LANES, lanes, strict=True)] if names else [],
        "modules": names,
        "first": first_difference(comparison, names),
        "parts": parts_of(page(one, many, comparison)),
    }


def cell(value: ErrorAndBound) -> list[float] | None:
    """The error and the bound of one module; None if it was not seen."""
    return None if isnan(value.error) else [min(value.error, MOST), value.bound]


def of_parameters(comparison: RunComparison, module: str) -> ErrorAndBound:
    """The gradient of a module's own parameters that is furthest from its bound."""
    own = [value for name, value in comparison.gradients.items() if name.rpartition(".")[0] == module]
    return max(own, key=lambda value: value.error / value.bound, default=ErrorAndBound())


def first_difference(comparison: RunComparison, names: list[str]) -> Json | None:
    """The lane and the module of the first difference, and what it looks like; None if there is none, or in no module. Inputs that no rank reads
    are before the first module."""
    found = comparison.diagnosis
    module = found and (found.tensor if found.tensor in (*names, INPUTS) else found.tensor.rpartition(".")[0])
    if found is None or module not in (*names, INPUTS):
        return None
    words = f"{module or 'model'}, {found.phase}, {found.pattern.kind} {found.pattern.detail}".rstrip()
    return {
        "module": -1 if module == INPUTS else names.index(module),
        "lane": PHASE_LANES.get(found.phase, 2),
        "text": f"first difference: {words}",
    }


def data_of(folders: Mapping[str, Path], reference: str = "") -> Json:
    """The view of dropped recordings: of two their comparison, of one what its ranks disagree in. The reference is the named one, else the one
    on fewer ranks."""
    recordings = sorted(map(Recording.read, (folders[name] for name in sorted(folders))), key=lambda r: r.world)
    if len(recordings) == 1:
        return findings(recordings[0])
    named = [r for r in recordings if folders.get(reference) == r.folder]
    one = (named or recordings)[0]
    many = next(r for r in recordings if r is not one)
    return data(one, many, compare(one, many, one.perturbed()), {path: name for name, path in folders.items()})


def findings(recording: Recording) -> Json:
    """The collectives of the last step of one recording beside those of its other ranks."""
    step = recording.steps - 1
    shown = findings_page(recording, step, list(between_members(recording, recording.step(step))))
    lines: Sequence[Json] = parts_of(shown)
    return {"title": "One recording", "reference": "", "lanes": [], "modules": [], "first": None, "parts": lines}
