"""`meshwright show OPERATION`: the steps, values or figure of a collective, or a comparison of its algorithms."""

import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Group
from rich.text import Text

from meshwright.describe.files import write_text
from meshwright.errors import MeshwrightError
from meshwright.programs.collectives import ALGORITHMS
from meshwright.programs.collectives.comparison import SIZES, Comparison, compare
from meshwright.programs.collectives.registry import algorithms_of, builder
from meshwright.units import parse_bytes
from meshwright.view import collectives as view
from meshwright.view.show.collective_request import (
    DEFAULT_CLUSTER,
    ELEMENT_BYTES,
    MOST_VALUES,
    CollectiveRequest,
    PreparedCollective,
    cluster_of,
    prepared,
)
from meshwright.view.show.options import unused
from meshwright.view.tables import show as print_out
from meshwright.view.tables import show_json

MOST_COMPARED = 1024


def data(request: CollectiveRequest) -> dict[str, Any]:
    """Return what `--json` prints."""
    return compared(request).as_dict() if request.compare else prepared(request).as_dict()


def show(request: CollectiveRequest) -> None:
    """Print, or write to a file, what the request asks for."""
    shown = compared(request) if request.compare else prepared(request)
    if request.html:
        from meshwright.view.page.collectives import comparison_html, program_html

        figure = comparison_html(shown) if isinstance(shown, Comparison) else program_html(shown)
        write_text(request.html, figure)
        print(f"written to {request.html}", file=sys.stderr)
    if request.as_json:
        show_json(shown.as_dict())
    else:
        print_out(page(shown, request))


def page(shown: Comparison | PreparedCollective, request: CollectiveRequest) -> Group:
    """What the terminal shows: a comparison, the values step by step, or the steps and the other algorithms."""
    if isinstance(shown, Comparison):
        return view.comparison_page(shown)
    program, walked, on, charge, inputs = shown
    if request.values and inputs is None:
        what, fix = f"{program.elements} elements are too many to print", f"--elements {MOST_VALUES}"
        raise MeshwrightError("MW-PROG-006", what, fix=fix)
    if request.values and inputs is not None:
        return view.values_page(program, inputs)
    others = ", ".join(name for name in ALGORITHMS[request.operation] if name != program.algorithm)
    words = Text(f"\nother algorithms: {others}   (--compare shows their times)", "dim")
    return Group(view.page(program, walked, on, charge=charge), *([words] if others else []))


def compared(request: CollectiveRequest) -> Comparison:
    """The times of all algorithms, or of the named ones, by message size."""
    given = {"values": request.values, "elements": request.elements >= 0, "root": request.root >= 0}
    for option, value in (given | {"segments": request.segments > 0, "node": request.node > 0}).items():
        if value:
            raise unused(f"--{option}", "a comparison sets it for each algorithm and size", "--size 64MiB")
    algorithms_of(request.operation)
    ranks = request.ranks or 8
    if ranks > MOST_COMPARED:
        what = f"ranks = {ranks} is too large for a comparison"
        raise MeshwrightError("MW-PROG-006", what, fix=f"--ranks {MOST_COMPARED}")
    cluster = cluster_of(request.cluster or DEFAULT_CLUSTER, ranks)
    names = [name.strip() for name in (request.names or request.algorithm).split(",") if name.strip()]
    for name in names:
        builder(request.operation, name)
    sizes: Sequence[float] = [parse_bytes(request.size)] if request.size else SIZES
    return compare(request.operation, cluster, ranks, sizes, names, element_bytes=ELEMENT_BYTES)
