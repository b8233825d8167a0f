"""Names of nodes: `node0`, `node1`, … resolve inside an emulation, forth and back, without a name server.

`ip netns exec` shows a process the files under /etc/netns/NAMESPACE in place of those in /etc. Without a hosts file there, torch
asks the host's name server about every peer, which a namespace cannot reach, and prints a warning for each.
"""

import contextlib
from pathlib import Path

from meshwright.comm.emulate.topology import address

FOLDER = Path("/etc/netns")


def write(namespace: str, nodes: int) -> None:
    """Write the hosts file of a namespace. Where /etc cannot be written, addresses still work."""
    prefixes = ("", "::ffff:")  # also as seen by a socket of IPv6, which torch's store opens
    lines = [f"{prefix}{address(node)} node{node}" for prefix in prefixes for node in range(nodes)]
    lines = ["127.0.0.1 localhost", *lines]
    with contextlib.suppress(OSError):
        folder = FOLDER / namespace
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "hosts").write_text("\n".join(lines) + "\n", "ascii")


def remove(namespace: str) -> None:
    """Remove the hosts file of a namespace, and the folders if they are empty."""
    folder = FOLDER / namespace
    with contextlib.suppress(OSError):
        (folder / "hosts").unlink(missing_ok=True)
        folder.rmdir()
        FOLDER.rmdir()
