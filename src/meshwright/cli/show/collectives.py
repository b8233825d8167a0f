"""`meshwright show OPERATION`: a collective's steps, numbers, figure, or its algorithms side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from meshwright.cli.show.options import unused
from meshwright.cost.collective import OPERATIONS as PRICED_AS
from meshwright.cost.collective import Choice, choose
from meshwright.cost.library import library_links, library_of
from meshwright.describe.cluster import Cluster
from meshwright.describe.config import load_cluster
from meshwright.errors import MeshwrightError
from meshwright.programs.collectives import ALGORITHMS, Program, accepts, build, check, groups_of, walk
from meshwright.programs.collectives.comparison import SIZES, SWITCHED, compare, options_for
from meshwright.programs.collectives.registry import algorithms_of, as_groups, builder
from meshwright.units import format_bytes, parse_bytes
from meshwright.view import collectives as view
from meshwright.view.tables import show as print_out
from meshwright.view.tables import show_json

USUAL = {"all-to-all": "pairwise", "point-to-point": "direct", "barrier": "dissemination"}  # else ring or binomial
DEFAULT_CLUSTER, DEFAULT_SIZE, ELEMENT_BYTES = "dgx-h100", "64MiB", 4
MOST_VALUES, MOST_COMPARED = 256, 1024
PRICED = set(PRICED_AS.values())  # operations that a training step has and the cost model prices


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
    timed = bool(asked.size or asked.cluster)
    size = parse_bytes(asked.size or DEFAULT_SIZE)
    algorithm, choice = chosen(asked, size if timed else 0.0)
    builder(asked.operation, algorithm)  # a wrong name is refused before anything else
    ranks = asked.ranks or (8 if choice or "groups" in accepts(asked.operation, algorithm) else 4)
    cluster = cluster_of(asked.cluster or DEFAULT_CLUSTER, ranks) if timed else None
    elements = (
        asked.elements if asked.elements >= 0 else int(size // ELEMENT_BYTES) if timed and not asked.values else ranks
    )
    program = check(
        build(asked.operation, algorithm, ranks, elements, **options(asked, algorithm, ranks, size, cluster, choice))
    )
    links = library_links(cluster, asked.operation, algorithm, ranks) if cluster and choice else cluster
    walked = walk(program, links, element_bytes=size / elements if elements else 0) if links else None
    on = f"for {format_bytes(size)} on {cluster.name}" if cluster else ""
    charge = view.Charge(library_of(cluster), choice.walked, choice.seconds) if cluster and choice else None
    inputs = lecture_inputs(program) if elements <= MOST_VALUES else None
    if asked.html:
        written(asked.html, view.html(program, walked, on, inputs, charge))
    if asked.as_json:
        return show_json(view.as_dict(program, walked, charge))
    if asked.values:
        return print_out(view.values_page(program, few_enough(inputs, elements)))
    others = [name for name in ALGORITHMS[asked.operation] if name != algorithm]
    print_out(view.page(program, walked, on, charge=charge))
    if others:
        from rich.text import Text

        print_out(Text("\nother algorithms: " + ", ".join(others) + "   (--compare puts them side by side)", "dim"))
    return None


def chosen(asked: Asked, size: float) -> tuple[str, Choice | None]:
    """The algorithm to show: the one named; on a cluster what its library runs there, with its price; else the usual one to learn."""
    usual = USUAL.get(asked.operation) or ("ring" if "ring" in ALGORITHMS[asked.operation] else "binomial")
    ranks = asked.ranks or 8
    if asked.algorithm or not size or asked.operation not in PRICED or ranks < 2:
        return asked.algorithm or usual, None
    cluster = cluster_of(asked.cluster or DEFAULT_CLUSTER, ranks)
    choice = choose(cluster, asked.operation, size, ranks)
    one_node = ranks <= cluster.node_size
    return "ring" if choice.algorithm == "multi-ring" and one_node else choice.algorithm, choice


def options(
    asked: Asked, algorithm: str, ranks: int, size: float, cluster: Cluster | None, choice: Choice | None
) -> dict[str, Any]:
    """The builder's options: from the command line, from the cluster, or defaults that suit a drawing."""
    accepted = accepts(asked.operation, algorithm)
    found = options_for(asked.operation, algorithm, cluster, ranks, size) if cluster else {}
    if asked.node > 0:
        if "groups" not in accepted:
            raise unused("--node", f"{algorithm} {asked.operation} does not know of nodes", "--algorithm multi-ring")
        found["groups"] = [range(a, min(a + asked.node, ranks)) for a in range(0, ranks, asked.node)]
    elif "groups" in accepted and algorithm not in SWITCHED and not (cluster and ranks > cluster.node_size):
        found["groups"] = as_groups(None, ranks)  # two halves: one node would have nothing to show
    elif "groups" in accepted:
        found["groups"] = groups_of(cluster, ranks) if cluster else [range(ranks)]
    if asked.root >= 0:
        found["root"] = asked.root
    if asked.segments > 0:
        found["segments"] = asked.segments
    elif choice and "segments" in accepted:
        found["segments"] = choice.segments
    elif "segments" in accepted:
        found["segments"] = min(found.get("segments", 3), 64)
    return found


def show_comparison(asked: Asked) -> None:
    """All algorithms, or those named, over message sizes."""
    for option, given in (("--values", asked.values), ("--elements", asked.elements >= 0), ("--root", asked.root >= 0),
                          ("--segments", asked.segments > 0), ("--node", asked.node > 0)):  # fmt: skip
        if given:
            raise unused(option, "a comparison builds each algorithm for every size", "--size 64MiB")
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
    cluster = load_cluster(name)
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
