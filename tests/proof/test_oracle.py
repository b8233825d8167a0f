"""One device against plain formulas: every kind of model and optimizer agrees to the last digits; bugs of shared code are found."""

import ast
from dataclasses import replace
from pathlib import Path

import bugs_shared
import layouts
import pytest

import meshwright.proof.oracle as oracle
import ranks
from meshwright.describe import catalog
from meshwright.describe.config import Config
from meshwright.describe.model import Model, Published
from meshwright.describe.plan import Plan
from meshwright.describe.workload import Workload
from meshwright.proof import prove as proofs
from meshwright.proof import records
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
    data = {"document_mask": True} if how.get("documents") else {}
    config = Config.from_parts(bug.model.as_dict(), "laptop", workload=work, plan=plan, data=data)
    proof = proofs.prove(config, ranks=2, steps=2, prepare=f"bugs_shared:{bug.name}")
    assert (proof.passed, proof.blamed) == (False, "none: one device itself")
    assert proof.agreements[-1].breaks[0].what == bug.what
