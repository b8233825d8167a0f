"""Parts of data parallelism: buckets are sent during backward, shards have their size, pieces cover the model once."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import ranks
from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.describe.workload import Workload

MODEL = Model(hidden=16, layers=3, heads=2, ffn=24, vocab=33, tied=True)
WORKLOAD = Workload(batch=8, seq=4)
PLANS = [
    Plan(replicate=4), Plan(shard=4, zero=3), Plan(shard=2, replicate=2, zero=3), Plan(tp=2, replicate=2),
    Plan(tp=2, sp=True, shard=2, zero=3), Plan(pp=2, tp=2), Plan(pp=2, shard=2, zero=3), Plan(pp=2, tp=2, order=("pp", "tp", "cp", "dp")),
]  # fmt: skip


def buckets(context, bytes_):
    from torch import distributed, nn

    from meshwright.parallel.data.buckets import Buckets

    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(4, 4, dtype=torch.float64) for _ in range(4)))
    made = Buckets(module, distributed.group.WORLD, bytes_)
    log = []
    send = made._send
    made._send = lambda: log.append("send") or send()
    for i, layer in enumerate(module):
        layer.register_full_backward_pre_hook(lambda *_, i=i: log.append(i))
    for last in (False, True):
        made.begin(last)
        module(torch.full((2, 4), 1.0 + context.rank, dtype=torch.float64)).sum().backward()
    made.finish()
    gradients = [p.grad.numpy().copy() for p in module.parameters()]
    views = all(
        p.grad.untyped_storage().data_ptr() == made.flat.untyped_storage().data_ptr() for p in module.parameters()
    )
    sizes = [m.numel() for m in made.messages]
    made.zero()
    return log, gradients, sizes, views, bool((made.flat == 0).all())


def boxes(context, model, plans, workload):
    """(name, start, shape, counted) of every piece, and bytes of parameters, under each plan."""
    from meshwright.parallel.apply import apply

    out = []
    for plan in plans:
        parallel = apply(model, plan, workload, context.rank)
        out.append([(p.name, p.start, tuple(p.local.shape), p.box.first_copy, p.full_shape) for p in parallel.pieces])
    return out


def test_buckets_are_views_sent_in_order_while_backward_runs():
    results = ranks.run(2, buckets, 256.0)
    for log, _, sizes, views, zeroed in results:
        assert len(sizes) == -(-4 * (16 + 4) * 8 // 256)
        assert sum(sizes) == 80
        assert views
        assert zeroed
        assert [entry for entry in log if entry != "send"] == [3, 2, 1, 0] * 2
        assert log.count("send") == len(sizes)
        first = log.index("send")
        assert log[:first].count(0) == 1  # nothing leaves in the first micro-batch
        assert 0 in log[first:]  # and the first message of the last leaves before backward is through
    for one, other in zip(results[0][1], results[1][1], strict=True):
        assert (one == other).all()


def test_buckets_are_summed_not_averaged():
    (_, alone, *_), (_, together, sizes, *_) = ranks.run(1, buckets, 1e9)[0], ranks.run(2, buckets, 1e9)[0]
    assert sizes == [80]  # all in one message
    assert (together[-1] == 2 * alone[-1]).all()  # the last bias sees ones, whatever the input


def test_counted_pieces_cover_every_element_once():
    by_rank = ranks.run(4, boxes, MODEL, PLANS, WORKLOAD)
    for i, plan in enumerate(PLANS):
        cover = {}
        for row in by_rank:
            for name, start, shape, counted, full in row[i]:
                whole = cover.setdefault(name, np.zeros(full, int))
                assert whole.shape == full
                if counted:
                    whole[tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))] += 1
        assert sum(w.size for w in cover.values()) == MODEL.total
        assert all((w == 1).all() for w in cover.values()), plan.title()


def test_zero_3_keeps_only_its_shard():
    (mine,) = ranks.run(4, boxes, MODEL, [Plan(shard=4, zero=3)], WORKLOAD)[1]
    for _, _, shape, _, full in mine:
        assert shape[0] <= -(-full[0] // 4)


def test_fewer_experts_than_ranks_are_cut_in_their_width():
    moe = MODEL.but(experts=3, top_k=1)
    held = [0] * 4
    for rank, (mine,) in enumerate(ranks.run(4, boxes, moe, [Plan(shard=4, zero=3)], WORKLOAD)):
        for name, _, shape, _, full in mine:
            if ".experts." in name:
                assert shape == (3, full[1] // 4, full[2])
            held[rank] += np.prod(shape)
    assert max(held) < 1.02 * min(held)  # but for rows of the vocabulary


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"zero": 3}, (True, True, torch.bfloat16, torch.float32)),
        ({"zero": 3, "grad_dtype": "bf16", "prefetch": False}, (False, True, torch.bfloat16, torch.bfloat16)),
        ({"zero": 3, "grad_dtype": "bf16", "comm_dtype": "fp32"}, (True, True, torch.bfloat16, torch.float32)),
        (
            {"zero": 3, "comm_dtype": "bf16"},
            (True, True, torch.bfloat16, torch.float32),
        ),  # narrowed by us when it is sent
        ({"zero": 2}, (True, False, torch.bfloat16, torch.float32)),
        ({"zero": 3, "pp": 2}, (True, False, torch.bfloat16, torch.float32)),
    ],
)
def test_sharding_options_are_passed_to_torch(fields, expected, monkeypatch):
    from meshwright.models import build
    from meshwright.parallel.data import zero

    asked = []
    monkeypatch.setattr(zero, "shard_units", lambda module, units, mesh, how, ignored=None: asked.append(how))
    mesh = SimpleNamespace(expert_sharding=None, sharding=lambda: None)
    zero.shard(build(MODEL), mesh, Plan(shard=2, **fields), torch.bfloat16)
    (how,) = asked
    assert (how.forward, how.reshard, how.param_dtype, how.reduce_dtype) == expected
    assert how.backward == how.forward


def test_gradients_of_one_rank_are_allocated_by_backward_and_freed():
    from torch import nn

    from meshwright.parallel.data.reduction import LocalGradients

    module, twin = (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2))
    twin.load_state_dict(module.state_dict())
    unused, late = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3), requires_grad=False)
    made = LocalGradients([*module.parameters(), unused, late])
    for step in range(2):
        inputs = torch.full((2, 4), 1.0 + step)
        for chunk in inputs.split(1):
            made.begin(last=True)
            module(chunk).square().sum().backward()
        made.finish()
        twin.zero_grad()
        twin(inputs).square().sum().backward()
        for ours, theirs in zip(module.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)
        assert not unused.grad.any()
        assert late.grad is None
        made.zero()
        assert all(p.grad is None for p in module.parameters())
    late.requires_grad_(True)
    late.sum().backward()
    made.zero()
    assert late.grad is None


def own_buckets(context):
    """By change to a user's module: whether the gradients of each step equal one device, or the error."""
    from torch import distributed, nn

    from meshwright.errors import MeshwrightError
    from meshwright.parallel.data.buckets import Buckets
    from meshwright.parallel.numerics.compress.compressors import make_compressor

    group, out = distributed.group.WORLD, {}

    def network():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()

    def loss(module, rank=context.rank):
        return module(torch.full((2, 3), 1.0 + rank, dtype=torch.float64)).square().sum()

    def right(module):
        twin = network()
        sum(loss(twin, rank) for rank in range(2)).backward()
        return all(torch.allclose(p.grad, q.grad) for p, q in zip(module.parameters(), twin.parameters(), strict=True))

    def step(module, buckets, **how):
        buckets.begin(last=True)
        loss(module).backward(**how)
        buckets.finish()
        return right(module)

    def code_of(do):
        try:
            return do() or "nothing"
        except MeshwrightError as error:
            return error.code

    module = network()
    buckets, optimizer = Buckets(module, group, float("inf")), torch.optim.SGD(module.parameters(), 0.0)
    out["zero_grad"] = [(optimizer.zero_grad(), step(module, buckets))[1] for _ in range(2)]
    module[0].weight.grad = module[0].weight.grad / 2
    buckets.zero()
    out["another gradient set, then a graph of the gradient"] = step(module, buckets, create_graph=True)
    buckets.zero()
    buckets.begin(last=False)
    loss(module).backward()
    optimizer.zero_grad()
    module[2](torch.ones(1, 4, dtype=torch.float64)).sum().backward()
    buckets.finish()
    out["unused after zero_grad"] = not module[0].weight.grad.any() and bool(module[2].weight.grad.any())

    for name in ("none", "top-k"):
        module = network()
        buckets = Buckets(module, group, 60.0, compressor=make_compressor(name, ratio=1.0))
        hook = module[0].weight.register_hook(lambda gradient: 1 / 0)
        buckets.begin(last=True)
        try:
            loss(module).backward()
        except ZeroDivisionError:
            out[f"left before it was given up, {name}"] = 0 < buckets._sent < len(buckets.messages)
        hook.remove()
        buckets.zero()
        out[f"given up, {name}"] = step(module, buckets)

    buckets.zero()
    buckets.begin(last=True)
    loss(module).backward()
    out["two backwards"] = code_of(lambda: loss(module).backward())
    out["no finish"] = code_of(lambda: buckets.begin(last=True))
    module[0].requires_grad_(False)
    late = Buckets(module, group, 1e9)
    module[0].requires_grad_(True)
    out["unfrozen"] = code_of(lambda: late.begin(last=True))
    replaced = Buckets(module, group, 1e9)
    module[2].weight = nn.Parameter(module[2].weight.detach())
    out["replaced"] = code_of(lambda: replaced.begin(last=True))
    shared = make_compressor("int8")
    of_one = Buckets(module, group, 1e9, compressor=shared, only={module[0].weight})
    out["one compressor"] = code_of(lambda: Buckets(module, group, 1e9, compressor=shared, only={module[2].weight}))
    of_one.begin(last=True)
    module[0].float()
    out["two dtypes"] = code_of(lambda: Buckets(module, group, 1e9))
    for name in ("int8", "top-k", "threshold", "powersgd"):
        for empty in (nn.Tanh(), network().requires_grad_(False), nn.Linear(0, 3, bias=False)):
            buckets = Buckets(empty, group, 1e9, compressor=make_compressor(name))
            buckets.begin(last=True)
            buckets.finish()
            buckets.zero()
    return out


