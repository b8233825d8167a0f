"""The memory of compressors: the cost model counts every buffer that they hold, to a few percent."""

from itertools import accumulate

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ranks
from meshwright.describe.config import Config
from meshwright.describe.plan import Plan
from meshwright.lower.compressed import Request, factor_sizes
from meshwright.lower.compression_memory import buffer_bytes
from meshwright.parallel.numerics.compress.base import columns_of, width_of
from meshwright.parallel.numerics.compress.compressors import make_compressor
from meshwright.training.measure.observe import LiveBytes
from meshwright.training.run import run_training

# One matrix has nearly all values: PowerSGD's copy of its largest matrix is counted as a copy of the message.
SHAPES = [torch.Size(shape) for shape in ((96,), (256, 160), (40,), (8, 16))]
OPTIONS = {"ratio": 0.1, "rank": 4, "threshold": 2.0}
NAMES = ("fp16", "bf16", "int8", "int4", "fp8", "top-k", "random-k", "threshold", "powersgd")


class CountMemory(TorchDispatchMode):
    def __init__(self, *existing):
        super().__init__()
        self.live = LiveBytes("cpu")
        for tensor in existing:
            self.live.add(tensor)
        self.start = self.live.now
        self.live.peak = self.start

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.live.add(leaf)
        return out


def held_bytes(compressor, message, out, layout, world):
    """Bytes besides the message and the last error: the most while a collective runs, and the most at any time."""
    kept = {**compressor.feedback.errors, **getattr(compressor, "bases", {})}
    counter, waits = CountMemory(message, out, *kept.values()), []
    del kept
    with counter:
        if message.ndim == 2:
            steps = compressor.scatter(0, message, layout, 0, out)
        else:
            steps = compressor.reduce(0, message, layout, 0, world)
        while (request := next(steps, None)) is not None:  # all ranks send what this one does
            if request.operation == "all_gather":
                request.out.view(world, -1)[:] = request.given.view(1, -1)
            elif request.operation != "all_reduce":
                request.out.view(-1)[:] = request.given.view(-1)[: request.out.numel()]
            del request
            waits.append(counter.live.now - counter.start)
    return max(waits), counter.live.peak - counter.start


@pytest.mark.parametrize("world", [2, 8])
@pytest.mark.parametrize("scattered", [False, True], ids=("buckets", "zero"))
@pytest.mark.parametrize("name", NAMES)
def test_the_buffers_of_a_message_are_those_predicted(name, scattered, world):
    plan = Plan(compression=name, **{f"compression_{key}": value for key, value in OPTIONS.items()})
    for dtype in (torch.float32, torch.float64, *([] if name == "fp16" else [torch.bfloat16])):
        random = torch.Generator().manual_seed(0)
        compressor = make_compressor(name, **OPTIONS)
        for _ in range(2):  # the second step has the error of the first
            columns = sum(width_of(shape, world) for shape in SHAPES)
            if scattered:
                layout, shape = columns_of(SHAPES, world), (world, columns)
            else:
                starts = accumulate((shape.numel() for shape in SHAPES), initial=0)
                layout = list(zip(starts, SHAPES, strict=False))
                shape = (sum(shape.numel() for shape in SHAPES),)
            message, out = torch.randn(shape, generator=random).to(dtype), torch.empty(columns, dtype=dtype)
            waits, peak = held_bytes(compressor, message, out, layout, world)
        width, factors = message.element_size(), factor_sizes(SHAPES, OPTIONS["rank"])
        predicted = buffer_bytes(name, Request(plan, message.numel(), width, world, scattered, factors))
        # Only scales and counts are not counted: a few bytes for each rank and parameter. A threshold passes
        # as many values as a normal distribution has, give or take the sample.
        assert np.allclose(predicted, (waits, peak), rtol=0.03, atol=100 * world), (dtype, predicted, waits, peak)


@pytest.mark.parametrize("name", ["int8", *ranks.soak(["bf16", "threshold"])])
def test_the_peak_memory_of_a_compressed_run_is_predicted(name):
    model = {"hidden": 128, "layers": 2, "heads": 2, "ffn": 512, "vocab": 256}
    plan = {"param_dtype": "fp32", "master": False, "replicate": 2, "bucket": "100kB", "compression": name}
    workload = {"batch": 4, "seq": 16, "precision": "fp32"}
    training = run_training(Config.from_parts(model, "laptop", "gloo-cpu", workload, plan), 2)
    memory = next(d for d in training.differences if d.unit == "GiB")
    assert memory.error == pytest.approx(0.0, abs=0.03)
