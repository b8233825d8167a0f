"""The emulated cluster as data: nodes, links, switches, addresses, and which rank runs on which node.

                       spine                        with an oversubscription of 1 one switch joins all nodes;
              up and down: nodes_per_switch         above 1 the nodes of a leaf switch share its uplink:
              × rate / oversubscription             uplink = nodes_per_switch × rate / oversubscription
              ┌──────────┴──────────┐
            leaf 0                leaf 1            this is the oversubscription of `describe.cluster`: downlinks
      rate ┌──┴──┐          rate ┌──┴──┐            over uplinks of one leaf
         node 0 node 1         node 2 node 3

`rate` is that of a node's link in each direction, in bytes/s on the wire, Ethernet, IP and TCP headers included: of 1,514 bytes
of a full frame 1,448 are data, so 200 Mb/s carry at most 191 Mb/s. `delay` is the time from one node to another, one way; a round
trip takes two delays. Ranks of one node talk through the node's loopback, which is not limited.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from meshwright.errors import MeshwrightError, nearest_number, shown, unknown
from meshwright.units import parse_rate, parse_seconds

NAME = re.compile(r"[a-z0-9]{1,12}", re.ASCII)
MAX_NODES, MAX_RANKS = 64, 256
MTU, DATA_BYTES, FRAME_BYTES = 1500, 1448, 1514  # a full frame: 14 Ethernet + 20 IP + 32 TCP (with timestamps) + data
MIN_RATE, MAX_DELAY_S = 1e5 / 8, 1.0
PLACEMENTS = ("blocks", "round-robin")
INTERFACE = "eth0"


@dataclass(frozen=True)
class Topology:
    """Nodes with `rate` bytes/s in each direction and `delay` seconds one way between any two of them."""

    nodes: int
    ranks_per_node: int
    rate: float
    delay: float = 0.0
    oversubscription: float = 1.0
    nodes_per_switch: int = 0  # 0: all nodes, or half of them if oversubscribed

    def __post_init__(self) -> None:
        check_range("nodes", self.nodes, MAX_NODES)
        check_range("ranks-per-node", self.ranks_per_node, MAX_RANKS // self.nodes)
        if self.rate < MIN_RATE:
            raise refused("the rate between nodes is below 0.1 Mb/s", "--between 200Mb/s,1ms")
        if not 0 <= self.delay <= MAX_DELAY_S:
            raise refused(f"a delay of {self.delay:g} s between nodes is above 1 s", "--between 200Mb/s,1s")
        over = f"oversubscription={self.oversubscription:g}"
        if not self.oversubscription >= 1:
            why = "It is the rate of a switch's downlinks over that of its uplink"
            raise refused(f"{over} is below 1", "--oversubscription 3", why)
        if not self.nodes_per_switch:
            whole = self.oversubscription == 1 or self.nodes == 1
            object.__setattr__(self, "nodes_per_switch", self.nodes if whole else max(1, self.nodes // 2))
        divisors = [d for d in range(1, self.nodes + 1) if self.nodes % d == 0]
        if self.nodes_per_switch not in divisors:
            what = f"nodes-per-switch={self.nodes_per_switch} does not divide {self.nodes} nodes"
            raise refused(what, f"--nodes-per-switch {nearest_number(self.nodes_per_switch, divisors)}", valid=divisors)
        if self.oversubscription > 1 and self.switches == 1:
            what, why = (
                f"{over} needs two switches, and one joins all nodes",
                "The uplink that nodes share lies between switches",
            )
            raise refused(what, f"--nodes {max(2, self.nodes)} --nodes-per-switch {max(1, self.nodes // 2)}", why)

    @property
    def world(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def switches(self) -> int:
        return self.nodes // self.nodes_per_switch

    @property
    def uplink(self) -> float:
        """Bytes/s between a leaf switch and the spine, in each direction."""
        return self.nodes_per_switch * self.rate / self.oversubscription

    @property
    def round_trip(self) -> float:
        return 2 * self.delay

    def switch_of(self, node: int) -> int:
        return node // self.nodes_per_switch

    def rate_between(self, pairs: list[tuple[int, int]]) -> float:
        """Bytes/s of data that the slowest of these (sender, receiver) pairs reaches while all send at once, if every link
        is shared evenly."""
        load = Counter(link for pair in pairs for link in self.links(*pair))
        wire = min(self.capacity(link) / flows for link, flows in load.items())
        return wire * DATA_BYTES / FRAME_BYTES

    def links(self, source: int, target: int) -> list[tuple[str, int]]:
        """The links that a frame passes: out of the node, up and down between switches, into the other node."""
        between: list[tuple[str, int]] = []
        if self.oversubscription > 1 and self.switch_of(source) != self.switch_of(target):
            between = [("up", self.switch_of(source)), ("down", self.switch_of(target))]
        return [("out", source), *between, ("in", target)]

    def capacity(self, link: tuple[str, int]) -> float:
        return self.uplink if link[0] in ("up", "down") else self.rate


def check_range(name: str, value: int, high: int) -> None:
    if not 1 <= value <= high:
        why = f"An emulated cluster has at most {MAX_NODES} nodes and {MAX_RANKS} ranks"
        fix = f"--{name} {min(max(value, 1), high)}"
        raise refused(f"{name}={value} is out of range", fix, why, [f"1 to {high}"])


def refused(what: str, fix: str, why: str = "", valid: Iterable[object] = ()) -> MeshwrightError:
    return MeshwrightError("MW-EMU-002", what, why=why, valid=list(valid), fix=fix)


def parse_between(text: str) -> tuple[float, float]:
    """Bytes/s and seconds from "200Mb/s,1ms"; without a delay it is 0."""
    rate, comma, delay = text.partition(",")
    if not rate.strip() or (comma and not delay.strip()):
        valid = ("200Mb/s", "200Mb/s,1ms", "1Gb/s,50us")
        raise refused(f"--between {shown(text)} is not a rate and a delay", "--between 200Mb/s,1ms", valid=valid)
    return parse_rate(rate), parse_seconds(delay) if comma else 0.0


def check_name(name: str) -> None:
    if not NAME.fullmatch(name):
        raise refused(f"name {shown(name)} is not 1 to 12 lower-case letters or digits", "--name lab1")


def namespace(name: str, node: int) -> str:
    return f"mw-{name}-n{node}"


def switch_namespace(name: str) -> str:
    return f"mw-{name}-switch"


def address(node: int) -> str:
    """The IPv4 address of a node. Emulations do not reach each other or the host, so all use the same addresses."""
    return f"10.77.0.{node + 1}"


@dataclass(frozen=True)
class RankPlace:
    """The node and the index of one rank."""

    rank: int
    node: int
    local_rank: int


def places(nodes: int, ranks_per_node: int, placement: str) -> Iterator[RankPlace]:
    """The ranks in order. In blocks, ranks 0, 1, … fill node 0 first; round-robin, they go to nodes 0, 1, 2, … in turn."""
    if placement not in PLACEMENTS:
        raise unknown("MW-EMU-002", "placement", placement, PLACEMENTS, "--placement {}")
    for rank in range(nodes * ranks_per_node):
        if placement == "blocks":
            yield RankPlace(rank, rank // ranks_per_node, rank % ranks_per_node)
        else:
            yield RankPlace(rank, rank % nodes, rank // nodes)
