"""Experts on many ranks: routing, what is sent, and bugs. The matrix (tests/proof) trains whole layouts."""

from functools import cache

import pytest

import ranks
from meshwright.describe.config import Config
from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.describe.workload import Workload
from meshwright.lower.step import step_program
from meshwright.proof import prove as proof
from meshwright.proof.compare import compare
from meshwright.proof.records import Job
from meshwright.proof.trace import record

WORKLOAD = Workload(batch=8, seq=8)
STEPS = 2
SHAPE = {
    "hidden": 16,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 24,
    "vocab": 40,
    "experts": 4,
    "top_k": 2,
    "expert_ffn": 12,
}
LATENT = {"attention": "mla", "kv_heads": 0, "kv_rank": 10, "nope_dim": 6, "rope_dim": 4, "value_dim": 5}
MODELS = {
    "mixtral": Model(**SHAPE),
    "qwen": Model(**SHAPE, shared_experts=1, shared_gate=True, router_bias=True, ffn_bias=True, activation="gelu"),
    "deepseek": Model(**{**SHAPE, **LATENT, "experts": 6, "layers": 3}, q_rank=8, shared_experts=2, dense_layers=1,
                      balance_bias=True, router={"groups": 3, "groups_kept": 2, "scale": 2.5}),
    "latent": Model(**{**SHAPE, **LATENT}, tied=True, moe_every=2),
}  # fmt: skip
Z3 = {"shard": 2, "zero": 3}
ROUTERS = {
    "capacity": {"capacity": 0.75},
    "losses": {"aux": 0.1, "z": 0.05, "score": "sigmoid"},
    "expert choice": {"choice": "expert", "aux": 0.1},
}


@cache
def one_device(name, router="", microbatch=8, prepare=""):
    model = MODELS[name].but(router=ROUTERS.get(router, MODELS[name].router))
    job = Job(model, Plan(microbatch=microbatch), WORKLOAD, steps=STEPS, dtypes=("fp64",), prepare=prepare)
    return ranks.run(1, record, job)[0]["fp64"]


def many(name, fields, router="", prepare=""):
    plan = Plan(**fields)
    model = MODELS[name].but(router=ROUTERS.get(router, MODELS[name].router))
    job = Job(model, plan, WORKLOAD, steps=STEPS, dtypes=("fp64",), prepare=prepare)
    return [result["fp64"] for result in ranks.run(plan.world, record, job)]


def agree(one, traces):
    agreement = compare(one, traces)
    assert not agreement.breaks, "\n".join(map(str, agreement.breaks[:5]))
    assert {p.name for trace in traces for p in trace.pieces} == {p.name for p in one.pieces}


@pytest.mark.parametrize("router", ["losses", "capacity"])
def test_micro_batches_in_flight_together_are_counted_together(router):
    """One device takes the samples that two ranks of two micro-batches have in flight at once."""
    plan = Plan(replicate=2, ep=2, microbatch=2)
    model = MODELS["mixtral"].but(router=ROUTERS[router])
    one = proof.one_device(Job(model, plan, WORKLOAD, steps=STEPS, dtypes=("fp64",)))
    assert one.plan.microbatch == 4
    agree(ranks.run(1, record, one)[0]["fp64"], many("mixtral", plan.as_dict(), router))


def test_a_router_that_is_described_is_proved_and_sends_what_is_lowered():
    router = {"capacity": 0.5, "aux": 0.1}
    config = Config.from_parts(
        MODELS["mixtral"].but(router=router),
        "laptop",
        workload={"batch": 8, "seq": 8, "precision": "fp32"},
        plan={"replicate": 2, "ep": 2, "microbatch": 2, "recompute": "full", "param_dtype": "fp32"},
    )
    found = proof.prove(config, ranks=2, steps=2)
    assert found.small.model.router.capacity == router["capacity"]
    assert found.passed, (found.agreements[0].breaks[:2], [row for _, row in found.rows if row.unexplained])


def test_capacity_and_choice_change_what_is_lowered():
    workload = Workload(batch=8, seq=8, imbalance=2.0)

    def sums(**router):
        program = step_program(MODELS["mixtral"].but(router=router), Plan(replicate=4, ep=2), workload)
        ops = {op.name: op for op in program.blocks["moe", "F"]}
        scores = ops["gather-scores"].message_bytes[0] if "gather-scores" in ops else 0.0
        return ops["experts-up"].flops[0], ops["dispatch"].message_bytes[0], scores

    (flops, sent, nothing), half, one, chosen = sums(), sums(capacity=0.5), sums(capacity=1.0), sums(choice="expert")
    assert nothing == 0
    assert (half[0], half[1]) == (flops / 4, sent / 4)
    assert (one[0], one[1]) == (chosen[0], chosen[1]) == (flops / 2, sent / 2)
    assert half[2] == chosen[2] == 8 * 4 * 4 * 4  # a sequence, four ranks, four experts, fp32


# Bugs on purpose: each must be seen


def gradients_over_dp():
    from meshwright.parallel import mesh

    plain = mesh.Mesh.group
    mesh.Mesh.group = lambda self, axis: plain(self, "dp" if axis == "expert_dp" else axis)


