"""The hook in torch's own DistributedDataParallel: several buckets, two rounds each, and what one device would emulate."""

from itertools import accumulate

import pytest
import torch

import ranks
from meshwright.errors import MeshwrightError
from meshwright.parallel.numerics.compress.compressors import make_compressor
from meshwright.parallel.numerics.compress.ddp_hook import CompressionState
from one_process import emulate

NAMES = ("none", "bf16", "int8", "top-k", "random-k", "threshold", "powersgd")
OPTIONS = {"ratio": 0.1, "rank": 2, "threshold": 1.5, "seed": 3}
STEPS = 4


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(12, 16), torch.nn.Tanh(), torch.nn.Linear(16, 10)).double()


def gradients(context, names):
    return {name: trained(context.rank, name) for name in names}


def trained(rank, name):
    """Of every step what each bucket held before and after the hook, by index, with its shapes."""
    from torch.nn.parallel import DistributedDataParallel

    from meshwright.parallel.numerics.compress.ddp_hook import hook

    DistributedDataParallel(network()).register_comm_hook(CompressionState(name), hook)  # torch reads its annotations
    model = DistributedDataParallel(network(), bucket_cap_mb=0.001)
    steps = []

    def watched(state, bucket):
        before, shapes = bucket.buffer().numpy().copy(), [tuple(g.shape) for g in bucket.gradients()]
        done = hook(state, bucket)
        steps[-1][bucket.index()] = shapes, before, done.value().numpy().copy()
        return done

    model.register_comm_hook(CompressionState(name, **OPTIONS), watched)
    for step in range(STEPS):
        steps.append({})
        random = torch.Generator().manual_seed(10 * step + rank)
        model.zero_grad()
        model(torch.randn(5, 12, generator=random, dtype=torch.float64)).square().sum().backward()
    return steps


def test_each_bucket_becomes_the_mean_that_one_device_emulates():
    by_rank = ranks.run(2, gradients, NAMES)
    for name in NAMES:
        steps = [rank[name] for rank in by_rank]
        assert len(steps[0][-1]) > 1
        compressed = [index for index in steps[0][-1] for _ in range(follow(name, index, steps))]
        assert bool(compressed) == (name != "none")
    assert [bucket[0] for bucket in steps[0][0].values()] != [bucket[0] for bucket in steps[0][1].values()]  # regrouped


def follow(name, index, steps):
    """One bucket through the steps; how often it was compressed: from the second time that it had the same shapes."""
    compressors, before, count = [make_compressor(name, **OPTIONS) for _ in steps], None, 0
    for buckets in zip(*([step.get(index) for step in rank] for rank in steps), strict=True):
        if buckets[0] is None:
            continue
        shapes, parts = buckets[0][0], [torch.from_numpy(given) / 2 for _, given, _ in buckets]
        expected = parts[0] + parts[1]
        if shapes == before and name != "none":
            starts = accumulate((torch.Size(s).numel() for s in shapes), initial=0)
            layout = [(at, torch.Size(s)) for at, s in zip(starts, shapes, strict=False)]
            expected, count = emulate(compressors, index, parts, layout)[0], count + 1
        before = shapes
        for _, _, found in buckets:
            torch.testing.assert_close(torch.from_numpy(found), expected, rtol=1e-12, atol=1e-12)
    return count


def test_what_is_kept_back_follows_the_scale_of_the_loss():
    state, compressor = CompressionState("int8"), make_compressor("int8")
    compressor.feedback.errors[3] = torch.ones(2)
    state.known = {0: ([], None), 1: ([], compressor)}
    state.rescale(0.5)
    assert compressor.feedback.errors[3].tolist() == [0.5, 0.5]


def test_an_unknown_name_is_told_at_once():
    with pytest.raises(MeshwrightError, match="MW-COMP-001"):
        CompressionState("zip")
