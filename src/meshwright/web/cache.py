"""Answers that were given before, by the request that they answer: the newest, up to a number of bytes."""

from __future__ import annotations

from collections import OrderedDict


class Cache:
    """A least-recently-used cache of byte strings. Answers depend on nothing but the request, so they never expire."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes, self.bytes = most_bytes, 0
        self.entries: OrderedDict[str, bytes] = OrderedDict()

    def get(self, key: str) -> bytes | None:
        if key in self.entries:
            self.entries.move_to_end(key)
        return self.entries.get(key)

    def put(self, key: str, value: bytes) -> None:
        """Keep an answer; the oldest ones are dropped to make room for it."""
        if key in self.entries or len(value) + len(key) > self.most_bytes // 4:
            return
        self.entries[key] = value
        self.bytes += len(key) + len(value)
        while self.bytes > self.most_bytes:
            old, dropped = self.entries.popitem(last=False)
            self.bytes -= len(old) + len(dropped)
