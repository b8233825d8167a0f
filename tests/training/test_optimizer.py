"""The update: learning rates, parameter groups, Muon's iteration, averages, gradients that are not finite, deterministic mode."""

import math
import sys
from types import ModuleType

import pytest
import torch
from torch import distributed, nn

import ranks
from meshwright.describe.config import Config
from meshwright.describe.layout import Layout
from meshwright.describe.model import Model
from meshwright.describe.optimizer import Optimizer
from meshwright.describe.plan import Plan
from meshwright.describe.sharding import boxes
from meshwright.describe.workload import Workload
from meshwright.errors import MeshwrightError
from meshwright.parallel.numerics.precision import LossScale
from meshwright.parallel.pieces import Piece
from meshwright.training.optimizer.make import parameter_groups
from meshwright.training.optimizer.muon import orthogonalise
from meshwright.training.optimizer.norm import FinitePolicy, Rollback
from meshwright.training.optimizer.schedule import base_rate, share_at
from meshwright.training.worker import deterministic_kernels

MODEL = Model(hidden=16, layers=2, heads=2, ffn=24, vocab=33, qkv_bias=True)
WORKLOAD = Workload(batch=4, seq=4)


# The learning rate


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", {0: 0.1, 9: 1.0, 10: 1.0, 109: 1.0, 500: 1.0}),
        ("cosine", {0: 0.1, 10: 1.0, 60: 0.55, 110: 0.1, 500: 0.1}),
        ("linear", {0: 0.1, 10: 1.0, 60: 0.55, 85: 0.325, 110: 0.1, 500: 0.1}),
        ("wsd", {0: 0.1, 10: 1.0, 99: 1.0, 100: 1.0, 105: 0.55, 110: 0.1, 500: 0.1}),
    ],
)
def test_the_learning_rate_of_a_step(schedule, expected):
    settings = Optimizer(schedule=schedule, warmup=10).with_steps(110)
    if schedule == "wsd":
        settings = settings.but(decay_start=100, decay_steps=10)
    assert {step: pytest.approx(share_at(settings, step)) for step in expected} == expected


def test_the_learning_rate_follows_the_batch():
    settings = Optimizer(learning_rate=0.01, scale_with_batch=256)
    for optimizer, factor in (("adamw", 2.0), ("muon", 2.0), ("sgd", 4.0), ("momentum", 4.0)):
        assert base_rate(settings, Workload(batch=1024, optimizer=optimizer)) == pytest.approx(0.01 * factor)


# Groups


def pieces_of(model):
    plan = Plan()
    return [
        Piece(box, nn.Parameter(torch.zeros(1)), (box.name,))
        for box in boxes(model, plan, Layout(plan), 0, range(model.layers))
    ]


def by_name(model, kind, **settings):
    """(weight decay, factor of the rate, Muon) of each parameter."""
    pieces = pieces_of(model)
    groups = parameter_groups(pieces, kind, Optimizer(**settings), model.hidden)
    found = {p: (g["weight_decay"], g["rate_factor"], g["orthogonal"]) for g in groups for p in g["params"]}
    return {piece.name: found[piece.parameter] for piece in pieces}


def test_weight_decay_belongs_to_matrices():
    model = Model(hidden=16, layers=2, heads=2, ffn=24, vocab=33, qkv_bias=True, experts=4, top_k=2, ffn_bias=True)
    decays = {name: decay for name, (decay, *_) in by_name(model, "adamw").items()}
    without = {name for name, decay in decays.items() if decay == 0.0}
    assert {name.rpartition(".")[2] for name in without} == {"bias", "weight"}
    assert all(name.endswith("bias") or "norm" in name for name in without)
    assert decays["embedding.tokens.weight"] == decays["layers.0.moe.experts.up.weight"] == 0.1
    assert by_name(model, "adamw", decay_embeddings=False)["embedding.tokens.weight"][0] == 0.0
    assert {decay for decay, *_ in by_name(model, "adam").values()} == {0.0}


def test_muon_updates_the_matrices_of_layers_and_the_rate_follows_the_width():
    model = MODEL.but(experts=4, top_k=2)
    found = by_name(model, "muon", scale_with_width=4)
    assert {name for name, (*_, orthogonal) in found.items() if orthogonal} == {
        f"layers.{layer}.{name}.weight"
        for layer in (0, 1)
        for name in (
            *(f"attention.{part}" for part in "qkvo"),
            *(f"moe.experts.{part}" for part in ("gate", "up", "down")),
        )
    }
    factors = {name: factor for name, (_, factor, _) in found.items()}
    assert factors["layers.0.attention.q.weight"] == 0.5
    assert factors["layers.0.moe.router.weight"] == factors["head.project.weight"] == 0.25
    assert factors["embedding.tokens.weight"] == factors["layers.0.attention_norm.weight"] == 1.0
    assert by_name(MODEL, "adamw", scale_with_width=4)["layers.0.attention.q.weight"][1] == 0.25


