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
from meshwright.errors import MeshwrightError
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
LARGEST_VALUE = 1e9  # of a value that is printed
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
    own = own_values(request) if request.values and request.names else []
    algorithm, choice = choose_algorithm(request, size if timed else 0.0, on_cluster)
    builder(request.operation, algorithm)  # raises for an unknown algorithm
    ranks = request.ranks or (8 if choice or "groups" in accepts(request.operation, algorithm) else 4)
    ranks = ranks if request.ranks or len(own) < 2 else len(own)
    cluster = cluster_of(on_cluster or request.cluster or DEFAULT_CLUSTER, ranks) if timed else None
    elements = int(size // ELEMENT_BYTES) if timed and not request.values else ranks
    elements = request.elements if request.elements >= 0 else elements_of(request.operation, own) if own else elements
    program = check(
        build(
            request.operation, algorithm, ranks, elements, **options(request, algorithm, ranks, size, cluster, choice)
        )
    )
    links = library_links(cluster, request.operation, algorithm, ranks) if cluster and choice else cluster
    walked = walk(program, links, element_bytes=size / elements if elements else 0) if links else None
    on = f"for {format_bytes(size)} on {cluster.name}" if cluster else ""
    charge = view.Charge(library_of(cluster), choice.walked, choice.seconds) if cluster and choice else None
    inputs = inputs_of(program, own) if own else lecture_inputs(program) if elements <= MOST_VALUES else None
    return PreparedCollective(program, walked, on, charge, inputs)


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


def own_values(request: CollectiveRequest) -> list[np.ndarray]:
    """The user's values: "1,2,3,4" is one list, "1,2/3,4" has one for each rank."""
    lists = [part.split(",") for part in request.names.split("/")]
    example = f"meshwright show {request.operation} --values 1,2,3,4"
    try:
        values = [np.array([float(word) for word in words]) for words in lists]
    except ValueError:
        what = f"'{request.names[:60]}' are not values"
        why = "Values are numbers with commas between them; a / begins the list of the next rank"
        raise MeshwrightError("MW-PROG-009", what, why=why, fix=example) from None
    if not all(np.isfinite(value).all() and np.abs(value).max() < LARGEST_VALUE for value in values):
        raise MeshwrightError("MW-PROG-009", f"values must be finite and below {LARGEST_VALUE:g}", fix=example)
    if sum(map(len, values)) > MOST_VALUES * max(len(values), 1):
        raise MeshwrightError("MW-PROG-006", f"more than {MOST_VALUES} values are too many to print", fix=example)
    return [value.astype(int) if (value == np.round(value)).all() else value for value in values]


def elements_of(operation: str, own: list[np.ndarray]) -> int:
    """The elements of the full buffer of these values."""
    shards = len(own) > 1 and operation in ("all-gather", "gather")
    return sum(map(len, own)) if shards else len(own[0])


def inputs_of(program: Program, own: list[np.ndarray]) -> list[np.ndarray]:
    """The values that each rank starts with: its own list; or, of one list, those of `lecture_inputs`."""
    example = lecture_inputs(program, own[0] if len(own) == 1 and len(own[0]) == program.elements else None)
    if len(own) == 1 and len(own[0]) == program.elements:
        return example
    needed = [len(values) for values in example]
    if len(own) != program.ranks or [len(values) for values in own] != needed:
        given = (
            f"{len(own)} lists of {', '.join(str(len(v)) for v in own)} values"
            if len(own) > 1
            else f"{len(own[0])} values"
        )
        each = f"{needed[0]}" if len(set(needed)) == 1 else ", ".join(map(str, needed))
        what = f"{given} do not fit {program.operation} of {program.elements} elements on {program.ranks} ranks"
        why = f"One list has the {program.elements} values of the buffer; {program.ranks} lists, with / between them, have {each} values each"
        raise MeshwrightError("MW-PROG-009", what, why=why, fix=f"--ranks {max(len(own), 2)}" if len(own) > 1 else "")
    return own


def lecture_inputs(program: Program, base: np.ndarray | None = None) -> list[np.ndarray]:
    """Return small input values: rank r starts with [0, 1, 2, …] + r; gathers start with the shards of the sum of these. `base` takes the place
    of [0, 1, 2, …], and of that sum."""
    ranks, n = program.ranks, program.elements
    edges = [r * n // ranks for r in range(ranks + 1)]
    first = np.arange(n) if base is None else base
    buffers = [first + r for r in range(ranks)]
    if base is not None and program.operation in ("all-gather", "gather"):
        return [base[edges[r] : edges[r + 1]] for r in range(ranks)]
    match program.operation:
        case "all-gather" | "gather":
            return [np.sum(buffers, axis=0)[edges[r] : edges[r + 1]] for r in range(ranks)]
        case "barrier":
            return [np.zeros(0) for _ in range(ranks)]
        case "all-to-all":
            return [first + 10 ** len(str(int(max(np.abs(first).max(initial=0), 1)))) * (r + 1) for r in range(ranks)]
    return buffers
