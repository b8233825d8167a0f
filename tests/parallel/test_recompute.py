"""Recompute changes only memory: parity is exact, and saved bytes fall as predicted."""

import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import ranks
from meshwright.cost.memory import memory
from meshwright.cost.step import step_cost
from meshwright.describe import catalog
from meshwright.describe.config import Config
from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.describe.stack import Stack
from meshwright.describe.workload import Workload
from meshwright.errors import MeshwrightError
from meshwright.lower.recompute import layers_to_recompute, resolve_recompute_budget
from meshwright.lower.step import step_program
from meshwright.models import build
from meshwright.models.attention import Geometry
from meshwright.parallel.recompute import memory_of, recompute, recompute_plan, recomputed
from meshwright.planner.advice.lint import check as lint
from meshwright.predict.estimate import estimate
from meshwright.predict.prediction import USABLE_MEMORY, peak, predict, resolve_recompute
from meshwright.proof.small import small_copy

MODEL = Model(hidden=32, layers=4, heads=4, kv_heads=2, ffn=48, vocab=50)
WORKLOAD = Workload(batch=2, seq=8, precision="fp32")


def network(plan, dtype=torch.float64):
    torch.manual_seed(0)
    made = build(MODEL).to_empty(device="cpu").to(dtype)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.2)
    recompute_plan(made, plan)
    return made


