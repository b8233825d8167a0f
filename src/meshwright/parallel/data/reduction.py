"""How the gradients of a stage are summed over its data-parallel ranks.

    zero 0   every rank has all parameters; gradients are all-reduced in buckets, behind the backward that makes them
    zero 1–3 each rank keeps a shard; torch reduce-scatters (`zero`)

Gradients are **summed** here, never averaged: the loss was divided by the global number of tokens already, and an
average over ranks on top of it is this field's favourite silent bug.

Routed experts are summed over expert_dp, all other gradients over dp·cp, and uncompressed gradients next to compressed
ones in separate buckets, so a stage may need several reductions (`CombinedReduction`). All have the same four
methods: `begin(last)` before each micro-batch, `start` after the last backward, `finish` before the update, `zero`
after it.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from meshwright.describe.plan import Plan
from meshwright.describe.sharding import DATA_AXES
from meshwright.parallel.data.buckets import Buckets
from meshwright.parallel.data.zero import Gradients, ShardedGradients, ZeroUnit, compress_scatters
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.numerics.compress.base import Compressor
from meshwright.parallel.numerics.compress.compressors import compressor_of
from meshwright.parallel.numerics.precision import DTYPES, narrow
from meshwright.parallel.pieces import Piece


class LocalGradients(Gradients):
    """Gradients that are not summed with any other rank's: autograd's own tensors, allocated while backward frees
    activations, and freed after the update. A flat buffer for them would take memory in addition to the activations of forward.

    With a wider `dtype` the gradients of the first micro-batch are converted before the next one's are added to them."""

    def __init__(self, parameters: Iterable[nn.Parameter], dtype: torch.dtype | None = None) -> None:
        self.parameters, self.dtype = list(parameters), dtype
        for p in self.parameters:  # None: any, so that a narrow gradient is added into the wide one as it is
            p.grad_dtype = p.dtype if dtype in (None, p.dtype) else None

    def begin(self, last: bool) -> None:
        for p in self.parameters if self.dtype else ():
            if p.grad is not None and p.grad.dtype != self.dtype:
                p.grad = p.grad.to(self.dtype)

    def finish(self) -> None:
        self.begin(last=True)
        for p in self.parameters:
            if p.grad is None and p.requires_grad:  # unused in this step
                p.grad = torch.zeros_like(p, dtype=self.dtype)

    def zero(self) -> None:
        for p in self.parameters:
            p.grad = None


class CombinedReduction:
    """The reductions of a stage whose parameters are not all summed over the same ranks."""

    def __init__(self, parts: list[Buckets | ShardedGradients | LocalGradients]) -> None:
        self.parts = parts

    def begin(self, last: bool) -> None:
        for part in self.parts:
            part.begin(last)

    def start(self) -> None:
        for part in self.parts:
            part.start()

    def finish(self) -> None:
        for part in self.parts:
            part.finish()

    def zero(self) -> None:
        for part in self.parts:
            part.zero()


Reduction = Buckets | ShardedGradients | LocalGradients | CombinedReduction


def make_reduction(
    module: nn.Module, mesh: Mesh, plan: Plan, dtype: torch.dtype, pieces: list[Piece], units: list[ZeroUnit]
) -> Reduction:
    """The reduction of one stage with these pieces. The table says over which axes each gradient is summed, and which may
    not be compressed (`rules.compressible`). `units`: what ZeRO gathers and reduces together."""
    options: dict[str, Any] = {
        "overlap": plan.overlap is None or "dp" in plan.overlap,
        "per_microbatch": plan.reduce == "microbatch",
    }
    if narrow(dtype):
        options["dtype"] = DTYPES[plan.grad_dtype]
    whole = [p for p in pieces if not isinstance(p.parameter, DTensor) and not p.frozen]
    uncompressed = {p.parameter for p in pieces if plan.wire != "none" and not all(b.compressible for b in p.boxes)}

    def over(group: str, only: set[nn.Parameter], compressor: Compressor | None = None) -> Buckets | LocalGradients:
        ranks = mesh.group(DATA_AXES[group].whole)
        if ranks is None:
            return LocalGradients(only, options.get("dtype"))
        return Buckets(module, ranks, plan.bucket, compressor=compressor, only=only, **options)

    parts: list[Buckets | ShardedGradients | LocalGradients] = []
    if isinstance(module, FSDPModule):
        parts.append(ShardedGradients(module, plan, compress_scatters(units, mesh, plan, uncompressed)))
    for group in DATA_AXES:
        for own in sorted({p.parameter.dtype for p in whole}, key=str):
            parameters = {p.parameter for p in whole if p.box.group == group and p.parameter.dtype == own}
            if parameters - uncompressed:
                parts.append(over(group, parameters - uncompressed, compressor_of(plan)))
            if parameters & uncompressed:
                parts.append(over(group, parameters & uncompressed))
    return parts[0] if len(parts) == 1 else CombinedReduction(parts)


def reductions_in(reductions: list[Reduction]) -> list[Buckets | ShardedGradients | LocalGradients]:
    """All reductions, the parts of combined ones in their place."""
    return [p for r in reductions for p in (r.parts if isinstance(r, CombinedReduction) else [r])]


def buckets_in(reductions: list[Reduction]) -> list[Buckets]:
    return [p for p in reductions_in(reductions) if isinstance(p, Buckets)]


def compressors_in(reductions: list[Reduction]) -> list[Compressor]:
    sharded = [p for p in reductions_in(reductions) if isinstance(p, ShardedGradients)]
    scattered = [scatter.compressor for part in sharded for scatter in part.scatters]
    return [*(b.compressor for b in buckets_in(reductions) if b.compressor is not None), *scattered]
