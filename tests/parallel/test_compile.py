"""What `run.compile` compiles, what it leaves out and says so, and the number of graphs of a model on one device."""

import pytest
import torch
from torch import distributed
from torch._dynamo import reset
from torch.torch_version import TorchVersion

import ranks
from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.describe.run import Run
from meshwright.describe.workload import Workload
from meshwright.errors import MeshwrightError
from meshwright.parallel import compile as compiling
from meshwright.parallel.apply import apply
from meshwright.parallel.compile import names_of_results, plan_compilation, resolve_compile
from meshwright.programs.pipelines import build
from meshwright.training.data.samples import RandomSamples
from meshwright.training.fake_group import fake_group, filled_receives
from meshwright.training.loop import Trainer

DENSE = Model(hidden=8, layers=3, heads=2, ffn=8, vocab=9, dropout_rate=0.3)
EXPERTS = DENSE.but(experts=2, top_k=1, expert_ffn=8, shared_experts=1, dropout_rate=0.0)


def planned(setting="blocks", device="cpu", model=DENSE, program=None, sharded=False, **fields):
    return plan_compilation(setting, device, Plan(**fields), model, program, sharded)


def test_auto_compiles_blocks_on_gpus_and_nothing_on_cpus():
    assert resolve_compile("auto", "cuda:1") == "blocks"
    assert resolve_compile("auto", "cpu") == "off"
    assert resolve_compile("whole", "cpu") == "whole"
    assert Run().compile == "auto"


def test_a_cpu_without_a_compiler_is_refused(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(MeshwrightError, match=r"MW-PAR-009.*C\+\+ compiler"):
        resolve_compile("blocks", "cpu")
    assert resolve_compile("auto", "cpu") == "off"


def test_what_cannot_be_compiled_is_left_out_with_its_reason():
    split = planned(program=build("zb-h1", 2, 4, 1), pp=2, schedule="zb-h1")
    assert split.mode == "off"
    assert "zb-h1 splits the backward" in split.notes[0]
    assert planned(program=build("1f1b", 2, 4, 1), pp=2).mode == "blocks"
    assert planned("whole").mode == "whole"
    for fields in ({"sharded": True}, {"recompute": "full"}, {"offload": "activations"}, {"model": EXPERTS}):
        found = planned("whole", **fields)
        assert (found.mode, found.notes[0][:11]) == ("blocks", "not whole: "), fields
    assert "routed experts" in planned(model=EXPERTS).notes[-1]
    assert planned().notes == []


@pytest.fixture
def traced_only(monkeypatch):
    """One process; graphs are traced and not compiled."""
    from torch._dynamo.utils import counters

    monkeypatch.setattr(compiling, "BACKEND", "eager")
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    reset()
    counters.clear()
    yield
    distributed.destroy_process_group()


def losses(model, mode):
    parallel = apply(model, Plan(), Workload(batch=2, seq=4), 0, dtype=torch.float64, compile=mode)
    return [record.loss for record in Trainer(parallel, RandomSamples(model, 4, 0, False)).train(3)]


@pytest.mark.parametrize(
    ("model", "mode", "counts"),
    [(DENSE, "blocks", (1, 0)), *ranks.soak([(DENSE, "whole", (1, 0))]), (EXPERTS, "blocks", (9, 1))],
    ids=["dense", "dense whole", "experts"],
)
def test_all_layers_of_a_kind_share_one_graph_in_every_step(traced_only, model, mode, counts):
    """One graph of a layer; with experts a layer is two graphs around their dispatch, the shared experts are one, so is the activation, the
    sums of copies are three, and the routing is two: the first micro-batch of a step begins the counts of tokens.
    Dropout draws other elements in each step without another graph."""
    assert losses(model, mode) == losses(model, "off")
    assert compiling.graph_counts() == counts


def test_no_compiled_function_returns_a_tensor_that_has_another_name(monkeypatch):
    """With one sequence a gathered tensor is contiguous in any order of its dimensions."""
    found = []

    def backend(graph, inputs):
        found.extend(names_of_results(graph))
        return graph.forward

    monkeypatch.setattr(compiling, "BACKEND", backend)
    plan = Plan(tp=2, sp=True, microbatch=1)
    reset()
    with fake_group(0, plan.world), filled_receives():
        workload = Workload(batch=plan.dp, seq=8)
        parallel = apply(DENSE, plan, workload, 0, dtype=torch.float64, compile="blocks")
        Trainer(parallel, RandomSamples(DENSE, 8, 0, False)).train(1)
    assert len(found) > 2
    assert [names for names in found if len(names) > 1] == []


class TwoNames(torch.autograd.Function):
    """Its second result is its `doubled`, if that is contiguous."""

    @staticmethod
    def forward(ctx, x):
        doubled = x * 2
        return x * 3, doubled.contiguous()

    @staticmethod
    def backward(ctx, of_first, of_second):
        return 3 * of_first + 2 * of_second


@pytest.mark.parametrize("release", ["2.11.0", "2.12.0"])
@pytest.mark.parametrize("contiguous", [True, False])
def test_a_compiled_layer_never_loses_a_gradient(monkeypatch, release, contiguous):
    """Under torch 2.11 the gradient would be zero, so the layer is refused there. Both releases are tested as far as this torch allows."""
    monkeypatch.setattr(compiling, "BACKEND", "aot_eager")
    monkeypatch.setattr(torch, "__version__", min(torch.__version__, TorchVersion(release)))
    reset()
    x = torch.ones(2, 3, dtype=torch.float64).requires_grad_()
    function = compiling.compiled(lambda x: TwoNames.apply(x if contiguous else x.t())[1].sum())
    if torch.__version__ < TorchVersion("2.12") and contiguous:
        with pytest.raises(MeshwrightError, match=r"MW-PAR-011: torch 2\.11.*(doubled and|and doubled)"):
            function(x)
    else:
        function(x).backward()
        assert torch.equal(x.grad, torch.full_like(x, 2))
