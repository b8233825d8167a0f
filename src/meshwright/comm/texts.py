"""Texts exchanged between ranks as bytes: nothing is pickled, so a rank receives data and never code."""

from __future__ import annotations

import numpy as np
import torch
from torch import distributed
from torch.distributed import ProcessGroup


def gather_texts(text: str, group: ProcessGroup | None) -> list[str]:
    """The text of every rank of a group on the CPU, on every rank. No group: this process is the only one."""
    if group is None or group.size() == 1:
        return [text]
    data = np.frombuffer(text.encode(), np.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(group.size())]
    distributed.all_gather(sizes, torch.tensor([len(data)]), group=group)
    padded = torch.zeros(max(1, *(int(size) for size in sizes)), dtype=torch.uint8)
    padded[: len(data)] = torch.from_numpy(data.copy())
    found = [torch.empty_like(padded) for _ in sizes]
    distributed.all_gather(found, padded, group=group)
    return [bytes(part[: int(size)].numpy()).decode() for part, size in zip(found, sizes, strict=True)]
