"""What an adapted model keeps for backward: bytes that autograd saves in a forward, beside those of the step program."""

from typing import Any

import numpy as np
import pytest
import torch

import ranks
from meshwright.describe import catalog
from meshwright.describe.adapter import Adapter
from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.describe.workload import Workload
from meshwright.lower.step import step_program
from meshwright.parallel.apply import apply

SHAPE = {"hidden": 256, "layers": 4, "heads": 8, "kv_heads": 4, "ffn": 512, "vocab": 640}
WORKLOAD = Workload(batch=2, seq=128, precision="fp32")
PLAN = Plan(microbatch=2, param_dtype="fp32", grad_dtype="fp32")
ADAPTERS: list[dict[str, object]] = [
    {},
    {"rank": 8},
    {"rank": 8, "targets": ("all-linear",)},
    {"rank": 8, "targets": ("down_proj",)},
    {"trains": ("lm_head",)},
]


def model(fields: dict[str, object]) -> Model:
    return Model(name="tiny", **SHAPE, adapter=Adapter(**fields))


def saved_bytes(context: Any, adapters: list[dict[str, object]]) -> list[int]:
    """Bytes of the tensors that a forward of each model saves, without its parameters and buffers."""
    out = []
    for fields in adapters:
        parallel = apply(model(fields), PLAN, WORKLOAD, context.rank, dtype=torch.float32)
        network, saved = parallel.stages[0], dict[int, torch.Tensor]()
        own = {t.untyped_storage().data_ptr() for t in (*network.parameters(), *network.buffers())}

        def keep(t: torch.Tensor, saved: dict[int, torch.Tensor] = saved) -> torch.Tensor:
            saved.setdefault(
                t.untyped_storage().data_ptr(), t
            )  # the address of a kept tensor is not given to another one
            return t

        ids = torch.randint(0, 640, (2, 128))
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            network(ids)
        out.append(sum(t.untyped_storage().nbytes() for at, t in saved.items() if at not in own))
    return out


def test_saved_bytes_are_those_that_autograd_keeps() -> None:
    (measured,) = ranks.run(1, saved_bytes, ADAPTERS)
    for fields, size in zip(ADAPTERS, measured, strict=True):
        step = step_program(model(fields), PLAN, WORKLOAD, catalog.load("stacks", "gloo-cpu"))
        rank = step.ranks[0]
        parts = step.saved["head"]
        head = sum(map(np.max, parts.values())) - np.max(rank.times("head", "E") * step.unsaved.get("head", 0.0))
        small = 9 * 2 * 128 * 4 + 2 * 128 * 32 * 4 + 2 * 128 * 8  # scales of nine norms, the rotation, token ids
        assert size == pytest.approx(float(np.max(rank.kept)) + head, abs=small), fields
