"""`meshwright show OPERATION`: the steps, values or figure of a collective, or a comparison of its algorithms."""

from collections.abc import Sequence
from typing import Any

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
    if request.compare:
        return show_comparison(request)
    shown = prepared(request)
    program, walked, on, charge, inputs = shown
    if request.html:
        from meshwright.view.page.collectives import program_html

        write_figure(request.html, program_html(shown))
    if request.as_json:
        return show_json(shown.as_dict())
    if request.values:
        if inputs is None:
            what, fix = f"{program.elements} elements are too many to print", f"--elements {MOST_VALUES}"
            raise MeshwrightError("MW-PROG-006", what, fix=fix)
        return print_out(view.values_page(program, inputs))
    alternatives = [name for name in ALGORITHMS[request.operation] if name != program.algorithm]
    print_out(view.page(program, walked, on, charge=charge))
    if alternatives:
        from rich.text import Text

        print_out(Text("\nother algorithms: " + ", ".join(alternatives) + "   (--compare shows their times)", "dim"))
    return None


def show_comparison(request: CollectiveRequest) -> None:
    """Print the times of all algorithms, or of the named ones, by message size."""
    comparison = compared(request)
    if request.html:
        from meshwright.view.page.collectives import comparison_html

        write_figure(request.html, comparison_html(comparison))
    if request.as_json:
        return show_json(comparison.as_dict())
    return print_out(view.comparison_page(comparison))


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


def write_figure(path: str, text: str) -> None:
    """Write the figure to a file."""
    import sys

    from meshwright.describe.files import write_text

    write_text(path, text)
    print(f"written to {path}", file=sys.stderr)
