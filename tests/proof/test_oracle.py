"""One device against plain formulas: every kind of model and optimizer agrees to the last digits; bugs of shared code are found."""

import ast
from dataclasses import replace
from pathlib import Path

import bugs_shared
import layouts
import numpy as np
import pytest
import torch

import meshwright.proof.oracle as oracle
import ranks
from meshwright.describe import catalog
from meshwright.describe.config import Config
from meshwright.describe.model import Model, Published
from meshwright.describe.optimizer import Optimizer
from meshwright.describe.plan import Plan
from meshwright.describe.workload import Workload
from meshwright.proof import prove as proofs
from meshwright.proof import records
from meshwright.proof.diagnosis import of_replay
from meshwright.proof.emulation import update
from meshwright.proof.prove import compare_with_formulas

M, SHAPE = layouts.MODELS, {**layouts.SHAPE, "layers": 2}
DROPS = {"dropout_rate": 0.2, "embedding_dropout": 0.1, "attention_dropout": 0.3}
ROPES = [
    {"kind": "linear", "factor": 3.0},
    {"kind": "dynamic", "factor": 4.0, "original_positions": 4},
    {"kind": "llama3", "factor": 8.0, "original_positions": 32},
    {"kind": "longrope", "factor": 4.0, "original_positions": 4, "short_factor": (1.0, 1.5), "long_factor": (2.0, 3.0)},
    {"kind": "yarn", "factor": 4.0, "original_positions": 64, "beta_fast": 4.0, "mscale": 0.7, "mscale_all_dim": 1.3},
]
ROUTERS = [{**router} for _, _, router in layouts.ROUTED] + [{"groups": 2, "groups_kept": 1}]
SETTINGS = records.SETTINGS.but(
    betas=(0.8, 0.93), epsilon=1e-6, weight_decay=0.3, decay_embeddings=False, scale_with_batch=24, scale_with_width=12
)
RESNET = catalog.load("models", "resnet-50").but(
    layers=3, resnet={"stages": (1, 2), "width": 4, "image": 16, "classes": 10}, published=Published()
)
CASES = {
    **{f"model {name}": (model, {}) for name, model in M.items()},
    **{f"rope {rope['kind']}": (Model(**SHAPE, rope=rope, max_positions=16), {}) for rope in ROPES},
    **{f"router {i}": (M["deepseek" if i % 2 else "mixtral"].but(router=router), {"size": 4}) for i, router in enumerate(ROUTERS)},
    "dropout": (Model(**SHAPE, **DROPS), {}),
    "dropout of an mlp": (M["mlp"].but(dropout_rate=0.3), {}),
    "documents": (M["gemma"], {"documents": True}),
    "relu2": (Model(**SHAPE, activation="relu2", norm_parameters="none"), {}),
    "quick-gelu": (Model(**SHAPE, activation="quick-gelu", causal=False, window=3), {}),
    "resnet": (RESNET, {"size": 4}),
    **{f"optimizer {kind}": (M["qwen-moe"], {"optimizer": kind}) for kind in ("muon", "adam", "momentum", "sgd")},
    "settings": (M["gpt"], {"settings": SETTINGS}),
    "settings of muon": (M["qwen"], {"settings": SETTINGS, "optimizer": "muon"}),
}  # fmt: skip


def job_of(model, size=8, documents=False, optimizer="adamw", settings=records.SETTINGS):
    workload = Workload(batch=8, seq=8, precision="fp32", optimizer=optimizer)
    plan = Plan(microbatch=size, param_dtype="fp32", master=False)
    more = {"documents": documents, "optimizer": settings, "reference": True, "oracle": True}
    return records.Job(model, plan, workload, steps=2, dtypes=("fp64",), **more)


def test_every_kind_of_model_router_rope_and_optimizer_agrees_with_its_formulas():
    traces = ranks.run(1, layouts.train_all, [job_of(model, **how) for model, how in CASES.values()])[0]
    wrong = {}
    for name, trace in zip(CASES, traces, strict=True):
        (agreement,) = compare_with_formulas(trace)
        wrong |= {name: str(agreement.breaks[0])} if agreement.breaks else {}
    assert not wrong


def test_the_formulas_import_nothing_that_computes_the_same():
    for path in Path(oracle.__file__).parent.glob("*.py"):
        modules = {node.module for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)}
        ours = {module for module in modules if module and module.startswith("meshwright")}
        allowed = ("meshwright.describe", "meshwright.proof", "meshwright.training.hooks")
        assert all(module.startswith(allowed) for module in ours), (path.name, ours)


@pytest.mark.parametrize("kind", ["swiglu", "geglu"])
def test_a_plug_in_without_a_formula_is_named(kind, monkeypatch):
    from meshwright.proof.oracle import network

    monkeypatch.delitem(network.ACTIVATIONS, kind)
    assert network.missing(Model(**SHAPE, activation=kind)) == f"activation {kind}"


def test_bugs_that_ranks_and_one_device_share_are_caught():
    traces = ranks.run(1, bugs_shared.traces_of_all, [job_of(bug.model, **bug.how) for bug in bugs_shared.SHARED])[0]
    first = {}
    for bug, trace in zip(bugs_shared.SHARED, traces, strict=True):
        breaks = compare_with_formulas(trace)[0].breaks
        first[bug.name] = breaks[0].what if breaks else "not seen"
    assert first == {bug.name: bug.what for bug in bugs_shared.SHARED}


