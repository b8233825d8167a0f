"""From bench results to a cluster: levels and links, factors of the collectives, a verdict, and the reasons, as one `cluster.toml`.

What was not measured is taken from the catalog's cluster, and the file says so: levels above the measured ones, the device where the
bench has no device part, prices. A cluster of few nodes stands for many: α and the rate of a link do not depend on the number of nodes,
the formulas of the collectives do; what may differ at scale, an oversubscribed switch above the measured nodes, is named as assumed.
"""

import re
import statistics
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import tomli_w

from meshwright.calibrate.device_fit import gpu_accelerator
from meshwright.calibrate.fit import (
    SPARE_POINTS,
    FittedCrossover,
    FittedFactors,
    Series,
    additions,
    crossovers,
    fitted_factors,
    series_of,
    with_factors,
)
from meshwright.calibrate.levels import FoundLevel, find_levels
from meshwright.calibrate.nccl_tests import TOOL as NCCL_TESTS
from meshwright.calibrate.points import Bench
from meshwright.calibrate.verdict import NORMAL, NetworkVerdict, call_seconds, verdicts
from meshwright.cost.collective import OPERATIONS
from meshwright.describe import catalog
from meshwright.describe.accelerator import Accelerator
from meshwright.describe.cluster import MOST_MEASURED, Cluster, Collectives, Level, Link, MeasuredCall
from meshwright.describe.config import load_cluster
from meshwright.describe.toml_values import table
from meshwright.errors import MeshwrightError
from meshwright.units import counted, format_bytes, format_rate, format_seconds

GROUPS = {False: "inside a node", True: "between nodes"}
LARGEST_HOST = 16  # devices of one host (DGX-2)
MANY = 4096  # units of the last level: it may hold any number
SHORTEST = 1e-7  # seconds; no message arrives sooner
NO_LIBRARY_TERMS = Collectives(
    call=0, call_across=0, chunk=0, peer=0, pair_loss=0, source="measured: in the factors of each operation"
)


@dataclass(frozen=True)
class Calibration:
    """The calibrated cluster, and everything that a person should know about it."""

    cluster: Cluster
    levels: list[FoundLevel]
    factors: list[FittedFactors]
    series: list[Series]
    crossovers: list[FittedCrossover]
    gamma: dict[str, float]
    expected: Cluster
    verdicts: list[NetworkVerdict]
    notes: list[str]

    def as_dict(self) -> dict[str, Any]:
        """Return what `meshwright calibrate --json` prints."""
        return {
            "cluster": table(self.cluster),
            "levels": [
                {"name": level.name, "units": level.units, "pairs": level.pairs, "slowdown": level.slowdown, **level.line.as_dict(),
                 "slow": [asdict(unit) for unit in level.slow]}
                for level in self.levels
            ],
            "factors": [{**asdict(f), "factors": f.factors.model_dump()} for f in self.factors],
            "algorithms": [
                {"operation": s.operation, "backend": s.backend, "algorithm": s.algorithm, "ranks": len(s.ranks), **s.line.as_dict()}
                for s in self.series
            ],
            "crossovers": [asdict(c) for c in self.crossovers],
            "gamma_s_per_byte": self.gamma,
            "expected": self.expected.name,
            "verdicts": [{**asdict(v), "factor": v.factor, "normal": v.normal} for v in self.verdicts],
            "notes": self.notes,
        }  # fmt: skip

    def to_toml(self) -> str:
        """The cluster file, with the notes as comments."""
        against = {
            v.level: f" against {v.expected} of {self.expected.name}" if v.expected else "" for v in self.verdicts
        }
        all_notes = [*self.notes, *(f"{v.level}: {v}{against[v.level]}" for v in self.verdicts)]
        lines = (line for note in all_notes for line in textwrap.wrap(note, 110, subsequent_indent="  "))
        comments = "".join(f"# {line}\n" for line in lines)
        return comments + "\n" + tomli_w.dumps({"cluster": table(self.cluster)})


