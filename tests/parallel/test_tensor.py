"""Parts of tensor parallelism: the exchange functions, the vocabulary, the table, and the number of all-reduces."""

from contextlib import nullcontext
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

import ranks
from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.describe.sharding import even_range
from meshwright.describe.workload import Workload
from meshwright.errors import MeshwrightError
from meshwright.models import build
from meshwright.models.loss import IGNORED, cross_entropy
from meshwright.parallel.tensor import styles as tensor
from meshwright.parallel.tensor import vocabulary
from meshwright.parallel.tensor.split import matches
from meshwright.parallel.tensor.tables import table_of
from meshwright.parallel.tensor.vocabulary import cross_entropy as split_cross_entropy
from meshwright.parallel.tensor.vocabulary import embed
from meshwright.proof.records import Job
from meshwright.proof.trace import record

LLAMA = Model(hidden=16, layers=3, heads=4, kv_heads=2, ffn=24, vocab=32)


def random(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def exchanges(context):
    """The output and input gradient of each exchange, compared with their definition on the tensors of all ranks."""
    from torch import distributed

    from meshwright.parallel import exchange

    group, rank, world = distributed.group.WORLD, context.rank, context.world
    part, whole = (2, 3, 4), (2, 3 * world, 4)
    shares, wholes = [random(part, r) for r in range(world)], [random(whole, r) for r in range(world)]
    cut = slice(3 * rank, 3 * rank + 3)
    expected = {  # input of this rank, expected output, gradients arriving on each rank, expected input gradient
        "copy_in": (wholes[rank], wholes[rank], wholes, sum(wholes)),
        "reduce_out": (wholes[rank], sum(wholes), wholes, wholes[rank]),
        "gather_in": (shares[rank], torch.cat(shares, 1), wholes, sum(wholes)[:, cut]),
        "scatter_out": (wholes[rank], sum(wholes)[:, cut], shares, torch.cat(shares, 1)),
        "join": (shares[rank], torch.cat(shares, 1), wholes, wholes[rank][:, cut]),
    }
    for name, (given, out, arriving, back) in expected.items():
        x = given.clone().requires_grad_()
        dims = () if name in ("copy_in", "reduce_out") else (1,)
        y = getattr(exchange, name)(x * 1.0, group, *dims)
        y.backward(arriving[rank].clone())
        torch.testing.assert_close(y, out, msg=name)
        torch.testing.assert_close(x.grad, back, msg=name)
    return True


def vocabulary_ends(context, vocabulary):
    from torch import distributed

    group, world = distributed.group.WORLD, context.world
    start, stop = even_range(vocabulary, world, context.rank)
    table = random((vocabulary, 5), 1)
    ids = torch.arange(vocabulary).flip(0)[None]
    rows = embed(ids, table[start:stop], start, vocabulary)
    distributed.all_reduce(rows)
    assert torch.equal(rows, torch.nn.functional.embedding(ids, table))

    logits = random((2, 6, vocabulary), 2) * 300  # whose exponentials are beyond float64 but for the shift
    target = torch.arange(12).reshape(2, 6) * 7 % vocabulary
    target[0, 2] = target[1, 5] = IGNORED
    whole = logits.clone().requires_grad_()
    expected = cross_entropy(whole, target)
    (expected * 0.3).backward()
    mine = logits[..., start:stop].clone().requires_grad_()
    loss = split_cross_entropy(mine, target, start, vocabulary, group)
    (loss * 0.3).backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(mine.grad, whole.grad[..., start:stop])
    return True


def omission(context):
    from torch import distributed, nn

    from meshwright.parallel.tensor.split import split

    with torch.device("meta"):
        network = build(LLAMA)
        network.extra = nn.Linear(4, 4)
    split(network, table_of(LLAMA), distributed.group.WORLD, head=4)


def uneven_heads(context):
    from torch import distributed

    from meshwright.parallel.tensor.split import split

    split(build(LLAMA.but(ffn=25)), table_of(LLAMA), distributed.group.WORLD, head=4, strict=False)


def region(context, again, changed=False):
    """Number of gathers and gradients of a region of three products under sequence parallelism; `changed`: its input is changed in place."""
    from torch import distributed, nn

    from meshwright.parallel import exchange
    from meshwright.parallel.tensor.regather import regather

    group = distributed.group.WORLD
    linears = nn.ModuleList(nn.Linear(8, 8, bias=False, dtype=torch.float64) for _ in range(3))
    for linear in linears:
        nn.init.eye_(linear.weight)
    x = random((2, 3, 8), context.rank).requires_grad_()
    calls = []
    gather, exchange.all_gather = exchange.all_gather, lambda *a: calls.append(1) or gather(*a)
    whole = exchange.gather_in(x, group, 1)
    with regather(whole, x, group) if again else nullcontext():
        if changed:
            whole.mul_(3.0)
        y = sum(linear(whole) for linear in linears)
    y.backward(torch.ones_like(y))
    return len(calls), x.grad.tolist(), [linear.weight.grad.tolist() for linear in linears]


def test_each_exchange_and_its_backward():
    assert ranks.run(3, exchanges) == [True] * 3


@pytest.mark.parametrize("vocabulary", [8, 11])
def test_a_split_vocabulary_equals_a_full_one(vocabulary):
    assert ranks.run(3, vocabulary_ends, vocabulary) == [True] * 3


def test_a_parameter_without_a_pattern_raises():
    with pytest.raises(MeshwrightError, match="MW-TP-001: 'extra' holds weight, bias"):
        ranks.run(2, omission)


def test_a_dimension_that_does_not_divide_raises():
    with pytest.raises(MeshwrightError, match=r"MW-TP-002: dimension 0 of 'layers\.0\.ffn\.gate\.weight', 25"):
        ranks.run(2, uneven_heads)


def test_regathering_in_backward_keeps_gradients_and_gathers_once_for_all_products():
    kept, again = ranks.run(2, region, False), ranks.run(2, region, True)
    for (calls_kept, x_kept, w_kept), (calls_again, x_again, w_again) in zip(kept, again, strict=True):
        assert (calls_kept, calls_again) == (1, 2)
        assert x_kept == x_again
        assert w_kept == w_again


def test_a_tensor_changed_in_place_is_not_regathered():
    kept, again = ranks.run(2, region, False, True), ranks.run(2, region, True, True)
    for (_, *gradients_kept), (calls_again, *gradients_again) in zip(kept, again, strict=True):
        assert calls_again == 1
        assert gradients_kept == gradients_again


def uneven_share(context):
    from torch import distributed

    from meshwright.parallel import exchange

    exchange.scatter_out(torch.ones(1, 3, 4), distributed.group.WORLD, 1)


def twice(context):
    """The errors of second-order gradients of each exchange."""
    from torch import distributed

    from meshwright.parallel import exchange
    from meshwright.parallel.context import sequence
    from meshwright.parallel.expert import dispatch as expert
    from meshwright.parallel.tensor import vocabulary

    group = distributed.group.WORLD
    x = torch.ones(2, 2, 4, 4, requires_grad=True)
    target = torch.zeros(2, 4, dtype=torch.long)
    calls = {
        "copy_in": lambda: exchange.copy_in(x, group),
        "reduce_out": lambda: exchange.reduce_out(x * 1, group),
        "gather_in": lambda: exchange.gather_in(x, group, 1),
        "scatter_out": lambda: exchange.scatter_out(x, group, 1),
        "join": lambda: exchange.join(x, group, 1),
        "all_to_all": lambda: expert.all_to_all(x[0], group, [1, 1], [1, 1]),
        "ring": lambda: sequence.ring_attention(x, x, x, group),
        "gather": lambda: sequence.gather_attention(x, x, x, group),
        "ulysses": lambda: sequence.ulysses_attention(x, x, x, group),
        "loss": lambda: vocabulary.cross_entropy(x[0], target, 4 * context.rank, 8, group),
    }
    refused = []
    for name, call in calls.items():
        (slope,) = torch.autograd.grad(call().square().sum(), x, create_graph=True)
        try:
            slope.square().sum().backward()
        except RuntimeError as error:
            refused += [name] if "once_differentiable" in str(error) else []
    return set(calls) - set(refused)


def test_a_second_order_gradient_is_refused():
    assert ranks.run(2, twice) == [set()] * 2


def test_a_sequence_that_does_not_divide_raises():
    with pytest.raises(MeshwrightError, match=r"MW-TP-006: dimension 1 of \(1, 3, 4\)"):
        ranks.run(2, uneven_share)


@pytest.mark.parametrize(
    ("fields", "kv_heads", "expected"),
    [
        # four a layer; embedding one, head one, and two small ones of the loss; the global norm
        ({}, 2, {("tp", "all_reduce"): 3 * 4 + 1 + 1 + 2 + 1}),
        # a head on both ranks: one more all-reduce, once per step
        ({}, 1, {("tp", "all_reduce"): 3 * 4 + 1 + 1 + 2 + 1 + 1}),
        # forward two gathers and two reduce-scatters a layer, backward the transposed and two gathers more for the weights
        (
            {"sp": True},
            2,
            {
                ("tp", "all_gather"): 3 * 6 + 1 + 2,
                ("tp", "reduce_scatter"): 3 * 4 + 1 + 1,
                ("tp", "all_reduce"): 2 + 1 + 1,
            },
        ),
        # of each pair the inner and the outer output gathered; backward the inner scattered, the input summed
        (
            {"tp_form": "all-gather"},
            2,
            {("tp", "all_gather"): 3 * 4, ("tp", "reduce_scatter"): 3 * 2, ("tp", "all_reduce"): 3 * 2 + 1 + 1 + 2 + 1},
        ),
    ],
)
def test_four_all_reduces_per_layer(fields, kv_heads, expected):
    model, plan = LLAMA.but(kv_heads=kv_heads), Plan(tp=2, microbatch=2, **fields)
    job = Job(model, plan, Workload(batch=2, seq=4), steps=1, dtypes=("fp32",), watch=True)
    for rank in ranks.run(2, record, job):
        counts = {key: count for key, (count, _) in rank["fp32"].observed.collectives.items()}
        assert counts == expected


def test_patterns_match_part_by_part():
    assert matches("layers.11.attention.q", "layers.*.attention.[qkv]")
    assert not matches("layers.11.attention.q", "layers.*")
    assert not matches("layers.11.attention.q_norm", "layers.*.attention.[qkv]")


def test_the_input_is_the_first_argument_positional_or_keyword():
    taken = tensor.input_of(lambda x, y, z=0: (x, y, z))
    for args, kwargs, rest in (((1, 2), {"z": 3}, (2, 3)), ((1,), {"y": 2}, (2, 0)), ((), {"y": 2, "x": 1}, (2, 0))):
        x, call = taken(args, kwargs)
        assert (x, call(9)) == (1, (9, *rest))


@pytest.mark.parametrize(
    ("padding", "expected"), [(0, (0, None)), (3, (3, None)), (4, (None, 0)), (6, (None, 2)), (None, (None, None))]
)
def test_the_padding_row_is_on_the_rank_that_has_it(padding, expected):
    for rank in range(2):
        group = SimpleNamespace(size=lambda: 2, rank=lambda rank=rank: rank)
        table = torch.nn.Embedding(7, 3, padding_idx=padding)
        tensor._vocabulary(tensor.Split(group), "table", table)
        assert (table.padding_idx, table.num_embeddings) == (expected[rank], (4, 3)[rank])


@pytest.mark.parametrize(("token", "vocabulary"), [(7, 7), (-1, 7), (8, 8)])
def test_a_token_outside_the_vocabulary_raises_as_on_one_device(token, vocabulary):
    ids, weight = torch.tensor([[0, token]]), torch.zeros(4, 3)
    with pytest.raises(IndexError):
        torch.nn.functional.embedding(ids, torch.zeros(vocabulary, 3))
    with pytest.raises(MeshwrightError, match=f"MW-TP-010: token {token} is not in the vocabulary of {vocabulary}"):
        embed(ids, weight, 0, vocabulary)
    with pytest.raises(MeshwrightError, match=f"MW-TP-010: target {token}"):
        split_cross_entropy(torch.zeros(1, 2, 4), torch.tensor([[IGNORED, token]]), 0, vocabulary, None)
    assert embed(torch.tensor([[0, vocabulary - 1]]), weight, 0, vocabulary).shape == (1, 2, 3)


@pytest.mark.parametrize("compiled", [False, True])
def test_the_loss_of_split_logits_keeps_them_in_their_dtype(compiled, monkeypatch):
    """The gradient is that of torch's loss of float32 logits; no tensor of all logits in float32 waits for backward."""
    monkeypatch.setattr(vocabulary.exchange, "all_reduce", lambda x, group, operation="sum": x)
    logits = random((24, 16), 3).bfloat16().requires_grad_()
    target = torch.arange(24) % 16
    expected = torch.nn.functional.cross_entropy(logits.float(), target, reduction="sum")
    (gradient,) = torch.autograd.grad(expected, logits)
    sizes: list[int] = []

    def pack(tensor):
        sizes.append(tensor.numel() * (tensor.dtype == torch.float32))
        return tensor

    loss = vocabulary.sum_of_losses
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        found = (torch.compile(loss, backend="aot_eager") if compiled else loss)(logits[None], target[None], 0, None)
    found.backward()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(logits.grad, gradient)
    assert max(sizes) <= 24


def test_boundaries_cover_without_overlap():
    for full in (0, 1, 7, 12):
        for parts in (1, 2, 5):
            ranges = [even_range(full, parts, i) for i in range(parts)]
            assert ranges[0][0] == 0
            assert ranges[-1][1] == full
            assert all(a[1] == b[0] for a, b in pairwise(ranges))
            lengths = [b - a for a, b in ranges]
            assert max(lengths) - min(lengths) <= 1