@pytest.mark.slow
@pytest.mark.parametrize("bug", bugs_shared.SHARED, ids=lambda bug: bug.name)
def test_verify_catches_a_shared_bug_on_a_plan_that_shows_it(bug, monkeypatch):
    """The bug is in the ranks and in the reference process, as it would be in the source."""
    plain = proofs.one_device
    monkeypatch.setattr(proofs, "one_device", lambda job, many=(): replace(plain(job, many), prepare=job.prepare))
    how = {**bug.how}
    work = {"batch": 8, "seq": 8, "precision": "fp32", "optimizer": how.get("optimizer", "adamw")}
    plan = {"replicate": 2, "microbatch": how.get("size", 4), "param_dtype": "fp32", "master": False}
    config = Config.from_parts(bug.model.as_dict(), "laptop", workload=work, plan=plan)
    masked = config.data.model_copy(update={"document_mask": bool(how.get("documents"))})  # without a token file
    config = replace(config, data=masked)
    proof = proofs.prove(config, ranks=2, steps=2, prepare=f"bugs_shared:{bug.name}")
    assert (proof.passed, proof.blamed) == (False, "none: one device itself")
    assert next(a for a in proof.agreements if a.oracle).breaks[0].what == bug.what


@pytest.mark.parametrize("kind", ["adamw", "adam", "momentum", "sgd"])
def test_the_formula_of_an_update_is_that_of_torch(kind):
    settings, random = SETTINGS.but(scale_with_batch=0, scale_with_width=0), np.random.default_rng(0)
    decay = settings.weight_decay if kind == "adamw" else 0.0
    weight = torch.nn.Parameter(torch.from_numpy(random.standard_normal((3, 4))))
    if kind.startswith("adam"):
        theirs = torch.optim.AdamW([weight], lr=0.01, betas=settings.betas, eps=settings.epsilon, weight_decay=decay)
    else:
        theirs = torch.optim.SGD([weight], lr=0.01, momentum=settings.momentum if kind == "momentum" else 0.0)
    ours, value = update.ReplayedOptimizer(kind, settings, decays=True), weight.detach().numpy().copy()
    for _ in range(4):
        gradient = random.standard_normal((3, 4))
        weight.grad = torch.from_numpy(gradient)
        theirs.step()
        value = ours.step(value, gradient, 0.01, "fp64")
        assert np.abs(value - weight.detach().numpy()).max() < 1e-14


def test_the_formula_of_a_schedule_is_that_of_torch():
    parameter = [torch.nn.Parameter(torch.zeros(1))]
    for kind in ("cosine", "linear"):
        settings = Optimizer(learning_rate=1.0, schedule=kind, warmup=4, decay_steps=16, min_learning_rate=0.25)
        optimizer = torch.optim.SGD(parameter, lr=1.0)
        decay = (
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 16, eta_min=0.25)
            if kind == "cosine"
            else torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.25, total_iters=16)
        )
        assert [update.learning_rate(settings, Workload(batch=8), step) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
        for step in range(4, 21):
            theirs = optimizer.param_groups[0]["lr"]
            assert update.learning_rate(settings, Workload(batch=8), step) == pytest.approx(theirs, rel=1e-12)
            optimizer.step()
            decay.step()


@pytest.mark.parametrize(
    ("fault", "what"),
    [
        ("", ""),
        ("decayed", "updated parameter"),
        ("clipped twice", "gradient given to the optimizer"),
        ("averaged too slowly", "moving average"),
        ("averaged before the update", "moving average"),
    ],
)
def test_an_update_in_fp32_is_replayed(fault, what):
    job = job_of(M["llama"], settings=records.SETTINGS.but(ema=0.9))
    gradient, before = np.float32([[3.0, 4.0], [0.0, 0.0]]), np.float32([[1.0, -2.0], [0.5, 0.25]])
    clipped = gradient * np.float32(1.0 / (5.0 + 1e-6)) ** (2 if fault == "clipped twice" else 1)
    role = "vector"  # no decay
    optimizer = update.ReplayedOptimizer("adamw", job.optimizer, decays=fault == "decayed")
    after = optimizer.step(before, clipped, job.optimizer.learning_rate / 10, "fp32").astype(np.float32)
    made = records.Update("fp32", "fp32", before, clipped, after)
    share = 0.99 if fault == "averaged too slowly" else 0.9
    average = share * before + (1 - share) * (before if fault == "averaged before the update" else after)
    piece = records.PieceTrace(
        "head.norm.weight", (0, 0), [gradient], [after], role, averages=[average], updates=[made]
    )
    breaks = update.replay([records.Trace(0, "fp32", losses=[1.0], norms=[5.0], pieces=[piece])], job, job.plan)
    assert [b.what for b in breaks] == ([what] if what else [])
    if what == "moving average":
        kind = "stale" if fault == "averaged before the update" else "other"
        assert (of_replay(breaks[0]).phase, of_replay(breaks[0]).pattern.kind) == ("update", kind)


@pytest.mark.slow
def test_one_device_agrees_with_the_formulas_under_every_layout_of_the_matrix():
    """The reference of a layout has its batch, its micro-batches and its order of samples."""
    exact = [layout for layout in layouts.all_layouts() if not (layout.plan.lossy or layout.plan.average_every)]
    references = dict.fromkeys(
        layout.reference for layout in exact if (layout.precision, layout.dtype) == ("bf16", "fp64")
    )
    jobs = [replace(reference.job(), oracle=True, prepare="") for reference in references]
    traces = ranks.run(1, layouts.train_all, jobs)[0]
    breaks = {ref.title: compare_with_formulas(trace)[0].breaks for ref, trace in zip(references, traces, strict=True)}
    assert len(breaks) > 60
    assert not {title: str(found[0]) for title, found in breaks.items() if found}
