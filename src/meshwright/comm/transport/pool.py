"""Staging buffers that are reused: a fresh large buffer costs a page fault every 4 KiB, more than the copy into it."""

from __future__ import annotations

import torch

SMALLEST = 4096
KEPT = 64 * 2**20  # bytes of free buffers that are kept


class Pool:
    """Free byte buffers by capacity; capacities are powers of two."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self.free: dict[int, list[torch.Tensor]] = {}
        self.kept = 0

    def take(self, size: int) -> torch.Tensor:
        """Return a buffer of `size` bytes, a view of one that may be larger."""
        capacity = max(SMALLEST, 1 << (size - 1).bit_length()) if size else SMALLEST
        free = self.free.get(capacity)
        if free:
            self.kept -= capacity
            found = free.pop()
        else:
            found = torch.empty(capacity, dtype=torch.uint8, device=self.device)
        return found if size == capacity else found[:size]

    def give(self, buffer: torch.Tensor) -> None:
        """Take a buffer back."""
        whole = buffer._base if buffer._base is not None else buffer
        if self.kept + whole.numel() <= KEPT:
            self.kept += whole.numel()
            self.free.setdefault(whole.numel(), []).append(whole)
