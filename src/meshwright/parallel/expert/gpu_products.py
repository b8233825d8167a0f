"""Products of a mixture of experts that a GPU computes faster in another form than autograd's.

    gate and up   one product (`models.joined`), whose two weights lie side by side in memory
    router        float32 results of bf16 operands, on tensor cores (`models.wide_products`)

Both are custom autograd functions, which torch may drop in a split backward: there the products are those of autograd. Weights side by side
need bf16 parameters that are rounded from masters and that ZeRO does not shard.
"""

from __future__ import annotations

import torch
from torch import nn

from meshwright.describe.plan import Plan
from meshwright.describe.workload import Workload
from meshwright.models.joined import join
from meshwright.models.moe import Experts, MixtureOfExperts, has_grouped_product
from meshwright.models.wide_products import wide_linear
from meshwright.parallel.mesh import Mesh
from meshwright.programs.pipelines.program import PipelineProgram

SMALLEST = 2048  # elements of one expert's matrix: the kernel of the optimizer steps over gaps after at least as many


def use_gpu_products(
    module: nn.Module, plan: Plan, workload: Workload, mesh: Mesh, program: PipelineProgram | None, dtype: torch.dtype
) -> None:
    """Let the mixtures of experts of a stage, whose memory is allocated, use these products where they can."""
    splits_backward = program is not None and program.splits_backward
    if dtype != torch.bfloat16 or torch.device(mesh.device).type != "cuda" or splits_backward:
        return
    joins = workload.precision != "fp8" and plan.master and not mesh.sharded and has_grouped_product()
    for part in module.modules():
        if isinstance(part, MixtureOfExperts):
            part.router.product = wide_linear
            if joins:
                join_projections(part.experts)


def join_projections(experts: Experts) -> None:
    """Keep the weights of gate and up side by side, if the experts have both."""
    if experts.gated and experts.up.bias is None and experts.up.weight[0].numel() >= SMALLEST:
        join(experts.gate, experts.up)
