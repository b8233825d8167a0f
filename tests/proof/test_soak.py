"""Random legal plans of the planner's space: each folds to a small copy, and the copy is proved.

A plan is drawn level by level of the space, degrees first, so that rare combinations are as frequent as common ones. Fields
that the space does not search are drawn too: the precision of products, and for every second plan a compression or a narrower
dtype of its gradient messages.
Every legal plan must fold, and every folded plan must be proved or be refused for a known reason. A failed proof is either a
bug in `parallel` or a false alarm of `verify`; both are failures.

MESHWRIGHT_SOAK_S is the number of seconds (default 600), MESHWRIGHT_SOAK_SEED the seed. Draw i of a seed is always the same
plan, and a failure reports both.
"""

import os
import time
from collections import Counter
from dataclasses import replace
from functools import cache

import inexact
import numpy as np
import pytest

import ranks  # noqa: F401  preloads what ranks need
from meshwright.describe import legality
from meshwright.describe.config import Config
from meshwright.errors import MeshwrightError
from meshwright.planner.search.space import Space
from meshwright.proof.prove import prove
from meshwright.proof.small import small_copy

PROBLEMS = [  # model, GPUs of dgx-h100, batch, sequence
    ("llama3-8b", 16, 32, 2048), ("llama3-70b", 64, 128, 8192), ("qwen2.5-7b", 8, 16, 2048), ("gemma2-9b", 32, 64, 4096),
    ("gpt3-13b", 32, 64, 2048), ("bert-large", 8, 32, 512), ("lecture-mlp", 16, 64, 1), ("mixtral-8x7b", 32, 64, 4096),
    ("qwen1.5-moe-a2.7b", 16, 32, 2048), ("deepseek-v2-lite", 32, 64, 4096), ("deepseek-v3", 256, 512, 4096),
]  # fmt: skip
PRECISIONS = ("bf16", "fp16", "fp8")
WIRES = [*inexact.KINDS.values(), {"comm_dtype": "bf16"}, {"comm_dtype": "fp16"}, {"comm_dtype": "fp8"}]
TOO_MANY = "MW-VERIFY-001"  # axes at 2 each need more ranks than there are
NOT_RUN = "MW-PAR-001"  # planned and costed only
TOO_OLD = "MW-PIPE-041"  # fp8 between the halves of a backward, before torch 2.13
RANKS = 8
STEPS = 2
SEED = int(os.environ.get("MESHWRIGHT_SOAK_SEED", "0"))
SOAK_S = float(os.environ.get("MESHWRIGHT_SOAK_S", "600"))


@cache
def space_of(problem):
    model, gpus, batch, seq = problem
    config = Config.from_parts(model, "dgx-h100", workload={"batch": batch, "seq": seq})
    config = replace(config, cluster=config.cluster.with_gpus(gpus))
    return config, Space(config.model, config.cluster, config.workload, config.stack)


def drawn(i):
    """The i-th configuration of this seed."""
    random = np.random.default_rng((SEED, i))
    config, space = space_of(PROBLEMS[random.integers(len(PROBLEMS))])
    frames = space.frames
    degrees = np.unique(np.stack((frames.tp, frames.cp, frames.pp, frames.dp)), axis=1).T
    tp, cp, pp, dp = degrees[random.integers(len(degrees))]
    rows = frames.take((frames.tp == tp) & (frames.cp == cp) & (frames.pp == pp) & (frames.dp == dp))
    for layer in (lambda rows: rows, space.shaped, space.placed, space.sharded, space.scheduled):
        rows = layer(rows)
        rows = rows.take(np.array([random.integers(len(rows))]))
    plan = space.plan(rows, 0)
    if random.integers(2):
        plan = plan.but(**WIRES[random.integers(len(WIRES))])
    precision = PRECISIONS[random.integers(len(PRECISIONS))]
    workload = config.workload.but(precision=precision)
    plan = plan.but(param_dtype="fp16") if precision == "fp16" else plan
    return replace(config, plan=plan, workload=workload)


def test_every_legal_plan_folds():
    seen = Counter()
    for i in range(120):
        config = drawn(i)
        config.plan.check(config.model, config.workload)
        try:
            small = small_copy(config, RANKS)
            legality.check(small.plan, small.model, small.workload, trainer=True)
            seen["folded"] += 1
        except MeshwrightError as error:
            if error.code not in (TOO_MANY, NOT_RUN):
                pytest.fail(f"draw {i} of seed {SEED}, {config.plan.title()}: {error}")
            seen[error.code] += 1
    assert seen["folded"] > 60, seen


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_random_legal_plans_are_proved(capsys):
    started, seen, failed, i = time.monotonic(), Counter(), [], 0
    while time.monotonic() - started < SOAK_S:
        config = drawn(i)
        try:
            proof = prove(config, ranks=RANKS, steps=STEPS, seed=i)
            if not proof.passed:
                failed.append((i, config.model.name, config.plan.title(), why(proof)))
            seen["proved" if proof.passed else "failed"] += 1
        except MeshwrightError as error:
            if error.code not in (TOO_MANY, NOT_RUN, TOO_OLD):
                failed.append((i, config.model.name, config.plan.title(), str(error)[-1500:]))
            seen[error.code] += 1
        i += 1
    with capsys.disabled():
        print(f"\n{i} plans of seed {SEED}: {dict(seen)}")
    assert not failed, "\n".join(map(str, failed))
    assert seen["proved"] > 0


def why(proof):
    breaks = [str(b) for agreement in proof.agreements for b in agreement.breaks[:2]]
    rows = [(rank, row) for rank, row in proof.rows if row.unexplained][:3]
    return proof.small.plan.title(), breaks, rows, proof.unknown, proof.blamed
