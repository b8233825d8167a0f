"""What is timed where the host computes: parts of layers, linear layers, attention, whole layers, the optimizer, and ZeRO units.

Each operation runs forward and backward through autograd, small and large, because a small training spends most of its time in the host's
work per operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import distributed, nn

from meshwright.comm.bench.layers import layers_call, unchanged
from meshwright.comm.bench.operations import (
    CHAIN,
    Case,
    attention_call,
    count_operators,
    linear_call,
    part_call,
    tile_call,
    update_call,
)

UNIT_PARAMETERS = 9  # of a ZeRO unit: as many as a transformer layer with gated FFN and without biases
SMALL, MIDDLE, LARGE = {"tokens": 4, "width": 16}, {"tokens": 128, "width": 64}, {"tokens": 512, "width": 256}
PARTS = ("norm", "activation", "residual", "rotation", "loss")
LINEARS = ((64, 32, 32), (64, 64, 64), (256, 64, 64), (256, 64, 192), (128, 64, 512), (512, 256, 256), (256, 512, 512))
ATTENTIONS = ((1, 1, 8, 8), (2, 4, 64, 16), (1, 4, 256, 16), (1, 4, 128, 64))
TILES = ((2, 2, 8, 8), (4, 4, 16, 16))
LAYERS = ((32, 32, 1), (160, 48, 5), (192, 96, 3), (384, 128, 2))  # tokens, width and sequences of whole layers
UPDATES = ((16, 64), (16, 16384))
PRODUCT, COPIED, LAUNCHES = (512, 512, 512), 2**26, 1000  # of `rate_cases`: m, n, k; bytes; operators in a row
SELECTED_FROM = 2**20  # elements, of which a top-k keeps one in a hundred


def cpu_cases(dtype: torch.dtype) -> Iterator[Case]:
    for part in PARTS:
        for size in (SMALL, MIDDLE, LARGE):
            repeats = 1 if part == "loss" else CHAIN
            yield Case(part, {k: float(v) for k, v in size.items()}, repeats, part_call(part, dtype, **size))
    for m, n, k in LINEARS:
        yield Case("linear", {"m": m, "n": n, "k": k}, CHAIN, linear_call(dtype, m, n, k))
    for batch, heads, seq, width in ATTENTIONS:
        shape = {"batch": batch, "heads": heads, "seq": seq, "width": width}
        yield Case("attention", shape, 2, attention_call(dtype, batch, heads, seq, width))
    for tokens, width, sequences in LAYERS:
        layers = partial(layers_call(dtype, tokens, width, sequences, CHAIN), unchanged)
        sizes = {"tokens": float(tokens), "width": float(width), "sequences": float(sequences)}
        yield Case("layer", sizes, CHAIN, layers)
    for batch, heads, seq, width in TILES:
        tile = tile_call(dtype, batch, heads, seq, width)
        sizes = {"batch": float(batch), "heads": float(heads), "seq": float(seq), "width": float(width)}
        yield Case("tile", {**sizes, "operators": count_operators(tile)}, 1, tile)
    state, name = (dtype, "") if dtype.itemsize > 2 else (torch.float32, "fp32")  # masters and summed gradients
    values = torch.randn(SELECTED_FROM, dtype=state)
    kept = SELECTED_FROM // 100
    yield Case("top-k", {"elements": SELECTED_FROM}, 1, lambda: values.abs().topk(kept, sorted=False), name)
    for tensors, elements in UPDATES:
        plain = [torch.randn(elements, dtype=state) for _ in range(tensors)]
        yield Case("optimizer", {"tensors": tensors, "elements": elements}, 1, update_call(plain), name)
    if distributed.is_initialized() and distributed.get_world_size() > 1:
        yield from sharded_cases(dtype)


def rate_cases(dtype: torch.dtype) -> Iterator[Case]:
    """Rates that `bench` shows and no fit uses: a matrix product, a copy beyond the caches, and the host's time for a single operator."""
    m, n, k = PRODUCT
    a, b, out = (torch.randn(*shape, dtype=dtype) for shape in ((m, k), (k, n), (m, n)))
    yield Case("gemm", {"m": m, "n": n, "k": k}, 1, partial(torch.mm, a, b, out=out))
    source = torch.zeros(COPIED, dtype=torch.uint8)
    yield Case("copy", {"bytes": float(COPIED)}, 1, partial(torch.empty_like(source).copy_, source))
    little = torch.zeros(16, dtype=dtype)
    yield Case("launch", {}, LAUNCHES, partial(repeated, partial(little.add_, 1.0), LAUNCHES))


def repeated(call: Callable[[], object], times: int) -> None:
    for _ in range(times):
        call()


def sharded_cases(dtype: torch.dtype) -> Iterator[Case]:
    """ZeRO units of a few parameters each: with their gathers and reductions, with hooks alone, and the same modules without ZeRO."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    # A slice of a larger mesh, as with pipeline or tensor parallelism: torch compares meshes in every operator.
    mesh = init_device_mesh("cpu", (1, distributed.get_world_size()), mesh_dim_names=("stage", "shard"))["shard"]
    units, held, plain = (nn.Sequential(*(small_unit(dtype) for _ in range(CHAIN))) for _ in range(3))
    for sharded, reshard in ((units, True), (held, False)):
        for unit in sharded:
            fully_shard(unit, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(units, mesh=mesh)
    kept = fully_shard(held, mesh=mesh, reshard_after_forward=False)
    x, start = torch.randn(1, 16, 16, dtype=dtype), torch.randn(1, 16, 16, dtype=dtype)
    kept.set_reshard_after_backward(False)  # a micro-batch that neither gathers nor reduces
    kept.set_requires_gradient_sync(False)
    for kind, module in (("sharded-units", units), ("held-units", held), ("plain-units", plain)):
        yield Case(kind, {"units": CHAIN}, 1, partial(forward_backward, module, x, start))


def small_unit(dtype: torch.dtype) -> nn.Module:
    """A ZeRO unit of some parameters."""
    return nn.Sequential(*(nn.Linear(16, 16, bias=False, dtype=dtype) for _ in range(UNIT_PARAMETERS)))


def forward_backward(module: nn.Module, x: torch.Tensor, start: torch.Tensor) -> None:
    module(x).backward(start)