def saved_bytes(run, parameters):
    """Bytes of distinct storages that autograd saves, without weights."""
    own = {p.untyped_storage().data_ptr() for p in parameters}
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = run()
    return sum(t.untyped_storage().nbytes() for address, t in kept.items() if address not in own), out


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_gradients_are_bitwise_those_without_recompute(mode):
    ids = torch.arange(16).reshape(2, 8)
    results = []
    for plan in (Plan(), Plan(recompute=mode)):
        net = network(plan)
        net(ids).square().sum().backward()
        results.append([p.grad for p in net.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def product_flops(plan):
    """FLOPs of matrix products in one forward and backward on one device."""
    model, ids = network(plan), torch.arange(16).reshape(2, 8)
    with FlopCounterMode(display=False) as counter:
        model(ids).square().sum().backward()
    return sum(n for op, n in counter.get_flop_counts()["Global"].items() if op is torch.ops.aten.mm)


def test_full_recompute_repeats_all_products_of_a_layer_but_the_last():
    """Torch ends the rerun at the last tensor that backward needs: the input of the down projection."""
    plans = [Plan(microbatch=2, recompute=mode) for mode in ("none", "full")]
    without, whole = map(product_flops, plans)
    program = step_program(MODEL, plans[1], WORKLOAD, Stack())
    again = sum(op.count * op.flops for phase, op in program.ops("dense") if phase == "R" and op.kind == "gemm")
    assert whole - without == pytest.approx(MODEL.layers * float(np.broadcast_to(again, 1)[0]))
    megatron = step_program(MODEL, plans[1], WORKLOAD, Stack(early_stop=False))
    more = sum(op.count * op.flops for phase, op in megatron.ops("dense") if phase == "R" and op.kind == "gemm")
    assert float(np.broadcast_to(more - again, 1)[0]) == pytest.approx(2 * 16 * MODEL.hidden * MODEL.ffn)


def products_run(plan):
    """The number of matrix products that one forward and backward run in compiled layers, as a profile counts them."""
    net, ids = build(MODEL).to_empty(device="cpu"), torch.arange(16).reshape(2, 8)
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.2)
    net.geometry.prepare(8, torch.float32, torch.device("cpu"))
    for layer in net.layers.values():
        layer.forward = torch.compile(layer.forward, backend="aot_eager", dynamic=False)
    recompute_plan(net, plan)
    net(ids).square().sum().backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        net(ids).square().sum().backward()
    return sum(row.count for row in profile.key_averages() if row.key == "aten::mm")


def test_full_recompute_around_a_compiled_layer_repeats_all_products():
    """The compiled graph hands its tensors to autograd when it has ended: it cannot stop early."""
    plans = [Plan(microbatch=2, recompute=mode) for mode in ("none", "full")]
    without, whole = map(products_run, plans)
    program = step_program(MODEL, plans[1], WORKLOAD, Stack(**catalog.entry("stacks", "meshwright")))
    flops = {
        p: sum(op.count * op.flops for phase, op in program.ops("dense") if phase == p and op.kind == "gemm")
        for p in "FR"
    }
    assert whole - without == 7 * MODEL.layers
    assert float(np.broadcast_to(flops["R"], 1)[0]) == pytest.approx(float(np.broadcast_to(flops["F"], 1)[0]))


def test_saved_bytes_fall_as_predicted():
    measured, predicted = {}, {}
    for mode in ("none", "selective", "full"):
        plan = Plan(recompute=mode, microbatch=2)
        net = network(plan, torch.float32)

        def run(net=net):
            x = torch.ones(2, 8, 32, requires_grad=True)
            for layer in net.layers.values():
                x = layer(x)
            return x

        measured[mode] = saved_bytes(run, net.parameters())[0]
        parts = step_program(MODEL, plan, WORKLOAD, Stack(fused=())).saved["dense"]
        predicted[mode] = MODEL.layers * sum(float(size[0]) for size in parts.values())
    assert measured["full"] == predicted["full"] == MODEL.layers * 2 * 8 * 32 * 4
    assert measured["none"] - measured["selective"] == predicted["none"] - predicted["selective"] > 0
    # Besides the prediction there are only one reciprocal root a token and norm, and the one table of rotations.
    assert measured["none"] == predicted["none"] + MODEL.layers * 2 * 16 * 4 + 2 * 8 * 8 * 4


@pytest.mark.parametrize(
    ("fields", "again"), [({"recompute_every": 2}, 4), ({"recompute_every": 3, "recompute_layers": 1}, 2)]
)
def test_recompute_of_some_layers_has_proportional_memory_and_work(fields, again):
    """Eight layers in two stages: saved, recomputed, and the mean of both."""
    model, workload = MODEL.but(layers=8), Workload(batch=8, seq=8, precision="fp32")
    plans = [Plan(pp=2, recompute="none"), Plan(pp=2, recompute="full", **fields), Plan(pp=2, recompute="full")]
    laptop = catalog.load("clusters", "laptop")
    cost = step_cost(step_program(model, plans, workload, Stack(), every_rank=True), laptop)
    kept = sum(rank.kept for rank in cost.program.ranks)
    assert kept[1] == pytest.approx(kept[0] + again / 8 * (kept[2] - kept[0]))
    assert cost.exposed["recompute"][1] == pytest.approx(again / 8 * cost.exposed["recompute"][2])
    single = step_cost(step_program(model, plans[1], workload, Stack(), every_rank=True), laptop)
    assert single.time[0] == pytest.approx(cost.time[1])


def test_auto_recomputes_the_fewest_layers_that_fit():
    plan, batch = Plan(recompute="auto", recompute_budget=1e12, microbatch=2), Workload(batch=2, seq=8)
    assert resolve_recompute_budget(MODEL, plan, batch).recompute == "none"
    half = 0.6 * layers_to_recompute(MODEL, plan, batch, 1e12).bytes
    chosen = resolve_recompute_budget(MODEL, plan.but(recompute_budget=half), batch)
    assert chosen == Plan(
        recompute="full", recompute_layers=layers_to_recompute(MODEL, plan, batch, half).layers, microbatch=2
    )
    assert 0 < chosen.recompute_layers < MODEL.layers
    auto = step_program(MODEL, plan.but(recompute_budget=half), batch)
    assert memory(auto, auto.ranks[0])["activations"][0] <= half + auto.saved["head"]["head"][0] * 2
    net = network(chosen)
    assert [layer.forward.__qualname__.startswith("recomputed") for layer in net.layers.values()] == [
        i < chosen.recompute_layers for i in range(MODEL.layers)
    ]


def test_every_nth_and_a_count_choose_layers_of_any_module():
    layers = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(6)]
    assert recompute(layers, every=2, count=2) == [layers[0], layers[2]]
    full, part = (nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(2))
    part.load_state_dict(full.state_dict())
    recompute([part])
    x = torch.ones(3, 4)  # needs no gradient, as a model's first input
    more, y = saved_bytes(lambda: full(x), full.parameters())
    less, z = saved_bytes(lambda: part(x), part.parameters())
    assert less == x.nbytes < more
    y.sum().backward()
    z.sum().backward()
    assert torch.equal(full[0].weight.grad, part[0].weight.grad)
    with pytest.raises(MeshwrightError, match="MW-PAR-002"):
        recompute(layers, every=0)


