"""Deterministic mode: the same run file gives the same bits in every run on the same devices.

Batches, initial weights and dropout are functions of the seed and the step under every plan, and collectives add in a fixed order. What is
left are kernels that add with atomic operations, in an order that differs from run to run (the backward of an embedding on a GPU), and
libraries that choose a kernel by timing. `run.deterministic` makes torch use only kernels with a fixed order. On CPUs with one thread per
rank all kernels have one already.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from meshwright.errors import MeshwrightError

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"  # cuBLAS repeats its sums only with a workspace of fixed size


@contextmanager
def deterministic_kernels(on: bool) -> Iterator[None]:
    """Inside the `with` block torch uses only deterministic kernels. An operation that has none raises MW-OPT-005."""
    if not on:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark, os.environ.get(WORKSPACE)
    os.environ.setdefault(WORKSPACE, ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        raise MeshwrightError(
            "MW-OPT-005",
            "run.deterministic=true, and the model uses an operation without a deterministic kernel",
            why=str(error).split(". ")[0],
            fix="--set run.deterministic=false",
        ) from error
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.backends.cudnn.benchmark = before[1]
        if before[2] is None:
            os.environ.pop(WORKSPACE, None)
