"""The memory of settings: the cost model's peak, corrected for what a plan cannot express, against the memory of a GPU.

Where parts of the model are not counted (towers for images, other layers than attention), the peak is a lower bound: it can show that a recipe does
not fit, never that it does. A recipe fits if 5% of the memory stays free, as `plan` demands of its winner.

The number of GPUs may be the smallest that the degrees allow (`Reading.gpus_are_least`), not the number that the recipe was made for. Then more
data-parallel ranks shard the optimizer states further: the recipe does not fit only if it does not fit on 64 times as many GPUs either.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from meshwright.cost.memory import memory
from meshwright.describe import catalog
from meshwright.describe.cluster import Cluster
from meshwright.describe.config import Config
from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.describe.result import USABLE_MEMORY, fit_words
from meshwright.describe.stack import Stack
from meshwright.describe.variants import ATTENTIONS
from meshwright.describe.workload import FP8
from meshwright.errors import MeshwrightError
from meshwright.interop.assemble import assemble
from meshwright.interop.keys import Facts, SettingsProblem
from meshwright.interop.reading import SettingsReading
from meshwright.interop.shapes import catalog_cluster, stated_memory
from meshwright.lower.program import StepProgram
from meshwright.predict.estimate import lowered
from meshwright.predict.prediction import element

# --- The share of saved activations that stays in the GPU's memory with selective recompute and offloading of modules that settings name.
#
# The plan's `recompute = "selective"` recomputes attention's softmax only, or what the stack says. Megatron-Core's `recompute_modules` names
# more. With h the hidden size and f the width of an expert, an expert layer saves h + 3·f values per routed token: the input, gate and up, and
# their product.
#
#     layernorm      outputs of norms                         moe_act      the product of gate and up: f of h + 3·f
#     mla_up_proj    queries, keys and values of latent attention, not their latents
#     mlp            the dense FFN                            moe          router, experts and shared experts
#
# Fine-grained offloading sends the inputs of the modules that `offload_modules` names to host memory.
#
#     core_attn      queries, keys and values                 attn_proj    the output of attention
#     qkv_linear     the input of attention                   *_norm       the input of a norm
#     expert_fc1     the input of experts: h of h + 3·f       moe_act      gate and up: 2·f        fused_group_mlp    all that experts save

ENDS = ("head", "embedding")
PARTS = ("attention", "ffn", "norm", "router", "experts", "shared")


def kept_share(program: StepProgram, model: Model, facts: Facts) -> float:
    """Bytes that stay in memory of the layers' saved activations, as a share of what the estimate counts."""
    kept = dict.fromkeys(PARTS, 1.0)
    if facts.get("recompute") == "selective":
        _recompute(kept, model, _names(facts.get("recompute_modules")))
    if facts.get("offloads_modules") and facts.get("recompute") != "full":
        _offload(kept, model, _names(facts.get("offload_modules")))
    total = left = 0.0
    for block, parts in program.saved.items():
        if block in ENDS:
            continue
        count = max(1, model.layer_kinds.count(block)) if block in model.layer_kinds else 0
        for part, size in parts.items():
            bytes_of = count * float(np.broadcast_to(size, program.batch.n)[0])
            total += bytes_of
            left += bytes_of * kept.get(part, 1.0)
    return left / total if total else 1.0


def _names(named: Any) -> Iterable[str]:
    return named if isinstance(named, list | tuple) else str(named or "").strip("[]").replace(",", " ").split()


def _recompute(kept: dict[str, float], model: Model, names: Iterable[str]) -> None:
    """Lower the shares of the parts whose modules are recomputed."""
    for name in names:
        if name == "layernorm":
            kept["norm"] = 0.5
        elif name == "mla_up_proj" and ATTENTIONS[model.attention].reads("kv_rank"):
            values = _attention_values(model)
            kept["attention"] = 1 - values["core_attn"] / sum(values.values())
        elif name == "mlp":
            kept["ffn"] = 0.0
        elif name == "shared_experts":
            kept["shared"] = 0.0
        elif name == "moe_act":
            kept["experts"] = min(kept["experts"], 1 - model.expert_width / _expert_values(model))
        elif name == "moe":
            kept |= {"experts": 0.0, "shared": 0.0, "router": 0.0}


def _offload(kept: dict[str, float], model: Model, names: Iterable[str]) -> None:
    """Lower the shares of the parts whose modules send their inputs to host memory."""
    values = _attention_values(model)
    for name in names:
        if name in values:
            kept["attention"] = max(0.0, kept["attention"] - values[name] / sum(values.values()))
        elif name in ("attn_norm", "mlp_norm"):
            kept["norm"] = max(0.0, kept["norm"] - 0.5)
        elif name in ("expert_fc1", "moe_act"):
            share = (model.hidden if name == "expert_fc1" else 2 * model.expert_width) / _expert_values(model)
            kept["experts"] = max(0.0, kept["experts"] - share)
        elif name == "fused_group_mlp":
            kept["experts"] = 0.0


