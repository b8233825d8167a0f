"""Compressed sums: over ranks they are what one device emulates, bit for bit; nothing is lost; each is what it says."""

import pytest
import torch

import ranks
from meshwright.describe.config import Config
from meshwright.describe.plan import Plan
from meshwright.errors import MeshwrightError
from meshwright.lower.compressed import exchanges
from meshwright.parallel.numerics.compress.base import columns_of
from meshwright.parallel.numerics.compress.compressors import make_compressor
from meshwright.parallel.numerics.compress.powersgd import PowerSGD, orthonormal
from meshwright.parallel.numerics.compress.schemes import count_kept, dequantise, quantise
from meshwright.proof.emulation.lossy_sum import to_rows
from meshwright.proof.prove import prove
from one_process import emulate, run_together

NAMES = ("fp16", "bf16", "int8", "int4", "fp8", "top-k", "random-k", "threshold", "absolute-threshold", "powersgd")
WITH_FEEDBACK = NAMES[2:]
OPTIONS = {"ratio": 0.1, "rank": 2, "threshold": 1.5, "seed": 3}
SHAPES = ((6, 10), (7,), (3, 4, 5), (12, 5), (1,))
BUCKET = 500.0  # several messages of 188 float64, cut through parameters


def parameters():
    return torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(s, dtype=torch.float64)) for s in SHAPES])


def gradient(rank, step):
    random = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(sum(torch.Size(s).numel() for s in SHAPES), generator=random, dtype=torch.float64) * (1 + rank)


def reduced(context, names, steps):
    """The flat sums of each step, and their errors, by name: real exchanges over the group."""
    from torch import distributed

    from meshwright.parallel.data.buckets import Buckets

    out = {}
    for name in names:
        buckets = Buckets(parameters(), distributed.group.WORLD, BUCKET, compressor=make_compressor(name, **OPTIONS))
        sums = []
        for step in range(steps):
            buckets.begin(last=True)
            buckets.flat.copy_(gradient(context.rank, step))
            buckets.finish()
            sums.append(buckets.flat.numpy().copy())
        lengths = [m.numel() for m in buckets.messages]
        out[name] = sums, lengths
    return out


def emulated(name, world, steps, layouts, lengths):
    compressors = [make_compressor(name, **OPTIONS) for _ in range(world)]
    sums = []
    for step in range(steps):
        parts = [gradient(r, step).split(lengths) for r in range(world)]
        whole = [emulate(compressors, i, [p[i] for p in parts], layouts[i])[0] for i in range(len(lengths))]
        sums.append(torch.cat(whole))
    return sums, compressors


def layouts_of(name):
    from meshwright.parallel.data.buckets import Buckets

    made = Buckets(parameters(), None, BUCKET, compressor=make_compressor(name, **OPTIONS))
    return made.layouts, [m.numel() for m in made.messages]


@pytest.mark.parametrize("world", [2, 3])
def test_over_ranks_they_are_what_one_device_emulates(world):
    by_rank = ranks.run(world, reduced, NAMES, 3)
    for name in NAMES:
        layouts, lengths = layouts_of(name)
        assert by_rank[0][name][1] == lengths
        assert len(lengths) >= 3
        expected, _ = emulated(name, world, 3, layouts, lengths)
        for result in by_rank:
            for array, want in zip(result[name][0], expected, strict=True):
                got = torch.from_numpy(array)
                if world == 2 or name not in ("fp16", "bf16", "random-k", "powersgd"):
                    assert torch.equal(got, want), name
                else:  # summed on the wire, where the order of three is the library's
                    bound = {"fp16": 2e-3, "bf16": 2e-2}.get(name, 1e-12)
                    assert (got - want).abs().max() <= bound * want.abs().max(), name
    for name in NAMES:  # every rank holds the same sums
        assert all((a == b).all() for a, b in zip(by_rank[0][name][0], by_rank[-1][name][0], strict=True))


@pytest.mark.parametrize("name", WITH_FEEDBACK)
def test_what_is_not_sent_is_kept(name):
    """After any number of steps, all that was given equals all that came out and what is still held back."""
    layouts, lengths = layouts_of(name)
    sums, compressors = emulated(name, 3, 4, layouts, lengths)
    given = sum(gradient(r, s) for r in range(3) for s in range(4))
    held = torch.cat([sum(c.feedback.errors[i] for c in compressors) for i in range(len(lengths))])
    torch.testing.assert_close(sum(sums) + held, given, rtol=1e-12, atol=1e-12)
    assert held.abs().max() > 1e-6  # it was lossy indeed


