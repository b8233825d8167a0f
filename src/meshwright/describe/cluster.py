"""The cluster: accelerators, links, and a hierarchy of levels that gives the bandwidth and latency between any two devices.

A message of n bytes on a **link** takes T(n) = α + n·β, with β = 1 / (bandwidth × achievable share). Bandwidth is per port and
per **direction**: NVLink 4's advertised 900 GB/s counts both directions, so it is 450 GB/s here.

A **level** joins `size` units of the level below it: level 0 joins devices into a node (or NVLink domain), level 1 joins nodes
into a rail group, and so on up to sites. The devices of a unit have consecutive numbers. A message takes the α of the lowest
level that contains both devices, and passes these **ports**:

- inside level 0: the sender's output port and the receiver's input port (a shared bus is one port for all devices);
- above level 0: the sender's and the receiver's network card (devices share a card if a node has fewer cards than devices),
  and, if a level is oversubscribed, the uplinks of the sender's and the receiver's unit.

Flows through one port share it max-min fairly (`programs.walk`).
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Annotated, Any, NamedTuple

from pydantic import BeforeValidator, Field

from meshwright.describe.accelerator import Accelerator
from meshwright.describe.base import Bytes, Described, Devices, Rate, Seconds, Size, Whole
from meshwright.describe.files import entry

MOST_MEASURED = 256  # measured calls that a cluster keeps


def named(kind: str) -> BeforeValidator:
    """A field that may be a catalog name or a table."""

    def load(value: Any) -> Any:
        return entry(kind, value) if isinstance(value, str) else value

    return BeforeValidator(load)


class Link(Described):
    """α, bandwidth per direction and port, and the share of it that large messages reach."""

    name: str
    alpha: Seconds
    bandwidth: Rate
    efficiency: float = Field(default=1.0, gt=0, le=1)
    hop: Seconds = 0.0
    """latency a library pays per ring or tree hop; 0: alpha"""
    in_switch: float = Field(default=0.85, gt=0, le=1)
    """share of the rate of rings that reduction in the switch sustains"""
    mesh: bool = False
    """links join devices directly, without a switch: a group of P uses P − 1 of them; `bandwidth` is that of all links of a device"""
    source: str = ""
    checked: str = "unchecked"
    """what the figures were compared with, and when"""

    @property
    def library_hop(self) -> float:
        return self.hop or self.alpha

    @property
    def beta(self) -> float:
        return 1.0 / (self.bandwidth * self.efficiency)

    @property
    def crossover(self) -> float:
        """n* = α/β: below it a message is bound by latency, above it by bandwidth."""
        return self.alpha / self.beta

    def time(self, n: float) -> float:
        return self.alpha + n * self.beta


class Level(Described):
    """`size` units of the level below, joined by `link`."""

    name: str
    size: Size
    link: Annotated[Link, named("links")]
    ports: Whole = 0
    """links that leave one node at this level; 0: one for each device"""
    oversubscription: float = Field(default=1.0, ge=1)
    """downlinks over uplinks of one unit below"""
    shared: bool = False
    """level 0 only: all devices share one bus"""
    reduces: bool = False
    """the switch reduces: an all-reduce sends each byte once"""


class Factors(Described):
    """Measured seconds of one operation over those of its formula, by term (1: equal), and the seconds that each call adds."""

    call: Seconds = Field(default=0.0, ge=0)
    """seconds of one call that do not depend on the number of ranks"""
    latency: float = Field(default=1.0, ge=0)
    """factor on the latency of the formula"""
    bytes: float = Field(default=1.0, gt=0)
    """factor on the seconds that the bytes take"""


class Collectives(Described):
    """Corrections of a communication library to the formulas of its programs (`cost.library`), and measured factors by operation.

    The defaults are NCCL's, from published measurements; `meshwright calibrate` writes those of a measured cluster.
    """

    call: Seconds = Field(default=8e-6, ge=0)
    """kernel start and synchronisation of one call"""
    call_across: Seconds = Field(default=30e-6, ge=0)
    """the same when network cards take part"""
    chunk: Seconds = Field(default=2.5e-6, ge=0)
    """start of one chunk of a transfer"""
    peer: Seconds = Field(default=1e-6, ge=0)
    """one more send and receive in a group of them"""
    pair_loss: float = Field(default=0.45, ge=0, lt=1)
    """share of the rate that a group of P loses, times P"""
    factors: dict[str, Factors] = Field(default_factory=dict)
    """inside a node, by operation such as all-reduce"""
    factors_across: dict[str, Factors] = Field(default_factory=dict)
    """between nodes, by operation"""
    source: str = "published measurements of NCCL"

    def factor(self, operation: str, across: bool = False) -> Factors:
        return (self.factors_across if across else self.factors).get(operation, AS_THE_FORMULA)


AS_THE_FORMULA = Factors()


class MeasuredCall(Described):
    """One measured call of a collective that a calibration was fitted to; stored so that figures can show it."""

    operation: str
    """all-reduce, all-gather, …, or point-to-point"""
    ranks: int = Field(ge=2)
    bytes: float = Field(gt=0)
    """n, the full buffer"""
    seconds: Seconds = Field(gt=0)


class Path(NamedTuple):
    """The path of a message between two devices: α and the ports it passes."""

    alpha: float
    ports: tuple[tuple[Any, ...], ...]


class Cluster(Described):
    """`gpus` devices under a hierarchy of levels. The last level may hold any number of units."""

    name: str
    accelerator: Annotated[Accelerator, named("accelerators")]
    levels: tuple[Level, ...] = Field(min_length=1)
    gpus: Devices = 0
    """devices in all; 0: one unit of level 0"""
    collectives: Collectives = Collectives()
    measured: tuple[MeasuredCall, ...] = Field(default=(), max_length=MOST_MEASURED)
    """bench points of a calibrated cluster, for figures"""
    published: Whole = 0
    """devices of the largest training run or collective that is published of this network; 0: none"""
    sharing: float = Field(default=1.0, ge=1)
    """processes per core, if they are more than the cores: a rank runs this many times faster while the others wait"""
    host_memory: Bytes = 0.0
    """memory of one host; 0: unknown, twice the memory of its devices is assumed"""
    host_devices: Whole = 0
    """devices of one host; 0: those of a node"""
    price: float = Field(default=0.0, ge=0)
    """US dollars per device-hour, for cost"""
    source: str = ""
    checked: str = "unchecked"
    """what the figures were compared with, and when"""

    @property
    def world(self) -> int:
        return self.gpus or self.node_size

    @property
    def host_size(self) -> int:
        """Devices of one host."""
        return self.host_devices or self.node_size

    @property
    def host_limit(self) -> float:
        """Bytes of memory of one host."""
        return self.host_memory or 2 * self.host_size * self.accelerator.memory

    @property
    def node_size(self) -> int:
        return self.levels[0].size

    @property
    def nodes(self) -> int:
        return math.ceil(self.world / self.node_size)

    @cached_property
    def spans(self) -> tuple[int, ...]:
        """Devices under one unit of each level; the last is at least the whole cluster."""
        spans = list(running_products([level.size for level in self.levels]))
        spans[-1] = max(spans[-1], self.world)
        return tuple(spans)

    def with_gpus(self, gpus: int) -> Cluster:
        return self.but(gpus=gpus)

    def with_nodes(self, nodes: int) -> Cluster:
        return self.but(gpus=nodes * self.node_size)

    def level_between(self, a: int, b: int) -> int:
        """Index of the lowest level whose unit holds both devices."""
        return next(k for k, span in enumerate(self.spans) if a // span == b // span)

    def level_of_span(self, span: int) -> int:
        """Index of the lowest level whose unit holds `span` consecutive, aligned devices."""
        return next((k for k, s in enumerate(self.spans) if span <= s), len(self.spans) - 1)

    def device_bandwidth(self, level: int) -> float:
        """Achievable bytes/s in one direction that each device gets at a level while all devices send."""
        entry = self.levels[level]
        rate = entry.link.bandwidth * entry.link.efficiency
        if level == 0:
            return rate / self.node_size if entry.shared else rate
        ports = entry.ports or self.node_size
        rate *= ports / self.node_size
        for k in range(1, level + 1):
            rate = min(rate, self._uplink(k) / min(self.spans[k - 1], self.world))
        return rate

    @property
    def card_bandwidth(self) -> float:
        """Achievable bytes/s in one direction of a device that is the only one of its node to send to another node."""
        return self.capacity(("nic-out", min(1, len(self.levels) - 1), 0, 0))

    def path(self, src: int, dst: int) -> Path:
        """α and the ports between two devices."""
        if src == dst:
            return Path(0.0, ())
        k = self.level_between(src, dst)
        entry = self.levels[k]
        if k == 0:
            if entry.shared:
                return Path(entry.link.alpha, (("bus", src // self.node_size),))
            return Path(entry.link.alpha, (("out", src), ("in", dst)))
        # One card serves every level above the node; a level of another link (a site's uplink) is one more port behind it.
        passed = [1] if entry.link.name == self.levels[1].link.name else [1, k]
        ports: list[tuple[Any, ...]] = [
            (way, j, *self._card(end, j)) for j in passed for way, end in (("nic-out", src), ("nic-in", dst))
        ]
        for j in range(1, k + 1):
            if self.levels[j].oversubscription > 1 and src // self.spans[j - 1] != dst // self.spans[j - 1]:
                ports += [("up", j, src // self.spans[j - 1]), ("down", j, dst // self.spans[j - 1])]
        return Path(entry.link.alpha, tuple(ports))

    def capacity(self, port: tuple[Any, ...]) -> float:
        """Achievable bytes/s of a port."""
        match port:
            case ("bus", _) | ("out", _) | ("in", _):
                link = self.levels[0].link
                return link.bandwidth * link.efficiency
            case ("nic-out" | "nic-in", k, *_):
                entry = self.levels[k]
                ports = entry.ports or self.node_size
                return entry.link.bandwidth * entry.link.efficiency * max(1.0, ports / self.node_size)
            case ("up" | "down", k, _):
                return self._uplink(k)
        raise ValueError(f"no such port: {port}")

    def _card(self, device: int, level: int) -> tuple[int, int]:
        node, local = divmod(device, self.node_size)
        ports = min(self.levels[level].ports or self.node_size, self.node_size)
        return node, local * ports // self.node_size

    def _uplink(self, level: int) -> float:
        entry = self.levels[level]
        devices = self.spans[level - 1]
        ports = entry.ports or self.node_size
        per_device = entry.link.bandwidth * entry.link.efficiency * ports / self.node_size
        return devices * per_device / entry.oversubscription


def running_products(sizes: list[int]) -> list[int]:
    """Running products in exact integers."""
    out, product = [], 1
    for size in sizes:
        product *= size
        out.append(product)
    return out


def uniform(ranks: int, alpha: float, bandwidth: float, memory_bandwidth: float = 1e30) -> Cluster:
    """`ranks` devices on one ideal switch: the setting of the closed formulas."""
    device = Accelerator(name="device", memory=80e9, memory_bandwidth=memory_bandwidth, peak={"bf16": 1e15})
    link = Link(name="link", alpha=alpha, bandwidth=bandwidth)
    return Cluster(name="uniform", accelerator=device, levels=(Level(name="switch", size=ranks, link=link),))