def _attention_values(model: Model) -> dict[str, int]:
    """Values per token that attention saves, by the module whose input they are."""
    block = next(model.blocks[kind] for kind in model.kinds if model.blocks[kind].attention)
    core = block.attention
    assert core is not None
    latents = sum(linear.d_out for linear in block.linears if linear.name in ("q_a", "kv_a"))
    heads = core.heads * core.qk + core.kv_heads * (core.qk + core.v)
    return {"qkv_linear": model.hidden + latents, "core_attn": heads, "attn_proj": core.heads * core.v}


def _expert_values(model: Model) -> int:
    return model.hidden + 3 * model.expert_width if model.experts else 4 * model.hidden


# --- The peak memory of a reading: the cost model's, with corrections for what a plan cannot express.
#
# offload     parameters that are offloaded take no memory of the GPU
# recompute   selective recompute of named modules, and activations that are offloaded by module (`kept_share`)
# replicas    Megatron's hybrid FSDP can shard the optimizer states over the groups with copies of the parameters as well
# shards      DeepSpeed's ZeRO-3 has 16-bit shards, and keeps up to `stage3_max_live_parameters` gathered: 10⁹ if it is not set
# loss        without a fused loss, a logit takes 14 bytes instead of 4: in 16 bits, and log-softmax and two gradients in fp32; 16 bytes where the
#             vocabulary is split over tensor-parallel ranks by DTensor, whose backward holds four fp32 tensors of that size
# 8 bits      Transformer Engine keeps the inputs of fp8 products in 8 bits, and of fp4 products in 4: about half of what a layer saves
# resharding  FSDP in a pipeline that frees weights after each forward holds those of two layers, not of the stage
# rounds      it reduces the gradients of a stage after the stage's last micro-batch of a call: where that is one round of an interleaved schedule,
#             backward goes stage by stage, and those of two stages are unsharded together
# pipeline    torch.distributed.pipelining has a receive buffer for the input and for the output gradient of each micro-batch, and keeps
#             the outputs of those in flight: 2·M·v tensors of b·s·h beyond the saved inputs. Unless `return_outputs` is false, the last
#             stage keeps the logits of all M micro-batches

EIGHT_BIT_STATES = 0.4  # of the bytes of optimizer states in fp32, where a master copy may stay
FUSED_BYTES = 4.0  # of a logit at the peak of a fused loss
UNFUSED_BYTES = 14.0  # of one that is not: in 16 bits, and log-softmax, its gradient and that of the logits in fp32
HALF_LOSS_BYTES = 8.0  # the same, where logits are not cast to fp32
SPLIT_LOSS_BYTES = 16.0  # the same, with DTensor's loss over a split vocabulary
# Bytes of saved activations over those in 16 bits, where half of them, the inputs of products, are kept in 8 bits, or in 4 with a scale per 16.
KEPT_SHARE = {**dict.fromkeys(FP8, 0.75), "fp4": 0.64}
GIB = 2.0**30
REPLACED_STATES = ("pure_half", "eight_bit_states", "offload_parameters", "offload_states")
LIVE_PARAMETERS = 1e9  # default of DeepSpeed's stage3_max_live_parameters


def peak_memory(reading: SettingsReading, cluster: Cluster) -> tuple[float, float]:
    """GiB of the fullest rank, and the memory of its device."""
    cluster = cluster.with_gpus(reading.gpus)
    plan, stack = _with_plain_states(reading)
    _, _, program = lowered(Config(reading.shape.model, cluster, plan, reading.workload, stack))
    share = kept_share(program, reading.shape.model, reading.facts)
    if reading.framework.splits_evenly:
        share *= KEPT_SHARE.get(reading.workload.precision, 1.0)
    ranks = ({part: element(size, 0) / GIB for part, size in memory(program, rank).items()} for rank in program.ranks)
    stages = [_stage(parts, share, reading) for parts in ranks]
    stages = [peak + _pipeline_buffers(reading) for peak in stages]
    stages[-1] += _unfused_loss(reading) + _kept_logits(reading)
    return max(stages), cluster.accelerator.memory / GIB


def _with_plain_states(reading: SettingsReading) -> tuple[Plan, Stack]:
    """The plan and the stack whose memory `_stage` corrects: 16-bit weights without a master where other states take the place of the usual
    ones, and all states at the peak, because their sizes decide which moment of a step is the fullest."""
    facts, plan, stack = reading.facts, reading.plan, reading.stack
    if facts.get("pure_half"):
        plan = plan.but(master=False)
    if any(facts.get(name) for name in REPLACED_STATES):
        stack = stack.but(lazy_gradients=False)
    return plan, stack


