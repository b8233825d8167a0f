"""Context parallelism: each kind against attention on one device, then whole layouts, their traffic and their bugs."""

import pytest
import torch

import ranks

SEQ = 24


def random(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def attention(q, k, v, causal, window):
    """In the plainest words: every score, every softmax."""
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
    """Largest error of output and gradients of every kind and case on this rank."""
    from torch import distributed

    from meshwright.parallel import blocks
    from meshwright.parallel.context import gather_attention, part_of, ring_attention, ulysses_attention

    group, worst = distributed.group.WORLD, {}

    def compare(kind, case, heads, keys, causal, zigzag, window, call):
        whole = [random((2, n, SEQ, 8), i).mul_(4).requires_grad_() for i, n in enumerate((heads, keys, keys))]
        slope = random((2, heads, SEQ, 8), 7)
        expected = attention(*whole, causal, window)
        expected.backward(slope)
        own = [part_of(x.detach(), group, 2, zigzag).requires_grad_() for x in whole]
        out = call(*own)
        out.backward(part_of(slope, group, 2, zigzag))
        pairs = [(out, expected), *((a.grad, b.grad) for a, b in zip(own, whole, strict=True))]
        errors = [(a - part_of(b, group, 2, zigzag)).abs().max().item() for a, b in pairs]
        worst[kind, case] = max(errors)

    for tile in (blocks.TILE, 2 * 4 * SEQ):  # one tile a rectangle, and several
        blocks.TILE = tile
        for case in CASES:
            heads, keys, causal, zigzag, window = case
            for name, function in (("ring", ring_attention), ("all-gather", gather_attention)):

                def call(q, k, v, function=function, causal=causal, zigzag=zigzag, window=window):
                    return function(q, k, v, group, causal, zigzag=zigzag, window=window)

                compare(f"{name} {tile}", case, *case, call)
    ranks_ = context.world
    for heads, keys, causal in ((2 * ranks_, 1, True), (ranks_, ranks_, False), (4 * ranks_, 2 * ranks_, True)):
        call = lambda q, k, v, causal=causal: ulysses_attention(q, k, v, group, causal)  # noqa: E731
        compare("ulysses", (heads, keys, causal), heads, keys, causal, False, 0, call)
    return worst


@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_kind_is_attention_on_one_device(world):
    for errors in ranks.run(world, functions):
        assert len(errors) == 4 * len(CASES) + 3
        assert max(errors.values()) < 1e-12, errors
