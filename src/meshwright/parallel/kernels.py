"""Which functions a rank computes with, where there is a choice: the loss, and on a GPU torch's attention kernel and the product of routers."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.describe.sharding import even_range
from meshwright.describe.workload import Workload
from meshwright.models import loss_function
from meshwright.models.attention_kernels import prefer_fastest
from meshwright.models.router import Router
from meshwright.models.wide_products import wide_linear
from meshwright.parallel.compile import Compilation, compiled
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.pipeline import Loss
from meshwright.parallel.tensor import vocabulary
from meshwright.programs.pipelines.program import PipelineProgram


def choose_loss(model: Model, mesh: Mesh, compilation: Compilation) -> Loss:
    """The loss of logits, summed over the tokens of a micro-batch: torch's, or one that sums over the ranks that split the vocabulary."""
    group = mesh.group("tp")
    if model.kind == "mlp":
        return loss_function(model)
    maybe_compiled: Callable[[Loss], Loss] = compiled if compilation.mode != "off" else lambda function: function
    if group is None:
        return maybe_compiled(loss_function(model))
    size = model.padded_vocab
    start, _ = even_range(size, group.size(), group.rank())
    summed = maybe_compiled(lambda logits, target: vocabulary.sum_of_losses(logits, target, start, group))

    def loss(logits_BSV: Tensor, target_BS: Tensor) -> Tensor:
        vocabulary.check_targets(target_BS, size)
        return summed(logits_BSV, target_BS)

    return loss


def can_fuse_loss(model: Model, mesh: Mesh, program: PipelineProgram | None) -> bool:
    """Whether the head computes the loss with its projection, chunk by chunk (`models.loss`). Not where ranks split the vocabulary, and
    not under a schedule that splits backward: the gradient of the head's weight is not a separate action then."""
    return model.kind == "transformer" and mesh.group("tp") is None and not splits_backward(program)


def splits_backward(program: PipelineProgram | None) -> bool:
    return program is not None and program.splits_backward


def choose_attention_kernel(model: Model, plan: Plan, workload: Workload, dtype: torch.dtype, device: str) -> None:
    """Let this process use the fastest of torch's attention kernels, measured on the shapes of this rank (`models.attention_kernels`)."""
    if model.kind == "transformer" and plan.cp == 1 and torch.device(device).type == "cuda":
        prefer_fastest(*attention_shapes(model, plan, workload), model.causal, dtype, device)


def choose_products(
    module: nn.Module, device: str, dtype: torch.dtype, program: PipelineProgram | None, fuses_loss: bool
) -> None:
    """Let the head of a stage compute the loss with its projection, and routers of bf16 tokens use a GPU's tensor cores
    (`models.wide_products`). The latter not under a schedule that splits backward: torch may drop a custom autograd function there."""
    head: Any = getattr(module, "head", None)
    if fuses_loss and head is not None:
        head.fuses_loss = True
    if dtype == torch.bfloat16 and torch.device(device).type == "cuda" and not splits_backward(program):
        for part in module.modules():
            if isinstance(part, Router):
                part.product = wide_linear


def attention_shapes(model: Model, plan: Plan, workload: Workload) -> tuple[torch.Size, torch.Size, torch.Size]:
    """[B, heads, S, width] of queries, keys and values of a micro-batch on this rank."""
    core = model.blocks[model.layer_kinds[0]].attention
    assert core is not None
    groups = max(1, core.kv_heads // plan.tp)
    sizes = ((core.heads // plan.tp, core.qk), (groups, core.qk), (groups, core.v))
    q, k, v = (torch.Size((plan.microbatch, n, workload.seq, width)) for n, width in sizes)
    return q, k, v