@pytest.mark.parametrize(
    ("optimizer", "workload", "plan", "words"),
    [
        ({"betas": [0.9, 0.99]}, {"optimizer": "sgd"}, {}, "optimizer.betas has no effect with workload.optimizer=sgd"),
        ({"momentum": 0.5}, {}, {}, "optimizer.momentum has no effect with workload.optimizer=adamw"),
        ({"clip": 0.5}, {"clip": False}, {}, "no effect with workload.clip=false"),
        ({}, {"ema": True}, {}, "without the decay of the average"),
        ({"ema": 0.9}, {}, {"replicate": 2, "average_every": 2}, "plan.average_every=2"),
        ({"on_nan": "rollback"}, {}, {"replicate": 2, "average_every": 2}, "plan.average_every=2"),
    ],
)
def test_options_that_the_run_does_not_use_are_refused(optimizer, workload, plan, words):
    parts = {"precision": "fp32", "batch": 8, "seq": 16, **workload}
    dtypes = {"param_dtype": "fp32", "master": False}
    config = Config.from_parts("nano", "laptop", "gloo-cpu", parts, {**dtypes, **plan}, optimizer=optimizer)
    with pytest.raises(MeshwrightError, match="MW-OPT-002") as error:
        config.check_trainable()
    assert words in str(error.value)


# Muon


@pytest.mark.parametrize("shape", [(8, 8), (6, 20), (20, 6), (3, 5, 9)])
def test_the_iteration_maps_singular_values_to_about_one(shape):
    u = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    left, sigma, right = torch.linalg.svd(u / u.norm(dim=(-2, -1), keepdim=True), full_matrices=False)
    for _ in range(5):
        sigma = 3.4445 * sigma - 4.7750 * sigma**3 + 2.0315 * sigma**5
    torch.testing.assert_close(orthogonalise(u), left @ torch.diag_embed(sigma) @ right, rtol=0, atol=1e-10)
    assert 0.6 < float(sigma.min()) <= float(sigma.max()) < 1.3
    assert not orthogonalise(torch.zeros(4, 4)).any()


def muon_steps(context):
    """The matrices after three steps of ours and of torch's Muon, from the same gradients; and how the other parameters are updated."""
    from meshwright.parallel.apply import apply
    from meshwright.training.optimizer.make import make_optimizer
    from meshwright.training.optimizer.schedule import set_learning_rate

    parallel = apply(MODEL, Plan(), WORKLOAD.but(optimizer="muon"), 0, dtype=torch.float32)
    ours = make_optimizer(parallel, Optimizer(momentum=0.95))
    set_learning_rate(ours, 0.01)
    ours.compute = torch.bfloat16  # as torch's
    matrices = [p for p in parallel.pieces if p.box.parameter.role == "matrix"]
    vectors = [p for p in parallel.pieces if p.box.parameter.role != "matrix"]
    copies = {piece.name: nn.Parameter(piece.local.detach().clone()) for piece in parallel.pieces}
    theirs = torch.optim.Muon(
        [copies[p.name] for p in matrices], lr=0.01, momentum=0.95, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    decayed = [copies[p.name] for p in vectors if p.parameter.ndim > 1]
    plain = [copies[p.name] for p in vectors if p.parameter.ndim == 1]
    adamw = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}], lr=0.01, betas=(0.9, 0.95)
    )
    draw = torch.Generator().manual_seed(1)
    for _ in range(3):
        for piece in parallel.pieces:
            piece.parameter.grad = torch.randn(piece.local.shape, generator=draw)
            copies[piece.name].grad = piece.parameter.grad.clone()
        for optimizer in (ours, theirs, adamw):
            optimizer.step()
    pairs = {p.name: (p.local.detach(), copies[p.name].detach()) for p in parallel.pieces}
    return [
        (p in matrices, float((pairs[p.name][0] - pairs[p.name][1]).abs().max()), math.sqrt(max(p.full_shape)))
        for p in parallel.pieces
    ]


def test_muon_is_the_muon_of_torch():
    """bf16 products in another order: each step an error of some roundings of an update of 0.2·√n learning rates."""
    (found,) = ranks.run(1, muon_steps)
    assert sum(is_matrix for is_matrix, *_ in found) == 14
    for is_matrix, error, width in found:
        assert error <= (3 * 0.01 * 0.2 * width * 8 * 2.0**-8 if is_matrix else 1e-6)


# Gradients that are not finite


def policy_of(on_nan, **fields):
    return FinitePolicy(Optimizer(on_nan=on_nan, **fields))