def calibrate(benches: Sequence[Bench], expect: str = "", name: str = "") -> Calibration:
    """The calibration of one cluster from one or more bench results of it; the result with the most ranks gives the levels."""
    if not benches:
        raise MeshwrightError(
            "MW-CALIB-002", "there is no bench result to calibrate from", fix="meshwright calibrate bench.json"
        )
    main = max(benches, key=lambda bench: (bench.tool != NCCL_TESTS, bench.world))
    for bench in benches:
        check_same_cluster(main, bench)
    expected = load_cluster(expect) if expect else best_match(main)
    backend = library_backend(main)
    # nccl-tests has no transfers of single pairs, so the links are the catalog's
    from_pairs = main.world > 1 and main.tool != NCCL_TESTS
    levels = find_levels(main, backend) if from_pairs else []
    device, about_device = measured_device(benches, expected)
    bare = cluster_of(levels, expected, main, name or "measured", backend, device)
    for bench in benches:
        check_nodes(bench, expected if not levels else bare)
    factors = fitted_factors(bare, benches, backend, from_pairs)
    series = series_of(point for bench in benches for point in bench.points)
    calibrated = with_factors(bare, factors).but(measured=measured_calls(benches, backend))
    of_algorithms, judged = (crossovers(series), additions(series)), verdicts(levels, expected, main)
    notes = [
        *notes_of(main, levels, expected, backend),
        *(f"{f.operation} {GROUPS[f.across]}: no factors on the formula ({f.refused})" for f in factors if f.refused),
        *([] if levels else about_collectives(factors, expected)),
        *about_device,
    ]
    return Calibration(calibrated, levels, factors, series, *of_algorithms, expected, judged, notes)


def check_same_cluster(main: Bench, bench: Bench) -> None:
    """Raise if two results are of different devices, or of as many ranks on another number of hosts: one fit would mix two networks."""
    devices = [sorted({info.device for info in b.ranks}) for b in (main, bench)]
    if devices[0] != devices[1] or (bench.world == main.world and len(bench.hosts) != len(main.hosts)):
        one, other = (
            f"{counted(b.world, 'rank')} on {counted(len(b.hosts), 'host')} ({', '.join(names)})"
            for b, names in zip((main, bench), devices, strict=True)
        )
        raise MeshwrightError(
            "MW-CALIB-009",
            f"the results are of different clusters: {one}, and {other}",
            why="One fit would mix two networks",
            fix="calibrate each cluster by its own results",
        )


def check_nodes(bench: Bench, cluster: Cluster) -> None:
    """Raise unless the ranks of nccl-tests lie in one node of the cluster or fill its nodes one after the other: other groups have no price.
    A node is a host, or where it has more devices than any host (NVL72) all hosts that its switches join."""
    hosts, size = list(bench.hosts.values()), cluster.node_size
    whole = all(ranks == list(range(ranks[0], ranks[0] + len(hosts[0]))) for ranks in hosts)
    per_node = len(hosts[0]) if size <= LARGEST_HOST else min(bench.world, size)
    fits = bench.world <= size if per_node == bench.world else per_node == size and bench.world % size == 0
    if bench.tool == NCCL_TESTS and not (whole and fits):
        raise MeshwrightError(
            "MW-CALIB-006",
            f"nccl-tests ran {bench.world} ranks on {len(hosts)} hosts, and a node of {cluster.name} has {size} devices",
            why="The price of a collective is known if its ranks lie in one node, or fill whole nodes in order",
            fix="mpirun -N with the devices of a node, or name the cluster that this is: --expect NAME",
        )


def about_collectives(factors: Sequence[FittedFactors], expected: Cluster) -> list[str]:
    """Sentences for collectives that take much longer than on the catalog's links, and for those that were not measured."""
    where_measured = {(f.operation, f.across): f for f in factors}
    slow = [
        f"{f.operation} {GROUPS[f.across]}: {f.factors.bytes:.1f}× the time per byte of the catalog's {expected.name}: slow (normal: up to {NORMAL}×)"
        for f in factors
        if f.factors.bytes > NORMAL
    ]
    missing = [
        f"{operation} {GROUPS[across]}"
        for across in (False, True)[: len(expected.levels)]
        for operation in OPERATIONS.values()
        if (operation, across) not in where_measured
    ]
    return slow + [f"not measured, so as the catalog's {expected.name} has them: {', '.join(missing)}"] * bool(missing)


