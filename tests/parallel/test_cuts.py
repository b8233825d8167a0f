"""Weights that hold several parts: the ranges of each part on a rank, and a user's network that is split by them."""

from functools import cache
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import ranks
import split_sums
from meshwright.describe.sharding import even_range
from meshwright.errors import MeshwrightError
from meshwright.parallel.tensor.cutting import ParameterCut, cut_out, fused_cuts


def group_of(ranks, rank):
    return SimpleNamespace(size=lambda: ranks, rank=lambda: rank)


@pytest.mark.parametrize(
    ("kind", "fields", "rank", "world", "expected"),
    [
        ("heads", "4,2,2", 0, 2, [(0, 12, 1), (24, 6, 1), (36, 6, 1)]),
        ("heads", "4,2,2", 1, 2, [(12, 12, 1), (30, 6, 1), (42, 6, 1)]),
        ("heads", "4,2,2", 1, 4, [(6, 6, 1), (24, 6, 2), (36, 6, 2)]),
        ("heads", "4,2,2", 2, 4, [(12, 6, 1), (30, 6, 2), (42, 6, 2)]),
        ("heads", "6,1,1", 1, 2, [(18, 18, 1), (36, 6, 2), (42, 6, 2)]),
        ("column", "1,1", 1, 4, [(6, 6, 1), (30, 6, 1)]),
        ("column", "2,1", 0, 2, [(0, 16, 1), (32, 8, 1)]),
        ("column", "3", 2, 3, [(32, 16, 1)]),
    ],
)
def test_a_rank_has_its_range_of_every_part(kind, fields, rank, world, expected):
    cuts = fused_cuts("w", 1, 48, kind, fields, group_of(world, rank))
    assert [(cut.start, cut.length, cut.copies) for cut in cuts] == expected
    assert {(cut.dim, cut.full) for cut in cuts} == {(1, 48)}
    whole = torch.arange(96).view(2, 48)
    held = cut_out(cuts, whole)
    assert held.tolist() == [[48 * row + at + i for at, n, _ in expected for i in range(n)] for row in range(2)]
    for (at, n, _), part in zip(expected, held.split([cut.length for cut in cuts], dim=cuts[0].dim), strict=True):
        assert torch.equal(part, whole[:, at : at + n])


@pytest.mark.parametrize(
    ("kind", "fields", "code"),
    [
        ("column", "1,0", "005"),
        ("column", "5,2", "005"),
        ("heads", "a,1", "005"),
        ("column", "", "005"),
        ("heads", "2,3,3", "002"),
        ("heads", "2,1,1", "002"),
        ("column", "5,3", "002"),
        ("heads", "8,3,1", "002"),
    ],
)
def test_parts_that_do_not_fit_or_do_not_divide_are_refused(kind, fields, code):
    with pytest.raises(MeshwrightError, match=f"MW-TP-{code}"):
        fused_cuts("w", 0, 48, kind, fields, group_of(4, 0))


def test_boundaries_are_as_even_as_possible():
    assert [even_range(10, 4, i) for i in range(4)] == [(0, 3), (3, 6), (6, 8), (8, 10)]


