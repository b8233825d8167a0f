"""Steps that do not go as planned: nothing to learn from, a failure in between, an evaluation in between, a scale that moves."""

import numpy as np
import pytest
import torch

import ranks
from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.describe.workload import Workload
from meshwright.errors import MeshwrightError
from meshwright.models.loss import IGNORED
from meshwright.training.hooks import Hook

MODEL = Model(hidden=16, layers=2, heads=2, ffn=24, vocab=33)
EXPERTS = MODEL.but(experts=4, top_k=2, balance_bias=True)
WORKLOAD = Workload(batch=4, seq=4)


class Padded:
    """Random tokens; of some samples every target is padding."""

    def __init__(self, padded):
        self.padded = padded

    def sample(self, step, index):
        tokens = np.random.default_rng((step, index)).integers(0, MODEL.vocab, WORKLOAD.seq + 1)
        targets = np.full(WORKLOAD.seq, IGNORED) if index in self.padded else tokens[1:]
        return tokens[:-1], targets


def trainer_of(context, model, plan, padded=()):
    from meshwright.parallel.apply import apply
    from meshwright.training.loop import Trainer

    return Trainer(apply(model, plan, WORKLOAD, context.rank, dtype=torch.float64), Padded(padded))


def values_of(record):
    return record.loss, record.gradient_norm, record.router


def padded(context, plan, samples):
    trainer = trainer_of(context, MODEL, plan, samples)
    records = trainer.train(2)
    finite = all(bool(p.local.isfinite().all()) for p in trainer.parallel.pieces)
    return [r.loss for r in records], [r.tokens for r in records], finite


def test_a_batch_of_padding_alone_teaches_nothing_and_spoils_nothing():
    for losses, tokens, finite in ranks.run(1, padded, Plan(), (0, 1, 2, 3)):
        assert (losses, tokens, finite) == ([0.0, 0.0], [0, 0], True)


def test_a_replica_of_padding_alone_has_no_say_in_the_average():
    (losses, tokens, finite), (others, *_) = ranks.run(2, padded, Plan(replicate=2, average_every=2), (0, 1))
    assert (losses, tokens, finite) == ([0.0, 0.0], [0, 0], True)
    assert min(others) > 1.0


def compared(context, work, *args):
    """What `work` returns for each value of its last argument, on the same ranks."""
    *common, values = args
    return [work(context, *common, value) for value in values]


def interrupted(context, model, plan, how):
    """Three steps, before the second of which, or before whose updates, something happens."""
    trainer, out = trainer_of(context, model, plan), []
    (module,) = trainer.parallel.stages.values()

    class Evaluate(Hook):
        def after_gradients(self, trainer):
            module.eval()
            with torch.no_grad():
                module(torch.zeros(1, WORKLOAD.seq, dtype=torch.long))
            module.train()

    if how == "evaluation before the update":
        trainer.hooks.append(Evaluate())
    for step in range(3):
        if step == 1 and how == "evaluation":
            Evaluate().after_gradients(trainer)
        if step == 1 and how == "failure":
            first = next(iter(module.layers.values()))
            hook = first.register_full_backward_pre_hook(lambda layer, gradients: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                trainer.train_step()
            hook.remove()
        out.append(values_of(trainer.train_step()))
    return out


@pytest.mark.parametrize(
    ("how", "plan"),
    [
        ("failure", {"replicate": 2, "ep": 2}),
        ("evaluation", {"shard": 2, "zero": 3}),
        *ranks.soak(
            [
                ("failure", {"replicate": 2, "bucket": 2000.0}),
                ("evaluation", {"replicate": 2}),
                ("evaluation before the update", {"shard": 2, "zero": 2}),
            ]
        ),
    ],
)
def test_what_comes_between_two_steps_changes_neither(how, plan):
    undisturbed, disturbed = ranks.run(2, compared, interrupted, EXPERTS, Plan(**plan), ("", how))[0]
    assert disturbed == undisturbed


def test_what_zero_has_under_way_cannot_be_taken_back():
    with pytest.raises(MeshwrightError, match="MW-PAR-006"):
        ranks.run(2, interrupted, MODEL, Plan(shard=2, zero=3), "failure")


def scaled(context, plan, growth):
    """Parameters after steps whose loss is scaled twice as much each time, or not at all."""
    from meshwright.parallel.numerics.precision import LossScale

    trainer = trainer_of(context, MODEL, plan)
    if growth:
        trainer.scale = LossScale(4.0, True, growth_interval=1)
    trainer.train(4)
    return trainer.scale.value, [p.local.detach().numpy().copy() for p in trainer.parallel.pieces]


@pytest.mark.parametrize(
    "plan", [{"replicate": 2, "compression": "top-k"}, {"shard": 2, "zero": 3, "compression": "int4"}]
)
def test_what_compression_kept_back_follows_the_scale_of_the_loss(plan):
    for (_, plain), (scale, moved) in ranks.run(2, compared, scaled, Plan(**plan), (False, True)):
        assert scale == 64.0
        for a, b in zip(plain, moved, strict=True):
            np.testing.assert_allclose(b, a, rtol=0, atol=1e-12)
