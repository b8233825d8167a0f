"""Random legal plans (`random_plans`): each folds to a small copy every day; in the soak each copy is proved.

MESHWRIGHT_SOAK_PLANS is the number of plans (default 200), MESHWRIGHT_SOAK_SEED the seed; a failure reports both.
"""

import os
from collections import Counter

import pytest
import random_plans

import ranks  # noqa: F401  preloads what ranks need
from meshwright.describe import legality
from meshwright.errors import MeshwrightError
from meshwright.proof.small import small_copy

SEED = int(os.environ.get("MESHWRIGHT_SOAK_SEED", "0"))
PLANS = int(os.environ.get("MESHWRIGHT_SOAK_PLANS", "200"))


def test_every_legal_plan_folds():
    seen = Counter()
    for i in range(120):
        config = random_plans.drawn(i, SEED)
        config.plan.check(config.model, config.workload)
        try:
            small = small_copy(config, random_plans.RANKS)
            legality.check(small.plan, small.model, small.workload, trainer=True)
            seen["folded"] += 1
        except MeshwrightError as error:
            if error.code not in random_plans.REFUSED:
                pytest.fail(f"draw {i} of seed {SEED}, {config.plan.title()}: {error}")
            seen[error.code] += 1
    assert seen["folded"] > 60, seen


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_random_legal_plans_are_proved(capsys):
    results = {i: random_plans.outcome(i, SEED) for i in range(PLANS)}
    seen = Counter(result for result, _ in results.values())
    with capsys.disabled():
        print(f"\n{PLANS} plans of seed {SEED}: {dict(seen)}")
    assert not {i: said for i, (result, said) in results.items() if result == "failed"}
    assert seen["proved"] > 0
