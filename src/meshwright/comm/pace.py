"""How much of a collective is in transfer at a time over point-to-point messages.

    lanes    Small lanes are reduced while others are in transfer; but each message costs about 0.1 ms of CPU time
    window   A receive that is posted early keeps its connection busy, and saves a trip over the network

On one host large messages need few early receives: one in transfer on each connection is enough, and more are slower, probably because they
fill the caches. Where ranks share cores another rank uses the time in which one waits. Measured with a ring of 64 MiB on 2 and 16
cores. Between hosts it is different: halving and doubling without early receives took 1.4 times as long at 200 Mb/s.
"""

from __future__ import annotations

from typing import NamedTuple

from meshwright.comm.run import WINDOW
from meshwright.comm.transport.handshake import Neighbours

LARGE_MESSAGE = 2**20  # bytes


class Pace(NamedTuple):
    """The bytes of a lane's part of a chunk, about, and the (step, lane) pairs whose receives are posted early if messages are large."""

    lane_bytes: int
    large_window: int

    def window(self, message_bytes: int) -> int:
        return self.large_window if message_bytes >= LARGE_MESSAGE else WINDOW


USUAL = Pace(2**23, WINDOW)
TWO_CONNECTIONS = Pace(2**22, 1)
SHARED_CORES = Pace(2**23, 0)


def pace_of(near: Neighbours, connections: int) -> Pace:
    """The pace of a group, by the hosts and cores of its ranks and the gloo connections between two of them."""
    if not near.one_host:
        return USUAL
    if near.share_cores:
        return SHARED_CORES
    return TWO_CONNECTIONS if connections > 1 else USUAL
