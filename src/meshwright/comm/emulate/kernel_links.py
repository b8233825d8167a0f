"""Links made by the kernel: veth pairs into bridges of a switch namespace, `tbf` for the rate, `netem` for the delay.

    node namespace            switch namespace
    eth0 ─────────────────── port0 ┐
      tbf rate (+ netem)       tbf ├─ leaf0 ─ up0 ── down0 ─┐
    eth0 ─────────────────── port1 ┘          tbf    tbf    ├─ spine   (only if oversubscribed)
                                     leaf1 ─ up1 ── down1 ──┘

A queue limits what leaves its device, so both ends of a pair have one: the node's limits what it sends, the port's what it
receives. A token bucket lets `burst` bytes pass at full speed after a pause: messages below the burst are not limited, so it is
as small as the timer allows. The queue is long enough that nothing is dropped: training fabrics are lossless too, and one TCP
retransmission timeout (200 ms) would be longer than most steps. Nothing is added to the network of the host itself.
"""

from meshwright.comm.emulate import system
from meshwright.comm.emulate.topology import INTERFACE, Topology, namespace, switch_namespace
from meshwright.errors import MeshwrightError

BURST_BYTES = 32 * 2**10
BURST_S = 5e-4  # a bucket holds at least what the link carries in this time, or the timer limits the rate
QUEUE_BYTES = 64 * 2**20
MAX_PACKETS = 100_000  # in the queue of netem


def build(name: str, topology: Topology) -> None:
    """Make the bridges and the links of all nodes; the namespaces exist."""
    switch = switch_namespace(name)
    oversubscribed = topology.oversubscription > 1
    for leaf in range(topology.switches if oversubscribed else 1):
        add_bridge(switch, f"leaf{leaf}")
    if oversubscribed:
        add_bridge(switch, "spine")
        for leaf in range(topology.switches):
            up, down = f"up{leaf}", f"down{leaf}"
            add_pair((switch, up), (switch, down))
            for device, bridge in ((up, f"leaf{leaf}"), (down, "spine")):
                attach(switch, device, bridge)
                limit(switch, device, topology.uplink)
    for node in range(topology.nodes):
        port = f"port{node}"
        add_pair((namespace(name, node), INTERFACE), (switch, port))
        attach(switch, port, f"leaf{topology.switch_of(node) if oversubscribed else 0}")
        limit(switch, port, topology.rate)
        limit(namespace(name, node), INTERFACE, topology.rate, topology.delay)


def add_bridge(switch: str, bridge: str) -> None:
    system.call("ip", "-n", switch, "link", "add", bridge, "type", "bridge", "forward_delay", "0")
    system.call("ip", "-n", switch, "link", "set", bridge, "up")


def add_pair(first: tuple[str, str], second: tuple[str, str]) -> None:
    """A veth pair whose ends are (namespace, device); they are made in their namespaces, never in the host's."""
    system.call(
        "ip", "link", "add", first[1], "netns", first[0], "type", "veth", "peer", "name", second[1], "netns", second[0]
    )


def attach(switch: str, device: str, bridge: str) -> None:
    system.call("ip", "-n", switch, "link", "set", device, "master", bridge, "up")


def limit(where: str, device: str, rate: float, delay: float = 0.0) -> None:
    """Limit what leaves a device to `rate` bytes/s, and delay it. netem is the inner queue of tbf."""
    burst = max(BURST_BYTES, int(rate * BURST_S))
    system.call(
        "tc", "-n", where, "qdisc", "add", "dev", device, "root", "handle", "1:", "tbf",
        "rate", f"{rate * 8:.0f}bit", "burst", str(burst), "limit", str(QUEUE_BYTES + burst),
    )  # fmt: skip
    if delay:
        add_delay(where, device, "1:1", delay)


def add_delay(where: str, device: str, parent: str, delay: float) -> None:
    system.call(
        "tc", "-n", where, "qdisc", "add", "dev", device, "parent", parent, "handle", "10:", "netem",
        "delay", f"{delay * 1e6:.0f}us", "limit", str(MAX_PACKETS),
    )  # fmt: skip


def has_netem(name: str) -> bool:
    """Whether this kernel has netem: a class of a probe in the switch namespace either takes it or not."""
    switch, device = switch_namespace(name), "probe"
    add_pair((switch, device), (switch, "probe2"))
    try:
        limit(switch, device, 1e6, delay=1e-3)
        return True
    except MeshwrightError as error:
        if "netem" in error.what:
            return False
        raise
    finally:
        system.call("ip", "-n", switch, "link", "delete", device)
