"""The pipeline stages of this rank: their layers, and the strategies that change layers from the inside.

`apply` calls these functions in its fixed order.

Which functions a rank computes with, where there is a choice: the loss, and on a GPU torch's attention kernel and the product of routers.

Which of torch's kernels computes attention on a GPU: the fastest one, measured on the shapes of the run.

torch has several kernels behind `scaled_dot_product_attention`. Which one is fastest depends on the GPU, the width of a head and the
versions: on an H200 with heads of 128, cuDNN's kernel takes 1.7 ms where FlashAttention 2 takes 2.8. A trial of some milliseconds at the
start decides; the others remain as alternatives for calls that the first one does not support, such as masks.

The choice holds for the process: forward, and a recomputed forward in backward, must use the same kernel.
"""

import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.describe.sharding import Box, even_range
from meshwright.describe.workload import Workload
from meshwright.models import loss_function
from meshwright.models.router import Router
from meshwright.models.wide_products import wide_linear
from meshwright.parallel.compile import Compilation, compiled
from meshwright.parallel.context import sequence as context
from meshwright.parallel.data import offload
from meshwright.parallel.expert.dispatch import place_experts
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.numerics import fp8, fp8_grouped, fp8_rows
from meshwright.parallel.pieces import cut_to_boxes
from meshwright.parallel.pipeline import Loss
from meshwright.parallel.recompute import recompute_plan
from meshwright.parallel.tensor import split as tensor
from meshwright.parallel.tensor import vocabulary
from meshwright.parallel.tensor.tables import table_of
from meshwright.programs.pipelines import build
from meshwright.programs.pipelines.program import PipelineProgram

KERNELS = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "FlashAttention": SDPBackend.FLASH_ATTENTION,
    "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
}
LONGEST = 8192  # tokens of a trial
WARMUP, REPEATS = 2, 5


def prefer_fastest(q: torch.Size, k: torch.Size, v: torch.Size, causal: bool, dtype: torch.dtype, device: str) -> str:
    """Measure each kernel on tensors of these shapes, [B, heads, S, width], and let this process use the fastest. Returns its name;
    empty if none of them supports the shapes."""
    seconds = {name: trial_s(kernel, (q, k, v), causal, dtype, device) for name, kernel in KERNELS.items()}
    order = sorted((name for name, s in seconds.items() if s is not None), key=lambda name: seconds[name] or 0.0)
    if not order:
        return ""
    others = [kernel for name, kernel in KERNELS.items() if name not in order]
    chosen = [*(KERNELS[name] for name in order), *others, SDPBackend.MATH]
    sdpa_kernel(chosen, set_priority=True).__enter__()  # until the process ends
    return order[0]


def trial_s(
    kernel: SDPBackend, shapes: tuple[torch.Size, ...], causal: bool, dtype: torch.dtype, device: str
) -> float | None:
    """Seconds of forward and backward; None if the kernel does not support the shapes."""
    q, k, v = (
        torch.randn(s[0], min(s[2], LONGEST), s[1], s[3], dtype=dtype, device=device).transpose(1, 2).requires_grad_()
        for s in shapes
    )
    with sdpa_kernel(kernel), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says at length why a kernel does not support the shapes
        for i in range(WARMUP + REPEATS):
            if i == WARMUP:
                torch.cuda.synchronize()
                began = time.perf_counter()
            try:
                y = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])
                y.sum().backward()
            except RuntimeError:  # "No available kernel"
                return None
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / REPEATS


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
    """Let this process use the fastest of torch's attention kernels, measured on the shapes of this rank."""
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


def program_of(plan: Plan, workload: Workload) -> PipelineProgram | None:
    if plan.pp == 1:
        return None
    return build(plan.schedule, plan.pp, plan.microbatches(workload), plan.virtual)


def stages_of(model: Model, plan: Plan, program: PipelineProgram | None, mesh: Mesh) -> dict[int, range]:
    """The layers of each pipeline stage of this rank, by stage."""
    if program is None:
        return {0: range(model.layers)}
    out, start = {}, 0
    for stage, count in enumerate(plan.stage_layers(model.layers)):
        if program.rank_of[stage] == mesh.index("pp"):
            out[stage] = range(start, start + count)
        start += count
    return out


def shard_stage(
    module: nn.Module,
    table: list[Box],
    model: Model,
    plan: Plan,
    workload: Workload,
    mesh: Mesh,
    copies: distributed.ProcessGroup | None,
) -> Tensor | None:
    """Apply the strategies that change layers from the inside to a stage on the meta device. Returns the positions of this
    rank's tokens under context parallelism."""
    group, ring = mesh.group("tp"), mesh.group("cp")
    layers: list[nn.Module] = list(module.layers.values())  # type: ignore[operator]
    position_ids = None
    if group is not None:
        rows, form, head = table_of(model), plan.tp_form, model.head_width
        tensor.split(module, rows, group, plan.sp, form=form, head=head, copies=copies, strict=False)
    if model.experts:
        cut_to_boxes(module, [box for box in table if box.expert])
        place_experts(module, mesh, plan, model, plan.microbatches(workload))
    if (model.attention_dropout or model.sinks or model.attention_softcap) and model.kind == "transformer":
        context.use_tiled_attention(module)
    if ring is not None:
        overlaps = plan.overlap is None or "cp" in plan.overlap
        position_ids = context.shard_sequence(module, model, ring, plan.cp_kind, workload.seq, overlaps)
    if workload.precision == "fp8":
        if workload.scaling == "row":
            fp8_rows.enable_fp8(layers)
        else:
            fp8.enable_fp8(layers, [g for g in (group, ring) if g is not None], keeps=not mesh.sharded)
        fp8_grouped.enable_fp8([module], mesh.group("expert_tp") if model.experts else None)
    return position_ids


def wrap_layers(module: nn.Module, plan: Plan) -> None:
    """Put the hooks of recompute and offload around the layers of a stage."""
    recompute_plan(module, plan)
    if plan.offloads_activations:
        offload.offload_activations(module.layers.values(), plan.offload_layers)  # type: ignore[operator]


def frozen_in(module: nn.Module) -> frozenset[str]:
    return frozenset(name for name, parameter in module.named_parameters() if not parameter.requires_grad)