def _unfused_loss(reading: SettingsReading) -> float:
    """GiB of logits in the last stage beyond what the stack's loss takes, where the settings state a loss that is not fused."""
    plan, stack = reading.plan, reading.stack
    if reading.facts.get("fused_loss") is not False:
        return 0.0
    is_split = plan.tp > 1 and reading.framework.name == "torchtitan"
    needed = SPLIT_LOSS_BYTES if is_split else HALF_LOSS_BYTES if reading.facts.get("half_loss") else UNFUSED_BYTES
    counted = FUSED_BYTES if "loss" in stack.fused else stack.loss_bytes
    return _logits(reading) * max(0.0, needed - counted) / GIB


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
    if plan.zero == 3 and plan.virtual > 2 and 0 < _pipeline_microbatches(reading) <= plan.pp:
        whole = 2 / plan.virtual
        out["gradients"] *= whole + (1 - whole) / plan.shard
    if plan.zero == 3 and reading.stack.name == "deepspeed":
        live = min(facts.get("live_parameters") or LIVE_PARAMETERS, model.total / plan.tp)
        out["gathered"] = max(out["gathered"], 2 * live / GIB)
    if facts.get("outer_optimizer"):
        out["optimizer"] /= plan.replicate
    out["slack"] = max(0.0, out["slack"] - reading.stack.allocator_slack * freed)
    if facts.get("pure_half") and not model.adapter.on:
        states = 1 if facts.get("eight_bit_states") else 2
        out |= {"gradients": out["parameters"], "optimizer": states * out["parameters"]}
    elif facts.get("eight_bit_states"):
        out["optimizer"] *= EIGHT_BIT_STATES
    if facts.get("offload_parameters"):
        out["parameters"] = 0.0
        if plan.reduces_each:  # whole gradients stay until they are reduced
            out["gradients"] = 0.0
    # The gradients follow the states, but not in Megatron.
    elif facts.get("offload_states") and not reading.framework.splits_evenly:
        out["gradients"] = 0.0
    return sum(out.values())


LARGEST = "dgx-b300"
GPUS = {"A10G (24 GB)": "aws-g5", "A100 (40 GB)": "azure-nd-a100-v4", "A100 and H100 (80 GB)": "dgx-h100", "H200 (141 GB)": "dgx-h200",
        "B200 (192 GB)": "dgx-b200", "B300 (288 GB)": LARGEST}  # fmt: skip
# Tokens of a sample of fine-tuning and of a micro-batch, where no length is stated. Automodel's examples train on HellaSwag, whose longest
# sample has fewer than 200.
SHORT_SEQUENCE, SHORT_SEQUENCES, FEW_TOKENS = 512, {"automodel": 192}, 16_384
MOST_GPUS = 16_384
BEYOND_DOUBT = 1.1  # of the memory of a GPU that is not stated
OTHER_MEMORY = 0.1  # share by which the memory in a GPU's name differs from that of another GPU of this name
DOUBLINGS = 6  # of the smallest number of GPUs, where a recipe may be meant for more


@dataclass(frozen=True)
class MemoryFit:
    """Whether it fits (None: unknown), the peak memory, and what is to say about it."""

    fits: bool | None = None
    gib: float | None = None
    problems: list[SettingsProblem] = field(default_factory=list)