def gradients_not_summed():
    from meshwright.parallel import mesh

    plain = mesh.Mesh.group
    mesh.Mesh.group = lambda self, axis: None if axis == "expert_dp" else plain(self, axis)


def statistics_of_one_rank():
    from meshwright.parallel.expert.dispatch import ParallelPlacement

    ParallelPlacement.sum_over_ranks = lambda self, values: values


def answers_in_another_order():
    from meshwright.parallel.expert.dispatch import ExpertDispatch

    plain = ExpertDispatch.combine
    ExpertDispatch.combine = lambda self, answers: plain(self, answers).flip(0)


def bias_added_by_every_rank():
    from meshwright.models.moe import GroupedLinear

    GroupedLinear.bias_share = property(lambda self: 1.0, lambda self, value: None)


@pytest.mark.parametrize(
    ("bug", "name", "fields", "router"),
    [
        (gradients_not_summed, "mixtral", {"tp": 2, "expert_tp": 1}, ""),
        (statistics_of_one_rank, "mixtral", {"replicate": 2, "ep": 2, "microbatch": 4}, "losses"),
        (answers_in_another_order, "mixtral", {"replicate": 2, "ep": 2, "microbatch": 4}, ""),
        *ranks.soak(  # in the corpus of bugs
            [
                (gradients_over_dp, "mixtral", {"replicate": 2, "ep": 2, "microbatch": 4}, ""),
                (bias_added_by_every_rank, "qwen", {"tp": 2}, ""),
            ]
        ),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_bug_is_caught(bug, name, fields, router):
    traces = many(name, fields, router, prepare=f"{__name__}:{bug.__name__}")
    assert compare(one_device(name, router), traces).breaks


# The transfer in its parts


def exchanged(context):
    """Uneven and empty splits, forward and backward, against what every rank knows of the others."""
    import torch
    from torch import distributed

    from meshwright.parallel.expert.dispatch import all_to_all

    sizes = [[0, 3, 1], [2, 0, 0], [0, 0, 0]]  # rows from rank to rank: the last sends none, the first gets few
    rank, group = context.rank, distributed.group.WORLD

    def rows(source, target, what):
        start = 100.0 * source + 10 * target + what
        return torch.arange(sizes[source][target], dtype=torch.float64)[:, None] * 0.1 + start + torch.zeros(1, 2)

    x = torch.cat([rows(rank, r, 0) for r in range(3)]).requires_grad_()
    incoming = [sizes[r][rank] for r in range(3)]
    y = all_to_all(x, group, sizes[rank], incoming)
    assert torch.equal(y, torch.cat([rows(r, rank, 0) for r in range(3)]))
    y.backward(torch.cat([rows(r, rank, 5) for r in range(3)]))
    assert torch.equal(x.grad, torch.cat([rows(rank, r, 5) for r in range(3)]))
    return True


def test_uneven_and_empty_splits_and_their_gradients():
    assert ranks.run(3, exchanged) == [True] * 3


def shared_between(context, overlap):
    """The order in which a layer's forward and backward send, wait and run the shared experts."""
    import torch

    from meshwright.parallel.apply import apply
    from meshwright.parallel.expert.dispatch import Transfer
    from meshwright.training.data.samples import RandomSamples
    from meshwright.training.loop import Trainer

    log = []
    start, wait = Transfer.start, Transfer.wait
    Transfer.start = lambda self, rows, backward: log.append("send") or start(self, rows, backward)
    Transfer.wait = lambda self: log.append("wait") or wait(self)
    model = MODELS["qwen"].but(layers=1)
    plan = Plan(replicate=2, ep=2, microbatch=4, overlap=("ep",) if overlap else ())
    parallel = apply(model, plan, WORKLOAD, context.rank, dtype=torch.float64)
    shared = parallel.stages[0].layers["0"].moe.shared
    shared.register_forward_hook(lambda *_: log.append("shared"))
    shared.register_full_backward_hook(lambda *_: log.append("shared"))
    record = Trainer(parallel, RandomSamples(model, 8, 0)).train_step()
    return log, record.router


def test_shared_experts_run_while_tokens_travel():
    for log, router in ranks.run(2, shared_between, True):
        assert log == ["send", "shared", "wait", "send", "wait", "send", "wait", "send", "shared", "wait"]
        assert 0 < router["entropy"] <= 1 <= router["peak"]
        assert router["dropped"] == 0
    for log, _ in ranks.run(2, shared_between, False):
        assert log[:3] == ["send", "wait", "shared"]


def test_what_is_sent_was_lowered_or_is_explained():
    plan = Plan(replicate=2, ep=2, recompute="full", param_dtype="fp32", master=False)
    workload = WORKLOAD.but(precision="fp32")
    job = Job(MODELS["deepseek"], plan, workload, steps=1, dtypes=("fp32",), watch=True)
    layers = MODELS["deepseek"].layer_count("moe") * plan.microbatches(workload)
    for result in ranks.run(plan.world, record, job):
        trace = result["fp32"]
        assert not trace.observed.unknown
        assert not [row for row in trace.traffic if row.unexplained], trace.traffic
        transfers = [row for row in trace.traffic if row.operation == "all_to_all"]
        # Four per layer and micro-batch, and one of counts; recompute repeats the three of forward.
        assert transfers
        assert all(row.lowered[0] == row.observed[0] == 8 * layers for row in transfers)
