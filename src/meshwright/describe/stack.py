"""Properties of a training framework: host times, fused kernels, overlap, memory overheads, and limits on what it can run.

Two stacks on the same cluster differ in host time per launch, fused kernels, attention kernel and overlapped communication.
In small runs these differences dominate: a layer of 60 launches at 6 µs takes at least 0.36 ms on any GPU (the *host floor*).
"""

from typing import Any, Literal

import numpy as np
from pydantic import Field

from meshwright.describe.base import Bytes, Described, Seconds
from meshwright.describe.schedules import ScheduleName

# --- What a training framework can run: the part of a stack that limits the search for a plan.
#
# An empty tuple is no limit. `source` says where each limit comes from: the framework's code or documentation.

Stage = Literal[0, 1, 2, 3]
Lacking = Literal[
    "tp", "cp", "pp", "ep", "expert_tp", "sp", "hsdp", "reshard", "reduce", "order", "recompute_layers", "tp_with_cp",
]  # fmt: skip


class Abilities(Described):
    """Limits of a framework; the defaults are no limits."""

    framework: str = ""
    """the framework that these limits belong to; empty: no framework is known"""
    schedules: tuple[ScheduleName, ...] = ()
    """pipeline schedules"""
    zero: tuple[Stage, ...] = ()
    """ZeRO stages"""
    zero_in_pipeline: tuple[Stage, ...] = ()
    """ZeRO stages together with a pipeline"""
    zero_in_split: tuple[Stage, ...] = ()
    """ZeRO stages where tensor or expert parallelism splits the layers"""
    cp_kinds: tuple[Literal["ring", "ulysses", "all-gather"], ...] = ()
    """kinds of context parallelism"""
    recomputes: tuple[Literal["none", "selective", "full"], ...] = ()
    """kinds of recompute"""
    without: tuple[Lacking, ...] = ()
    """axes and features that the framework does not have, or whose value it chooses itself"""
    even_stages: bool = False
    """layers must divide by pp × virtual"""
    own_stages: bool = False
    """the framework itself divides the model over stages (`stages_by`)"""
    stages_by: Literal["layers", "products"] = "layers"
    """what the framework divides evenly over stages: layers, or the matrix products of layers and head (`plan.framework_stages`)"""
    stages_by_size: bool = False
    """more than two stages per rank are stated by their layers: n of them make ceil(L / n) stages, or ceil((L + 2) / n) with embedding and head"""
    tensor_divides_kv: bool = False
    """tp must divide the KV heads"""
    shards_context: bool = False
    """context-parallel ranks always shard the weights (ZeRO-3)"""
    source: str = ""
    """where these limits are stated"""


Fused = Literal["norm", "activation", "rope", "bias-dropout", "softmax", "loss", "optimizer", "accumulate", "experts"]
Axis = Literal["dp", "tp", "cp", "pp", "ep"]
Graphed = Literal["step", "attention", "router", "ffn"]
Module = Literal["core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act"]
Saves = Literal["sharded", "copied", "rank-0", "weights", "group", "device"]
Loads = Literal["sharded", "rank-0", "every-rank"]