def measured_calls(benches: Sequence[Bench], backend: str) -> tuple[MeasuredCall, ...]:
    """The library's calls by operation, ranks and size, for figures: evenly thinned out to `MOST_MEASURED`."""
    points = [p for bench in benches for p in bench.points if p.backend == backend and len(p.ranks) > 1 and p.bytes > 0]
    library = [p for p in points if not p.algorithm and p.concurrent == 1]
    medians: dict[tuple[str, int, int], list[float]] = {}
    for p in library:
        medians.setdefault((p.operation, len(p.ranks), p.bytes), []).append(p.median_s)
    calls = [
        MeasuredCall(operation=operation, ranks=ranks, bytes=size, seconds=statistics.median(seconds))
        for (operation, ranks, size), seconds in sorted(medians.items())
    ]
    return tuple(calls[:: -(-len(calls) // MOST_MEASURED) or 1])


def library_backend(bench: Bench) -> str:
    """The backend whose points give the levels: NCCL where it was measured, else gloo, else the first there is."""
    backends = list(dict.fromkeys(point.backend for point in bench.points))
    return next((name for name in ("nccl", "gloo") if name in backends), backends[0] if backends else "gloo")


def best_match(bench: Bench) -> Cluster:
    """The catalog's cluster with this device and, of several, with nodes of the measured size; the laptop for CPUs."""
    device = bench.ranks[0].device.lower() if bench.ranks else "cpu"
    if device == "cpu":
        return catalog.load("clusters", "laptop")
    per_host = max((len(ranks) for ranks in bench.hosts.values()), default=1)

    def likeness(cluster: Cluster) -> tuple[int, int, int]:
        chip = cluster.accelerator.name.lower().split("-")[0]
        words = re.findall(r"[a-z]+\d+[a-z]*", device)
        return int(chip in words), int(cluster.node_size == per_host), -len(cluster.accelerator.name)

    best = max((catalog.load("clusters", entry) for entry in catalog.names("clusters")), key=likeness)
    if not likeness(best)[0]:
        raise MeshwrightError(
            "MW-CALIB-007",
            f"the catalog has no cluster with the device '{bench.ranks[0].device}'",
            why="What was not measured would be another device's",
            valid=catalog.names("clusters"),
            fix="--expect NAME, or a cluster file of this device (docs/how-to/own-hardware.md)",
        )
    return best


def measured_device(benches: Sequence[Bench], expected: Cluster) -> tuple[Accelerator, list[str]]:
    """The expected device with the shares of its peak rates that were measured on a GPU; a CPU is calibrated where it trains."""
    points = [point for bench in benches for point in bench.device]
    if expected.accelerator.name.startswith("cpu"):
        return expected.accelerator, ["the device: `meshwright train` measures the CPU it runs on"]
    if not points:
        return expected.accelerator, [f"the device: not measured, {expected.accelerator.name} of the catalog"]
    dates = ", ".join(dict.fromkeys(bench.made for bench in benches if bench.device))
    return gpu_accelerator(points, expected.accelerator, f"meshwright bench of {dates}")


def cluster_of(
    levels: list[FoundLevel], expected: Cluster, bench: Bench, name: str, backend: str, device: Accelerator
) -> Cluster:
    """The cluster of the found levels, without factors; levels that were not measured are the expected cluster's."""
    fitted_levels, size = [], 1
    for k, level in enumerate(levels):
        units = len(level.units[0]) // size
        size = len(level.units[0])
        last = k == len(levels) - 1 and len(bench.hosts) > 1
        fitted_levels.append(measured_level(level, MANY if last else units, expected, bench, k))
    gpus_of_one_host = len(bench.hosts) == 1 and backend != "gloo"
    if gpus_of_one_host or not levels:
        fitted_levels += list(expected.levels[1 if levels else 0 :])
    return Cluster(
        name=name,
        accelerator=device,
        levels=tuple(fitted_levels),
        gpus=bench.world if len(bench.hosts) > 1 else 0,
        collectives=NO_LIBRARY_TERMS if levels and backend != "nccl" else expected.collectives,
        price=expected.price,
        source=f"{bench.tool} of {bench.made or 'unknown date'}: {where(bench, backend)}",
        checked="measured" if levels else f"{'collectives' if bench.world > 1 else 'device'} measured, links not",
    )


def measured_level(level: FoundLevel, size: int, expected: Cluster, bench: Bench, k: int) -> Level:
    """One level with its measured link. Which link is shared follows from pairs that exchanged at the same time; what NCCL takes to start
    a call is not part of the link's latency, since the cost model adds it to every call."""
    rate, per_host = level.line.bandwidth, max(len(ranks) for ranks in bench.hosts.values())
    inside = all(len({info.host for info in bench.ranks if info.rank in unit}) == 1 for unit in level.units)
    shared = inside and k == 0 and level.shared
    if shared:  # all flows on one bus: its rate is what they reach together
        rate *= level.together / level.slowdown
    ports = 0 if inside or not level.shared else max(1, round(min(per_host, level.together) / level.slowdown))
    call = call_seconds(expected, inside)
    link = Link(
        name=f"measured-{level.name.replace(' ', '-')}",
        alpha=float(
            f"{max(level.line.alpha - call, SHORTEST):.6g}"
        ),  # six digits: more are noise, and a person reads the file
        bandwidth=float(f"{rate:.6g}"),
        in_switch=expected.levels[min(k, len(expected.levels) - 1)].link.in_switch,
        source=f"{level.pairs} pairs, {level.line.points} points, residual {level.line.residual:.1%}, largest deviation {level.line.deviation:.0%} "
        f"at {format_bytes(level.line.deviates_at)}",
        checked="measured",
    )
    reduces = expected.levels[min(k, len(expected.levels) - 1)].reduces
    return Level(name=level.name, size=size, link=link, ports=ports, shared=shared, reduces=reduces)


def where(bench: Bench, backend: str) -> str:
    """Ranks, hosts and library of a bench, as a phrase."""
    ranks, hosts = bench.world, len(bench.hosts)
    words = f"{ranks} rank{'s' * (ranks != 1)} on {hosts} host{'s' * (hosts != 1)}"
    return f"{words}, {backend}" if bench.points else words


def notes_of(bench: Bench, levels: list[FoundLevel], expected: Cluster, backend: str) -> list[str]:
    """Return notes: what was measured, concluded and assumed."""
    hosts = bench.hosts
    notes = [f"measured by `{bench.tool}` ({bench.made or 'unknown date'}): {where(bench, backend)}"]
    if bench.state == "interrupted":
        notes.append(f"the bench was interrupted ({bench.why}): fewer sizes were measured")
    notes += [f"{sentence}: an idle machine is faster" for sentence in bench.load()]
    for level in levels:
        units = len(level.units)
        text = (
            f"{level.name}: α {format_seconds(level.line.alpha)}, {format_rate(level.line.bandwidth)} a pair, "
            f"from {counted(level.pairs, 'pair')} in {counted(units, 'unit')} of {counted(len(level.units[0]), 'rank')}"
        )
        if level.shared:
            text += (
                f"; {level.together} pairs at the same time take {level.slowdown:.1f}× as long, so they share a link"
            )
        notes.append(text)
        if level.line.points < 2 + SPARE_POINTS:
            notes.append(
                f"{level.name}: {level.line.points} points for α and the rate, and {2 + SPARE_POINTS} are needed to judge them: their residual says "
                "nothing; bench more sizes, or with a longer --budget"
            )
        if any(list(unit) != list(range(unit[0], unit[0] + len(unit))) for unit in level.units):
            notes.append(f"{level.name}: ranks of one unit are not consecutive; a plan's layout assumes that they are")
    if len(hosts) > 1 and levels:
        notes.append(
            f"more than {len(hosts)} nodes: α and the rate of a link stay as measured, since they do not depend on the number of nodes; "
            "collectives follow their formulas, so a ring's latency grows with the number of ranks; assumed: no switch above the "
            f"{len(hosts)} measured nodes is oversubscribed (set levels.oversubscription where one is)"
        )
    elif levels and backend != "gloo" and len(expected.levels) > 1:
        notes.append(
            f"one node was measured: the levels between nodes are those of the catalog's {expected.name}, not measured"
        )
    if not levels:
        why = "nccl-tests measures no single pairs" if bench.world > 1 else "one rank was measured"
        fitted = ", and factors on them are fitted to the measured collectives" if bench.world > 1 else ""
        notes.append(f"{why}: all links are those of the catalog's {expected.name}, not measured{fitted}")
    return notes
