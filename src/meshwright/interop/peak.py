"""The peak memory of a reading: the cost model's, with corrections for what a plan cannot express.

adapters    only low-rank adapters have gradients and optimizer states: 12 bytes for each of their parameters (16-bit weight and
            gradient, two fp32 moments)
recompute   selective recompute of named modules, and activations that are offloaded by module or by layer (`kept`)
replicas    Megatron's hybrid FSDP can shard the optimizer states over the groups with copies of the parameters as well
shards      FSDP2 keeps one fp32 shard of the parameters and casts what it gathers: no 16-bit shard
loss        without a fused loss, a logit takes 12 bytes instead of 4: in 16 bits with its gradient, and both in fp32; 16 bytes where the
            vocabulary is split over tensor-parallel ranks by DTensor, whose backward holds four fp32 tensors of that size
8 bits      Transformer Engine keeps the inputs of fp8 products in 8 bits, and of fp4 products in 4: about half of what a layer saves
resharding  FSDP in a pipeline that frees weights after each forward holds those of two layers, not of the stage
pipeline    torch.distributed.pipelining has a receive buffer for the input and for the output gradient of each micro-batch, and keeps
            the outputs of those in flight: 2·M·v tensors of b·s·h beyond the saved inputs. Unless `return_outputs` is false, the last
            stage keeps the logits of all M micro-batches
"""

from __future__ import annotations

from meshwright.cost.estimate import estimate
from meshwright.describe.cluster import Cluster
from meshwright.describe.workload import FP8
from meshwright.interop.kept import kept_share
from meshwright.interop.reading import SettingsReading

ADAPTER_BYTES = 12.0
UNFUSED_BYTES = 8.0  # of a logit, beyond a fused loss
SPLIT_LOSS_BYTES = 12.0  # the same, with DTensor's loss over a split vocabulary
# Bytes of saved activations over those in 16 bits, where half of them, the inputs of products, are kept in 8 bits, or in 4 with a scale per 16.
KEPT_SHARE = {**dict.fromkeys(FP8, 0.75), "fp4": 0.64}
GIB = 2.0**30
DEFAULT_RANK = 16


def peak_memory(reading: SettingsReading, cluster: Cluster) -> tuple[float, float]:
    """GiB of the fullest rank, and the memory of its device."""
    cluster = cluster.with_gpus(reading.gpus)
    result = estimate(reading.shape.model, cluster, reading.plan, reading.workload, reading.stack)
    share = kept_share(result.program, reading.shape.model, reading.facts)
    if reading.framework.splits_evenly:
        share *= KEPT_SHARE.get(reading.workload.precision, 1.0)
    stages = [_stage(parts, share, reading) for parts in result.prediction.memory_by_stage]
    stages = [peak + _pipeline_buffers(reading) for peak in stages]
    stages[-1] += _unfused_loss(reading) + _kept_logits(reading)
    return max(stages), result.prediction.memory_limit_gib


def _unfused_loss(reading: SettingsReading) -> float:
    """GiB of logits in the last stage beyond those of a fused loss."""
    plan = reading.plan
    if reading.facts.get("fused_loss") is not False or "loss" not in reading.stack.fused:
        return 0.0
    is_split = plan.tp > 1 and reading.framework.name == "torchtitan"
    return _logits(reading) * (SPLIT_LOSS_BYTES if is_split else UNFUSED_BYTES) / GIB


def _logits(reading: SettingsReading) -> float:
    """Logits of one micro-batch on a rank of the last stage."""
    plan = reading.plan
    return plan.microbatch * reading.workload.seq / plan.cp * reading.shape.model.padded_vocab / plan.tp


def _pipeline_microbatches(reading: SettingsReading) -> int:
    """Micro-batches that torch's pipeline gets in one call: those of the local batch; 0 without such a pipeline."""
    if reading.plan.pp == 1 or not reading.framework.torch_pipeline:
        return 0
    local = reading.facts.get("local_batch") or reading.plan.microbatch * reading.plan.pp
    return max(1, int(local) // reading.plan.microbatch)


def _pipeline_buffers(reading: SettingsReading) -> float:
    """GiB of torch's receive buffers and kept outputs on a rank, which has `virtual` stages."""
    plan = reading.plan
    split = plan.cp * (plan.tp if plan.sp else 1)
    size = plan.microbatch * reading.workload.seq / split * reading.shape.model.hidden * 2
    return 2 * _pipeline_microbatches(reading) * plan.virtual * size / GIB


def _kept_logits(reading: SettingsReading) -> float:
    """GiB of 16-bit logits of earlier micro-batches, which torch's last stage keeps for its caller; torchtitan does not ask for them."""
    if reading.framework.name == "torchtitan":
        return 0.0
    return max(0, _pipeline_microbatches(reading) - 1) * _logits(reading) * 2 / GIB


def _stage(parts: dict[str, float], share: float, reading: SettingsReading) -> float:
    """Peak of one stage, corrected."""
    out = dict(parts)
    freed = (1 - share) * out["activations"]
    out["activations"] -= freed
    plan, model, facts = reading.plan, reading.shape.model, reading.facts
    if plan.zero == 3 and plan.pp > 1 and facts.get("reshard"):
        layers = max(1, model.layers / plan.pp)
        held = out["gathered"] * min(1.0, 2 / layers)
        freed += out["gathered"] - held
        out["gathered"] = held
    if (
        plan.zero == 3 and plan.master and reading.framework.name == "torchtitan"
    ):  # fp32 shards are cast when they are gathered
        out["parameters"] = 0.0
    if facts.get("outer_optimizer"):
        out["optimizer"] /= plan.replicate
    out["slack"] = max(0.0, out["slack"] - reading.stack.allocator_slack * freed)
    if adapters := facts.get("adapters"):
        rank = adapters if isinstance(adapters, int) and not isinstance(adapters, bool) else DEFAULT_RANK
        count = rank * (8 * model.hidden + 3 * (model.ffn or model.expert_width)) * model.layers / (plan.pp * plan.tp)
        out |= {"gradients": 0.0, "optimizer": count * ADAPTER_BYTES / GIB}
    return sum(out.values())