class Stack(Described):
    name: str = "default"
    launch: Seconds = 5e-6
    """host time of one kernel launch"""
    product_launch: Seconds = 0.0
    """host time of one matrix product; 0: that of any launch"""
    attention_launch: Seconds = 0.0
    """host time of one launch of attention, with the reshapes around it; 0: that of any launch"""
    tile_launch: Seconds = 0.0
    """host time of one operator of attention in tiles; 0: that of any launch"""
    update_launch: Seconds = 0.0
    """host time of one launch outside autograd: optimizer, norm; 0: that of any launch"""
    unit_launch: Seconds = 0.0
    """host time of one gather or reduction of a ZeRO unit; 0: collective_launch"""
    unit_hooks: Seconds = 0.0
    """host time of the hooks of a ZeRO unit in one forward and backward, gathered or not"""
    elementwise_launch: dict[str, float] = Field(default_factory=dict)
    """host time of a norm, activation, residual, rotation or loss over that of its launches; default 1"""
    bare_operator: float = Field(default=1.0, gt=0, le=1)
    """host time of an operator of torch over that of a launch, which has a framework's module around it: routing and sorting of tokens, each
    expert of a loop"""
    expert_launch: float = Field(default=1.0, ge=1, le=100)
    """host time of one launch of routed experts over that of other launches: compiled layers leave them to eager operators"""
    graph_call: Seconds = 0.0
    """host time of one call of a compiled graph, forward or backward: guards, wrappers, autograd's function. A layer is one graph, one with
    routed experts four: before and after them, the routing, the activation (parallel/compile.py)"""
    collective_launch: Seconds = 20e-6
    """host time to issue one collective"""
    collective_operators: float = Field(default=2.0, gt=0, le=1000)
    """operators whose host time the issue of one collective takes: a fit sets collective_launch to so many times launch"""
    action: Seconds = 0.0
    """host time of one action of a pipeline schedule"""
    step_overhead: Seconds = 5e-3
    """host time of one step outside the model: data, logging, loop"""
    products: float = Field(default=1.0, gt=0, le=2)
    """rate of matrix products over what the device sustains in benchmarks (1: as benchmarked)"""
    attention_rate: float = Field(default=1.0, gt=0, le=2)
    """rate of attention kernels over what the device sustains in benchmarks (1: as benchmarked)"""
    elementwise: float = Field(default=1.0, gt=0, le=20)
    """time of memory-bound operations over that of one pass at the device's copy rate for each kernel of `fused`"""
    network: float = Field(default=1.0, gt=0, le=2)
    """rate of collectives between nodes during a step over what the library reaches in benchmarks (1: as benchmarked); inside nodes it is 1"""
    hides: float = Field(default=0.85, ge=0, le=1)
    """share of compute behind which overlapped communication can run"""
    asynchronous: bool = True
    """the host runs ahead of the device; false where the host computes (CPU): their times add up"""
    separate_projections: bool = False
    """q, k, v and gate, up are products of their own instead of one each: each reads its input again, and gradients of the input are added up"""
    joined_adapters: bool = False
    """the matrices of a product are one module, whose adapter is one pair of matrices"""
    graphs: tuple[Graphed, ...] = ()
    """what is replayed from CUDA graphs, or compiled away, at almost no host time. step: all launches. attention: the mixer of a layer with its
    norm. router: the router of experts, shared experts and their norm. ffn: the dense FFN with its norm"""
    fused: tuple[Fused, ...] = ("norm", "activation", "rope", "bias-dropout", "softmax", "optimizer", "accumulate")
    attention: Literal["flash", "triton", "fused", "sdpa", "stored"] = "flash"
    """flash: recomputes the softmax; triton: its first version in Triton; fused: vendor's flash; sdpa: the one of the two that torch's
    scaled_dot_product_attention takes on the device; stored: keeps the scores"""
    dispatch: Literal["all-to-all", "deduplicated"] = "all-to-all"
    """deduplicated: a token is sent to another node once, for all its experts there (DeepEP), not once for each expert"""
    tiled_context: bool = False
    """ring and all-gather attention run in tiles of torch operators: no fused kernel returns the log-sum-exp"""
    context_in_blocks: bool = False
    """all-gather attention computes and merges a block for each rank, with keys and values repeated to the heads
    of queries (torch's context_parallel)"""
    overlap: tuple[Axis, ...] = ("dp",)
    """axes whose communication overlaps with compute"""
    overlap_zero: tuple[int, ...] = (0, 1, 2, 3)
    """ZeRO stages whose data-parallel communication overlaps, where dp is in `overlap`"""
    overlap_in_pieces: bool = True
    """tensor-parallel messages overlap in pieces of a product and of its all-gather or reduce-scatter: only with sequence parallelism and inside a
    node; false: a compiler schedules them behind other products (XLA)"""
    overlap_sums: bool = True
    """messages that overlap in pieces: also the reduce-scatter of an input gradient that is the sum of several products (q, k, v; gate, up)"""
    orders_messages: bool = False
    """sequence parallelism cuts the second dimension of its tensors: where a micro-batch has several sequences, the buffer that a collective gathered
    or reduces is copied to bring them in order. Messages that overlap in pieces need only the sum of the pieces (DTensor)"""
    async_linears: Literal["none", "backward", "own-shard"] = "none"
    """collectives of tensor parallelism that run behind one product of their linear layer where tp is not in `overlap`. backward: in column layers,
    the gather of the input behind the gradient of the input, whose reduction runs behind the gradient of the weight (Megatron). own-shard: also
    the gathers that a product waits for, behind the product of the rank's own shard (nanotron)"""
    selective: Literal["attention", "operators"] = "attention"
    """what `recompute = selective` recomputes: the core of attention, or all but attention and every second product (torchtitan)"""
    reruns: tuple[Module, ...] = ()
    """modules of each layer that backward computes again by themselves, by Megatron-Core's names (recompute_modules): the core of attention, norms of
    the layer, up-projections of latents with their rotation, the dense FFN, all of the experts, their activation. Counted in the time only"""
    early_stop: bool = True
    """recompute stops as soon as backward has the tensors it needs, as in torch without reentrant autograd (use_reentrant = False) or compiled"""
    reruns_graphs: bool = False
    """recompute = full is around the compiled graph of a layer, not inside it: all of the graph runs again, also what early_stop would leave out"""
    shared_scales: bool = False
    """fp8: ranks that hold shards of a tensor agree on one scale, with a small message per matrix product"""
    fp8_gathers: bool = False
    """fp8: can all-gather activations and ZeRO-3 weights in fp8 (plan.gather_dtype)"""
    fp8_activation_gathers: bool = True
    """fp8: plan.gather_dtype also narrows the all-gathers of sequence parallelism, not only those of ZeRO-3 weights"""
    gathers_narrow: tuple[Literal["fp8", "mxfp8"], ...] = ()
    """precisions in which the framework itself quantises what sequence parallelism gathers: runs of it have plan.gather_dtype = fp8"""
    keeps_gathered: bool = False
    """sequence parallelism: linear layers keep their input for backward as it was gathered from the ranks (DTensor); otherwise their part of it,
    which they gather again"""
    keeps_quantised: bool = False
    """linear layers keep their input for backward as they quantised it to fp8, mxfp8 or fp4"""
    fp8_scaling: Literal["delayed", "current"] = "delayed"
    """how a stack with `keeps_quantised` scales fp8. delayed: by the maxima of earlier steps, in the kernels that compute the operands. current: by
    the tensor's own maximum, for which a pass reads it before another quantises it"""
    wide_layers: int = Field(default=0, ge=0, le=10_000)
    """layers whose products stay in 16 bits beside a narrower precision (Megatron's first_last_layers_bf16); counted in the time only"""
    fp8_passes: float = Field(default=0.0, ge=0, le=20)
    """fp8: bytes moved to quantise an element of an operand, and 2 more to transpose it; 0: other kernels do it on the way"""
    logits_chunk: Bytes = 0.0
    """the loss is computed with its projection, in chunks of this many bytes of logits; 0: at once"""
    gradient_views: bool = False
    """buckets are parts of one buffer of all gradients that ZeRO does not shard, and units of ZeRO are reduced from a copy of one unit: no other
    memory for messages of gradients"""
    torch_pipeline: bool = False
    """pipelines run on torch.distributed.pipelining on CPU: it keeps every message of a step, and between the halves of a split backward all tensors
    saved for backward and the gradient of the output of every product"""
    frees_narrow: bool = False
    """a 16-bit gradient is freed as soon as it was added to its sum in 32 bits"""
    lazy_gradients: bool = False
    """backward allocates gradients while it frees activations, where a step has one micro-batch on one data-parallel rank"""
    reuses_saved: bool = False
    """a compiled backward writes gradients of activations into the memory of saved tensors that it has read for the last time"""
    weighs_activations: bool = False
    """routing weights multiply the activations of experts before their last product, whose outputs backward does not need then"""
    unfused: tuple[Literal["scaled-rope", "clamped-gelu"], ...] = ()
    """cases that kernels of `fused` do not cover. scaled-rope: a rotation with a factor of cosine and sine (YaRN). clamped-gelu: the clamps of
    experts gated by quick GELU (gpt-oss)"""
    loops_experts: bool = False
    """each expert's product and the quantisation of its rows are kernels of their own, issued one after another"""
    offloads: tuple[Literal["states", "activations"], ...] = ()
    """what the stack can keep in host memory; the planner searches only these"""
    compressions: tuple[str, ...] = ()
    """compressions of gradients that the stack can run; the planner offers only these"""
    fp32_shards: bool = False
    """ZeRO-3 shards are in fp32 and are the masters; parameters in 16 bits exist only while they are gathered"""
    reduces_last: bool = False
    """ZeRO-3 in a pipeline: gradients are reduced when all micro-batches of a stage have run backward, and its compute waits (the action REDUCE_GRAD
    of torch.distributed.pipelining, which our trainer's stages run too: `PipelineStage.perform_reduce_grad`)"""
    root_unit: bool = False
    """ZeRO-3: the embedding and the head are one unit, the model's root, which is gathered for the whole of backward"""
    casts_inputs: bool = False
    """adapters multiply copies of their inputs, which are cast to their dtype, as PEFT's: each saves its copy"""
    whole_scales: bool = False
    """ZeRO-3 shards the codes of a quantised base and not its scales, which bitsandbytes keeps outside the parameter"""
    half_states: bool = False
    """weights in bf16 are the only ones: moments and gradients are in bf16 as well (gradients in fp32 where a pipeline adds them up)"""
    usual_zero: Stage = 1
    """ZeRO stage of a published run that does not state it"""
    usual_recompute: Literal["", "none", "selective", "full"] = ""
    """what the framework recomputes unless it is told otherwise, in a published run that does not say; "": the least that fits"""
    usual_sharding: Literal["all", "node"] = "all"
    """ranks over which ZeRO-3 shards in a published run that does not say. node: hybrid sharding, a copy of the weights in each node"""
    asks_overlap: tuple[Axis, ...] = ()
    """axes of `overlap` that a setting switches on, which is off by default: published runs overlap them where they say so"""
    defers_reduction: bool = False
    """ZeRO-3 without a pipeline: gradients of micro-batches are added up whole and reduced once per step, unless settings say otherwise"""
    keeps_expert_weights: bool = False
    """ZeRO-3 with expert parallelism: weights stay gathered from forward to backward, unless settings say otherwise"""
    usual_routing: Literal["learned", "consecutive"] = "learned"
    """how published runs route tokens to experts. consecutive: a gate for benchmarks gives token i the experts i·k to i·k + k − 1, modulo
    their number"""
    flat_shards: bool = False
    """ZeRO-1 and 2 shard one flat buffer in buckets; otherwise each unit, with the rows of each tensor padded to the ranks"""
    zero_reduction: Literal["buckets", "all-reduce", "whole"] = "buckets"
    """ZeRO-1 and 2 reduce-scatter gradients in buckets; or all-reduce them in buckets; or all-reduce them in one call after backward"""
    gathers_ahead: bool = True
    """ZeRO-1 and 2 gather updated parameters in buckets behind the next forward where data parallelism overlaps; otherwise in one call that the next
    forward waits for"""
    shard_copy: Seconds = 0.0
    """ZeRO-1 and 2: host time in which the shard of one parameter on one rank is copied from the buffer of the gather, which is not the memory of
    the parameters; 0: it is"""
    gathers: Literal["layer", "parameter"] = "layer"
    """what one collective of ZeRO-3 gathers: the parameters of a layer, the next layer's ahead; or one parameter as its module runs"""
    interleaved_rounds: bool = False
    """interleaved schedules run micro-batches in rounds of pp: the number of micro-batches must be a multiple of pp"""
    sends_parts: bool = False
    """without sequence parallelism, each tensor-parallel rank sends 1/tp of the activations to the next stage, which gathers them"""
    saves: Saves = "sharded"
    """how a checkpoint is saved. sharded: each rank writes its shards, tensor by tensor. copied: each rank copies them to host memory first. rank-0:
    rank 0 collects the full weights, then the full optimizer states, in host memory, through its device a unit at a time. weights: shards, and
    rank 0 collects the full 16-bit weights. group: the first rank of each data-parallel group collects the optimizer states. device: every device
    gathers the full weights"""
    loads: Loads = "sharded"
    """how a checkpoint is loaded. sharded: each rank reads its shards. rank-0: rank 0 reads full tensors and sends them. every-rank: every rank
    reads the full weights to host memory"""
    blocking_p2p: bool = False
    """a pipeline send blocks until it is received"""
    order: tuple[str, ...] = ("tp", "cp", "pp", "dp")
    """axes, fastest first"""
    gradient_dtype: str = "fp32"
    """dtype gradients are accumulated and reduced in"""
    reduction_dtype: str = ""
    """dtype gradients that are accumulated in fp32 are reduced in; "": fp32"""
    fp16_gradient_dtype: str = ""
    """dtype gradients are accumulated in where a run trains in fp16; "": `gradient_dtype`"""
    flat_copies: bool = False
    """the reduction and the update copy gradients to flat buffers, which cannot take the segments that torch's allocator holds for activations"""
    compute_slowdown: float = Field(default=0.1, ge=0, lt=1)
    """share of compute lost while communication runs"""
    saved: float = Field(default=1.0, gt=0, le=10)
    """bytes that the layers save for backward over those of the tensors that their operations need"""
    loss_bytes: float = Field(default=14.0, ge=6, le=40)
    """bytes of memory per logit at the peak of a loss that is not fused; default: torch's cross_entropy has the logits in 16 bits, and log-softmax,
    its gradient and the gradient of the logits in fp32"""
    split_loss_bytes: float = Field(default=0.0, ge=0, le=40)
    """the same where ranks hold parts of the vocabulary; 0: as otherwise"""
    allocator_slack: float = Field(default=0.06, ge=0, le=1)
    """reserved but unused share of live memory"""
    context: Bytes = 1.2e9
    """driver context, libraries and workspaces per device"""
    workspace: Bytes = 2.0**25
    """part of `context` that torch's allocator counts as allocated: the workspace of cuBLAS, 32 MiB on Hopper"""
    communicator: Bytes = 0.25e9
    """buffers per communicator and device"""
    can: Abilities = Abilities()
    """what the framework can run; the planner searches only that"""
    obsolete: bool = False
    """no longer in use: its runs do not tell what a stack without published runs is like"""
    evidence: Literal["typical", "published", "calibrated", "calibrated-typical"] = "typical"
    """what the numbers are from: other stacks, published runs of this stack, operations measured on this machine, or five of the user's runs
    (`meshwright calibrate --from-run`), of a stack of the catalog or (`calibrated-typical`) of another one"""
    measured_runs: int = Field(default=0, ge=0)
    """runs of the user that the numbers are adjusted to and explain"""
    covariance: tuple[float, ...] = Field(default=(), max_length=64)
    """of the calibrated numbers, row by row (`calibrate.response`)"""
    source: str = ""

    def accumulation_dtype(self, precision: str) -> str:
        """The dtype in which gradients of a run in this precision are accumulated."""
        return self.fp16_gradient_dtype if self.fp16_gradient_dtype and precision == "fp16" else self.gradient_dtype

    def reduced_dtype(self, precision: str) -> str:
        """The dtype in which they are reduced: `reduction_dtype` where it is narrower than the sums."""
        sums = self.accumulation_dtype(precision)
        return self.reduction_dtype if self.reduction_dtype and sums == "fp32" else sums

    @property
    def offload_kinds(self) -> list[str]:
        """The values of `plan.offload` that the stack can run, besides "none"."""
        return [*self.offloads, *["both"] * (len(self.offloads) == 2)]

    def overlaps(self, axis: str, sp: Any, zero: Any, ring: Any) -> Any:
        """Whether the communication of an axis overlaps with compute in plans that leave it to the stack. `ring` attention passes one block on while
        it computes another: it overlaps wherever the stack overlaps anything."""
        on = axis in self.overlap
        if axis == "cp":
            return np.asarray(ring, bool) & bool(self.overlap) | on
        if axis == "tp" and self.overlap_in_pieces:
            return np.asarray(sp, bool) & on
        return np.isin(zero, self.overlap_zero) & on if axis == "dp" else on
