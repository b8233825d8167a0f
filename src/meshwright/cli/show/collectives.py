"""`meshwright show OPERATION`: a collective's steps, numbers, figure, or its algorithms side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from meshwright.describe import catalog
from meshwright.describe.cluster import Cluster
from meshwright.errors import MeshwrightError
from meshwright.programs.collectives import ALGORITHMS, Program, accepts, build, check, groups_of, walk
from meshwright.programs.collectives.comparison import SIZES, compare, options_for
from meshwright.programs.collectives.registry import algorithms_of, as_groups, builder
from meshwright.units import format_bytes, parse_bytes
from meshwright.view import collectives as view
from meshwright.view.tables import show as print_out
from meshwright.view.tables import show_json

USUAL = {"all-to-all": "pairwise", "point-to-point": "direct", "barrier": "dissemination"}  # else ring or binomial
DEFAULT_CLUSTER, DEFAULT_SIZE, ELEMENT_BYTES = "dgx-h100", "64MiB", 4
MOST_VALUES, MOST_COMPARED = 256, 1024


class Asked(NamedTuple):
    """The words of the command line."""

    operation: str
    algorithm: str = ""
    ranks: int = 0
    size: str = ""
    cluster: str = ""
    elements: int = -1
    root: int = -1
    segments: int = 0
    node: int = 0
    values: bool = False
    compare: bool = False
    names: str = ""
    html: str = ""
    as_json: bool = False


def show(asked: Asked) -> None:
    """Answer."""
    if asked.compare:
        return show_comparison(asked)
    algorithm = (
        asked.algorithm
        or USUAL.get(asked.operation)
        or ("ring" if "ring" in ALGORITHMS[asked.operation] else "binomial")
    )
    builder(asked.operation, algorithm)  # a wrong name is refused before anything else
    aware = "groups" in accepts(asked.operation, algorithm)
    ranks = asked.ranks or (8 if aware else 4)
    timed = bool(asked.size or asked.cluster)
    size = parse_bytes(asked.size or DEFAULT_SIZE)
    cluster = cluster_of(asked.cluster or DEFAULT_CLUSTER, ranks) if timed else None
    elements = (
        asked.elements if asked.elements >= 0 else int(size // ELEMENT_BYTES) if timed and not asked.values else ranks
    )
    program = check(
        build(asked.operation, algorithm, ranks, elements, **options(asked, algorithm, ranks, size, cluster))
    )
    walked = walk(program, cluster, element_bytes=size / elements if elements else 0) if cluster else None
    on = f"for {format_bytes(size)} on {cluster.name}" if cluster else ""
    inputs = lecture_inputs(program) if elements <= MOST_VALUES else None
    if asked.html:
        written(asked.html, view.html(program, walked, on, inputs))
    if asked.as_json:
        return show_json(view.as_dict(program, walked))
    if asked.values:
        return print_out(view.values_page(program, few_enough(inputs, elements)))
    others = [name for name in ALGORITHMS[asked.operation] if name != algorithm]
    print_out(view.page(program, walked, on))
    if others:
        from rich.text import Text

        print_out(Text("\nother algorithms: " + ", ".join(others) + "   (--compare puts them side by side)", "dim"))
    return None


def options(asked: Asked, algorithm: str, ranks: int, size: float, cluster: Cluster | None) -> dict[str, Any]:
    """What the builder takes, from the words, the cluster, or its own defaults."""
    accepted = accepts(asked.operation, algorithm)
    chosen = options_for(asked.operation, algorithm, cluster, ranks, size) if cluster else {}
    if asked.node > 0 and "groups" in accepted:
        chosen["groups"] = [range(a, min(a + asked.node, ranks)) for a in range(0, ranks, asked.node)]
    elif "groups" in accepted:
        chosen["groups"] = (
            groups_of(cluster, ranks) if cluster and ranks > cluster.node_size else as_groups(None, ranks)
        )
    if asked.root >= 0:
        chosen["root"] = asked.root
    if asked.segments > 0:
        chosen["segments"] = asked.segments
    elif "segments" in accepted:
        chosen.setdefault("segments", 3)
        chosen["segments"] = min(chosen["segments"], 64)
    return chosen


def show_comparison(asked: Asked) -> None:
    """All algorithms, or those named, over message sizes."""
    algorithms_of(asked.operation)
    ranks = asked.ranks or 8
    if ranks > MOST_COMPARED:
        raise MeshwrightError("MW-PROG-006", f"ranks = {ranks} are too many to compare", fix=f"--ranks {MOST_COMPARED}")
    cluster = cluster_of(asked.cluster or DEFAULT_CLUSTER, ranks)
    names = [name.strip() for name in asked.names.split(",") if name.strip()] or (
        [asked.algorithm] if asked.algorithm else []
    )
    for name in names:
        builder(asked.operation, name)
    sizes: Sequence[float] = [parse_bytes(asked.size)] if asked.size else SIZES
    found = compare(asked.operation, cluster, ranks, sizes, names, element_bytes=ELEMENT_BYTES)
    if asked.html:
        written(asked.html, view.comparison_html(found))
    if asked.as_json:
        return show_json(found.as_dict())
    return print_out(view.comparison_page(found))


def cluster_of(name: str, ranks: int) -> Cluster:
    """A cluster from the catalog or a file's [cluster], with room for the ranks."""
    if name.endswith(".toml"):
        from meshwright.describe.draft import Draft

        draft = Draft()
        draft.lay_file(Path(name))
        cluster = Cluster(**draft.opened("cluster"))
    else:
        cluster = catalog.load("clusters", name)
    return cluster if cluster.world >= ranks else cluster.with_gpus(ranks)


def lecture_inputs(program: Program) -> list[np.ndarray]:
    """The lecture's numbers: rank r starts with [0, 1, 2, …] + r; what starts as shards starts as shards of the sum of those."""
    ranks, n = program.ranks, program.elements
    edges = [r * n // ranks for r in range(ranks + 1)]
    whole = [np.arange(n) + r for r in range(ranks)]
    match program.operation:
        case "all-gather" | "gather":
            return [np.sum(whole, axis=0)[edges[r] : edges[r + 1]] for r in range(ranks)]
        case "barrier":
            return [np.zeros(0) for _ in range(ranks)]
        case "all-to-all":
            return [np.arange(n) + 10 ** len(str(max(n - 1, 1))) * (r + 1) for r in range(ranks)]
    return whole


def few_enough(inputs: list[np.ndarray] | None, elements: int) -> list[np.ndarray]:
    if inputs is None:
        raise MeshwrightError(
            "MW-PROG-006", f"{elements} elements are too many to print", fix=f"--elements {MOST_VALUES}"
        )
    return inputs


def written(path: str, text: str) -> None:
    """The figure in its file."""
    import sys

    from meshwright.describe.files import write_text

    write_text(path, text)
    print(f"written to {path}", file=sys.stderr)