def test_a_step_that_is_not_finite_stops_is_skipped_or_rolled_back():
    still = LossScale()
    stop = policy_of("stop")
    assert (stop.accept(True, 0, still), stop.error) == (True, None)
    assert not stop.accept(False, 1, still)
    assert (stop.error.code, stop.error.exit_code) == ("MW-OPT-003", 1)

    skip = policy_of("skip", most_skips=2)
    outcomes = []
    for step, finite in enumerate([True, False, False, True, False, False, False]):
        accepted = skip.accept(finite, step, still)
        outcomes.append((accepted, skip.error is not None))
    assert outcomes == [
        (True, False),
        (False, False),
        (False, False),
        (True, False),
        (False, False),
        (False, False),
        (False, True),
    ]

    back = policy_of("rollback", most_skips=2)
    for attempt in range(3):  # steps 3 to 5 are trained again after each rollback, and step 5 is never finite
        assert all(back.accept(True, step, still) for step in (3, 4))
        assert not back.accept(False, 5, still)
        assert isinstance(back.error, Rollback) == (attempt < 2)
    assert back.error.code == "MW-OPT-003"
    assert back.accept(True, 6, still)
    assert back.failures == 0


def test_an_overflow_of_fp16_lowers_the_scale_before_the_policy_decides():
    scale, policy = LossScale(4.0, True), policy_of("stop")
    assert [policy.accept(False, step, scale) or policy.error for step in range(2)] == [None, None]
    assert scale.value == 1.0
    policy.accept(False, 2, scale)
    assert policy.error.code == "MW-OPT-003"


class Poison:
    """A hook: from some steps on, one rank's gradients contain a NaN."""

    def __new__(cls, *args):
        from meshwright.training.hooks import Hook

        class Poisoning(Hook):
            def after_gradients(self, trainer):
                if trainer.step in args[0] and trainer.parallel.mesh.rank == args[1]:
                    trainer.parallel.pieces[-1].gradient.view(-1)[0] = float("nan")

        return Poisoning()


def poisoned(context, plan, dtype, settings, poison, steps):
    from meshwright.parallel.apply import apply
    from meshwright.training.data.samples import RandomSamples
    from meshwright.training.loop import Trainer

    parallel = apply(MODEL, plan, WORKLOAD, context.rank, dtype=dtype)
    trainer = Trainer(parallel, RandomSamples(MODEL, WORKLOAD.seq, 0), settings, hooks=[Poison(poison, 1)])
    out, error = [], ""
    values = [p.local.detach().clone() for p in parallel.pieces]
    for _ in range(steps):
        try:
            record = trainer.train_step()
        except MeshwrightError as raised:
            error = raised.code
        moved = any(bool((p.local != v).any()) for p, v in zip(parallel.pieces, values, strict=True))
        values = [p.local.detach().clone() for p in parallel.pieces]
        out.append(moved)
        if error:
            break
    finite = all(bool(v.isfinite().all()) for v in values)
    return out, error, finite, trainer.step, None if error else record.loss


@pytest.mark.parametrize(("plan", "dtype"), [({"shard": 2, "zero": 2}, "bfloat16"), ({"tp": 2}, "float32")])
def test_all_ranks_skip_a_step_in_which_one_rank_has_a_nan(plan, dtype):
    settings = Optimizer(on_nan="skip")
    found = ranks.run(2, poisoned, Plan(**plan, microbatch=2), getattr(torch, dtype), settings, (1,), 3)
    for moved, error, finite, step, loss in found:
        assert (moved, error, finite, step) == ([True, False, True], "", True, 3)
        assert math.isfinite(loss)


@pytest.mark.parametrize(("on_nan", "code"), [("stop", "MW-OPT-003"), ("rollback", "MW-OPT-004")])
def test_all_ranks_raise_in_the_step_in_which_one_rank_has_a_nan(on_nan, code):
    found = ranks.run(
        2, poisoned, Plan(shard=2, zero=3, microbatch=2), torch.float32, Optimizer(on_nan=on_nan), (1,), 3
    )
    assert [(moved, error, finite, step) for moved, error, finite, step, _ in found] == [
        ([True, False], code, True, 2)
    ] * 2


@pytest.fixture
def alone():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


class KernelInTorch(ModuleType):
    """The kernel of fused AdamW, in torch's operations."""

    @staticmethod
    def update(weight, gradient, moments, rounded, factor, guarded, step, group):
        if guarded and not factor > 0:
            return
        (beta_1, beta_2), rate, (first, second) = group["betas"], group["lr"], moments
        gradient = gradient.to(weight.dtype) * factor.to(weight.dtype)
        first.lerp_(gradient, 1 - beta_1)
        second.mul_(beta_2).addcmul_(gradient, gradient, value=1 - beta_2)
        weight.mul_(1 - rate * group["weight_decay"])
        weight.sub_(rate / (1 - beta_1**step) * first / (second.sqrt() / math.sqrt(1 - beta_2**step) + group["eps"]))
        if rounded is not None:
            rounded.copy_(weight)


