"""Plans costed in one batch have the times and memory that each has alone, also with another batch, sequence, precision, number of GPUs, load of
experts and adapter."""

from __future__ import annotations

import pytest
from test_lint import config

from meshwright.describe.config import Config
from meshwright.planner.advice.alternatives import SizedPlan, costs
from meshwright.planner.advice.changes import candidates, within_memory
from meshwright.predict.estimate import estimate
from meshwright.view.page.choices import sizes

ADAPTED = {"extends": "llama3-8b", "adapter": {"rank": 16, "base": "nf4"}}
CASES = {
    "equal stages": config("llama3-8b", "dgx-h100", 64, 128, 8192, tp=8, sp=True, pp=2, shard=4, zero=1, recompute="full"),
    "uneven stages": config("llama3-8b", "dgx-h100", 48, 96, 4096, tp=8, sp=True, pp=6),
    "stated stages": config("llama3-8b", "dgx-h100", 32, 64, 4096, tp=8, sp=True, pp=4, layers_per_stage=[7, 9, 9, 7]),
    "some recomputed": config("llama3-8b", "dgx-h100", 64, 128, 8192, tp=8, sp=True, pp=8, recompute="full", recompute_every=3),
    "interleaved": config("llama3-70b", "dgx-h100", 64, 128, 8192, "megatron-core", tp=8, sp=True, pp=8, virtual=5,
                          schedule="interleaved", recompute="full"),
    "kinds of layers": config("nemotron-h-8b", "dgx-h100", 64, 128, 8192, tp=8, sp=True, pp=2, shard=4, zero=1),
    "experts": config("deepseek-v3.2", "meta-h100", 2048, 4096, 8192, pp=16, shard=128, zero=1, ep=64, recompute="full"),
    "adapters": config(ADAPTED, "dgx-h100", 16, 64, tp=4, pp=2, shard=2, zero=1),
    "windows, long": config("gemma3-27b", "gb200-nvl72", 144, 288, 16384, tp=4, sp=True, cp=2, shard=18, zero=3, recompute="full"),
    "part of a node": config("llama3-8b", "dgx-h100", 4, 16, shard=4, zero=3, recompute="auto"),
    "no sequence": config("resnet-50", "dgx-a100", 8, 256, 1, replicate=8),
    "shared cores": config("tiny", "laptop", 4, 16, 256, replicate=2, pp=2),
}  # fmt: skip
MOST = 6  # plans, and as many other sizes, of each case that are estimated alone


@pytest.mark.parametrize("c", CASES.values(), ids=CASES)
def test_a_batch_of_trials_is_each_one_alone(c: Config) -> None:
    present = within_memory(c, c.plan)
    assert present is not None
    sized = [trial for _, trial in sizes(c, c.plan, c.plan)[1] if isinstance(trial, SizedPlan)]
    assert {trial.workload.batch for trial in sized} - {c.workload.batch}
    assert {trial.cluster.world for trial in sized} - {c.cluster.world}
    others = [change.plan for change in candidates(c, c.plan) if change.plan]
    trials = [*sized, present, *others]
    chosen = [*range(0, len(sized), 1 + len(sized) // MOST), *range(len(sized), len(trials), len(others) // MOST)]
    seconds, gib = costs(c, trials)
    for k in chosen:
        trial = trials[k]
        size = trial if isinstance(trial, SizedPlan) else SizedPlan(trial, c.workload, c.cluster, c.model)
        alone = estimate(c.but(**size._asdict())).prediction
        assert (seconds[k], gib[k]) == pytest.approx((alone.step_time_s, alone.memory_gib), rel=1e-9), size
