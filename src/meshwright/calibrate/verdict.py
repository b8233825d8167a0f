"""Is the network normal? Each measured level compared with the link that the catalog expects there, with likely causes where it is slow.

A link is normal if a pair reaches at least 1/NORMAL of the catalog's rate, with at most NORMAL_LATENCY times its latency: libraries,
message sizes and drivers explain less than that. The causes are rules over what was measured and what the system reports; each
states its evidence.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from meshwright.calibrate.levels import FoundLevel
from meshwright.calibrate.points import Bench
from meshwright.cost.library import library_of
from meshwright.describe.cluster import Cluster, Level
from meshwright.units import format_rate, format_seconds

NORMAL, NORMAL_LATENCY = 1.5, 5.0
CLOSE = 1.35  # a rate this close to that of an interface is probably the interface's
PCIE = (5e9, 70e9)  # bytes/s that a pair of GPUs reaches over PCIe 3 to 6
TCP_LATENCY = 15e-6  # RDMA takes less, kernel sockets take more


@dataclass(frozen=True)
class NetworkVerdict:
    """A measured level and the expected one. `factor`: expected over measured rate; above 1 is slow. `expected` is empty where the
    expected cluster has no such level: then there is nothing to compare with."""

    level: str
    expected: str
    rate: float
    expected_rate: float
    latency: float
    expected_latency: float
    causes: tuple[str, ...] = ()

    @property
    def factor(self) -> float:
        return self.expected_rate / self.rate if self.expected else 1.0

    @property
    def latency_factor(self) -> float:
        return self.latency / self.expected_latency if self.expected and self.expected_latency else 1.0

    @property
    def normal(self) -> bool:
        return self.factor <= NORMAL and self.latency_factor <= NORMAL_LATENCY and not self.causes

    def __str__(self) -> str:
        if self.normal:
            return "normal" if self.expected else "nothing to compare with"
        words = []
        if self.factor > NORMAL:
            words.append(f"rate slow by {self.factor:.1f}×")
        if self.latency_factor > NORMAL_LATENCY:
            words.append(f"latency {self.latency_factor:.1f}×")
        return ", ".join(words) or "normal but for the causes"


def verdicts(levels: list[FoundLevel], expected: Cluster, bench: Bench) -> list[NetworkVerdict]:
    """One verdict for each measured level that the expected cluster has a link for."""
    lines = []
    for k, level in enumerate(levels):
        link = matching_level(level, k, levels, expected, len(bench.hosts))
        if link is None:
            lines.append(
                NetworkVerdict(
                    level.name, "", level.line.bandwidth, 0.0, level.line.alpha, 0.0, tuple(slow_causes(level))
                )
            )
            continue
        rate, expected_rate = level.line.bandwidth, link.link.bandwidth * link.link.efficiency
        inside = is_inside(level, bench)
        call = call_seconds(expected, inside)
        one = NetworkVerdict(
            level.name, link.link.name, rate, expected_rate, level.line.alpha, link.link.library_hop + call
        )
        causes = (*slow_causes(level), *causes_of(one, level, link, bench, inside, call))
        lines.append(replace(one, causes=causes))
    return lines


def call_seconds(expected: Cluster, inside: bool) -> float:
    """Return the seconds in which NCCL or RCCL starts a call, which a pair's latency contains; gloo's is in the latency of its links."""
    added = expected.collectives
    return 0.0 if library_of(expected) == "gloo" else added.call if inside else added.call_across


def is_inside(level: FoundLevel, bench: Bench) -> bool:
    """Whether the level joins ranks of one host."""
    hosts = {info.rank: info.host for info in bench.ranks}
    return all(len({hosts[r] for r in unit}) == 1 for unit in level.units)


def matching_level(level: FoundLevel, k: int, levels: list[FoundLevel], expected: Cluster, hosts: int) -> Level | None:
    """The level of the catalog that joins as much: level 0 inside a node; between nodes the first above, then the next."""
    node = next((j for j, other in enumerate(levels) if len(other.units) == hosts), -1)
    if k <= node:
        return expected.levels[0]
    return expected.levels[min(k - node, len(expected.levels) - 1)] if len(expected.levels) > 1 else None


def slow_causes(level: FoundLevel) -> Iterable[str]:
    for unit in level.slow:
        yield f"{unit.name} is slow: {unit.what} {unit.factor:.1f}× worse than between the others (it is left out of the fit)"


def causes_of(
    verdict: NetworkVerdict, level: FoundLevel, link: Level, bench: Bench, inside: bool, call: float
) -> Iterable[str]:
    """Likely causes of a slow level, the most specific first."""
    slow = verdict.factor > NORMAL
    late = verdict.latency_factor > NORMAL_LATENCY
    expects_nvlink = "nvlink" in link.link.name or link.link.bandwidth > PCIE[1]
    if inside:
        if slow and expects_nvlink and PCIE[0] <= verdict.rate <= PCIE[1]:
            yield f"PCIe instead of NVLink: {format_rate(verdict.rate)} is what PCIe carries{_gpu_evidence(bench)}"
        elif slow and any(info.device == "cpu" for info in bench.ranks):
            yield "the ranks share the cores of a CPU with each other or with other programs"
        return
    if slow or late:
        yield from network_causes(verdict, bench, call)
    if level.shared and not link.ports and not slow:
        yield (
            f"oversubscription, or devices that share a card: {level.together} pairs at the same time take "
            f"{level.slowdown:.1f}× as long as one pair"
        )


def network_causes(verdict: NetworkVerdict, bench: Bench, call: float) -> Iterable[str]:
    reports = [report for report in bench.topology.values() if isinstance(report, dict)]
    rdma = any(report.get("rdma") for report in reports)
    has_cause = False
    for name, rate in sorted(interface_rates(reports).items(), key=lambda item: item[1]):
        faster = {n: r for n, r in interface_rates(reports).items() if r > 1.5 * rate}
        if rate / CLOSE <= verdict.rate <= rate * CLOSE and (faster or rdma):
            better = ", ".join(f"{n} has {format_rate(r)}" for n, r in faster.items()) or "an RDMA device is there"
            yield (
                f"wrong interface: {format_rate(verdict.rate)} is the rate of {name}, and {better} "
                "(set NCCL_SOCKET_IFNAME, NCCL_IB_HCA or GLOO_SOCKET_IFNAME)"
            )
            has_cause = True
    if verdict.latency - call > TCP_LATENCY > verdict.expected_latency - call:
        why = (
            "no RDMA device was found"
            if not rdma
            else "an RDMA device is there (NCCL_IB_DISABLE, GPUDirect, container devices)"
        )
        yield f"TCP instead of RDMA: a message takes {format_seconds(verdict.latency)}; {why}"
        has_cause = True
    if not has_cause and verdict.factor > NORMAL:
        yield "other traffic on the network, an oversubscribed switch, or a link that negotiated a lower rate"


def interface_rates(reports: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Rates of the interfaces that are up, in bytes/s."""
    return {
        name: float(facts["bytes_per_s"])
        for report in reports
        for name, facts in report.get("interfaces", {}).items()
        if facts.get("bytes_per_s") and facts.get("state") in ("up", "unknown")
    }


def _gpu_evidence(bench: Bench) -> str:
    kinds = {
        word for report in bench.topology.values() if isinstance(report, dict)
        for row in report.get("gpu_links", []) for word in row if word != "X"
    }  # fmt: skip
    if not kinds:
        return ""
    nvlink = [word for word in kinds if word.startswith("NV")]
    if nvlink:
        return f"; nvidia-smi reports {', '.join(sorted(nvlink))}: is peer access disabled (NCCL_P2P_DISABLE, a container)?"
    return f"; nvidia-smi reports {', '.join(sorted(kinds))} between GPUs"
