"""DeepSpeed has an accelerator for CPUs, which it takes when told before its import. It would compile collectives in shared memory, for minutes."""

from __future__ import annotations

import os
from typing import Any


def take_cpu() -> None:
    """DS_ACCELERATOR=cpu"""
    os.environ["DS_ACCELERATOR"] = "cpu"


def without_compiling(module: Any) -> None:
    """collectives in shared memory, which would be compiled: gloo's"""
    module.build_shm_op = lambda: None


BEFORE = {"deepspeed": take_cpu}
AFTER = {"deepspeed.comm.torch": without_compiling}
