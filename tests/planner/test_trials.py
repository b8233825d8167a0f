"""Plans costed in one batch have the times and memory that each has alone, also with another batch, sequence, precision, number of GPUs, load of
experts and adapter."""

from __future__ import annotations

from copy import deepcopy

import pytest
from test_lint import config

from meshwright.describe.config import Config
from meshwright.describe.result import USABLE_MEMORY
from meshwright.planner.advice.alternatives import SizedPlan, costs, within_memory
from meshwright.planner.advice.changes import KNOBS, candidates
from meshwright.predict.estimate import estimate
from meshwright.predict.prediction import peak, recomputing
from meshwright.view.page.choices import choices, sizes

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
    (present,) = within_memory(c, [c.plan])
    assert present is not None
    sized = [trial for _, trial in sizes(c, c.plan, c.plan)[1] if isinstance(trial, SizedPlan)]
    resolved = within_memory(c, sized)
    sized = [trial._replace(plan=plan) for trial, plan in zip(sized, resolved, strict=True) if plan]
    assert {trial.workload.batch for trial in sized} - {c.workload.batch}
    assert {trial.cluster.world for trial in sized} - {c.cluster.world}
    others = [plan for plan in within_memory(c, [x.plan for x in candidates(c, c.plan) if x.plan]) if plan]
    trials = [*sized, present, *others]
    chosen = [*range(0, len(sized), 1 + len(sized) // MOST), *range(len(sized), len(trials), len(others) // MOST)]
    seconds, gib = costs(c, trials)
    for k in chosen:
        trial = trials[k]
        size = trial if isinstance(trial, SizedPlan) else SizedPlan(trial, c.workload, c.cluster, c.model)
        alone = estimate(c.but(**size._asdict())).prediction
        assert (seconds[k], gib[k]) == pytest.approx((alone.step_time_s, alone.memory_gib), rel=1e-9), size


SHOWN = {*KNOBS, "cluster.gpus", "workload.batch", "workload.seq", "workload.precision"} - {"offload"}
# Plans that recompute as many layers as fit: the number is found for each choice.
AUTO = {
    "interleaved": config("llama3-70b", "dgx-h100", 64, 512, 8192, tp=4, sp=True, cp=2, pp=4, virtual=5, schedule="interleaved",
                          shard=2, zero=1, recompute="auto"),
    "experts": config("mixtral-8x22b", "dgx-h100", 256, 256, 32768, "megatron-core", tp=4, sp=True, cp=2, pp=8, shard=4, ep=4, zero=1,
                      recompute="auto"),
    "long": config("llama3-8b", "dgx-h100", 32, 32, 131072, "torchtitan", tp=2, sp=True, cp=4, shard=4, zero=3, recompute="auto"),
    "kinds of layers": config("deepseek-v3", "dgx-h800", 256, 1920, 4096, pp=8, shard=32, ep=32, zero=1, recompute="auto"),
    "stages of the framework": config("llama3-8b", "dgx-h100", 8, 64, 8192, "nanotron", pp=8, recompute="auto"),
}  # fmt: skip


DAILY = "interleaved", "stages of the framework"


@pytest.mark.parametrize(
    "c", [pytest.param(c, id=k, marks=() if k in DAILY else pytest.mark.slow) for k, c in AUTO.items()]
)
def test_every_chip_of_an_automatic_recompute_is_the_estimate_of_its_configuration(c: Config) -> None:
    document, here, limit = c.to_dict(), estimate(c), USABLE_MEMORY * c.cluster.accelerator.memory
    found, layers = choices(document), set[int]()

    def needed(other: Config, count: int) -> float:
        return peak(other.model, recomputing(other.plan, count), other.workload, other.stack)

    for path, values in (found["fields"] | found["sizes"]).items():
        for choice in values:
            if not choice["legal"] or ("saves_s" not in choice and path not in SHOWN):
                continue
            document_there = deepcopy(document)
            for key, value in ({path: choice["value"]} | choice["changes"]).items():
                section, _, field = key.rpartition(".")
                document_there.setdefault(section or "plan", {})[field] = value
            there = Config.from_document(document_there)
            if "saves_s" not in choice and needed(there, there.model.layers) > limit:
                continue  # with every layer recomputed
            alone = estimate(there)
            if "saves_s" not in choice:
                assert alone.config.to_dict() == here.config.to_dict(), (path, choice)
                continue
            shown = here.prediction.step_time_s - choice["saves_s"], here.prediction.memory_gib + choice["more_gib"]
            both = alone.prediction.step_time_s, alone.prediction.memory_gib
            assert shown == pytest.approx(both, rel=1e-9), (path, choice)
            if there.plan.recompute == "auto" and (count := alone.plan.recompute_layers):
                assert needed(there, count) <= limit < needed(there, count - 1), (path, choice)
                layers.add(count)
    assert layers
