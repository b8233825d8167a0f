"""Run a function of a test on several ranks: new processes for each call, a time limit, and no process left afterwards.

    def work(context, x): ...                 # in the module of the test
    results = ranks.run(4, work, x)           # the return values, by rank

If a rank fails, the test fails with the traceback of the rank.
"""

from collections.abc import Callable
from typing import Any

import pytest

from meshwright.training.launch import local

# What the modules of tests import, once in the forkserver instead of in every rank; ignored where it is missing.
local.PRELOAD += ["meshwright.proof.trace", "meshwright.training.worker", "meshwright.training.run"]
local.PRELOAD += ["pytest", "hypothesis"]
local.PRELOAD += [f"transformers.models.{name}.modeling_{name}" for name in ("llama", "gpt2", "mixtral", "vit")]
SILENCE_S = 120.0  # only a rank that hangs reaches these, also on a machine with ten processes per core
GROUP_TIMEOUT_S = 60.0


def soak(cases: list[Any]) -> list[Any]:
    """Parameters of a test that only `make soak` runs: the matrix shows their kinds every day. A tuple is one value per name."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow) for case in cases]


def run(
    world: int,
    work: Callable[..., Any],
    *args: Any,
    silence: float = SILENCE_S,
    group_timeout: float = GROUP_TIMEOUT_S,
    **options: Any,
) -> list[Any]:
    target = f"{work.__module__}:{work.__qualname__}"
    return local.run(target, world, *args, silence=silence, group_timeout=group_timeout, **options)