def fit(reading: SettingsReading) -> MemoryFit:
    """The memory of a reading against that of its hardware. Where none is stated: of the GPU on which the framework's own recipes are run; else
    it does not fit only if no GPU of the catalog has the memory."""
    entry, memory = catalog_cluster(reading.hardware), stated_memory(reading.hardware)
    if reading.facts.get("microbatch") or reading.facts.get("local_batch"):  # else too little is stated
        reading = replace(reading, shape=reading.shape.with_least_vocab())
    if not (reading.shape.complete and "half" in reading.facts and reading.assembled.fit_is_known):
        return MemoryFit()
    if not (entry or memory) and (reading.hardware or not reading.framework.on_gpus):
        return MemoryFit()
    cluster: Cluster = catalog.load("clusters", entry or reading.framework.usual_cluster or LARGEST)
    if memory and abs(memory * GIB / cluster.accelerator.memory - 1) > OTHER_MEMORY:
        cluster = cluster.but(accelerator=cluster.accelerator.but(name=reading.hardware, memory=memory * GIB))
    is_stated = bool(entry or memory)
    try:
        smallest, bounded = _with_assumptions(reading)
        sizes = [(smallest, peak_memory(smallest, cluster))]
        limit = sizes[0][1][1]
        if sizes[0][1][0] > USABLE_MEMORY * limit and smallest.gpus_are_least:
            sizes += [(larger, peak_memory(larger, cluster)) for larger in _with_more_gpus(smallest)]
    except MeshwrightError as error:
        return MemoryFit(problems=[SettingsProblem(error.code, error.what, error.why, error.fix, "note")])
    peak = sizes[0][1][0]
    most = USABLE_MEMORY if is_stated else BEYOND_DOUBT
    enough = next(((r, size) for r, (size, _) in sizes if size <= most * limit), None)
    known = is_stated and not bounded and not reading.shape.partial and not reading.facts.get("unbounded_length")
    if enough is not None:
        notes = [] if is_stated else [_fitting_gpus(peak)]
        if enough[0] is not smallest:
            what = f"{peak:.1f} GiB on {cluster.accelerator.name} of {limit:.1f} GiB"
            notes, known = [_needs_more(what, smallest.gpus, enough[0].gpus, enough[1])], False
        return MemoryFit(True if known else None, peak, notes)
    best, (peak, limit) = min(sizes, key=lambda size: size[1][0])
    on = f", on {best.gpus} GPUs" if len(sizes) > 1 else ""
    why = f"It {fit_words(peak, limit)}: fragments and peaks come on top"
    if not is_stated:
        why += f". No GPU is stated: {_fitting_gpus(peak).what}"
    what = f"{peak:.1f} GiB on {cluster.accelerator.name} of {limit:.1f} GiB{on}{bounded}"
    return MemoryFit(False, peak, [SettingsProblem("MW-LINT-013", what, why=why)])


def _with_assumptions(reading: SettingsReading) -> tuple[SettingsReading, str]:
    """The reading with the least sequence, micro-batch and GPUs where the settings state none, and words for what was assumed.

    What is assumed is less than what runs: the peak is a lower bound, which can only show that a recipe does not fit."""
    facts, words = reading.facts, list[str]()
    added: Facts = {}
    if not facts.get("seq") and not facts.get("packed_seq"):
        sequences = facts.get("microbatch") or facts.get("local_batch") or 1
        added["seq"] = max(1, min(SHORT_SEQUENCES.get(reading.framework.name, SHORT_SEQUENCE), FEW_TOKENS // sequences))
        words.append(f"{added['seq']} tokens")
    if not facts.get("microbatch") and not facts.get("local_batch"):
        words.append("micro-batch 1")
    if not reading.gpus and facts.get("sharding") == "none" and reading.framework.launcher_shards:
        added["sharding"] = "parameters"
    if reading.gpus and not added:
        return reading, f", with {' and '.join(words)} assumed" if words else ""
    gpus = abs(reading.assembled.gpus)
    shape = reading.shape
    made = assemble({**facts, **added}, reading.framework, gpus, shape.layers, shape.experts)
    least = reading.gpus_are_least or not reading.gpus
    understood = replace(reading.understood, facts={**facts, **added})
    assumed = f", with {' and '.join(words)} assumed" if words else ""
    return replace(reading, understood=understood, assembled=made, gpus_are_least=least), assumed


def _fitting_gpus(peak: float) -> SettingsProblem:
    """A note that lists the GPUs with enough memory."""
    limits = {name: catalog.load("clusters", entry).accelerator.memory / GIB for name, entry in GPUS.items()}
    names = [name for name, limit in limits.items() if peak <= USABLE_MEMORY * limit]
    what = f"{peak:.1f} GiB fit on {', '.join(names)}" if names else f"{peak:.1f} GiB fit on no GPU of the catalog"
    return SettingsProblem("MW-LINT-013", what, why="The settings state no GPU", severity="note")


def _needs_more(what: str, gpus: int, enough: int, peak: float) -> SettingsProblem:
    return SettingsProblem(
        "MW-LINT-013",
        f"{what}, on {gpus} GPUs",
        why=f"{gpus} is the smallest number of GPUs that the degrees allow; on {enough} GPUs, {peak:.1f} GiB fit",
        fix=f"{enough} GPUs",
        severity="note",
    )


def _with_more_gpus(reading: SettingsReading) -> Iterator[SettingsReading]:
    """The same settings on two, four, … times the GPUs, with as many micro-batches on each: only the shards get smaller."""
    shape, batch = reading.shape, reading.facts.get("batch")
    power = 0
    while (power := power + 1) <= DOUBLINGS or (not reading.hardware and reading.gpus * 2**power <= MOST_GPUS):
        factor = 2**power
        facts = {**reading.facts, **({"batch": batch * factor} if batch else {})}
        made = assemble(facts, reading.framework, reading.gpus * factor, shape.layers, shape.experts)
        yield replace(reading, assembled=made, gpus_are_least=False)
