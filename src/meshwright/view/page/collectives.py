"""The explorer of collectives: one program step by step, its time, the times of all algorithms by size, duals and the family of operations.

The program, its walk and its price are those of `meshwright show OPERATION --json`; the comparison is that of `--compare`.
"""

from collections.abc import Sequence
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.programs.collectives import ALGORITHMS, OPERATIONS, Program
from meshwright.programs.collectives.comparison import SIZES, Comparison, compare, runs_on
from meshwright.programs.collectives.contract import DUAL
from meshwright.programs.collectives.formulas import text as formula
from meshwright.units import format_bytes, format_seconds, parse_bytes
from meshwright.view.collectives import MOST_DRAWN, as_dict
from meshwright.view.page.bundle import written_view
from meshwright.view.page.subject import Subject
from meshwright.view.show.collective_request import (
    ELEMENT_BYTES,
    CollectiveRequest,
    PreparedCollective,
    cluster_of,
    prepared,
)

RANKS = (2, 3, 4, 6, 8, 12, 16, 24, 32)
MESSAGE_SIZES = tuple(2.0**k for k in range(10, 34, 2))  # 1 KiB to 8 GiB
# How operations are composed of others (`programs.collectives.contract`).
FAMILY = (
    ("all-reduce", ("reduce-scatter", "all-gather")),
    ("all-reduce", ("reduce", "broadcast")),
    ("all-gather", ("gather", "broadcast")),
    ("reduce-scatter", ("reduce", "scatter")),
)
USED_BY = {
    "all-reduce": "DDP gradients, tensor parallelism", "all-gather": "FSDP weights, sequence parallelism", "reduce-scatter": "ZeRO gradients",
    "all-to-all": "expert dispatch, Ulysses attention", "point-to-point": "pipeline stages, ring attention",
    "broadcast": "first weights, data", "reduce": "metrics", "gather": "checkpoints", "scatter": "data", "barrier": "start and end of a run",
}  # fmt: skip


def data(subject: Subject) -> dict[str, Any]:
    """The program of the chosen operation, and the comparison of its algorithms on this cluster."""
    operation = subject.option("operation", "all-reduce", list(OPERATIONS))
    ranks = subject.option("ranks", 8, RANKS)
    size = subject.option("size", "64MiB")
    cluster = cluster_of(subject.cluster, ranks)
    usable = [name for name in ALGORITHMS[operation] if runs_on(cluster, name)]
    algorithm = subject.option("algorithm", "", ["", *usable])
    request = CollectiveRequest(operation, algorithm=algorithm, ranks=ranks, size=size)
    shown = prepared(request, cluster)
    step_by_step = prepared(request._replace(size="", algorithm=shown.program.algorithm)).program
    compared = (
        None if subject.is_provisional else compare(operation, cluster, ranks, SIZES, element_bytes=ELEMENT_BYTES)
    )
    out = content(operation, shown.program.algorithm, usable, ranks, cluster.name, shown, compared, step_by_step)
    return out | {"chosen": bool(algorithm), "size_bytes": parse_bytes(size)}


def content(
    operation: str,
    algorithm: str,
    usable: Sequence[str],
    ranks: int,
    cluster: str,
    shown: PreparedCollective | None = None,
    compared: Comparison | None = None,
    steps: Program | None = None,
) -> dict[str, Any]:
    """The data of the view: the operation and its family, the algorithms with their formulas, a program with its time, and a comparison."""
    return {
        "operation": operation,
        "algorithm": algorithm,
        "operations": [
            {"name": name, "about": words, "dual": DUAL.get(name, ""), "used": USED_BY[name]}
            for name, words in OPERATIONS.items()
        ],
        "algorithms": [
            {"name": name, "formula": formula(operation, name), "runs": name in usable}
            for name in ALGORITHMS[operation]
        ],
        "rank_choices": list(RANKS),
        "size_choices": [{"bytes": n, "text": format_bytes(n).replace(" ", "")} for n in MESSAGE_SIZES],
        "family": [{"whole": whole, "parts": list(parts)} for whole, parts in FAMILY],
        "chosen": True,
        "ranks": ranks,
        "size_bytes": None,
        "cluster": cluster,
        "program": program_data(steps) if steps else None,
        "time_s": seconds_of(shown) if shown else None,
        "steps": shown.program.steps if shown else 0,
        "comparison": compared.as_dict() if compared else None,
        "formulas": {"time_s": formula_text(shown) if shown else "", "crossovers": crossovers(compared)},
    }


def program_html(shown: PreparedCollective) -> str:
    """One program as an HTML file that opens from disk, for `show OPERATION --html`."""
    program = shown.program
    if program_data(program) is None:
        raise MeshwrightError(
            "MW-SHOW-002",
            f"a figure of {program.ranks} ranks and {len(program.moves.step)} moves is too large to read",
            why=f"It draws up to {MOST_DRAWN} ranks",
            fix="--ranks 8",
        )
    names = program.operation, program.algorithm, list(ALGORITHMS[program.operation])
    data = content(*names, program.ranks, shown.on, shown, steps=program)
    return written_view("collectives", f"{program.algorithm} {program.operation}", data)


def comparison_html(compared: Comparison) -> str:
    """The times of the algorithms by size as an HTML file that opens from disk."""
    data = content(compared.operation, "", list(compared.times), compared.ranks, compared.cluster, compared=compared)
    return written_view("collectives", f"{compared.operation}: algorithms by message size", data)


def seconds_of(shown: PreparedCollective) -> float | None:
    """The price of a call where the cost model has one, else the time of the walk."""
    return shown.charge.seconds if shown.charge else shown.walked.makespan if shown.walked else None


def program_data(program: Program) -> dict[str, Any] | None:
    """The moves of a program, small enough to play: what `show --json` prints, without a walk."""
    if program.ranks > MOST_DRAWN or len(program.moves.step) > MOST_DRAWN**2 * 4:
        return None
    return as_dict(program)


def formula_text(shown: PreparedCollective) -> str:
    """The formula of the program with its time."""
    program, charge = shown.program, shown.charge
    text = f"{program.algorithm} {program.operation}: t = {formula(program.operation, program.algorithm)}"
    if charge:
        walked, extra, total = map(format_seconds, (charge.walked, charge.seconds - charge.walked, charge.seconds))
        return f"{text}\n= {walked} on the links at the rates of {charge.library} + {extra} for the call and its chunks = {total} {shown.on}"
    return text + (f"\n= {format_seconds(shown.walked.makespan)} {shown.on}" if shown.walked is not None else "")


def crossovers(compared: Comparison | None) -> str:
    if compared is None or not compared.crossovers:
        return "one algorithm is the fastest at every size"
    return "; ".join(
        f"from {format_bytes(c.size)} on, {c.after} is faster than {c.before}" for c in compared.crossovers
    )
