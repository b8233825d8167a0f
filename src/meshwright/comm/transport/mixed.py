"""Shared memory to the ranks of this host, point-to-point messages to all others, in a group on several hosts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from meshwright.comm.call import Place
from meshwright.comm.transport.base import Begin, Destination, Pending, PendingGroup, Transport
from meshwright.comm.transport.point_to_point import PointToPoint
from meshwright.comm.transport.shared_memory import SharedMemory


class Mixed:
    """Chooses the transport by peer. Before it blocks in point-to-point messages it sends what shared memory has queued."""

    def __init__(self, near: SharedMemory, far: PointToPoint) -> None:
        self.near, self.far = near, far
        self.rank, self.size = far.rank, far.size
        self.posts_early, self.arrays = True, False
        far.before_wait = near.drain

    def by_peer(self, peer: int) -> Transport:
        return self.near if peer in self.near.links else self.far

    def begin(self, begin: Begin) -> None:
        self.near.begin(begin)
        sent, received = (
            {peer: size for peer, size in table.items() if peer not in self.near.links}
            for table in (begin.sent, begin.received)
        )
        self.far.begin(begin._replace(sent=sent, received=received))

    def send(self, peers: Sequence[int], pieces: Sequence[torch.Tensor], place: Place) -> Pending | None:
        near = [peer for peer in peers if peer in self.near.links]
        if len(near) == len(peers):
            return self.near.send(peers, pieces, place)
        far = self.far.send([peer for peer in peers if peer not in near], pieces, place)
        both = (self.near.send(near, pieces, place) if near else None, far)
        return PendingGroup([pending for pending in both if pending is not None])

    def receive(self, peer: int, pieces: Sequence[Destination], place: Place, direct: bool) -> Pending:
        return self.by_peer(peer).receive(peer, pieces, place, direct)

    def end(self) -> None:
        self.far.end()

    def close(self) -> None:
        self.near.close()
        self.far.close()
