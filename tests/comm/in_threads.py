"""A transport between threads of one process, for tests of the interpreter without starting ranks."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import torch

from meshwright.comm.transport.base import apply


class Threads:
    """Messages of one rank through queues. Sends are delivered late, to show a schedule that overwrites what it still sends."""

    posts_early = True

    def __init__(self, rank: int, size: int, queues: dict[tuple[int, int], queue.Queue]) -> None:
        self.rank, self.size, self.queues = rank, size, queues

    def begin(self, begin):
        self.combine = begin.combine
        self.largest = begin.largest
        self.sizes: list[int] = []

    def send(self, peer, pieces, place):
        return Sending(self, peer, pieces)

    def receive(self, peer, pieces, place, direct):
        if direct:  # from here on the target may be overwritten: make a wrong `direct` visible
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
                self.copy = [piece.clone() for piece in self.pieces]
                self.sent = True
        return torch.cat(self.copy) if self.copy else torch.empty(0)

    def wait(self):
        self.data()


class Receiving:
    def __init__(self, transport, peer, pieces):
        self.transport, self.peer, self.pieces = transport, peer, pieces

    def wait(self):
        data = self.transport.queues[self.peer, self.transport.rank].get(timeout=20).data()
        elements = sum(piece.into.numel() for piece in self.pieces)
        assert data.numel() == elements
        if self.transport.largest >= 0 and elements:
            assert elements * self.pieces[0].into.element_size() <= self.transport.largest
        apply(data, self.pieces, self.transport.combine)


def run(ranks: int, work: Callable[[Threads], Any]) -> list[Any]:
    """Call work(transport) on every rank, each in a thread, and return the results."""
    queues = {(a, b): queue.Queue() for a in range(ranks) for b in range(ranks)}
    results: list[Any] = [None] * ranks

    def rank_main(rank: int) -> None:
        try:
            results[rank] = work(Threads(rank, ranks, queues))
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
