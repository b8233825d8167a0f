"""Context parallelism: each kind compared with attention on one device, how plans are folded, and bugs."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ranks
from meshwright.describe.config import Config
from meshwright.describe.model import Model
from meshwright.describe.workload import Workload
from meshwright.errors import MeshwrightError
from meshwright.lower.attention_tiles import OPERATORS
from meshwright.parallel.context.blocks import (
    AttentionPattern,
    BlockAttention,
    BlockGradients,
    position_ids,
    rectangles,
)
from meshwright.parallel.context.sequence import is_zigzag, runs_of
from meshwright.proof.prove import prove
from meshwright.proof.small import small_copy

SEQ = 24
WORKLOAD = Workload(batch=8, seq=SEQ)


def random(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def attention(q, k, v, causal, window):
    """The plain formula: every score, every softmax."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    place = torch.arange(q.shape[2])
    ago = place[:, None] - place[None]
    seen = (ago >= 0 if causal else ago == ago) & (ago.abs() < (window or len(place)))
    scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(~seen, -torch.inf)
    return scores.softmax(-1) @ v


CASES = [  # heads, KV heads, causal, zigzag, window
    (4, 2, True, True, 0), (2, 2, True, False, 0), (4, 1, False, False, 0), (2, 2, False, True, 0),
    (2, 1, True, True, 5), (2, 2, True, False, 3), (2, 1, False, True, 4), (2, 2, True, True, 1),
]  # fmt: skip


def functions(context):
    """The largest error of output and gradients for every kind and case on this rank."""
    from torch import distributed

    from meshwright.parallel.context import blocks
    from meshwright.parallel.context.sequence import gather_attention, part_of, ring_attention, ulysses_attention

    group, worst = distributed.group.WORLD, {}

    def compare(kind, case, heads, keys, causal, zigzag, window, call):
        whole = [random((2, n, SEQ, 8), i).mul_(4).requires_grad_() for i, n in enumerate((heads, keys, keys))]
        grad_output = random((2, heads, SEQ, 8), 7)
        expected = attention(*whole, causal, window)
        expected.backward(grad_output)
        own = [part_of(x.detach(), group, 2, zigzag).requires_grad_() for x in whole]
        out = call(*own)
        out.backward(part_of(grad_output, group, 2, zigzag))
        pairs = [(out, expected), *((a.grad, b.grad) for a, b in zip(own, whole, strict=True))]
        errors = [(a - part_of(b, group, 2, zigzag)).abs().max().item() for a, b in pairs]
        worst[kind, case] = max(errors)

    for tile, cases in ((blocks.TILE, CASES), (2 * 4 * SEQ, CASES[::2])):  # one tile a rectangle, and several
        blocks.TILE = tile
        for case in cases:
            heads, keys, causal, zigzag, window = case
            for name, function in (("ring", ring_attention), ("all-gather", gather_attention)):

                def call(q, k, v, function=function, causal=causal, zigzag=zigzag, window=window):
                    return function(q, k, v, group, causal, zigzag=zigzag, window=window)

                compare(f"{name} {tile}", case, *case, call)
    ranks_ = context.world
    many = SEQ * ranks_  # as many heads a rank as tokens
    for heads, keys, causal in (
        (2 * ranks_, 1, True),
        (ranks_, ranks_, False),
        (4 * ranks_, 2 * ranks_, True),
        (many, 2 * ranks_, True),
        (2 * many, many, True),
    ):
        call = lambda q, k, v, causal=causal: ulysses_attention(q, k, v, group, causal)  # noqa: E731
        compare("ulysses", (heads, keys, causal), heads, keys, causal, False, 0, call)
    return worst


@pytest.mark.parametrize("world", [2, 3])
def test_every_kind_equals_attention_on_one_device(world):
    for errors in ranks.run(world, functions):
        assert len(errors) == 3 * len(CASES) + 5
        assert max(errors.values()) < 1e-12, errors


def plain_forward(q, k, v, triangle, scale):
    scores = q @ k.transpose(-1, -2) * scale
    scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), -torch.inf) if triangle else scores
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def plain_backward(grad_output, q, k, v, output, total, triangle, scale):
    """The gradients of Σ grad_output ∘ exp(s − ℓ) v as kernels compute them, with the final ℓ and output given."""
    assert grad_output.stride(-1) == 1  # kernels read rows
    with torch.enable_grad():
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        scores = q @ k.transpose(-1, -2) * scale
        seen = torch.ones_like(scores, dtype=torch.bool)
        share = (scores - total[..., None]).exp() * (seen.tril() if triangle else seen)
        moved = share.sum(-1) * (grad_output * output).sum(-1)
        return torch.autograd.grad(((share @ v) * grad_output).sum() - moved.sum(), (q, k, v))


