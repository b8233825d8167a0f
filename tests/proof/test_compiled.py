"""Layouts whose layers are compiled train what one device trains without compilation, in float64, and have no graph breaks.

inductor takes 25 s of a CPU to compile the graphs of a transformer layer for each rank, and to trace them ("aot_eager") takes 6: `make soak` does
both, and `make test-torch` traces. Every day layers are traced on one device (`tests/parallel`).
"""

import layouts
import pytest

import ranks
from meshwright.describe.config import Config
from meshwright.parallel import compile as compiling
from meshwright.proof.compare import compare
from meshwright.proof.prove import prove

SP, Z3, CP = {"tp": 2, "sp": True}, {"shard": 2, "zero": 3}, {"cp": 2}
# A model, a plan, and the graph breaks of its layers: one at the dispatch of each kind of layer with experts (gpt-oss has two kinds, with a
# window and without), else none.
OVER_OURS = [("qwen", {**SP, "recompute": "selective"}, 0)]  # ranks exchange through the backend meshwright
SOAK = [
    ("drops", {**Z3, "recompute": "full"}, 0),
    ("mlp", {"tp": 2}, 0),
    ("qwen", {**SP, "recompute": "selective"}, 0),
    ("qwen-moe", {"replicate": 2, "ep": 2}, 1),
    ("llama", {"replicate": 2, "bucket": 2000}, 0),
    ("gpt", {"shard": 2, "zero": 1}, 0),
    ("llama", {"shard": 2, "zero": 2}, 0),
    ("gemma", {**Z3, "microbatch": 2}, 0),
    ("gpt", {"tp": 2}, 0),
    ("qwen", {**SP, "recompute": "full"}, 0),
    ("gemma", {**SP, "offload": "activations"}, 0),
    ("llama", CP, 0),
    ("gpt", {**CP, "cp_kind": "all-gather"}, 0),
    ("qwen", {**CP, "cp_kind": "ulysses"}, 0),
    ("llama", {"pp": 2}, 0),
    ("qwen", {"pp": 2, "schedule": "interleaved", "virtual": 2}, 0),
    ("drops", SP, 0),
    ("drops", CP, 0),
    ("mixtral", {**Z3, "ep": 2}, 1),
    ("deepseek", {**SP, "expert_tp": 1, "ep": 2}, 1),
    ("gpt-oss", {**Z3, "recompute": "selective"}, 2),
    ("gpt", {**Z3, **SP, "offload": "both"}, 0),
    ("qwen", {**Z3, "pp": 2, "recompute": "full"}, 0),
]
CASES = [
    *(pytest.param(*case, "aot_eager", id=f"{case[0]} {case[1]} traced", marks=pytest.mark.slow) for case in SOAK),
    *(pytest.param(*case, "inductor", id=f"{case[0]} {case[1]}", marks=pytest.mark.slow) for case in SOAK),
    *(
        pytest.param(*case, "inductor over ours", id=f"{case[0]} {case[1]} over ours", marks=pytest.mark.slow)
        for case in OVER_OURS
    ),
]


def train(context, job, mode, backend, cache):
    import os

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    compiling.BACKEND = backend
    from dataclasses import replace

    return layouts.train_all(context, [replace(job, compile=mode)])


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return str(tmp_path_factory.mktemp("inductor"))


def traces(layout, mode, backend, cache):
    options = {"silence": 300.0, "group_timeout": 150.0}
    if backend.endswith(" over ours"):
        backend, options["backend"] = backend.removesuffix(" over ours"), "meshwright"
    return [rank[0] for rank in ranks.run(layout.plan.world, train, layout.job(), mode, backend, cache, **options)]


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("model", "fields", "breaks", "backend"), CASES)
def test_a_compiled_layout_trains_what_one_device_trains(model, fields, breaks, backend, cache):
    layout = layouts.Layout(model, layouts.Plan(**fields))
    one = ranks.run(1, layouts.train_all, [layout.reference.job()])[0][0]
    many = traces(layout, "blocks", backend, cache)
    agreement = compare(one, many)
    assert not agreement.breaks, "\n".join(map(str, agreement.breaks[:5]))
    assert all(error < 1e-10 for error in agreement.errors.values()), agreement.errors
    assert {trace.compiled for trace in many} == {"blocks"}
    # The activation and three sums of experts are compiled a second time, for any number of rows.
    most = 12 + (4 if layout.job().model.experts else 0)
    assert all(0 < trace.graphs < most for trace in many), [trace.graphs for trace in many]
    assert [trace.graph_breaks for trace in many] == [breaks] * len(many)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_whole_stage_in_one_graph_trains_what_one_device_trains(cache):
    layout = layouts.Layout("drops", layouts.Plan(**SP))
    one = ranks.run(1, layouts.train_all, [layout.reference.job()])[0][0]
    many = traces(layout, "whole", "inductor", cache)
    assert all(error < 1e-10 for error in compare(one, many).errors.values())
    assert [(trace.compiled, trace.graphs, trace.graph_breaks) for trace in many] == [("whole", 3, 0)] * 2


def traced_only():
    compiling.BACKEND = "aot_eager"


@pytest.mark.parametrize(("setting", "part"), [("blocks", "evaluation, save and resume"), ("auto", "compiled layers")])
def test_a_proof_says_what_it_leaves_out_with_compiled_layers(setting, part):
    """A plan for GPUs is compiled where it is trained; here its layers are compiled only if the run file asks for it."""
    tiny = {"kind": "mlp", "hidden": 16, "layers": 2}  # the fewest operations to trace
    plan = {"param_dtype": "fp32", "master": False, "microbatch": 4}
    workload = {"batch": 4, "seq": 8, "precision": "fp32"}
    config = Config.from_parts(tiny, "dgx-h100", workload=workload, plan=plan, run={"compile": setting})
    proof = prove(config, ranks=1, steps=2, prepare="test_compiled:traced_only")
    copy = proof.copies[0]
    assert proof.passed
    assert copy.oracles[part].startswith("nothing: ")
    assert {trace.compiled for trace in copy.traces} == {"blocks" if setting == "blocks" else "off"}
    assert any(a.phase for a in copy.agreements) == (setting == "auto")


def test_a_split_backward_is_not_compiled_and_says_so():
    layout = layouts.Layout("llama", layouts.Plan(pp=2, schedule="zb-h1"))
    many = traces(layout, "blocks", "aot_eager", "")
    assert {trace.compiled for trace in many} == {"off"}
