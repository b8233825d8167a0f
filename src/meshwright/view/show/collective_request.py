"""A collective as a user asks for it: its program, its walk on a cluster, the price in the cost model, and small input values.

`meshwright show OPERATION` prints it, the page's explorer of collectives draws it, and /api/show answers it.
"""

from typing import Any, NamedTuple

import numpy as np

from meshwright.cost.collective import OPERATIONS as PRICED_AS
from meshwright.cost.collective import ChosenProgram, choose
from meshwright.cost.library import library_links, library_of
from meshwright.describe.cluster import Cluster
from meshwright.describe.config import load_cluster
from meshwright.programs.collectives import ALGORITHMS, Program, accepts, build, check, groups_of, walk
from meshwright.programs.collectives.comparison import SWITCHED, options_for
from meshwright.programs.collectives.registry import as_groups, builder
from meshwright.units import format_bytes, parse_bytes
from meshwright.view import collectives as view
from meshwright.view.show.options import unused

# The default algorithm; for other operations it is ring or binomial.
USUAL = {"all-to-all": "pairwise", "point-to-point": "direct", "barrier": "dissemination"}
DEFAULT_CLUSTER, DEFAULT_SIZE, ELEMENT_BYTES = "dgx-h100", "64MiB", 4
MOST_VALUES = 256
PRICED = set(PRICED_AS.values())  # operations that a training step has and the cost model prices


class CollectiveRequest(NamedTuple):
    """The arguments of the command line, or of /api/show."""

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


class PreparedCollective(NamedTuple):
    """A collective to show: its program, its simulation on a cluster, the cost model's price, and small input values."""

    program: Program
    walked: Any
    on: str
    charge: view.Charge | None
    inputs: list[np.ndarray] | None

    def as_dict(self) -> dict[str, Any]:
        return view.as_dict(self.program, self.walked, self.charge)


def prepared(request: CollectiveRequest, on_cluster: Cluster | None = None) -> PreparedCollective:
    """Build, check and, with a size or a cluster (a name, or `on_cluster`), simulate the collective of a request."""
    timed = bool(request.size or request.cluster or on_cluster)
    size = parse_bytes(request.size or DEFAULT_SIZE)
    algorithm, choice = choose_algorithm(request, size if timed else 0.0, on_cluster)
    builder(request.operation, algorithm)  # raises for an unknown algorithm
    ranks = request.ranks or (8 if choice or "groups" in accepts(request.operation, algorithm) else 4)
    cluster = cluster_of(on_cluster or request.cluster or DEFAULT_CLUSTER, ranks) if timed else None
    elements = int(size // ELEMENT_BYTES) if timed and not request.values else ranks
    elements = request.elements if request.elements >= 0 else elements
    program = check(
        build(
            request.operation, algorithm, ranks, elements, **options(request, algorithm, ranks, size, cluster, choice)
        )
    )
    links = library_links(cluster, request.operation, algorithm, ranks) if cluster and choice else cluster
    walked = walk(program, links, element_bytes=size / elements if elements else 0) if links else None
    on = f"for {format_bytes(size)} on {cluster.name}" if cluster else ""
    charge = view.Charge(library_of(cluster), choice.walked, choice.seconds) if cluster and choice else None
    return PreparedCollective(program, walked, on, charge, lecture_inputs(program) if elements <= MOST_VALUES else None)


def choose_algorithm(
    request: CollectiveRequest, size: float, on_cluster: Cluster | None = None
) -> tuple[str, ChosenProgram | None]:
    """Return the algorithm to show: the named one; with a cluster, the library's choice and its price; else the default."""
    usual = USUAL.get(request.operation) or ("ring" if "ring" in ALGORITHMS[request.operation] else "binomial")
    ranks = request.ranks or 8
    if request.algorithm or not size or request.operation not in PRICED or ranks < 2:
        return request.algorithm or usual, None
    cluster = cluster_of(on_cluster or request.cluster or DEFAULT_CLUSTER, ranks)
    choice = choose(cluster, request.operation, size, ranks)
    one_node = ranks <= cluster.node_size
    return "ring" if choice.algorithm == "multi-ring" and one_node else choice.algorithm, choice


def options(
    request: CollectiveRequest,
    algorithm: str,
    ranks: int,
    size: float,
    cluster: Cluster | None,
    choice: ChosenProgram | None,
) -> dict[str, Any]:
    """Return the builder's options: from the command line, from the cluster, or defaults for a small drawing."""
    accepted = accepts(request.operation, algorithm)
    choices = options_for(request.operation, algorithm, cluster, ranks, size) if cluster else {}
    if request.node > 0:
        if "groups" not in accepted:
            raise unused("--node", f"{algorithm} {request.operation} is not node-aware", "--algorithm multi-ring")
        choices["groups"] = [range(a, min(a + request.node, ranks)) for a in range(0, ranks, request.node)]
    elif "groups" in accepted and algorithm not in SWITCHED and not (cluster and ranks > cluster.node_size):
        choices["groups"] = as_groups(None, ranks)  # two nodes, so that there is traffic between nodes to show
    elif "groups" in accepted:
        choices["groups"] = groups_of(cluster, ranks) if cluster else [range(ranks)]
    if request.root >= 0:
        choices["root"] = request.root
    if request.segments > 0:
        choices["segments"] = request.segments
    elif choice and "segments" in accepted:
        choices["segments"] = choice.segments
    elif "segments" in accepted:
        choices["segments"] = min(choices.get("segments", 3), 64)
    return choices


def cluster_of(name: str | Cluster, ranks: int) -> Cluster:
    """Return a cluster (of the catalog, of [cluster] of a file, or given), enlarged to the number of ranks if needed."""
    cluster = name if isinstance(name, Cluster) else load_cluster(name)
    return cluster if cluster.world >= ranks else cluster.with_gpus(ranks)


def lecture_inputs(program: Program) -> list[np.ndarray]:
    """Return small input values: rank r starts with [0, 1, 2, …] + r; gathers start with the shards of the sum of these."""
    ranks, n = program.ranks, program.elements
    edges = [r * n // ranks for r in range(ranks + 1)]
    buffers = [np.arange(n) + r for r in range(ranks)]
    match program.operation:
        case "all-gather" | "gather":
            return [np.sum(buffers, axis=0)[edges[r] : edges[r + 1]] for r in range(ranks)]
        case "barrier":
            return [np.zeros(0) for _ in range(ranks)]
        case "all-to-all":
            return [np.arange(n) + 10 ** len(str(max(n - 1, 1))) * (r + 1) for r in range(ranks)]
    return buffers
