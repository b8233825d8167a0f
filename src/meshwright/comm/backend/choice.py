"""Which program a call runs: the one with the smallest simulated time, for its size, on the hosts of its ranks.

Rank 0 of the group walks every program that `cost.library` lists for the backend over a cluster with the group's shape
(its ranks by host) and the links of the calibration, or of the catalog if there is none. It publishes the choice in the
group's store, so that all ranks run the same program also where their floating point differs. Sizes are rounded up to
powers of two, and a choice is made once for each; a log line says which and why.

Programs whose times are equal within TIE are chosen by what the walk does not count: first the smallest messages between hosts (the walk
gives the flows over one link equal shares; in fact one may get more, and the ranks behind the others wait for a whole message), then
the fewest steps (each ends with ranks that wait for each other), then the order of the library.
"""

from __future__ import annotations

import json
import logging
from typing import Any, NamedTuple

from meshwright.comm.schedule import largest_message
from meshwright.cost.library import LIBRARIES
from meshwright.describe import catalog
from meshwright.describe.cluster import Cluster, Level
from meshwright.programs.collectives.comparison import compare, options_for
from meshwright.programs.collectives.program import Program
from meshwright.programs.collectives.registry import build
from meshwright.units import counted, format_bytes, format_seconds

log = logging.getLogger("meshwright.comm")
INSIDE, BETWEEN = "shared-memory", "ethernet-10"  # links of the catalog, until the machine is measured
SMALLEST = 1024  # bytes; smaller calls use the same program
TIE = 0.01


class Choice(NamedTuple):
    algorithm: str
    options: dict[str, Any]


class Chooser:
    """Chooses programs for one group, and keeps them."""

    def __init__(self, store: Any, rank: int, hosts: list[tuple[int, ...]], cluster: Cluster | None) -> None:
        self.store, self.rank, self.size = store, rank, sum(map(len, hosts))
        self.hosts, self.calibrated = hosts, cluster is not None
        self.cluster = shaped(cluster, hosts)
        self.placement = placement_of(hosts)
        self.choices: dict[tuple[str, int], Choice] = {}
        self.programs: dict[tuple, Program] = {}

    def program(self, operation: str, elements: int, element_bytes: int, root: int = 0) -> Program:
        """The program of a call; programs are kept, because the same sizes return every step."""
        choice = self.choose(operation, elements * element_bytes)
        key = (operation, choice.algorithm, elements, root, tuple(sorted(choice.options.items())))
        if key not in self.programs:
            if len(self.programs) >= 256:
                self.programs.clear()
            options = {**choice.options, "root": root} if root else choice.options
            self.programs[key] = build(operation, choice.algorithm, self.size, elements, **options)
        return self.programs[key]

    def choose(self, operation: str, size: int) -> Choice:
        rounded = max(SMALLEST, 1 << max(0, size - 1).bit_length())
        key = (operation, rounded)
        if key not in self.choices:
            self.choices[key] = self.agree(operation, rounded)
        return self.choices[key]

    def agree(self, operation: str, size: int) -> Choice:
        """The algorithm that rank 0 publishes; the options follow from it."""
        names = LIBRARIES["meshwright"].get(operation, ())
        name = names[0] if len(names) == 1 else ""
        if not name and self.rank == 0:
            name = self.fastest(operation, size, names)
            self.store.set(f"choice/{operation}/{size}", json.dumps(name))
        elif not name:
            name = json.loads(self.store.get(f"choice/{operation}/{size}"))
        return Choice(name, options_for(operation, name, self.cluster, self.size, size, self.placement))

    def fastest(self, operation: str, size: int, names: tuple[str, ...]) -> str:
        times = compare(operation, self.cluster, self.size, (float(size),), names, self.placement).times
        order = sorted(names, key=lambda name: times[name][0])
        equal = [name for name in names if times[name][0] <= (1 + TIE) * times[order[0]][0]]
        chosen = min(equal, key=lambda name: self.uncounted(operation, name, size))
        shown = ", ".join(f"{name} {format_seconds(times[name][0])}" for name in order[:3])
        why = "the smallest simulated time"
        if len(equal) > 1:
            why += f" within {TIE:.0%}, of these the smallest messages between hosts and the fewest steps"
        log.info(
            "%s up to %s on %s of %s: %s, %s (%s; links: %s)",
            operation,
            format_bytes(size),
            counted(self.size, "rank"),
            counted(len(self.hosts), "host"),
            chosen,
            why,
            shown,
            self.cluster.name if self.calibrated else "uncalibrated, from the catalog",
        )
        return chosen

    def uncounted(self, operation: str, name: str, size: int) -> tuple[int, int]:
        """The elements of a program's largest message between hosts, and its steps."""
        options = options_for(operation, name, self.cluster, self.size, size, self.placement)
        host = {rank: k for k, members in enumerate(self.hosts) for rank in members}
        program = build(operation, name, self.size, size, **options)
        return largest_message(program, [host[rank] for rank in range(self.size)]), program.steps


def placement_of(hosts: list[tuple[int, ...]]) -> list[int]:
    """The device of each rank: the hosts' devices have consecutive numbers."""
    width = max(map(len, hosts))
    device = {rank: host * width + k for host, members in enumerate(hosts) for k, rank in enumerate(members)}
    return [device[rank] for rank in range(len(device))]


def shaped(cluster: Cluster | None, hosts: list[tuple[int, ...]]) -> Cluster:
    """A cluster with the group's hosts: the links and device of the calibration where there is one."""
    width = max(map(len, hosts))
    base = cluster or catalog.load("clusters", "laptop")
    inside = base.levels[0].but(size=width)
    if cluster is None:
        inside = inside.but(link=catalog.load("links", INSIDE))
    levels = [inside]
    if len(hosts) > 1:
        above = base.levels[1] if len(base.levels) > 1 else Level(name="hosts", size=len(hosts), link=BETWEEN, ports=1)
        levels.append(above.but(size=len(hosts)))
    return base.but(levels=tuple(levels), gpus=width * len(hosts))
