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

from pydantic import BeforeValidator, Field, field_validator

from meshwright.describe.base import Bytes, Described, Devices, Flops, Rate, Seconds, Size, Whole
from meshwright.describe.files import entry
from meshwright.errors import MeshwrightError, unknown

DTYPE_BYTES = {
    "fp64": 8.0, "fp32": 4.0, "tf32": 4.0, "fp16": 2.0, "bf16": 2.0, "fp8": 1.0, "mxfp8": 1.0, "int8": 1.0, "fp4": 0.5,
    "int4": 0.5,
}  # fmt: skip
MOST_MEASURED = 256  # measured calls that a cluster keeps
LEAST_MEMORY = 1e6  # bytes of a device


def named(kind: str) -> BeforeValidator:
    """A field that may be a catalog name or a table."""

    def load(value: Any) -> Any:
        return entry(kind, value) if isinstance(value, str) else value

    return BeforeValidator(load)


PRIOR = "uncalibrated: never measured, so the median shares of the measured chips (H100, B200, MI355X)"


# Rate of the first flash attention in Triton over that of version 2, whose paper (Dao 2023, section 4.1) has 1/1.4 forward (1.3 to 1.5 times slower)
# and 1/2 backward, which has 2.5 times the operations.
TRITON_FLASH = 3.5 / (1.4 + 2.5 * 2)


class Efficiency(Described):
    """The share of its peak rates that a device sustains, from measured matrix products and copies (`calibrate`).

    The defaults are for a device that was never measured: the median of the measured devices. Its predictions have a wider band
    (`predict.prediction`).
    """

    gemm: float = Field(default=0.66, gt=0, le=1)
    """large matrix products, sustained"""
    gemm_fp8: float = Field(default=0.0, ge=0, le=1)
    """large fp8 products; 0: as `gemm`"""
    gemm_mxfp8: float = Field(default=0.0, ge=0, le=1)
    """large products of fp8 with a scale per block; 0: as `gemm`"""
    gemm_fp4: float = Field(default=0.0, ge=0, le=1)
    """large fp4 products; 0: as `gemm`"""
    grouped: float = Field(default=1.0, gt=0)
    """rate of the products of several experts in one kernel, over that of one large product"""
    gemm_traffic: float = Field(default=0.35, ge=0)
    """part of a product's smaller term, arithmetic or traffic, that is not hidden"""
    floor: Seconds = 2e-6
    """ramp of any kernel"""
    flash: float = Field(default=0.25, gt=0, le=1)
    """flash attention, forward and backward, head dim 128"""
    fused: float = Field(default=0.39, gt=0, le=1)
    """the vendor's fused attention"""
    memory: float = Field(default=0.80, gt=0, le=1)
    """elementwise kernels, of memory bandwidth"""
    tile: float = Field(default=128.0, ge=1)
    """a smaller dimension of a product costs as much; 1 on CPUs"""
    sequence_half: float = Field(default=700.0, ge=0)
    """sequence length at which flash attention reaches half of its peak rate"""
    update: float = Field(default=1.0, gt=0)
    """rate of the optimizer's updates, which work in place, over that of `memory`"""
    selection: Seconds = 0.0
    """time of one element from which a top-k selects, where it is not bound by memory (CPU)"""
    exponential: Seconds = 0.0
    """time of one exp, erf or tanh of an activation or a softmax, where it is not hidden (CPU)"""
    elementwise: dict[str, float] = Field(default_factory=dict)
    """seconds of a norm, activation, residual, rotation or loss over those of its bytes at `memory`; default 1"""
    doubt: float = Field(default=0.0, ge=0, le=1)
    """standard deviation of ln seconds of a step that shares add which were assumed"""
    measured_dtype: str = ""
    """dtype of the operations that `train` timed on this machine; empty: catalog, published runs or `bench`"""
    source: str = PRIOR

    def products(self, dtype: str) -> float:
        """The share of the peak rate of a dtype that large matrix products sustain."""
        narrow = {"fp8": self.gemm_fp8, "mxfp8": self.gemm_mxfp8, "fp4": self.gemm_fp4}
        return narrow.get(dtype, 0.0) or self.gemm

    def attention(self, kernel: str) -> float:
        """The share of the peak rate that an attention kernel (`Stack.attention`) sustains."""
        return self.fused if kernel == "fused" else self.flash * (TRITON_FLASH if kernel == "triton" else 1.0)

    @property
    def measured(self) -> bool:
        """Whether these shares were measured or fitted to published runs of the device."""
        return self.source != PRIOR


class Accelerator(Described):
    """One device: dense peak rates by dtype, memory, memory bandwidth."""

    name: str
    memory: Bytes
    memory_bandwidth: Rate
    peak: dict[str, Flops]
    """dense FLOP/s by dtype; never the sparse figure"""
    efficiency: Efficiency = Efficiency()
    power: float = Field(default=0.0, ge=0)
    """watts of the board at which its shares of peak hold; 0: unknown"""
    power_limit: float = Field(default=0.0, ge=0)
    """watts to which the board is limited (`nvidia-smi --power-limit`); 0: no limit below `power`"""
    host_bandwidth: Rate = 25e9
    """bytes/s between the device and its host's memory, per direction; the default is what PCIe 4 x16 reaches"""
    planning_only: bool = False
    """our trainer does not run on it"""
    source: str = ""
    checked: str = "unchecked"
    """what the figures were compared with, and when"""

    @field_validator("memory")
    @classmethod
    def _has_a_unit(cls, memory: float) -> float:
        """A bare number is bytes: `memory = 80` without its unit would be 80 bytes."""
        if memory < LEAST_MEMORY:
            what = f"{memory:g} bytes of memory"
            why = "A number without a unit is bytes, and no device has so little"
            raise MeshwrightError("MW-CONF-003", what, why=why, fix=f"{memory:g}GiB" if memory >= 1 else "80GiB")
        return memory

    def peak_for(self, dtype: str) -> float:
        """Peak FLOP/s of a dtype; a dtype that the device lacks runs at the rate of the next wider dtype."""
        wider = {
            "fp4": ["mxfp8", "fp8", "bf16"],
            "mxfp8": ["fp8", "bf16"],
            "fp8": ["bf16"],
            "bf16": ["fp16", "fp32"],
            "fp16": ["bf16", "fp32"],
            "tf32": ["fp32"],
            "int8": ["fp8", "bf16"],
        }
        for name in [dtype, *wider.get(dtype, []), "fp32"]:
            if name in self.peak:
                return self.peak[name]
        raise unknown("MW-CLUS-002", f"dtype of {self.name}", dtype, self.peak)

    @property
    def clock(self) -> float:
        """The clock of products and attention under the power limit, over that at full power.

            P ≈ C · V² · f and V ∝ f   →   f = (limit / power)^⅓

        Published sweeps of limits agree within 3% where the limit is 60% of the power or more: a V100 at 250 and 200 W is 1.13 and 1.05 times as
        fast as at 175 W (cube root 1.13, 1.05), an RTX 3090 at 330 W has 0.95 of its rate at 388 W (0.95)."""
        if not 0 < self.power_limit < self.power:
            return 1.0
        return float((self.power_limit / self.power) ** (1 / 3))

    @property
    def gamma(self) -> float:
        """Seconds to reduce one byte into another: two reads and a write of memory."""
        return 3.0 / self.memory_bandwidth


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
