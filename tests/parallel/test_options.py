"""Options of data parallelism on a user's module: order of gathers, dtypes and overlap."""

import pytest
import torch
from torch import nn

import ranks
from meshwright.cost.memory import gathered_memory, state_memory
from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.describe.workload import Workload
from meshwright.lower.step import step_program

LAYERS = 6


class Own(nn.Module):
    """A user's network: layers, a buffer, and a head."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.ModuleList(nn.Linear(8, 8, dtype=torch.float64) for _ in range(LAYERS))
        self.end = nn.Linear(8, 3, dtype=torch.float64)
        self.register_buffer("shift", torch.full((8,), 0.1, dtype=torch.float64))

    def forward(self, x):
        for layer in self.body:
            x = torch.tanh(layer(x))
        return self.end(x + self.shift.to(x.dtype))


def batch(rank):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


class Gathers:
    """Replaces torch's all-gather and counts calls."""

    def __init__(self):
        self.count = 0

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        from meshwright.parallel import operators

        self.count += 1
        return operators.gather_into(output_tensor, input_tensor, group=group, async_op=async_op)


def sharded(context, options):
    """Gradients, the dtypes inside, and the number of units gathered or in flight while each unit runs, in forward and backward."""
    from torch.distributed.device_mesh import init_device_mesh

    from meshwright.parallel.data.gathering import Gathering, grouped, shard_units

    module = Own()
    units = grouped(list(module.body), options.pop("layers", 1))
    shard_units(module, units, init_device_mesh("cpu", (context.world,)), Gathering(**options))
    gathers, ahead, seen = Gathers(), {"forward": [], "backward": []}, set()

    def look(which):
        """Those asked for, less those that are through with their work."""
        return lambda *_: ahead[which].append(gathers.count - len(ahead[which]))

    for unit in units:
        unit[0].set_custom_all_gather(gathers)
        unit[0].register_forward_hook(lambda m, args, out: seen.add((args[0].dtype, module.shift.dtype)))
        unit[0].register_forward_pre_hook(look("forward"))
        unit[0].register_full_backward_hook(look("backward"))
    for _ in range(2):  # in the first, torch learns the order
        module.zero_grad()
        ahead["forward"].clear()
        gathers.count = 0
        loss = module(batch(context.rank)).sum()
        ahead["backward"].clear()
        gathers.count = 0
        loss.backward()
    gradients = [p.grad.full_tensor().numpy() for p in module.parameters()]
    return [len(unit) for unit in units], ahead, seen, gradients


def alone(world):
    module = Own()
    sum(module(batch(rank)).sum() for rank in range(world)).backward()
    return [p.grad.numpy() for p in module.parameters()]


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({}, [1] * 6),
        ({"layers": 4}, [4, 2]),
        ({"layers": 0}, []),
        ({"reshard": False}, [1] * 6),
        ({"forward": False, "backward": False}, [1] * 6),
    ],
)
def test_units_are_wrapped_and_prefetched_as_configured(options, sizes):
    for made, ahead, _, gradients in ranks.run(2, sharded, options):
        assert made == sizes
        for got, expected in zip(gradients, alone(2), strict=True):
            assert abs(got - expected).max() < 1e-13
        if not options.get("reshard", True):
            assert set(ahead["backward"]) <= {0, -1, -2, -3, -4, -5}  # nothing is gathered again
        elif made == [1] * 6:
            assert max(ahead["forward"]) == 1
            assert max(ahead["backward"]) == 1 + options.get("backward", True)  # torch's default: one unit ahead


def test_parameters_and_reductions_have_separate_dtypes():
    options = {"param_dtype": torch.float32, "reduce_dtype": torch.float64}
    for _, _, seen, gradients in ranks.run(2, sharded, options):
        assert {x for x, _ in seen} == {torch.float32}
        assert gradients[0].dtype == "float64"
        assert 1e-9 < abs(gradients[0] - alone(2)[0]).max() < 1e-2


def replicated(context, options, orders, used):
    """Flat gradients of each step, and the number of messages sent before backward ends."""
    from torch import distributed

    from meshwright.parallel.data.buckets import Buckets

    module = Own()
    buckets = Buckets(module, distributed.group.WORLD, 600.0, **options)
    out = []
    for step, order in enumerate(orders):
        for microbatch in range(2):
            buckets.begin(last=microbatch == 1)
            x = batch(context.rank)
            for i in order[context.rank]:
                x = torch.tanh(module.body[i](x))
            (module.end(x) if used[step] else x).sum().backward()
        early = buckets._sent
        buckets.finish()
        out.append((buckets.flat.numpy().copy(), early, len(buckets.messages)))
        buckets.zero()
    return out


def test_ranks_may_run_their_layers_in_any_order():
    orders = [([0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0]), ([2, 3], [4, 0, 1])]
    one, other = ranks.run(2, replicated, {}, orders, (True, True))
    for (a, _, _), (b, _, _) in zip(one, other, strict=True):
        assert (a == b).all()
        assert (a != 0).any()


def test_reducing_every_micro_batch_gives_the_same_sum():
    order = ([0, 1, 2, 3, 4, 5],) * 2
    once, each = (ranks.run(2, replicated, {"per_microbatch": e}, [order] * 2, (True, True))[0] for e in (False, True))
    for (a, _, _), (b, _, _) in zip(once, each, strict=True):
        assert abs(a - b).max() < 1e-12


MODEL = Model(hidden=16, layers=4, heads=4, kv_heads=2, ffn=24, vocab=33)


def test_wider_units_are_fewer_messages_and_more_memory():
    plans = [Plan(shard=4, zero=3, wrap=n) for n in (1, 2, 0)]
    program = step_program(MODEL, plans, Workload(batch=8, seq=8))
    gathers = {
        kind: next(op for op in program.blocks[kind, "F"] if op.name == "gather-weights")
        for kind in ("embedding", "dense", "head")
    }
    for gather in gathers.values():  # of a message that several share, each has its part
        assert (gather.count * gather.message_bytes).tolist() == pytest.approx([gather.message_bytes[0]] * 3)
    messages = sum(gather.count * (4 if kind == "dense" else 1) for kind, gather in gathers.items())
    assert messages.tolist() == pytest.approx([6, 4, 1])
    memory = gathered_memory(program, program.ranks[0])
    assert memory[0] < memory[1] <= memory[2]
    many = step_program(MODEL, [Plan(replicate=2), Plan(replicate=2, reduce="microbatch")], Workload(batch=8, seq=8))
    once, each = state_memory(many, many.ranks[0])["gradients"]
    assert each > once


def plans_zero(plans):
    import numpy as np

    return np.zeros(len(plans))
