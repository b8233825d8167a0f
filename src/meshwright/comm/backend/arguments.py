"""Arguments of a process group's methods, brought into the form of a program: one tensor, one name of a reduction, sizes of blocks.

A wrong argument raises an error that names the method and both sizes, before anything is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed import ReduceOp

from meshwright.comm.work import Work
from meshwright.errors import MeshwrightError

REDUCTIONS = (
    (ReduceOp.SUM, "sum"), (ReduceOp.AVG, "avg"), (ReduceOp.PRODUCT, "product"), (ReduceOp.MIN, "min"), (ReduceOp.MAX, "max"),
    (ReduceOp.BAND, "band"), (ReduceOp.BOR, "bor"), (ReduceOp.BXOR, "bxor"),
)  # fmt: skip


def one(items: Sequence, name: str) -> Sequence:
    """The only item of a list: a process has one device, so one tensor."""
    if len(items) != 1:
        raise MeshwrightError("MW-COMM-001", f"{name} expects one tensor (or list) per rank, not {len(items)}")
    return items


def rows(tensor: torch.Tensor, splits: Sequence[int] | None, ranks: int) -> list[int]:
    """Elements of each block: splits count rows of the first dimension; without them all blocks are equal."""
    length = tensor.shape[0] if tensor.dim() else tensor.numel()
    counts = list(splits) if splits else [length // ranks] * ranks
    if len(counts) != ranks or sum(counts) != length:
        raise sizes_differ("all_to_all_single", sum(counts), length)
    width = tensor.numel() // length if length else 0
    return [count * width for count in counts]


def copies(into: Sequence[torch.Tensor], merged: torch.Tensor) -> Callable[[], None]:
    """The step after a program: copy the parts of one buffer into the caller's tensors."""

    def copy() -> None:
        at = 0
        for tensor in into:
            tensor.copy_(merged[at : at + tensor.numel()].view(tensor.shape))
            at += tensor.numel()

    return copy


def last(works: list[Work]) -> Work:
    """The handle of the last of several calls; calls complete in order."""
    return works[-1] if works else Work().finish()


def reduction_of(opts: Any) -> str:
    operation = opts.reduceOp
    for value, name in REDUCTIONS:
        if operation == value:
            return name
    raise MeshwrightError(
        "MW-COMM-002",
        f"the backend meshwright has no reduction {opts.reduceOp}",
        valid=[name for _, name in REDUCTIONS],
    )


def sizes_differ(name: str, found: int, expected: int) -> MeshwrightError:
    return MeshwrightError("MW-COMM-001", f"{name}: a tensor has {found} elements where {expected} are needed")