def test_buckets_follow_a_users_changes_to_gradients_or_raise():
    for out in ranks.run(2, own_buckets):
        assert out.pop("zero_grad") == [True, True]
        codes = {
            key: out.pop(key)
            for key in ("two backwards", "no finish", "unfrozen", "replaced", "two dtypes", "one compressor")
        }
        expected = ["MW-ZERO-004", "MW-ZERO-004", "MW-ZERO-003", "MW-ZERO-003", "MW-ZERO-005", "MW-COMP-003"]
        assert list(codes.values()) == expected
        assert out == dict.fromkeys(out, True)


@pytest.mark.parametrize("kind", ["flat", "own"])
def test_narrow_gradients_are_added_in_float32_without_a_converted_copy(kind):
    """10 bytes an element: on a GPU the copy costs as many again, a sixth of a pipeline stage's step."""
    from torch import nn
    from torch.utils._python_dispatch import TorchDispatchMode

    from meshwright.parallel.data.buckets import Buckets
    from meshwright.parallel.data.reduction import LocalGradients

    module = nn.Linear(8, 8).bfloat16()
    made = (
        LocalGradients(module.parameters(), torch.float32)
        if kind == "own"
        else Buckets(module, None, 1e6, dtype=torch.float32)
    )
    inputs = torch.randn(6, 8, dtype=torch.bfloat16)
    wanted = [torch.zeros(p.shape) for p in module.parameters()]
    calls = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            calls.append(str(function))
            return function(*args, **kwargs or {})

    for i, chunk in enumerate(inputs.split(2)):
        for total, gradient in zip(wanted, torch.autograd.grad(module(chunk).sum(), module.parameters()), strict=True):
            total += gradient
        made.begin(last=i == 2)
        calls.clear()
        with Seen():
            module(chunk).sum().backward()
        assert not [name for name in calls if "_to_copy" in name]
    made.finish()
    for p, total in zip(module.parameters(), wanted, strict=True):
        assert p.grad.dtype == torch.float32
        assert torch.equal(p.grad, total)