@pytest.mark.parametrize("clip", [False, True])
def test_an_update_before_the_host_knows_the_norm_is_the_same_update(alone, monkeypatch, clip):
    """One that is launched although the norm is not finite changes nothing, and is not counted."""
    from meshwright.parallel.apply import apply
    from meshwright.training.data.samples import RandomSamples
    from meshwright.training.loop import Trainer
    from meshwright.training.optimizer import make

    def trained(fused):
        monkeypatch.setattr(make, "can_fuse", lambda _: fused)
        work = WORKLOAD.but(clip=clip)
        parallel = apply(MODEL, Plan(microbatch=4), work, 0, dtype=torch.bfloat16)
        settings = Optimizer(learning_rate=0.01, on_nan="skip", clip=0.1, warmup=0)
        trainer = Trainer(parallel, RandomSamples(MODEL, work.seq, 0), settings, hooks=[Poison((1, 2), 0)])
        trainer.skip_steps = {4}
        moved, records = [], []
        for _ in range(6):
            before = [p.local.detach().clone() for p in parallel.updated]
            records.append(trainer.train_step())
            moved.append(not all(map(torch.equal, before, (p.local for p in parallel.updated))))
        steps = {int(state["step"]) for state in trainer.optimizer.state.values()}
        return moved, [r.updated for r in records], [r.loss for r in records], steps, parallel.updated

    monkeypatch.setitem(sys.modules, f"{make.__package__}.adamw_kernel", KernelInTorch("adamw_kernel"))
    moved, updated, losses, steps, pieces = trained(fused=True)
    assert moved == updated == [True, False, False, True, False, True]
    assert steps == {3}
    *expected, plain = trained(fused=False)
    assert expected[:2] == [moved, updated]
    assert losses == pytest.approx(expected[2], rel=1e-5)
    for ours, theirs in zip(pieces, plain, strict=True):
        assert torch.allclose(ours.local, theirs.local, rtol=1e-4, atol=1e-6)


# The moving average


def averaged(context, plan, dtype):
    from meshwright.parallel.apply import apply
    from meshwright.training.data.samples import RandomSamples
    from meshwright.training.loop import Trainer

    parallel = apply(MODEL, plan, WORKLOAD, context.rank, dtype=dtype)
    trainer = Trainer(parallel, RandomSamples(MODEL, WORKLOAD.seq, 0), Optimizer(ema=0.75))
    pieces = trainer.average.pieces
    expected = [p.local.detach().double().clone() for p in pieces]
    for _ in range(3):
        trainer.train_step()
        expected = [0.75 * e + 0.25 * p.local.double() for e, p in zip(expected, pieces, strict=True)]
    off = max(float((v - e).abs().max()) for v, e in zip(trainer.average.values, expected, strict=True))
    trained = [p.local.detach().clone() for p in parallel.pieces]
    with trainer.average.applied():
        inside = [p.local.detach().clone() for p in parallel.pieces]
    same = all(bool((p.local == t).all()) for p, t in zip(parallel.pieces, trained, strict=True))
    applied = all(bool((i == v.to(i.dtype)).all()) for i, v in zip(inside, trainer.average.values, strict=True))
    return off, same, applied, trainer.average.values[0].dtype


def test_the_average_of_the_weights_follows_them():
    for off, same, applied, dtype in ranks.run(2, averaged, Plan(shard=2, zero=2), torch.bfloat16):
        assert (same, applied, dtype) == (True, True, torch.float32)
        assert off < 1e-6
    ((off, same, applied, _),) = ranks.run(1, averaged, Plan(), torch.float64)
    assert (same, applied) == (True, True)
    assert off < 1e-15


def test_an_average_takes_memory_in_the_plan():
    config = Config.from_parts("nano", "laptop", optimizer={"ema": 0.999})
    assert config.workload.ema
    assert config.origin("workload.ema") == "optimizer.ema"


# Deterministic mode


def test_deterministic_mode_refuses_kernels_that_are_not():
    def scatter():
        torch.zeros(4).put_(torch.tensor([0, 0]), torch.ones(2))

    with deterministic_kernels(False):
        scatter()
    with deterministic_kernels(True):
        assert torch.are_deterministic_algorithms_enabled()
    with pytest.raises(MeshwrightError, match="MW-OPT-005"), deterministic_kernels(True):
        scatter()
    assert not torch.are_deterministic_algorithms_enabled()
    with pytest.raises(ZeroDivisionError), deterministic_kernels(True):
        1 / 0  # noqa: B018
