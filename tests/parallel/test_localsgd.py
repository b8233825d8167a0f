"""Local SGD: with k = 1 and SGD it equals data parallelism, for any numbers of tokens."""

import numpy as np
import pytest
import torch

import ranks
from meshwright.cost.step import step_cost
from meshwright.describe import catalog
from meshwright.describe.config import Config
from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.describe.workload import Workload
from meshwright.errors import MeshwrightError
from meshwright.lower.step import step_program
from meshwright.proof.prove import prove

MODEL = Model(hidden=16, layers=2, heads=2, ffn=24, vocab=32)
SGD = Workload(batch=4, seq=8, precision="fp32", optimizer="sgd", clip=False)


def trained(context, plan, workload, every, steps):
    """Parameters after each step, and the collectives of one more."""
    from meshwright.describe.optimizer import Optimizer
    from meshwright.parallel.apply import apply
    from meshwright.training.data.samples import RandomSamples
    from meshwright.training.loop import Trainer
    from meshwright.training.measure.observe import Observer

    parallel = apply(MODEL, plan.but(average_every=every), workload, context.rank, dtype=torch.float64)
    trainer = Trainer(parallel, RandomSamples(MODEL, workload.seq, 0), Optimizer(learning_rate=0.5, warmup=1))
    history, seen = [], []
    for _ in range(steps):
        with Observer(trainer) as observer:
            trainer.train_step()
        seen.append(observer.observed().collectives)
        history.append({p.name: p.local.detach().numpy().copy() for p in parallel.pieces})
    return history, seen


@pytest.mark.parametrize("plan", [Plan(replicate=2, microbatch=2), *ranks.soak([Plan(replicate=2, tp=2)])])
def test_averaging_every_step_is_data_parallelism(plan):
    """Padding differs between replicas, so an unweighted average would be wrong."""
    data_parallel, local_sgd = (ranks.run(plan.world, trained, plan, SGD, every, 3) for every in (0, 1))
    for (exact, _), (local, _) in zip(data_parallel, local_sgd, strict=True):
        for a, b in zip(exact, local, strict=True):
            for name in a:
                np.testing.assert_allclose(b[name], a[name], rtol=0, atol=1e-13)
    assert (data_parallel[0][0][0]["head.norm.weight"] != data_parallel[0][0][2]["head.norm.weight"]).any()


def test_replicas_diverge_without_traffic_between_averages_and_agree_after():
    one, other = ranks.run(2, trained, Plan(replicate=2, microbatch=2), SGD, 3, 6)
    for step in range(6):
        averaged = step % 3 == 2
        equal = all((one[0][step][name] == other[0][step][name]).all() for name in one[0][step])
        assert equal == averaged
        assert bool(one[1][step]) == averaged  # no messages in between
    ((operation, (count, size)),) = one[1][2].items()
    elements = sum(value.size for value in one[0][0].values())
    assert (operation[1], count, size) == ("all_reduce", 1, 8 * (elements + 1))


def averaged(context, every):
    """A user's module: each replica adds a different number per step."""
    from torch import distributed

    from meshwright.parallel.data.local_sgd import Average

    module = torch.nn.Linear(3, 2).double()
    torch.nn.init.constant_(module.weight, 1.0)
    average = Average(list(module.parameters()), distributed.group.WORLD, every)
    results = []
    for _ in range(4):
        with torch.no_grad():
            module.weight += 1.0 + context.rank
        results.append((average.after_update(10.0 * (1 + 2 * context.rank)), module.weight.detach().numpy().copy()))
    return results


def test_a_users_module_is_averaged_by_its_tokens():
    for rank, fields in enumerate(ranks.run(2, averaged, 2)):
        assert [done for done, _ in fields] == [False, True, False, True]
        drift = 1.0 + rank
        for (_, found), expected in zip(fields, (1 + drift, 4.5, 4.5 + drift, 8.0), strict=True):  # (10·2 + 30·4) / 40
            np.testing.assert_allclose(found, expected, rtol=1e-15)


@pytest.mark.parametrize(
    "plan", [{"shard": 2, "zero": 3}, {"replicate": 2, "cp": 2}, {}, {"replicate": 2, "compression": "int8"}]
)
def test_replicas_that_share_experts_or_states_are_refused(plan):
    with pytest.raises(MeshwrightError, match="MW-PLAN-015") as error:
        Plan(**plan, average_every=2)
    assert error.value.fix
    with pytest.raises(MeshwrightError, match="MW-PLAN-015"):
        Plan(replicate=2, average_every=2).check(MODEL.but(experts=4, top_k=2), SGD)


def test_a_local_sgd_plan_is_proved_against_replicas_on_one_device():
    """AdamW and clipping per replica; two separate steps, then the average."""
    workload = {"batch": 8, "seq": 8, "precision": "fp32"}
    plan = {"replicate": 2, "average_every": 8, "param_dtype": "fp32"}
    config = Config.from_parts(MODEL, "laptop", workload=workload, plan=plan)
    proof = prove(config, ranks=4, steps=3)
    assert proof.small.plan.average_every == 4
    assert proof.passed, (proof.agreements[0].breaks[:3], [row for _, row in proof.rows if row.unexplained])
    assert proof.agreements[0].errors["parameter"] < 1e-12
    assert all(row.equal for _, row in proof.rows)
    assert not [
        row for _, row in proof.rows if (row.axis, row.operation) == ("replicate", "all_reduce")
    ]  # of the third step


def test_bytes_fall_with_the_steps_between_averages():
    plans = [Plan(replicate=8, bucket=1e12), *(Plan(replicate=8, average_every=n) for n in (1, 10))]
    cost = step_cost(step_program(MODEL, plans, Workload(batch=8, seq=8)), catalog.load("clusters", "laptop"))
    assert cost.traffic["dp"][1] == pytest.approx(cost.traffic["dp"][0], rel=1e-3)  # and one number more
    assert cost.traffic["dp"][2] == pytest.approx(cost.traffic["dp"][1] / 10)
    assert cost.exposed["dp"][2] < cost.exposed["dp"][1]
