"""Values that a rank reports besides the trained model: which gradients are partial sums, the balance of experts, the weight of the
router losses, the positions of its tokens. Training continues if one of them is wrong, and a proof does not compare them."""

import pytest
import torch

import ranks
from meshwright.describe.layout import Layout
from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.describe.workload import Workload
from meshwright.parallel.context.sequence import token_order

WORKLOAD = Workload(batch=4, seq=8)
MODEL = Model(
    hidden=16,
    layers=2,
    heads=4,
    kv_heads=2,
    ffn=24,
    vocab=33,
    experts=4,
    top_k=2,
    expert_ffn=12,
    dense_layers=1,
    ffn_bias=True,
    activation="gelu",
)


def partial(context, plans):
    """(kind, name) of the gradients that are parts of a sum, under each plan."""
    from meshwright.parallel.apply import apply

    made = [apply(MODEL, plan, WORKLOAD, context.rank) for plan in plans]
    return [{(p.box.partial, p.name.rpartition(".")[2]) for p in one.pieces if p.box.partial} for one in made]


def test_a_gradient_is_a_part_only_where_ranks_share_its_parameter():
    plans = [Plan(replicate=2, ep=2), Plan(tp=2, expert_tp=1), Plan(tp=2)]
    for alone, whole, cut in ranks.run(2, partial, plans):
        assert not alone
        assert {kind for kind, _ in whole} == {kind for kind, _ in cut} - {"expert_tp"} == {"tp"}
        assert {name for kind, name in cut if kind == "expert_tp"} == {"bias"}


def load(context, plan, scale):
    """The first step's metrics of the routers, and what their losses weigh where every loss is scaled."""
    from meshwright.models.moe import MixtureOfExperts
    from meshwright.parallel.apply import apply
    from meshwright.training.data.samples import RandomSamples
    from meshwright.training.loop import Trainer

    parallel = apply(MODEL, plan, WORKLOAD, context.rank, dtype=torch.float64, scatter=True)
    metrics = Trainer(parallel, RandomSamples(MODEL, WORKLOAD.seq, 0)).train_step().router
    parallel.set_tokens(torch.tensor(8.0), scale)
    layers = [
        part for stage in parallel.stages.values() for part in stage.modules() if isinstance(part, MixtureOfExperts)
    ]
    return metrics, [part.placement.share for part in layers], float(parallel.tokens)


def test_the_load_is_of_all_stages_and_a_router_scales_its_losses_as_the_step_does():
    """The first stage has no experts: it must report the load of the second."""
    ((one, shares, tokens),) = ranks.run(1, load, Plan(microbatch=4), 4.0)
    assert (shares, tokens) == ([4.0], 2.0)
    assert 0 < one["entropy"] < 1 < one["peak"]
    assert one["idle"] < 1
    for metrics, shares, _ in ranks.run(2, load, Plan(pp=2), 4.0):
        assert metrics == pytest.approx(one)
        assert shares in ([], [4.0 / 4])


@pytest.mark.parametrize(
    "plan", [Plan(), Plan(replicate=2), Plan(cp=3, cp_kind="all-gather"), Plan(tp=3, sp=True)], ids=str
)
def test_the_order_of_tokens_is_one_devices_also_of_an_odd_sequence(plan):
    rows, seq = 2, 9
    order = token_order(Layout(plan), 0, MODEL, rows, seq // plan.cp // plan.tp)
    assert order.shape == (plan.world, rows * seq // plan.cp // plan.tp)
    assert torch.equal(order.flatten().sort().values, torch.arange(plan.dp * rows * seq))
    assert torch.equal(order[0, : seq // plan.cp // plan.tp], torch.arange(seq // plan.cp // plan.tp))


def unsent_part(context, plan):
    """The part that compression has not sent, before and after the loss scale changes; the load and the gradients after an aborted step,
    or the error."""
    from meshwright.errors import MeshwrightError
    from meshwright.lower.rank import Routed
    from meshwright.models.moe import MixtureOfExperts
    from meshwright.parallel.apply import apply
    from meshwright.parallel.data.reduction import compressors_in
    from meshwright.training.data.samples import RandomSamples
    from meshwright.training.loop import Trainer

    parallel = apply(MODEL, plan, WORKLOAD, context.rank, dtype=torch.float64)
    trainer = Trainer(parallel, RandomSamples(MODEL, WORKLOAD.seq, 0))
    trainer.train_step()
    errors = [e for c in compressors_in(parallel.reductions) for e in c.feedback.errors.values()]
    before = [e.clone() for e in errors]
    parallel.set_tokens(torch.tensor(8.0), 4.0)
    parallel.set_tokens(torch.tensor(8.0), 4.0)
    ratios = {float((e / b)[b != 0].mean()) for e, b in zip(errors, before, strict=True) if b.any()}
    (module,) = parallel.stages.values()
    layers = [part for part in module.modules() if isinstance(part, MixtureOfExperts)]
    for part in layers:
        part.router.load = torch.ones(2, 4)
        part.placement.count(Routed(1, 1, 1, 1), 0.0)
    for piece in parallel.pieces:
        piece.gradient.add_(1.0)
    try:
        parallel.abort_step()
    except MeshwrightError as error:
        return ratios, error.code
    left = [part.router.load for part in layers] + [bool(part.placement.dispatches) for part in layers]
    return ratios, [*left, any(bool(piece.gradient.any()) for piece in parallel.pieces)]


@pytest.mark.parametrize(
    ("plan", "left"), [({"replicate": 2}, [None, False, False]), ({"shard": 2, "zero": 3}, "MW-PAR-006")]
)
def test_the_unsent_part_is_scaled_and_the_load_of_an_aborted_step_is_reset(plan, left):
    for ratios, found in ranks.run(2, unsent_part, Plan(**plan, compression="top-k")):
        assert ratios == {4.0}
        assert found == left