class Attend(nn.Module):
    """Heads of width four; one weight holds queries, keys and values."""

    def __init__(self):
        super().__init__()
        self.heads, self.kv_heads = 4, 2
        self.qkv, self.o = nn.Linear(16, 32), nn.Linear(16, 16)

    def forward(self, x):
        counts = (self.heads, self.kv_heads, self.kv_heads)
        q, k, v = (part.unflatten(-1, (-1, 4)) for part in self.qkv(x).split([4 * n for n in counts], -1))
        k, v = (part.repeat_interleave(self.heads // self.kv_heads, 2) for part in (k, v))
        seen = torch.softmax(torch.einsum("bshd,bthd->bhst", q, k), -1)
        return self.o(torch.einsum("bhst,bthd->bshd", seen, v).flatten(-2))


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.both, self.down = nn.Linear(16, 24), nn.Linear(12, 16)

    def forward(self, x):
        gate, up = self.both(x).chunk(2, -1)
        return self.down(torch.tanh(gate) * up)


TABLE = (
    ("", "divided"),
    ("norm", "between"),
    ("attend", "region"),
    ("attend", "counts:heads,kv_heads"),
    ("attend.qkv", "heads:4,2,2"),
    ("attend.o", "row"),
    ("gated", "region"),
    ("gated.both", "column:1,1"),
    ("gated.down", "row"),
)


def network():
    torch.manual_seed(0)
    layers = {"norm": nn.LayerNorm(16), "attend": Attend(), "gated": Gated()}
    module = nn.ModuleDict(layers).double()
    for p in module.parameters():
        nn.init.normal_(p, std=0.3)
    module.forward = lambda x: module["gated"](x + module["attend"](module["norm"](x)))
    return module


def divided(context):
    """The largest differences from one device, on two and four ranks, with and without sequence parallelism."""
    from torch import distributed

    from meshwright.parallel.tensor.split import split

    pairs = [distributed.new_group([0, 1]), distributed.new_group([2, 3])]
    out = []
    for group, sequence in (
        (pairs[context.rank // 2], False),
        (distributed.group.WORLD, False),
        (distributed.group.WORLD, True),
    ):
        plain, module = network(), network()
        done = split(module, TABLE, group, sequence)
        whole = torch.linspace(-1, 1, 2 * 8 * 16, dtype=torch.float64).view(2, 8, 16).sin()
        x = whole.chunk(group.size(), 1)[group.rank()].contiguous() if sequence else whole
        expected = plain(whole)
        expected.square().sum().backward()
        y = module(x)
        y.square().sum().backward()
        split_sums.sum_gradients(done, module)
        mine = expected.chunk(group.size(), 1)[group.rank()] if sequence else expected
        slopes = {n: p.grad for n, p in plain.named_parameters()}
        errors = {
            "output": (y - mine).abs().max(),
            "norm": split_sums.norm(done, module) - nn.utils.get_total_norm(slopes.values()),
        }
        for n, p in module.named_parameters():
            errors[n] = (split_sums.whole(done, n, p.grad) - slopes[n]).abs().max()
            errors[f"{n} itself"] = (split_sums.whole(done, n, p) - plain.get_parameter(n)).abs().max()
        copies = {n: [cut.copies for cut in cuts] for n, cuts in done.fused.items()}
        out.append(({n: abs(float(e)) for n, e in errors.items()}, copies, module["gated"].both.out_features))
    return out


@cache
def by_rank():
    return ranks.run(4, divided)


@pytest.mark.parametrize("case", range(3), ids=["two", "four", "four-sequence"])
def test_split_fused_projections_equal_one_device(case):
    for rank in by_rank():
        errors, copies, columns = rank[case]
        assert not {name: error for name, error in errors.items() if not error < 1e-11}
        assert copies["attend.qkv.weight"] == copies["attend.qkv.bias"] == [1, 1 + (case > 0), 1 + (case > 0)]
        assert copies["gated.both.weight"] == [1, 1]
        assert columns == 24 // (4 if case else 2)


def test_a_replicated_parameter_has_no_cut():
    from meshwright.parallel.tensor.cutting import Split

    done = Split(
        None, cuts={"a": ParameterCut(0, 2, 2, 4)}, fused={"b": fused_cuts("b", 0, 8, "column", "1,1", group_of(2, 1))}
    )
    assert [len(done.cuts_of(n)) for n in "abc"] == [1, 2, 0]
    local = torch.arange(4.0)
    assert [part.tolist() for part in split_sums.parts(done, "b", local)] == [[0.0, 1.0], [2.0, 3.0]]
    assert split_sums.parts(done, "c", local)[0] is local
    assert torch.equal(split_sums.whole(done, "c", local), local)
    assert split_sums.whole(done, "c", local) is not local
