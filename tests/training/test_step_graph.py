"""A step through `StepGraph` is the step of the trainer, bit by bit. The capture itself needs a GPU (`tests/gpu`)."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed

from meshwright.describe.model import Model
from meshwright.describe.optimizer import Optimizer
from meshwright.describe.plan import Plan
from meshwright.describe.workload import Workload
from meshwright.errors import MeshwrightError
from meshwright.models.loss import IGNORED
from meshwright.parallel.apply import apply
from meshwright.training.loop import Trainer
from meshwright.training.step_graph import ORDINARY_STEPS, StepGraph, why_not

STEPS = ORDINARY_STEPS + 4
MODEL = Model(hidden=32, layers=2, heads=4, kv_heads=2, ffn=48, vocab=64, dropout_rate=0.1)
EXPERTS = MODEL.but(experts=4, top_k=2, expert_ffn=24, balance_bias=True, router={"aux": 0.01})
SINGLE = {"param_dtype": "fp32", "master": False}
Case = tuple[Model, dict[str, Any], dict[str, Any], dict[str, Any]]
CASES: dict[str, Case] = {
    "micro-batches": (MODEL, {"microbatch": 2, **SINGLE}, {"precision": "fp32"}, {}),
    "loss scale": (MODEL, {"microbatch": 2, "param_dtype": "fp16"}, {"precision": "fp16"}, {}),
    "masters and recompute": (MODEL, {"microbatch": 4, "recompute": "full"}, {}, {"ema": 0.9}),
    "fp8": (MODEL.but(ffn=64), {"microbatch": 4}, {"precision": "fp8"}, {}),
    "experts": (EXPERTS, {"microbatch": 2, **SINGLE}, {"precision": "fp32", "optimizer": "muon"}, {}),
}


class Uneven:
    """Tokens whose number of valid targets differs from step to step."""

    def sample(self, step, index):
        tokens = np.random.default_rng((step, index)).integers(0, 64, 17)
        targets = tokens[1:].copy()
        targets[: (3 * step + index) % 7] = IGNORED
        return tokens[:-1], targets


class Repeat:
    """A graph without a GPU: a capture leaves no numbers, and a replay computes them again from the tensors that the capture read."""

    def __init__(self, parallel):
        self.parallel, self.replays = parallel, 0

    def ordinary(self, step):
        return step()

    def record(self, step):
        parallel, first = self.parallel, step()
        read = parallel.tokens, parallel.samples_B
        for tensor in self.tensors(first):
            tensor.fill_(7)

        def replay():
            now = parallel.tokens, parallel.samples_B
            parallel.tokens, parallel.samples_B = read
            parallel.zero_gradients()
            for router in first.loads:
                router.load = None
            for kept, computed in zip(self.tensors(first), self.tensors(step()), strict=True):
                kept.copy_(computed)
            parallel.zero_gradients()
            for router in first.loads:
                router.load = None
            parallel.tokens, parallel.samples_B = now
            self.replays += 1

        return first, replay

    def tensors(self, results):
        return [results.loss, *results.gradients.values(), *results.loads.values()]


@pytest.fixture
def alone():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def trained(case, captured):
    """The records of a training, its last weights and loss scale, and the number of replays."""
    model, plan, workload, settings = CASES[case]
    dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[plan.get("param_dtype", "bf16")]
    work = Workload(**{"batch": 4, "seq": 16, "clip": True, **workload})
    parallel = apply(model, Plan(**plan), work, 0, dtype=dtype)
    recorder = Repeat(parallel)
    graph = StepGraph(parallel, recorder) if captured else None
    optimizer = Optimizer(learning_rate=0.01, warmup=4, clip=0.5, on_nan="skip", **settings)
    trainer = Trainer(parallel, Uneven(), optimizer, graph=graph)
    trainer.scale.growth_interval = 2
    records = [replace(record, seconds=0.0) for record in trainer.train(STEPS)]
    weights = [p.local.detach().clone() for p in parallel.updated]
    return records, weights, trainer.scale.value, recorder.replays


@pytest.mark.parametrize("case", CASES)
def test_steps_from_fixed_tensors_are_the_same_steps(alone, case):
    (records, weights, scale, _), (found, same, _, replays) = (trained(case, captured) for captured in (False, True))
    assert replays == STEPS - ORDINARY_STEPS
    assert found == records
    assert all(map(torch.equal, weights, same))
    assert len({record.tokens for record in records}) > 2
    assert any(record.updated for record in records[ORDINARY_STEPS:])
    assert (scale in (1.0, 2.0**16)) == (case != "loss scale")


def test_what_a_graph_cannot_hold_is_refused(alone):
    parallel = apply(MODEL, Plan(), Workload(batch=4, seq=16), 0)
    assert why_not(parallel) == "the run is not on a GPU"
    with pytest.raises(MeshwrightError, match=r"MW-PAR-010.*cannot be captured"):
        StepGraph(parallel)
    graph = StepGraph(parallel, Repeat(parallel))
    parallel.documents_BS = torch.zeros(4, 16)
    with pytest.raises(MeshwrightError, match="documents"):
        graph(torch.zeros(4, 16), torch.zeros(4, 16))
