"""Replicas that train alone and average: with k = 1 and SGD it is data parallelism, whatever their tokens."""

import numpy as np
import pytest
import torch

import ranks
from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.describe.workload import Workload
from meshwright.errors import MeshwrightError

MODEL = Model(hidden=16, layers=2, heads=2, ffn=24, vocab=32)
SGD = Workload(batch=4, seq=8, precision="fp32", optimizer="sgd", clip=False)


def trained(context, plan, workload, every, steps):
    """Parameters after each step, and the collectives of one more."""
    from meshwright.parallel.apply import apply
    from meshwright.parallel.localsgd import LocalSgd
    from meshwright.train.data import RandomSamples
    from meshwright.train.loop import Trainer
    from meshwright.train.observe import Observer
    from meshwright.train.records import Settings

    parallel = apply(MODEL, plan, workload, context.rank, dtype=torch.float64)
    if every:
        LocalSgd(parallel, every)
    trainer = Trainer(parallel, RandomSamples(MODEL, workload.seq, 0), Settings(learning_rate=0.5, warmup=1))
    history, seen = [], []
    for _ in range(steps):
        with Observer(trainer) as observer:
            trainer.train_step()
        seen.append(observer.observed().collectives)
        history.append({p.name: p.local.detach().numpy().copy() for p in parallel.pieces})
    return history, seen


@pytest.mark.parametrize("plan", [Plan(replicate=2, microbatch=2), Plan(replicate=2, tp=2)])
def test_averaging_every_step_is_data_parallelism(plan):
    """Padding differs between replicas, so an unweighted average would not do."""
    together, apart = ranks.run(plan.world, trained, plan, SGD, 0, 3), ranks.run(plan.world, trained, plan, SGD, 1, 3)
    for (exact, _), (local, _) in zip(together, apart, strict=True):
        for a, b in zip(exact, local, strict=True):
            for name in a:
                np.testing.assert_allclose(b[name], a[name], rtol=0, atol=1e-13)
    assert (together[0][0][0]["head.norm.weight"] != together[0][0][2]["head.norm.weight"]).any()


def test_between_averages_replicas_are_quiet_and_drift_and_then_agree():
    one, other = ranks.run(2, trained, Plan(replicate=2, microbatch=2), SGD, 3, 6)
    for step in range(6):
        averaged = step % 3 == 2
        equal = all((one[0][step][name] == other[0][step][name]).all() for name in one[0][step])
        assert equal == averaged
        assert bool(one[1][step]) == averaged  # nothing at all is said in between
    ((operation, (count, size)),) = one[1][2].items()
    elements = sum(value.size for value in one[0][0].values())
    assert (operation[1], count, size) == ("all_reduce", 1, 8 * (elements + 1))


def test_replicas_that_need_each_other_are_refused():
    with pytest.raises(MeshwrightError, match="MW-PAR-004"):
        ranks.run(2, trained, Plan(shard=2, zero=3), SGD, 2, 1)
