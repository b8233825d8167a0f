"""A transport between threads of one process, for tests of the interpreter without starting ranks."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from meshwright.comm.transport.base import PendingGroup, apply


class Threads:
    """Messages of one rank through queues. Sends are delivered late, to show a schedule that overwrites what it still sends."""

    def __init__(self, rank: int, size: int, queues: dict[tuple[int, int], queue.Queue], arrays: bool) -> None:
        self.rank, self.size, self.queues = rank, size, queues
        self.posts_early, self.arrays = not arrays, arrays

    def begin(self, begin):
        self.combine, self.store = begin.combine, begin.store
        self.largest = begin.largest
        self.sizes: list[int] = []

    def send(self, peers, pieces, place):
        return PendingGroup([Sending(self, peer, pieces) for peer in peers])

    def receive(self, peer, pieces, place, direct):
        if direct and self.posts_early:  # from here on the target may be overwritten: make a wrong `direct` visible
            for piece in pieces:
                piece.into.fill_(99)
        return Receiving(self, peer, pieces)

    def end(self):
        pass

    def close(self):
        pass


class Sending:
    def __init__(self, transport, peer, pieces):
        self.transport, self.peer, self.pieces, self.sent = transport, peer, pieces, False
        transport.queues[transport.rank, peer].put(self)
        self.lock = threading.Lock()

    def data(self):
        with self.lock:
            if not self.sent:
                self.copy = [piece.copy() if self.transport.arrays else piece.clone() for piece in self.pieces]
                self.sent = True
        if self.transport.arrays:
            return np.concatenate(self.copy) if self.copy else np.empty(0)
        return torch.cat(self.copy) if self.copy else torch.empty(0)

    def wait(self):
        self.data()


class Receiving:
    def __init__(self, transport, peer, pieces):
        self.transport, self.peer, self.pieces = transport, peer, pieces

    def wait(self):
        data = self.transport.queues[self.peer, self.transport.rank].get(timeout=20).data()
        elements = sum(len(piece.into) for piece in self.pieces)
        assert len(data) == elements
        if self.transport.largest >= 0 and elements:
            assert elements * self.pieces[0].into.itemsize <= self.transport.largest
        apply(data, self.pieces, self.transport.combine, self.transport.store)


def run(ranks: int, work: Callable[[Threads], Any], arrays: bool = False) -> list[Any]:
    """Call work(transport) on every rank, each in a thread, and return the results; with `arrays` in the order of shared memory."""
    queues = {(a, b): queue.Queue() for a in range(ranks) for b in range(ranks)}
    results: list[Any] = [None] * ranks

    def rank_main(rank: int) -> None:
        try:
            results[rank] = work(Threads(rank, ranks, queues, arrays))
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=rank_main, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results
