"""Offload moves memory without changing results: exact gradients and updates, and the number of copied bytes."""

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import ranks
from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.describe.workload import Workload
from meshwright.parallel.data import offload
from meshwright.parallel.recompute import recompute
from meshwright.parallel.tensor.regather import regather

MODEL = Model(hidden=16, layers=2, heads=2, ffn=24, vocab=32)


@pytest.mark.parametrize("hooks", ["regather", "offload"])
def test_hooks_do_not_keep_an_operator_alive_that_only_the_first_half_of_a_backward_reaches(hooks):
    """Attention saves its output, and the second half of a split backward does not run it again: nothing but the graph may hold that tensor."""
    x = torch.ones(3, requires_grad=True)
    if hooks == "regather":
        with regather(x, x, None):
            y = x.exp()  # saves its output
    else:
        y = offload.ActivationOffload().wrap(nn.Module(), torch.exp)(x)
    output = StorageWeakRef(y.untyped_storage())
    torch.autograd.grad(y.sum(), x, retain_graph=True)
    del y
    assert output.expired()


def layers(count=3):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(count))).double()


def test_activations_return_unchanged_and_are_copied_once():
    plain, moved = layers(), layers()
    away = offload.offload_activations(moved)
    x = torch.ones(5, 8, dtype=torch.float64, requires_grad=True)
    y = moved(x)
    each = x.nbytes  # a layer saves its input, tanh's output (which the second product saves too): two tensors
    assert away.down_bytes == 3 * 2 * each
    assert away.up_bytes == 0
    y.sum().backward()
    assert away.up_bytes == 3 * 2 * each  # three operations ask for two tensors
    assert not away._moved  # the host's copies went with the graph
    z = torch.ones_like(x).requires_grad_()
    plain(z).sum().backward()
    assert torch.equal(x.grad, z.grad)
    for a, b in zip(plain.parameters(), moved.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


@pytest.mark.parametrize(("count", "ahead"), [(1, 3), (2, 2), (3, 1), (4, 1), (0, 1)])
def test_the_first_layers_are_offloaded_and_return_while_later_ones_compute(count, ahead):
    """At backward of layer i those of layer i − ahead are back: L − n layers are on the device, or two."""
    plain, moved = layers(5), layers(5)
    away = offload.offload_activations(moved, count)
    x = torch.ones(5, 8, dtype=torch.float64, requires_grad=True)
    z = x.detach().clone().requires_grad_()
    returned = {}

    def watch(number):
        def note(_):
            returned[number] = away.up_bytes // (2 * x.nbytes)

        return note

    h = x
    for number, layer in enumerate(moved):
        h = layer(h)
        h.register_hook(watch(number))  # after the hook that starts copies
    number = count or 5
    assert away.down_bytes == number * 2 * x.nbytes
    h.sum().backward()
    plain(z).sum().backward()
    assert away.up_bytes == away.down_bytes
    last = number == 5  # of the last layer nothing has returned when its backward starts
    assert returned == {i: len(range(max(i - ahead, 0), number)) - (last and i == 4) for i in range(5)}
    assert torch.equal(x.grad, z.grad)
    for a, b in zip(plain.parameters(), moved.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_only_the_input_of_a_recomputed_layer_is_offloaded():
    net, plain = layers(), layers()
    recompute(net)
    away = offload.offload_activations(net)
    x = torch.ones(5, 8, dtype=torch.float64, requires_grad=True)
    net(x).sum().backward()
    plain(x).sum().backward()
    assert away.down_bytes == away.up_bytes == 3 * x.nbytes
    assert torch.equal(net[0][0].weight.grad, plain[0][0].weight.grad)


def test_a_tensor_changed_in_place_is_offloaded_as_saved():
    away = offload.ActivationOffload()
    x = torch.ones(4)
    first = away.send(x)
    x.add_(1)
    second = away.send(x)
    assert away.fetch(first).tolist() == [1.0] * 4
    assert away.fetch(second).tolist() == [2.0] * 4


def test_views_of_one_storage_are_copied_once_unless_transposed():
    away = offload.ActivationOffload()
    x = torch.arange(6.0).view(2, 3)
    for view in (x, x.view(-1), x.view(1, 2, 3)):
        assert torch.equal(away.fetch(away.send(view)), view)
    assert away.down_bytes == x.nbytes
    wide = torch.arange(16.0).view(4, 4)
    for view in (x.T, wide[:2, ::2], wide[::2, :2]):  # as many numbers from the same place, and others
        assert torch.equal(away.fetch(away.send(view)), view)
    assert away.down_bytes == 2 * x.nbytes + 2 * 4 * 4


def offloaded_bytes_of_a_region(context):
    """Bytes that a sequence-parallel region of one product and one activation offloads, and the gradient of its input."""
    from torch import distributed

    from meshwright.parallel.tensor.split import split

    torch.manual_seed(0)
    pair = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).double()
    layer, plain = nn.ModuleDict({"pair": pair}), nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).double()
    plain.load_state_dict(pair.state_dict())
    layer.forward = lambda x: pair(x)
    table = (("", "divided"), ("pair", "region"), ("pair.0", "column"), ("pair.2", "row"))
    split(layer, table, distributed.group.WORLD, True)
    away = offload.offload_activations([layer])
    whole = torch.linspace(-1, 1, 2 * 6 * 8, dtype=torch.float64).view(2, 6, 8).requires_grad_()
    share = whole.detach().chunk(context.world, 1)[context.rank].contiguous().requires_grad_()
    layer(share).square().sum().backward()
    plain(whole).square().sum().backward()
    torch.testing.assert_close(share.grad, whole.grad.chunk(context.world, 1)[context.rank])
    return away.down_bytes, share.nbytes, whole.nbytes


def test_a_sequence_parallel_region_offloads_its_share_and_its_activations():
    for down, share, whole in ranks.run(2, offloaded_bytes_of_a_region):
        assert down == share + whole // 2  # never the gathered input; half the columns of tanh's output


def bytes_of_states(context, plan, workload, dtype):
    from meshwright.parallel.apply import apply
    from meshwright.training.data.samples import RandomSamples
    from meshwright.training.loop import Trainer

    parallel = apply(MODEL, plan, workload, context.rank, dtype=getattr(torch, dtype))
    trainer = Trainer(parallel, RandomSamples(MODEL, workload.seq, 0))
    trainer.train(2)
    own = {id(p.parameter) for p in parallel.pieces}
    held = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    return trainer.masters.moved_bytes, sum(p.local.numel() for p in parallel.pieces), bool(own & held)


@pytest.mark.parametrize(("dtype", "crossing"), [("float32", 4 + 4), ("bfloat16", 4 + 2)])
def test_states_stay_on_the_host_and_gradients_and_parameters_are_copied(dtype, crossing):
    """fp32 gradients to the host, parameters back; the optimizer holds no tensor of the model."""
    plan = Plan(offload="states", microbatch=2)
    ((moved, elements, shares),) = ranks.run(1, bytes_of_states, plan, Workload(batch=2, seq=4), dtype)
    assert moved == 2 * crossing * elements
    assert not shares