def test_recomputed_dropout_is_the_same_and_a_layer_is_recomputed_once():
    calls = []

    class Dropped(nn.Module):
        def forward(self, x):
            calls.append(1)
            return nn.functional.dropout(x, 0.5).exp()

    layer = Dropped()
    recompute([layer])
    x = torch.ones(64, requires_grad=True)
    y = layer(x)
    state = torch.get_rng_state()
    torch.autograd.grad(y.sum(), x, retain_graph=True)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert len(calls) == 2  # two backward passes, as for I and W, but one recompute
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(gradient, torch.where(y == 1, 0.0, 2 * y.detach()))


@pytest.mark.parametrize(("pp", "microbatches"), [(1, 1), (2, 4)])
def test_a_budget_is_met_with_the_fewest_layers(pp, microbatches):
    model, plan = MODEL.but(layers=8), Plan(pp=pp, microbatch=2)
    workload = Workload(batch=2 * microbatches, seq=8, precision="fp32")
    none = layers_to_recompute(model, plan, workload, 1e12)
    some = layers_to_recompute(model, plan, workload, 0.6 * none.bytes)
    assert none.layers == 0
    assert 0 < some.layers < some.of == model.layers // pp
    assert some.bytes <= 0.6 * none.bytes
    assert layers_to_recompute(model, plan, workload, some.bytes).layers == some.layers
    assert layers_to_recompute(model, plan, workload, some.bytes - 1).layers == some.layers + 1
    with pytest.raises(MeshwrightError, match="MW-PAR-003"):
        layers_to_recompute(model, plan, workload, 1.0)


def test_auto_without_a_budget_uses_the_memory_of_the_device():
    """The fewest layers with which the plan fits, by the memory model of `estimate`, in every command."""
    model = MODEL.but(layers=8, hidden=256, ffn=1024, vocab=512)
    laptop, stack = catalog.load("clusters", "laptop"), Stack()
    plan, workload = Plan(recompute="auto", pp=2, microbatch=4), Workload(batch=16, seq=512)
    whole, bare = (peak(model, plan.but(recompute=r), workload, stack) for r in ("none", "full"))
    assert resolve_recompute(model, plan, workload, stack, 1.1 * whole).recompute == "none"
    device = 0.5 * (whole + bare) / USABLE_MEMORY
    chosen = resolve_recompute(model, plan, workload, stack, device)
    assert 0 < chosen.recompute_layers < 4
    fewer = chosen.but(recompute_layers=chosen.recompute_layers - 1)
    assert peak(model, chosen, workload, stack) <= USABLE_MEMORY * device < peak(model, fewer, workload, stack)
    with pytest.raises(MeshwrightError, match=r"MW-PAR-003: .* per device with every layer recomputed, more than"):
        resolve_recompute(model, plan, workload, stack, bare)
    explicit = plan.but(recompute_budget=layers_to_recompute(model, plan, workload, 1e12).bytes)
    # An explicit budget takes precedence.
    assert resolve_recompute(model, explicit, workload, stack, 1.0).recompute == "none"
    with pytest.raises(MeshwrightError, match="MW-PAR-004"):
        step_program(model, plan, workload)

    cluster, tight = (laptop.with_gpus(2).but(accelerator=laptop.accelerator.but(memory=m)) for m in (device, bare))
    config = Config(model, cluster, plan, workload, stack)
    assert estimate(Config(model, cluster, plan, workload, stack)).plan == chosen
    assert predict(Config(model, cluster, plan, workload, stack)) == predict(
        Config(model, cluster, chosen, workload, stack)
    )
    small = small_copy(config, 8).plan
    assert (small.recompute, small.recompute_layers) == ("full", 1)
    with pytest.raises(MeshwrightError, match="MW-PAR-003"):
        lint.check(replace(config, cluster=tight))