@pytest.mark.parametrize("name", NAMES[:-1])
def test_owners_get_their_rows_of_the_sum_and_what_is_not_sent_is_kept(name):
    """Three ranks, rows of 7 for each: what came out and what is held back is all that was given, row by row."""
    compressors, layout = [make_compressor(name, **OPTIONS) for _ in range(3)], [(0, torch.Size([3, 7]))]
    out, given, first = torch.zeros(3, 7, dtype=torch.float64), 0, None
    total = torch.zeros_like(out)
    for step in range(4):
        rows = [gradient(rank, step)[:21].view(3, 7) for rank in range(3)]
        run_together([c.scatter(0, rows[r], layout, r, out[r]) for r, c in enumerate(compressors)])
        total, given = total + out, given + sum(rows)
        first = out.clone() if first is None else first
    if name in WITH_FEEDBACK:
        held = sum(c.feedback.errors[0] for c in compressors)
        torch.testing.assert_close(total + held, given, rtol=1e-12, atol=1e-12)
        assert held.abs().max() > 1e-6
    exact = sum(gradient(rank, 0)[:21].view(3, 7) for rank in range(3))
    loss = {"fp16": 1e-2, "bf16": 5e-2, "int8": 5e-2, "int4": 1.0, "fp8": 0.5}.get(name)
    if loss is None:  # sparse: some values are the exact ones, or parts of them, and the others are zero
        assert 0 < (first != 0).sum() < 21
    else:
        assert 0 < (first - exact).abs().max() < loss


def alone(name, *gradients, **options):
    compressors = [make_compressor(name, **{**OPTIONS, **options}) for _ in gradients]
    return emulate(compressors, 0, list(gradients), [(0, torch.Size([gradients[0].numel()]))])[0]


def test_each_is_what_its_definition_says():
    a, b = gradient(0, 0), gradient(1, 0)
    assert torch.equal(alone("fp16", a, b), (a.half() + b.half()).double())
    assert torch.equal(alone("bf16", a, b), (a.bfloat16() + b.bfloat16()).double())
    for name, levels in (("int8", 127), ("int4", 7)):
        bound = (a.abs().max() + b.abs().max() + (a + b).abs().max() * 1.2) / (2 * levels)
        assert (alone(name, a, b) - (a + b)).abs().max() <= bound
    k = count_kept(a.numel(), 0.1)
    assert k == 19  # of 188
    largest = sum(torch.where(g.abs() >= g.abs().sort().values[-k], g, 0.0) for g in (a, b))
    assert torch.equal(alone("top-k", a, b), largest)
    above = sum(torch.where(g.abs() >= 1.5 * g.square().mean().sqrt(), g, 0.0) for g in (a, b))
    assert torch.equal(alone("threshold", a, b), above)
    fixed = sum(torch.where(g.abs() >= 1.5, g, 0.0) for g in (a, b))
    assert 0 < (fixed != 0).sum() < fixed.numel()
    assert torch.equal(alone("absolute-threshold", a, b), fixed)
    some = alone("random-k", a, b)
    assert (some != 0).sum() == k
    assert torch.equal(some[some != 0], (a + b)[some != 0])


@pytest.mark.parametrize(("kind", "error"), [("int8", 0.5 / 127), ("int4", 0.5 / 7), ("fp8", 2**-4)])
def test_numbers_survive_their_packing(kind, error):
    rows = torch.stack((torch.linspace(-3, 3, 20, dtype=torch.float64), torch.zeros(20, dtype=torch.float64)))
    packed = quantise(rows, kind)
    assert packed.shape[1] == 4 + (10 if kind == "int4" else 20)
    back = dequantise(packed, kind, torch.float64)
    assert (back - rows).abs().max() <= 3 * error * 1.001
    assert torch.equal(quantise(back, kind)[:, 4:], packed[:, 4:])


def test_powersgd_keeps_a_matrix_of_its_rank_and_finds_the_leading_directions():
    random = torch.Generator().manual_seed(0)
    layout = [(0, torch.Size([20, 30]))]
    left, right = (torch.randn(n, 2, generator=random, dtype=torch.float64) for n in (20, 30))
    low = [(left * w @ right.T).flatten() for w in (1.0, 2.0)]
    exact = emulate([PowerSGD(2), PowerSGD(2)], 0, low, layout)[0]
    torch.testing.assert_close(exact, low[0] + low[1])

    noisy = (left @ right.T + 0.1 * torch.randn(20, 30, generator=random, dtype=torch.float64)).flatten()
    compressor = PowerSGD(2, feedback=False)
    errors = [(emulate([compressor], 0, [noisy], layout)[0] - noisy).norm() for _ in range(5)]
    singular = torch.linalg.svdvals(noisy.view(20, 30))
    assert errors[-1] <= 1.001 * singular[2:].norm()  # warm starts reach the best approximation of rank 2
    assert errors[-1] <= errors[0]


def test_powersgd_gives_owners_their_rows_of_what_all_would_hear():
    """Matrices and a vector whose rows do not divide over three ranks; two steps, the second with what was kept back."""
    shapes = [torch.Size(s) for s in ((7, 10), (4,), (5, 3, 4), (2, 2))]
    sizes, columns = [s.numel() for s in shapes], columns_of(shapes, 3)
    starts = [sum(sizes[:i]) for i in range(4)]
    owners, everyone = ([PowerSGD(2) for _ in range(3)] for _ in range(2))
    for step in range(2):
        messages = [gradient(rank, step)[: sum(sizes)] for rank in range(3)]
        want = emulate(everyone, 0, messages, list(zip(starts, shapes, strict=True)))[0].split(sizes)
        parts = [[p.view(s) for p, s in zip(m.split(sizes), shapes, strict=True)] for m in messages]
        rows = [torch.cat([to_rows(p, 3) for p in mine], 1) for mine in parts]
        out = torch.full((3, rows[0].shape[1]), 9.0, dtype=torch.float64)
        run_together([c.scatter(0, rows[r], columns, r, out[r]) for r, c in enumerate(owners)])
        rows_of = [to_rows(w.view(s), 3) for w, s in zip(want, shapes, strict=True)]
        torch.testing.assert_close(out, torch.cat(rows_of, 1), rtol=1e-12, atol=1e-12)
    messages = exchanges(Plan(compression="powersgd", compression_rank=2), 0, 8, [tuple(s) for s in shapes], 3, True)
    assert [n for _, n in messages] == [8 * (14 + 4 + 10 + 4), 8 * (20 + 24)]


