"""A transport between threads of one process, for tests of the interpreter without starting ranks."""

import queue
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch


class Threads:
    """Messages of one rank through queues. Sends are delivered late, to show a schedule that overwrites what it still sends."""

    slice_bytes = sys.maxsize

    def __init__(self, rank: int, size: int, queues: dict[tuple[int, int], queue.Queue]) -> None:
        self.rank, self.size, self.queues = rank, size, queues

    def begin(self, call, sent, received):
        pass

    def send(self, peers, pieces, place):
        return [Sending(self, peer, pieces) for peer in peers]

    def receive(self, peer, to, place):
        if to.direct:  # from here on the target may be overwritten: make a wrong `direct` visible
            for part in to.parts:
                part.into.fill_(99)
        return Receiving(self, peer, to)

    def end(self):
        pass

    def close(self):
        pass


class Sending:
    def __init__(self, transport, peer, pieces):
        self.transport, self.peer, self.pieces, self.sent = transport, peer, pieces, False
        self.lock = threading.Lock()
        transport.queues[transport.rank, peer].put(self)

    def data(self):
        with self.lock:
            if not self.sent:
                self.copy = torch.cat(self.pieces) if self.pieces else torch.empty(0)
                self.sent = True
        return self.copy

    def wait(self):
        self.data()


class Receiving:
    def __init__(self, transport, peer, to):
        self.transport, self.peer, self.to = transport, peer, to

    def wait(self):
        data = self.transport.queues[self.peer, self.transport.rank].get(timeout=20).data()
        assert len(data) == sum(len(part.into) for part in self.to.parts)
        self.to.apply(data)


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
