"""`train` runs every plan that `plan` proposes and `verify` accepts: random plans of the planner's space on small models."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

import ranks  # noqa: F401  preloads what ranks need
from meshwright.describe.config import Config
from meshwright.describe.plan import Plan
from meshwright.errors import MeshwrightError
from meshwright.planner.search.choices import choices
from meshwright.planner.search.space import Space
from meshwright.proof.small import small_copy
from meshwright.training.run import check, run_training

SHAPE = {"hidden": 24, "layers": 4, "heads": 6, "kv_heads": 3, "ffn": 36, "vocab": 257}
MODELS = {
    "dense": SHAPE,
    "odd hidden": {**SHAPE, "hidden": 25, "head_dim": 4},
    "tied": {**SHAPE, "tied": True, "positions": "learned", "max_positions": 16},
    "few positions": {**SHAPE, "positions": "learned", "max_positions": 8},
    "moe": {**SHAPE, "experts": 4, "top_k": 2, "expert_ffn": 33, "dense_layers": 1},
    "shared": {**SHAPE, "experts": 6, "top_k": 2, "expert_ffn": 12, "shared_experts": 1, "moe_every": 2},
    "alibi": {**SHAPE, "positions": "alibi"},
    "mlp": {"kind": "mlp", "hidden": 24, "layers": 4},
}
TOO_MANY = "MW-VERIFY-001"  # axes at 2 each need more ranks than there are


@cache
def space_of(model: str, gpus: int, seq: int, form: str) -> tuple[Config, Space]:
    workload = {"batch": 24, "seq": seq, "precision": "fp32"}
    base = {"param_dtype": "fp32", "master": False, "tp_form": form}
    made = Config.from_parts(MODELS[model], {"extends": "laptop", "gpus": gpus}, "gloo-cpu", workload, base)
    plan = Plan(**base)
    options = choices(plan, [], tuple(made.stack.order))
    return made, Space(made.but(plan=plan), options)


def drawn(random: np.random.Generator, gpus: tuple[int, ...]) -> Config | None:
    """A random plan of the planner's space; None where the space is empty."""
    model = list(MODELS)[random.integers(len(MODELS))]
    form = "all-gather" if random.integers(4) == 0 else "megatron"
    made, space = space_of(model, int(random.choice(gpus)), int(random.choice([12, 16, 18])), form)
    rows = space.frames
    if not len(rows):
        return None
    for layer in (lambda rows: rows, space.shaped, space.placed, space.sharded, space.scheduled):
        rows = layer(rows)
        rows = rows.take(np.array([random.integers(len(rows))]))
    return Config(made.model, made.cluster, space.plan(rows, 0), made.workload, made.stack)


def verify_accepts(config: Config) -> bool:
    """Whether `verify` accepts this plan, by its checks before any rank starts. Plans of the planner are always legal."""
    try:
        config.check_trainable()
        small_copy(config, 8)
    except MeshwrightError as error:
        return error.code == TOO_MANY
    return True


def test_train_would_run_what_the_planner_proposes_and_verify_accepts() -> None:
    seen = {True: 0, False: 0}
    for seed in range(250):
        config = drawn(np.random.default_rng(seed), (1, 2, 3, 4, 6, 8))
        if config is None:
            continue
        accepted = verify_accepts(config)
        seen[accepted] += 1
        if accepted:
            check(config, 1)
        else:
            with pytest.raises(MeshwrightError):
                check(config, 1)
    assert seen[True] > 120
    assert seen[False] > 10  # plans that are only modelled: alibi, too few positions, uneven columns


def train_one(seed: int) -> None:
    """Run the first accepted plan of a seed for one step."""
    random = np.random.default_rng(seed)
    config = None
    while config is None or not verify_accepts(config):
        config = drawn(random, (2, 3, 4))
    assert np.isfinite(run_training(config, 1).measurement.loss).all(), config.plan.title()


@pytest.mark.parametrize("seed", range(3))
def test_train_runs_a_random_plan(seed: int) -> None:
    train_one(seed)


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("seed", range(100, 140))
def test_train_runs_many_random_plans(seed: int) -> None:
    train_one(seed)