def test_powersgd_comes_back_from_a_gradient_of_zero_and_of_a_smaller_rank():
    layout = [(0, torch.Size([6, 8]))]
    compressor = PowerSGD(2)
    zero, one = torch.zeros(48, dtype=torch.float64), torch.ones(48, dtype=torch.float64)
    assert emulate([compressor], 0, [zero], layout)[0].abs().max() == 0
    torch.testing.assert_close(emulate([compressor], 0, [one], layout)[0], one)
    first, second = torch.zeros(2, 6, 8, dtype=torch.float64)
    first[0] = torch.arange(1.0, 9.0)  # one row: the second direction kept of it is zero everywhere
    second[2:5:2] = torch.tensor([[1.0], [-2.0]]) * torch.arange(1.0, 9.0) ** torch.tensor([[1.0], [2.0]])
    compressor = PowerSGD(2)
    for matrix in (first.flatten(), second.flatten()):
        torch.testing.assert_close(emulate([compressor], 0, [matrix], layout)[0], matrix)
    basis = orthonormal(torch.randn(9, 3, dtype=torch.float64))
    torch.testing.assert_close(basis.T @ basis, torch.eye(3, dtype=torch.float64))


MODEL = {"hidden": 16, "layers": 4, "heads": 4, "kv_heads": 2, "ffn": 24, "vocab": 32, "ffn_bias": True}


def config_of(plan):
    return Config.from_parts(
        MODEL,
        "laptop",
        workload={"batch": 8, "seq": 8, "precision": "fp32"},
        plan={"replicate": 2, "microbatch": 2, "bucket": 4e3, "param_dtype": "fp32", **plan},
    )


@pytest.mark.parametrize("prepare", ["", "test_compress:halved"])
def test_a_16_bit_sum_of_four_ranks_is_held_to_what_its_order_makes_of_it(prepare):
    proof = prove(config_of({"compression": "bf16", "cp": 2}), ranks=4, steps=2, prepare=prepare)
    assert proof.passed == (not prepare)
    if not prepare:
        assert 1e-6 < proof.agreements[0].errors["gradient"] < 0.02


def halved():
    """In every rank: a bug of a factor."""
    from meshwright.parallel.data.buckets import Buckets

    finish = Buckets.finish

    def half(self):
        finish(self)
        self.flat.div_(2)

    Buckets.finish = half


def options(context):
    """Frozen and unused parameters, and no overlap: what leaves when, and the gradients."""
    from torch import distributed, nn

    from meshwright.parallel.data.buckets import Buckets

    torch.manual_seed(0)
    module = nn.ModuleList(nn.Linear(4, 4, dtype=torch.float64) for _ in range(4))
    module[1].requires_grad_(False)
    out = []
    for overlap in (True, False):
        made = Buckets(module, distributed.group.WORLD, 200.0, overlap=overlap)
        made.begin(last=True)
        x = torch.full((2, 4), 1.0 + context.rank, dtype=torch.float64)
        module[3](module[1](module[0](x))).sum().backward()  # the third is not used
        started = made._sent
        made.finish()
        out.append((started, len(made.messages), made.flat.numel(), made.flat.tolist(), module[2].weight.grad.tolist()))
    return out


def test_frozen_and_unused_parameters_and_no_overlap():
    for result in ranks.run(2, options):
        (early, messages, elements, flat, unused), (late, *_, again, _) = result
        assert elements == 3 * 20  # the frozen layer has no place
        assert messages == -(-elements * 8 // 200)
        assert 0 < early < messages  # the unused layer delays the remaining messages until the end
        assert late == 0
        assert flat == again
        assert flat[:4] == [4.0] * 4  # two ranks' two rows, summed
        assert unused == [[0.0] * 4] * 4


@pytest.mark.parametrize(
    "fields", [{"ratio": 0.0}, {"ratio": 1.5}, {"ratio": float("nan")}, {"rank": 0}, {"threshold": 0.0}]
)
def test_shares_that_are_none_are_told(fields):
    with pytest.raises(MeshwrightError, match="MW-COMP-002"):
        make_compressor("top-k", **fields)
    assert make_compressor("top-k", ratio=1.0, rank=1, threshold=1e-9)


def test_an_unknown_name_is_told():
    with pytest.raises(MeshwrightError, match="MW-COMP-001"):
        make_compressor("gzip")