@pytest.mark.parametrize("zigzag", [True, False])
def test_a_kernel_that_returns_its_log_sum_exp_gives_the_same_result(monkeypatch, zigzag):
    """All ranks of a ring one after the other, in one process, with a kernel instead of tiles."""
    from meshwright.parallel.context import blocks, kernels

    calls = []
    kernel = kernels.Kernel(plain_forward, plain_backward)
    monkeypatch.setattr(blocks, "kernel_for", lambda *asked: calls.append(asked[-1]) or kernel)
    whole = [random((1, 2, SEQ, 8), i).requires_grad_() for i in range(3)]
    grad_output, runs = random((1, 2, SEQ, 8), 7), runs_of(SEQ, 3, zigzag)
    pattern = AttentionPattern(True, scale=0.7)
    expected = attention(whole[0] * (0.7 * 8**0.5), *whole[1:], True, 0)
    expected.backward(grad_output)
    (q, k, v), at = (x.detach() for x in whole), [position_ids(own) for own in runs]
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    for me in range(3):
        mine = blocks.BlockAttention(q[:, :, at[me]], runs[me], pattern)
        for source in (me, me - 1, me - 2):
            mine.attend_block(k[:, :, at[source]], v[:, :, at[source]], runs[source])
        torch.testing.assert_close(mine.output_BNSD, expected[:, :, at[me]], rtol=0, atol=1e-12)
        sloping = grad_output[:, :, at[me]].mT.contiguous().mT
        back = blocks.BlockGradients(sloping, q[:, :, at[me]], mine.output_BNSD, mine.lse_BNS, runs[me], pattern)
        for source in (me, me - 1, me - 2):
            added = torch.zeros(2, 1, 2, SEQ // 3, 8, dtype=torch.float64)
            back.attend_block(k[:, :, at[source]], v[:, :, at[source]], runs[source], *added)
            dk[:, :, at[source]] += added[0]
            dv[:, :, at[source]] += added[1]
        torch.testing.assert_close(back.dq, whole[0].grad[:, :, at[me]], rtol=0, atol=1e-12)
    torch.testing.assert_close(dk, whole[1].grad, rtol=0, atol=1e-12)
    torch.testing.assert_close(dv, whole[2].grad, rtol=0, atol=1e-12)
    assert sum(calls) == 2 * 3  # each rank's own triangle, forward and backward


def test_torch_has_the_private_kernels():
    from meshwright.parallel.context import kernels

    assert kernels._has("cudnn")
    assert kernels._has("flash")
    assert not kernels._has("steam")
    x = torch.zeros(1, 1, 8, 8)
    assert kernels.kernel_for(x, x, x, True) is None


class Largest(TorchDispatchMode):
    """The largest number of elements in the result of any operator."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.most = max(self.most, leaf.numel())
        return out


def sizes(context, seq):
    from torch import distributed

    from meshwright.parallel.context import blocks
    from meshwright.parallel.context.sequence import gather_attention, ring_attention

    blocks.TILE, found = 1, []  # a row at a time
    for function in (ring_attention, gather_attention):
        q, k, v = (random((1, 1, seq // context.world, 8), i).requires_grad_() for i in range(3))
        with Largest() as seen:
            function(q, k, v, distributed.group.WORLD).sum().backward()
        found.append(seen.most)
    return found


def test_no_rank_holds_all_scores_and_a_ring_rank_not_all_keys():
    seq, world, width = 48, 2, 8
    for ring, gather in ranks.run(world, sizes, seq):
        assert ring == 2 * seq // world * width  # one rank's K and V
        assert gather == 2 * seq * width


def wrong_calls(context):
    from torch import distributed

    from meshwright.parallel.context.sequence import gather_attention, ring_attention, ulysses_attention

    results = []
    for call, query, key in (
        (ring_attention, (1, 2, 3, 4), (1, 2, 3, 4)),
        (ulysses_attention, (1, 3, 4, 4), (1, 3, 4, 4)),
        (ring_attention, (1, 2, 4, 4), (1, 2, 6, 4)),
        (gather_attention, (1, 3, 4, 4), (1, 2, 4, 4)),
    ):
        q, k = random(query, 0), random(key, 1)
        with pytest.raises(MeshwrightError) as error:
            call(q, k, k, distributed.group.WORLD)
        results.append(error.value.code)
    for call in (ring_attention, gather_attention, ulysses_attention):
        x = random((0, 2, 4, 4), 0).requires_grad_()
        call(x, x, x, distributed.group.WORLD).sum().backward()
        results.append(tuple(x.grad.shape))
    return results


def test_indivisible_sizes_are_refused_and_an_empty_batch_works():
    for errors in ranks.run(2, wrong_calls):
        assert errors == ["MW-CP-001", "MW-CP-002", "MW-CP-003", "MW-CP-003", *[(0, 2, 4, 4)] * 3]


# Who sees whom

LLAMA = {"hidden": 32, "layers": 4, "heads": 4, "kv_heads": 2, "ffn": 48, "vocab": 50}


@pytest.mark.parametrize(
    "pattern",
    [
        AttentionPattern(True),
        AttentionPattern(False),
        AttentionPattern(True, 3),
        AttentionPattern(False, 3),
        AttentionPattern(True, 7),
    ],
)
@pytest.mark.parametrize("zigzag", [True, False])
def test_rectangles_cover_exactly_the_visible_pairs(zigzag, pattern):
    runs = runs_of(SEQ, 3, zigzag)
    for mine in runs:
        for other in runs:
            ago = position_ids(mine)[:, None] - position_ids(other)[None]
            sees = (ago >= 0 if pattern.causal else ago == ago) & (ago.abs() < (pattern.window or SEQ))
            covered = torch.zeros_like(sees)
            for r in rectangles(mine, other, pattern):
                block = sees[r.queries, r.keys]
                assert not covered[r.queries, r.keys].any()
                covered[r.queries, r.keys] = True
                assert block.any()
                if r.visible != "mask":
                    assert torch.equal(block, block.new_ones(block.shape).tril(0 if r.visible == "triangle" else SEQ))
            assert not (sees & ~covered).any()


def test_zigzag_gives_every_rank_half_a_block_at_every_step_in_one_rectangle():
    ranks_, length = 4, SEQ // 4
    runs = runs_of(SEQ, ranks_, zigzag=True)
    assert torch.equal(torch.cat([position_ids(own) for own in runs]).sort().values, torch.arange(SEQ))
    for me in range(ranks_):
        for source in range(ranks_):
            (r,) = rectangles(runs[me], runs[source], AttentionPattern(True))
            area = (r.queries.stop - r.queries.start) * (r.keys.stop - r.keys.start)
            assert (r.visible, area) == (("triangle", length**2) if me == source else ("all", length**2 // 2))
    straight = runs_of(SEQ, ranks_, zigzag=False)
    assert [len(rectangles(own, straight[1], AttentionPattern(True))) for own in straight] == [0, 1, 1, 1]


def test_zigzag_is_used_only_for_causal_blocks():
    causal, both = Model(**LLAMA), Model(**LLAMA, causal=False)
    assert [is_zigzag(causal, kind, 24, 4) for kind in ("ring", "all-gather", "ulysses")] == [True, True, False]
    assert not is_zigzag(both, "ring", 24, 4)
    assert not is_zigzag(causal, "all-gather", 20, 4)


# Proofs; the matrix (tests/proof) trains whole layouts.

SMALL = {"hidden": 16, "layers": 2, "heads": 2, "ffn": 24, "vocab": 32}


def proof_of(plan, model=None, prepare=""):
    workload = {"batch": 4, "seq": 48, "precision": "fp32"}
    plan = {"param_dtype": "fp32", **plan}
    config = Config.from_parts({**SMALL, **(model or {})}, "laptop", workload=workload, plan=plan)
    return prove(config, ranks=4, steps=1, prepare=f"test_context:{prepare}" if prepare else "")


@pytest.mark.parametrize("kind", ["ring", "all-gather", "ulysses"])
def test_small_copies_keep_every_context_legal(kind):
    for cp, tp, heads, kv in ((2, 1, 4, 1), (4, 1, 8, 2), (3, 1, 6, 6), (2, 2, 8, 2), (4, 2, 16, 16), (6, 1, 12, 3)):
        model = {**SMALL, "hidden": heads * 8, "heads": heads, "kv_heads": kv}
        plan = {"cp": cp, "cp_kind": kind, "tp": tp, "sp": tp > 1}
        config = Config.from_parts(model, "laptop", workload={"batch": 4, "seq": 48}, plan=plan)
        small = small_copy(config, ranks=8)
        assert (small.plan.cp, small.plan.cp_kind) == (cp, kind)


def wrong_offset():
    """Every rank uses the positions of the start of the sequence."""
    from meshwright.parallel.context import sequence as context

    put_on = context.shard_sequence

    def put(module, *rest):
        own = put_on(module, *rest)
        module.geometry.position_ids = torch.arange(len(own))
        return own

    context.shard_sequence = put


def no_sync_without_dp():
    """Gradients are reduced over dp, which has one rank, although cp has two ranks with different tokens."""
    from meshwright.parallel.data.buckets import Buckets

    start = Buckets.__init__
    Buckets.__init__ = lambda self, module, group, *rest, **options: start(self, module, None, *rest, **options)


def own_tokens_only():
    """The loss is divided by the tokens of the part of one rank."""
    from meshwright.parallel.apply import Parallel

    all_reduce = Parallel.all_reduce
    Parallel.all_reduce = lambda self, values, axis: values if axis == "dp_cp" else all_reduce(self, values, axis)


@pytest.mark.parametrize(
    ("bug", "model", "what"),
    [
        ("wrong_offset", {"positions": "learned", "max_positions": 48}, "loss"),
        ("own_tokens_only", {}, "loss"),
        *ranks.soak([("wrong_offset", {}, "loss"), ("no_sync_without_dp", {}, "gradient")]),  # in the corpus of bugs
    ],
)
def test_a_bug_of_context_parallelism_is_caught(bug, model, what):
    proof = proof_of({"cp": 2}, model, bug)
    assert not proof.parity
    first = proof.agreements[0].breaks[0]
    assert (proof.blamed, first.what, first.step) == ("cp", what, 0), str(first)


def test_operators_of_a_tile_are_those_that_the_cost_model_counts() -> None:
    """`lower.attention_tiles` counts the torch operators of ring attention without a fused kernel, forward and backward."""

    def operators(ranks: int) -> tuple[int, int]:
        runs, pattern = runs_of(64, ranks, True), AttentionPattern(True)
        q, k, v, grad = (torch.randn(2, 4, 64 // ranks, 16) for _ in range(4))
        attended, outputs = BlockAttention(q, runs[0], pattern), (torch.zeros_like(k), torch.zeros_like(v))
        with Operators() as forward:
            for block in runs:
                attended.attend_block(k, v, block)
        assert attended.output_BNSD is not None
        gradients = BlockGradients(grad, q, attended.output_BNSD, attended.lse_BNS, runs[0], pattern)
        with Operators() as backward:
            for block in runs:
                gradients.attend_block(k, v, block, *outputs)
        return forward.count, backward.count

    few, many = operators(2), operators(4)
    for phase, two, four in zip(("F", "I"), few, many, strict=True):
        each, once = OPERATORS[phase]
        assert (four - two) / 2 == pytest.approx(each, rel=0.05)
        assert two == pytest.approx(2 * each + once, rel=0.05)


class Operators(TorchDispatchMode):
    """Counts the operators that torch dispatches, views included."""

    count = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.count += 1
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize("overlaps", [True, False])
def test_a_ring_receives_behind_its_compute_or_before_it(overlaps, monkeypatch):
    from meshwright.parallel.context import attend as ring

    events = []

    class Message:
        def __init__(self, sent, received, group):
            self.received = received
            events.append("post")

        def wait(self):
            events.append("wait")
            return self.received

    class Group:
        size, rank = staticmethod(lambda: 3), staticmethod(lambda: 0)

    monkeypatch.setattr(ring, "RingMessage", Message)
    for source, _ in ring.ring_blocks(torch.zeros(4), Group(), overlaps):
        events.append(f"compute {source}")
    sequential = ["post", "wait", "compute 0", "wait", "post", "wait", "compute 2", "wait", "compute 1"]
    assert events == (
        ["post", "compute 0", "wait", "post", "compute 2", "wait", "compute 1"] if overlaps else sequential
    )
