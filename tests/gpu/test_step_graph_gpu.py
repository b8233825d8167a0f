"""Steps replayed from a CUDA graph are the ordinary steps."""

import traceback
from typing import Any

import pytest
import torch

import ranks
from meshwright.describe.model import Model
from meshwright.describe.optimizer import Optimizer
from meshwright.describe.plan import Plan
from meshwright.describe.workload import Workload

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
MODEL = Model(hidden=256, layers=2, heads=4, kv_heads=2, ffn=512, vocab=512, dropout_rate=0.1)
EXPERTS = MODEL.but(experts=4, top_k=2, expert_ffn=256, shared_experts=1, balance_bias=True, router={"aux": 0.01})
CASES: dict[str, tuple[Model, str, dict[str, Any], str]] = {
    "eager": (MODEL, "bf16", {"microbatch": 4}, "off"),
    "compiled": (MODEL, "bf16", {"microbatch": 4}, "blocks"),
    "recompute": (MODEL, "bf16", {"microbatch": 4, "recompute": "full"}, "blocks"),
    "loss scale": (MODEL, "fp16", {"microbatch": 4, "param_dtype": "fp16"}, "blocks"),
    "fp8": (MODEL, "fp8", {"microbatch": 4}, "blocks"),
    "experts": (EXPERTS, "bf16", {"microbatch": 4}, "blocks"),
    "experts, eager": (EXPERTS, "bf16", {"microbatch": 8}, "off"),
}


def trained(context, captured):
    """Losses and gradient norms of seven steps of each case, five of them replayed, with the last weights."""
    from meshwright.parallel.apply import apply
    from meshwright.training.data.samples import RandomSamples
    from meshwright.training.loop import Trainer
    from meshwright.training.step_graph import StepGraph

    out: dict[str, Any] = {}
    for name, (model, precision, plan, mode) in CASES.items():
        dtype = torch.float16 if precision == "fp16" else torch.bfloat16
        work = Workload(batch=8, seq=128, precision=precision, clip=True)
        parallel = apply(model, Plan(**plan), work, context.rank, device=context.device, dtype=dtype, compile=mode)
        try:
            graph = StepGraph(parallel) if captured else None
            settings = Optimizer(learning_rate=1e-3, warmup=4, clip=0.5, on_nan="skip")
            trainer = Trainer(parallel, RandomSamples(model, 128, 0), settings, graph=graph)
            trainer.scale.growth_interval = 3
            records = [(r.loss, r.gradient_norm, r.updated) for r in trainer.train(7)]
            out[name] = records, [p.local.detach().float().cpu().numpy() for p in parallel.updated]
        except Exception as error:  # the other cases are tried
            out[name] = [repr(error), repr(error.__cause__), traceback.format_exc()[-2000:]], []
        del parallel
    return out


def test_replayed_steps_are_the_ordinary_steps():
    """Kernels that add in another order in each run, as those of scattered gradients, leave differences in the last digits."""
    ordinary, replayed = (
        ranks.run(1, trained, captured, device="cuda", silence=150.0)[0] for captured in (False, True)
    )
    wrong = {}
    for name in CASES:
        (expected, weights), (found, same) = ordinary[name], replayed[name]
        print(name, expected, found, sep="\n    ")  # shown if a case fails
        equal = len(expected) == len(found) == 7 and all(
            again == pytest.approx(loss, rel=2e-4) and other == pytest.approx(norm, rel=2e-3) and updated == too
            for (loss, norm, updated), (again, other, too) in zip(expected, found, strict=True)
        )
        if not equal or any(abs(a - b).max() > 2e-3 for a, b in zip(weights, same, strict=True)):
            wrong[name] = expected, found
    assert not wrong
