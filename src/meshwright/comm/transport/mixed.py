"""Shared memory to the ranks of this host, point-to-point messages to all others."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from meshwright.comm.call import Place
from meshwright.comm.transport.base import Begin, Destination, Pending, Transport
from meshwright.comm.transport.point_to_point import PointToPoint
from meshwright.comm.transport.shared_memory import SharedMemory


class Mixed:
    """Chooses the transport by peer. Before it blocks in point-to-point messages it sends what shared memory has queued."""

    def __init__(self, near: SharedMemory, far: PointToPoint) -> None:
        self.near, self.far = near, far
        self.rank, self.size = far.rank, far.size
        self.posts_early = len(near.links) < far.size - 1
        far.before_wait = near.drain

    def by_peer(self, peer: int) -> Transport:
        return self.near if peer in self.near.links else self.far

    def begin(self, begin: Begin) -> None:
        self.near.begin(begin)
        if not self.posts_early:
            return
        sent, received = (
            {peer: size for peer, size in table.items() if peer not in self.near.links}
            for table in (begin.sent, begin.received)
        )
        self.far.begin(begin._replace(sent=sent, received=received))

    def send(self, peer: int, pieces: Sequence[torch.Tensor], place: Place) -> Pending:
        return self.by_peer(peer).send(peer, pieces, place)

    def receive(self, peer: int, pieces: Sequence[Destination], place: Place, direct: bool) -> Pending:
        return self.by_peer(peer).receive(peer, pieces, place, direct)

    def end(self) -> None:
        if self.posts_early:
            self.far.end()

    def close(self) -> None:
        self.near.close()
        self.far.close()