def resolved_on_two_ranks(context):
    from meshwright.parallel.apply import apply

    plan = Plan(recompute="auto", tp=2, param_dtype="fp32", master=False)
    return apply(MODEL, plan, WORKLOAD, context.rank).plan.recompute


def test_a_rank_fits_in_its_share_of_the_host_memory():
    assert ranks.run(2, resolved_on_two_ranks) == ["none", "none"]


def memory_here(context, pages=None):
    if pages:
        os.sysconf = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": pages[context.rank]}.get
    return memory_of(context.device)


def test_the_memory_of_a_rank_is_its_share_of_the_host():
    whole = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    assert memory_of("cpu") == whole
    assert ranks.run(2, memory_here) == [whole / 2] * 2
    assert ranks.run(2, memory_here, [2000, 1000]) == [4096 * 500.0] * 2  # on hosts of two sizes, the smaller one's


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.drop = nn.Linear(4, 4), nn.Dropout(0.5)

    def forward(self, x, *, scale, sides):
        return self.drop(torch.tanh(self.linear(x) * scale)) + sides[0]


def test_keyword_arguments_and_nested_tensors():
    full, part = Named().eval(), Named().eval()
    part.load_state_dict(full.state_dict())
    recompute([part])
    gradients = []
    for module in (full, part):
        x, scale, side = (torch.full((3, 4), value, requires_grad=True) for value in (1.0, 0.5, 2.0))
        module(x, scale=scale, sides=(side, None)).square().sum().backward()
        gradients.append([x.grad, scale.grad, side.grad, module.linear.weight.grad])
    for a, b in zip(*gradients, strict=True):
        assert torch.equal(a, b)


class Growing(nn.Module):
    rows = 1

    def forward(self, x):
        self.rows += 1
        return x[: self.rows].exp().sum()


def test_a_module_that_recomputes_differently_is_refused():
    growing, dropping = Growing(), Named()
    recompute([growing, dropping])
    y = growing(torch.ones(4, requires_grad=True))
    with pytest.raises(
        MeshwrightError, match=r"MW-PAR-005: .* saved a tensor of shape \(3,\) where the original saved \(2,\)"
    ):
        y.backward()
    y = dropping(torch.ones(3, 4), scale=torch.ones(4), sides=(torch.zeros(1),))
    dropping.eval()
    with pytest.raises(MeshwrightError, match=r"MW-PAR-005: .* saved fewer tensors"):
        y.sum().backward()


def test_running_statistics_count_a_batch_once():
    plain, layer = (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2))
    layer.load_state_dict(plain.state_dict())
    recompute([layer])
    x = torch.arange(12.0).view(3, 4)
    for module in (plain, layer):
        module(x).square().sum().backward()
    for a, b in zip(plain.buffers(), layer.buffers(), strict=True):
        assert torch.equal(a, b)


class _LosesExceptions:
    """What torch 2.11 does with an exception of a hook inside of `Function.apply`."""

    def __init__(self, always: bool = False) -> None:
        self.calls, self.always = 0, always

    def __call__(self, x):
        self.calls += 1
        if self.always and self.calls > 1:
            raise SystemError("apply returned NULL without setting an exception")
        try:
            return (x * x).exp()
        except Exception:
            raise SystemError("apply returned NULL without setting an exception") from None


def test_a_rerun_that_has_all_tensors_may_lose_its_exception():
    x = torch.ones(3, requires_grad=True)
    recomputed(_LosesExceptions())(x).sum().backward()
    assert torch.equal(x.grad, 2 * torch.exp(torch.ones(3)))
    out = recomputed(_LosesExceptions(always=True))(torch.ones(3, requires_grad=True))
    with pytest.raises(SystemError):
        out.sum().backward()


def test_what_attention_keeps_is_found_on_the_present_gpu():
    """Prepared for "cuda", found for tensors of "cuda:0": otherwise forward and rerun of a compiled layer are two graphs."""
    geometry = Geometry(MODEL)
    with FakeTensorMode():
        geometry.prepare(8, torch.float32, torch.device("cuda"))
        before = set(geometry._cache)
        geometry.angles(8, torch.float32, torch.empty(1, device="cuda").device)
    assert before
    assert set(geometry._cache) == before