@pytest.mark.parametrize(
    ("fields", "adds"),
    [
        ({"replicate": 2}, True),
        ({"zero": 1, "shard": 2}, True),
        ({"zero": 3, "shard": 2, "reduce": "step"}, True),
        ({"zero": 2, "shard": 2}, False),
        ({"zero": 3, "shard": 2}, False),
    ],
)
def test_whole_gradients_are_added_up_where_the_cost_model_says(fields, adds):
    """Micro-batches that reduce to shards copy their 16-bit gradients to the buffer of the reduction, and add none of them to a sum in float32."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from meshwright.describe.stack import Stack
    from meshwright.lower.step import step_program
    from meshwright.parallel.apply import apply
    from meshwright.training.data.samples import RandomSamples
    from meshwright.training.fake_group import fake_group, filled_receives
    from meshwright.training.loop import Trainer

    model = Model(hidden=64, layers=2, heads=4, kv_heads=2, ffn=160, vocab=96)
    plan, work = Plan(microbatch=1, **fields), Workload(batch=4, seq=16, precision="bf16")
    added = copied = 0

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal added, copied
            tensors = [x for x in args if isinstance(x, torch.Tensor) and x.dim() > 0]
            if str(function) == "aten.add_.Tensor" and len({x.dtype for x in tensors}) > 1:
                added += tensors[0].numel()
            copied += "chunk_cat" in str(function)
            return function(*args, **kwargs or {})

    with fake_group(0, plan.world), filled_receives():
        trainer = Trainer(apply(model, plan, work, 0, dtype=torch.bfloat16), RandomSamples(model, 16, 0, False))
        with Seen():
            trainer.train(1)
    program = step_program(model, plan, work, Stack(fused=()))
    sums, copies = program.batch.gradient_passes("dense")
    assert (added > sum(model.parameters().values()) / 2) == sums.all() == adds
    assert (added == 0) == (not sums.any())
    assert (copied > 0) == (fields.get("zero", 0) > 0)
    assert copies.all() == (fields == {"zero": 2, "shard": 2})
