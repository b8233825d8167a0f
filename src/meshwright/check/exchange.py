"""Notes from all ranks to rank 0 through the key-value store of `torch.distributed`: nobody waits for anybody.

A rank sets a key and goes on. Rank 0 asks in later steps whether the keys of all ranks are there, which the store answers at once. A rank that
stays more than `BEHIND` checks and `PATIENCE_S` behind is not asked again; if it has sent before, it is late. Without torch.distributed the
store is in this process.
"""

import json
import time
from collections.abc import Callable
from typing import Any

from torch import distributed

from meshwright.check.process_hooks import initialized, rank, world

BEHIND = 3  # checks
PATIENCE_S = 10.0
POLL_S = 0.02
Receive = Callable[[list[dict[str, Any]], list[int]], None]  # notes of a step, and the ranks that are late


class NoteExchange:
    """The notes of one rank to rank 0, and a word back: stop."""

    def __init__(self, name: str = "") -> None:
        self.rank, self.ranks = rank(), list(range(world()))
        self.store: Any = distributed.HashStore()
        if initialized():
            self.store = distributed.PrefixStore(
                f"meshwright/{name}", distributed.distributed_c10d._get_default_store()
            )
        # On rank 0: steps whose notes are not all there, and when this rank sent its own
        self.waiting: list[tuple[int, float]] = []
        self.patience = PATIENCE_S
        self.heard: set[int] = set()

    def send(self, note: dict[str, Any]) -> None:
        self.store.set(f"{note['step']}/{self.rank}", json.dumps(note))
        if self.rank == 0:
            self.waiting.append((note["step"], time.monotonic()))

    def look(self, receive: Receive, wait: float = 0.0) -> None:
        """On rank 0: pass on the notes of every step that all ranks have sent, or that they have had time for."""
        until = time.monotonic() + wait
        while self.rank == 0 and self.waiting:
            (step, sent), now = self.waiting[0], time.monotonic()
            keys = [f"{step}/{r}" for r in self.ranks]
            complete = self.store.check(keys)
            if not complete and wait and now < until:
                time.sleep(POLL_S)
                continue
            behind = not complete and len(self.waiting) > BEHIND and (bool(wait) or now - sent > self.patience)
            if not complete and not behind:
                return
            notes = [json.loads(self.store.get(key)) for key in keys if self.store.check([key])]
            for note in notes:
                self.store.delete_key(f"{note['step']}/{note['rank']}")
            self.waiting.pop(0)
            here = {note["rank"] for note in notes}
            self.heard |= here
            late = sorted(self.heard - here) if behind else []
            if behind:
                self.ranks = sorted(here)
            receive(notes, late)

    def stop(self) -> None:
        """Tell all ranks to end at their next check, which rank 0 has not reached yet."""
        self.store.set("stop", "1")

    def stopped(self) -> bool:
        return bool(self.store.check(["stop"]))
