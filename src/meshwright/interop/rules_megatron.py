"""What Megatron-Core, Megatron-LM, Megatron-Bridge and ms-swift's Megatron refuse."""

import math
from collections.abc import Callable
from typing import Any

from meshwright.interop.rules import VIRTUAL, Rule, SettingsOptions

CORE = ("megatron-lm", "megatron-bridge", "ms-swift")
LM = ("megatron-lm",)
NEMO = ("nemo-1",)
ENDS = (
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
)
COUNTED_ENDS = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
CHUNK = "num_layers_per_virtual_pipeline_stage"
LAYOUT = "pipeline_model_parallel_layout"
OVERLAP = "overlap_moe_expert_parallel_comm"
MEGATRON_FSDP = ("use_megatron_fsdp", "use_custom_fsdp", "use_mcore_fsdp")
SHARDED = ("use_distributed_optimizer", *MEGATRON_FSDP)
WIDE = ("fp32", "torch.float32", "float32", None)


def _twice(
    where: tuple[str, ...], first: str, second: str, when: Callable[[SettingsOptions], Any] | None = None
) -> Rule:
    """Two statements of the layers of pipeline stages."""
    spelled = [name.replace("_", " ") for name in (first, second)]
    why = "Both state the layers of pipeline stages, and the framework refuses two statements"
    test = when or (lambda o: o.both(first, second))
    return Rule(where, test, f"{spelled[0]} and {spelled[1]} are both set", why, f"drop {spelled[1]}", "MW-SET-003")


def _offloads(o: SettingsOptions) -> bool:
    """Whether layers are offloaded to the CPU."""
    return o.on("cpu_offloading") or bool(o.facts.get("offload_layers"))


def _groups(o: SettingsOptions) -> bool:
    """Whether routing limited to groups of experts has impossible numbers."""
    topk, groups, experts = (
        o.number("moe_router_group_topk"),
        o.number("moe_router_num_groups"),
        o.facts.get("model.experts"),
    )
    return bool(topk and (not groups or topk > groups or (experts and experts % groups)))


def _instances(o: SettingsOptions) -> bool:
    """Whether the data-parallel ranks, or those of experts, are not whole instances of the distributed optimizer."""
    count, gpus, pp = o.number("num_distributed_optimizer_instances"), o.facts.get("gpus") or 0, o.degree("pp")
    if count < 2 or not gpus:
        return False
    grids = [o.degree("tp") * o.degree("cp") * pp]
    if o.degree("ep") > 1:
        grids.append((o.facts.get("expert_tp") or o.degree("tp")) * o.degree("ep") * pp)
    return any(gpus % grid == 0 and gpus // grid % count for grid in grids)


def _low_states(o: SettingsOptions) -> bool:
    names = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
    return any(o[name] not in WIDE for name in names) and o["use_precision_aware_optimizer"] is False


def _conflicts(
    option: str, what: str, why: str, tests: dict[str, Callable[[SettingsOptions], Any]]
) -> tuple[Rule, ...]:
    """Rules of one option that excludes several others."""
    return tuple(
        Rule(CORE, lambda o, test=test: o.on(option) and test(o), f"{what} with {name}", why, "drop one of the two")  # type: ignore[misc]
        for name, test in tests.items()
    )


OVERLAP_RULES = _conflicts(
    OVERLAP,
    "overlap of the exchange of expert parallelism",
    "The framework cannot split the layer into compute and exchange then",
    {
        "recompute of whole expert layers": lambda o: o.has("recompute_modules", "moe"),
        "overlap of shared experts": lambda o: o.on("moe_shared_expert_overlap"),
        "a recompute method": lambda o: o.on("recompute_method"),
        "full recompute": lambda o: o.full,
        "expert parallel size 1": lambda o: o.degree("ep") == 1,
        "the allgather dispatcher": lambda o: o["moe_token_dispatcher_type"] == "allgather",
        "several layers of multi-token prediction": lambda o: o.number("mtp_num_layers") > 1,
    },
)
FSDP2_RULES = _conflicts(
    "use_torch_fsdp2",
    "PyTorch's FSDP2",
    "The framework refuses the two together",
    {
        "Megatron's FSDP": lambda o: o.on(*MEGATRON_FSDP),
        "a pipeline of {pp} stages": lambda o: o.degree("pp") > 1,
        "fp16": lambda o: o.facts.get("half") == "fp16",
        "expert parallelism {ep}": lambda o: o.degree("ep") > 1,
        "the distributed optimizer": lambda o: o.on("use_distributed_optimizer"),
    },
)
MEGATRON_RULES = (
    Rule(CORE, lambda o: o.full and not o.on("recompute_method", OVERLAP) and not o.facts.get("scripted"),
         "full recompute without a recompute method", "The framework has no default method",
         "recompute method uniform, with recompute num layers 1"),
    Rule(CORE, lambda o: o.full and o["recompute_method"] in ("uniform",
         "block") and "recompute_num_layers" in o.values and not o.on("recompute_num_layers"),
         "full recompute without the number of layers", "The framework has no default for it", "recompute num layers 1"),
    Rule(LM, lambda o: o.full and o.on("recompute_method") and "recompute_num_layers" not in o.values and not o.facts.get("scripted"),
         "full recompute without the number of layers", "The framework has no default for it", "--recompute-num-layers 1"),
    Rule(CORE, lambda o: o.selective and o.on("recompute_method"),
         "selective recompute with recompute method", "Only full recompute chooses layers", "drop recompute method, or full recompute"),
    Rule(CORE, lambda o: o.selective and o.on("recompute_num_layers"),
         "selective recompute with recompute num layers", "Only full recompute chooses layers", "drop recompute num layers, or full recompute"),
    Rule(CORE, lambda o: o.selective and o.has("recompute_modules", "shared_experts") and o.on("moe_shared_expert_overlap"),
         "recompute of shared experts while they overlap with the dispatcher", "Their forward is not kept in one piece",
         "drop shared_experts from the recompute modules, or the overlap"),
    Rule(CORE, lambda o: o.selective and o.has("recompute_modules", "moe_act", "layernorm") and o["fp8_recipe"] == "delayed" and o.on("fp8",
         "fp8_format"),
         "recompute of moe_act or layernorm with delayed scaling in fp8", "Their outputs are discarded before the scale is known",
         "another fp8 recipe"),
    Rule(CORE, lambda o: o.full and o["cuda_graph_impl"] in ("local", "transformer_engine"),
         "full recompute with CUDA graphs of layers", "Only a graph of the full iteration can recompute whole layers",
         "cuda graph impl full_iteration, or selective recompute"),
    Rule(CORE, lambda o: o.on("cpu_offloading") and o["cuda_graph_impl"] in ("local", "transformer_engine"),
         "CUDA graphs with layers offloaded to the CPU", "A graph cannot hold the copies", "cuda graph impl none"),
    Rule(CORE, lambda o: _offloads(o) and o.degree("pp") > 1,
         "layers offloaded to the CPU in a pipeline of {pp} stages", "The framework offloads layers only without a pipeline",
         "pipeline size 1, or fine-grained activation offloading"),
    Rule(CORE, lambda o: (o.facts.get("offload_layers") or 0) >= (o.facts.get("model.layers") or math.inf),
         "{offload_layers} of the model's layers offloaded to the CPU", "The last layer stays: its backward begins at once",
         "fewer layers than the model has"),
    Rule(CORE, lambda o: _offloads(o) and o.on("recompute_granularity"),
         "layers offloaded to the CPU together with recompute", "Each of the two replaces saved activations", "drop one of the two"),
    Rule(CORE, lambda o: o.on("fine_grained_activation_offloading") and o.on("offload_modules"),
         "activations of modules go to the host ({offload_modules})", "A plan offloads whole layers: `lint --recipes` counts the memory that these "
         "modules free, and no prediction has the time of their copies", "cpu offloading of layers, which is predicted", severity="warning"),
    Rule(CORE, lambda o: o.on("fine_grained_activation_offloading") and (o.on("cpu_offloading") or o["offload_modules"] in ([], "")),
         "fine-grained activation offloading without modules, or with offloaded layers", "It sends the inputs of named modules to the host",
         "offload modules, without cpu offloading"),
    Rule(CORE, lambda o: o.on("fine_grained_activation_offloading") and o.has("offload_modules", "attn_proj") and not o.has("offload_modules",
         "core_attn"),
         "attn_proj is offloaded without core_attn", "The input of the projection is the output of the attention that stays",
         "offload modules core_attn attn_proj"),
    Rule(NEMO, lambda o: o.on("peft_scheme"), "adapters ({peft_scheme}) in settings of NeMo 1", "Training of all weights is read from its settings",
         "settings of Megatron-Bridge or Automodel, whose adapters are read"),
    Rule(NEMO, lambda o: o["megatron_amp_O2"] is False and not o.on("fsdp") and o.facts.get("half") in ("fp16", "bf16"),
         "{half} without megatron_amp_O2", "The weights stay in fp32 under autocast; predicted are 16-bit weights with a copy in fp32",
         "megatron_amp_O2 true", severity="warning"),
    Rule(CORE, lambda o: o.on("distribute_saved_activations") and (o.facts.get("sp") or not o.full or o.degree("tp") == 1),
         "distributed saved activations without tensor parallelism and full recompute, or with sequence parallelism",
         "They divide the inputs of recomputed layers over tensor-parallel ranks, as sequence parallelism does",
         "drop distribute saved activations"),
    _twice(CORE, LAYOUT, ENDS[0], lambda o: o.on(LAYOUT) and o.on(*ENDS)),
    _twice(CORE, LAYOUT, COUNTED_ENDS[0], lambda o: o.on(LAYOUT) and o.on(*COUNTED_ENDS)),
    _twice(CORE, ENDS[0], COUNTED_ENDS[0], lambda o: o.on(*ENDS) and o.on(*COUNTED_ENDS)),
    _twice(CORE, CHUNK, LAYOUT), _twice(CORE, CHUNK, VIRTUAL[1]), _twice(CORE, LAYOUT, VIRTUAL[1]),
    _twice(CORE, CHUNK, ENDS[0], lambda o: o.on(CHUNK) and o.on(*ENDS)),
    _twice(CORE, "hybrid_layer_pattern", CHUNK), _twice(CORE, "hybrid_layer_pattern", VIRTUAL[1]), _twice(CORE, "hybrid_layer_pattern", LAYOUT),
    _twice(CORE, "hybrid_layer_pattern", COUNTED_ENDS[0], lambda o: o.on("hybrid_layer_pattern") and o.on(*COUNTED_ENDS)),
    _twice(CORE, "hybrid_layer_pattern", ENDS[0], lambda o: "|" in str(o["hybrid_layer_pattern"]) and o.on(*ENDS)),
    Rule(CORE, lambda o: o.virtual > 1 and o.degree("pp") == 1 and not o.facts.get("scripted"), "{virtual} virtual stages without a pipeline",
         "Virtual stages divide the stage of a rank; the interleaved schedule needs a pipeline of at least 2 ranks",
         "pipeline size 2 or more, or no virtual stages", "MW-SET-003"),
    Rule(CORE, lambda o: o.on(CHUNK) and o.degree("pp") == 1, "layers per virtual stage without a pipeline",
         "Virtual stages divide the stage of a rank", "pipeline size 2 or more, or no virtual stages", "MW-SET-003"),
    Rule(CORE, lambda o: o.on(*ENDS) and o.degree("pp") == 1, "layers of the first or last pipeline stage without a pipeline",
         "One rank has all layers, and none are left for other stages", "pipeline size 2 or more, or drop these counts", "MW-SET-003"),
    Rule(CORE, lambda o: o.virtual > 1 and o.degree("pp") == 2 and o.on("no_overlap_p2p_communication"),
         "an interleaved schedule of 2 ranks without overlap of its messages", "Two ranks would exchange several messages at once",
         "drop --no-overlap-p2p-communication, or pipeline size 4"),
    Rule(CORE, lambda o: o.on("max_position_embeddings") and (o.facts.get("seq") or 0) > (o.facts.get("model.max_positions") or math.inf),
         "a sequence of {tokens} tokens with {positions} positions", "The framework refuses sequences longer than its positions",
         "max position embeddings {seq}"),
    Rule(CORE, lambda o: len(o.levels) > 1 and math.prod(o.levels) != o.degree("cp"),
         "hierarchical context parallelism {levels} with context parallelism {cp}", "The sizes of its levels multiply to the context-parallel size",
         "sizes whose product is the context parallel size"),
    Rule(CORE, lambda o: o.has("cp_comm_type", "a2a+p2p") and o.degree("cp") > 1 and not o.levels,
         "context parallelism by a2a+p2p without the sizes of its two levels", "The framework does not choose them",
         "hierarchical context parallel sizes, or cp comm type p2p"),
    Rule(CORE, lambda o: o.on("hybrid_context_parallel") and (o.degree("pp") > 1 or o.on(*MEGATRON_FSDP, "enable_cuda_graph")),
         "hybrid context parallelism with a pipeline, CUDA graphs or FSDP", "The framework refuses them together", "drop hybrid context parallel"),
    Rule(CORE, lambda o: o.on("delay_wgrad_compute") and not o.on(OVERLAP, "moe_a2a_overlap"),
         "delayed weight gradients without overlap of expert parallelism", "They are delayed to be computed during its exchange",
         "overlap moe expert parallel comm"),
    *OVERLAP_RULES,
    Rule(CORE, lambda o: o.on(OVERLAP) and o.degree("pp") > 1 and not o.on(LAYOUT, CHUNK, "pp_layout", *VIRTUAL),
         "overlap of the exchange of expert parallelism in a pipeline without virtual stages",
         "It overlaps the forward of one virtual stage with the backward of another", "virtual stages"),
    Rule(CORE, lambda o: o.degree("ep") > 1 and o.on("num_layers") and not o.facts.get("model.experts"),
         "expert parallelism {ep} of a model without experts", "There are no experts to divide", "--num-experts, or expert parallelism 1"),
    Rule(CORE, lambda o: o.degree("tp") > 1 and o.facts.get("model.experts") and not o.facts.get("sp"),
         "experts with tensor parallelism {tp} and without sequence parallelism",
         "A layer of experts raises an error in training then (megatron/core/transformer/moe/moe_layer.py)", "sequence parallel"),
    Rule(CORE, lambda o: o.degree("ep") > 1 and o.facts.get("half") == "fp16", "expert parallelism in fp16",
         "The framework trains divided experts in bf16", "--bf16"),
    Rule(CORE, lambda o: o.on("moe_enable_deepep") and o["moe_token_dispatcher_type"] in ("alltoall", "allgather"),
         "DeepEP with the {moe_token_dispatcher_type} dispatcher", "DeepEP is a backend of the flex dispatcher", "moe token dispatcher type flex"),
    Rule(CORE, lambda o: o.on("moe_shared_expert_overlap") and o["moe_token_dispatcher_type"] == "allgather",
         "overlap of shared experts with the allgather dispatcher", "Only the alltoall and flex dispatchers overlap",
         "moe token dispatcher type alltoall"),
    Rule(LM, lambda o: o.on("moe_pad_expert_input_to_capacity") and not o.on("moe_expert_capacity_factor"),
         "expert inputs padded to a capacity that is not set", "The capacity is the length to pad to", "moe expert capacity factor"),
    Rule(CORE, _groups, "routing to {moe_router_group_topk} of {moe_router_num_groups} groups of experts",
         "Groups must divide the experts, and no more groups can be chosen than there are", "moe router num groups"),
    Rule(LM, lambda o: o.on("fp8_format", "fp4_format") and o["transformer_impl"] == "local",
         "fp8 or fp4 with the local transformer implementation", "Only Transformer Engine multiplies in fp8; the local layers stay in 16 bits",
         "--transformer-impl transformer_engine", severity="warning"),
    Rule(LM, lambda o: o.on("fp8_recipe", "fp8_margin", "fp8_amax_history_len") and not o.on("fp8_format", "fp8"),
         "options of fp8 without --fp8-format", "Without a format the products stay in 16 bits", "--fp8-format hybrid", severity="warning"),
    Rule(CORE, lambda o: o.both("fp8_format", "fp4_format") or o.both("fp8", "fp4"), "fp8 and fp4 are both set",
         "The two precisions exclude each other", "drop one of the two", "MW-SET-005"),
    Rule(CORE, lambda o: o["fp16"] is True and o["bf16"] is True, "bf16 and fp16 are both set", "The two precisions exclude each other",
         "drop one of the two",
         "MW-SET-005"),
    Rule(CORE, _low_states, "16- or 8-bit optimizer states without the precision-aware optimizer",
         "Only that optimizer keeps states in other dtypes than fp32",
         "use precision aware optimizer, or fp32 states"),
    Rule(LM, lambda o: o.on("optimizer_cpu_offload") and not o.on("use_precision_aware_optimizer"),
         "optimizer states on the CPU without the precision-aware optimizer", "The framework's offload is part of that optimizer",
         "--use-precision-aware-optimizer"),
    Rule(LM, lambda o: o.on("use_precision_aware_optimizer") and not o.on(*SHARDED),
         "the precision-aware optimizer without sharded optimizer states",
         "It is an implementation of the distributed optimizer", "--use-distributed-optimizer"),
    Rule(LM, lambda o: o.on("fp8_param_gather") and not o.on(*SHARDED, "use_torch_fsdp2"),
         "weights gathered in fp8 without sharded optimizer states",
         "Only sharded states need a gather", "--use-distributed-optimizer"),
    Rule(LM, lambda o: o.on("fp8_param_gather", "fp8_param") and not o.on("fp8_format", "fp8"), "weights in fp8 without fp8 products",
         "Weights are kept in fp8 for products in fp8", "--fp8-format hybrid"),
    Rule(LM, lambda o: o.on("fp4_param_gather") and not o.on("fp4_format", "fp4"), "weights in fp4 without fp4 products",
         "Weights are kept in fp4 for products in fp4", "--fp4-format e2m1"),
    Rule(LM, lambda o: o.on("overlap_param_gather") and not o.on(*SHARDED) and o["optimizer"] != "dist_muon",
         "overlap of the parameter gather without sharded optimizer states", "Only sharded states need a gather", "--use-distributed-optimizer"),
    Rule(LM, lambda o: o.on("overlap_param_gather") and o.on(*SHARDED) and not o.on("overlap_grad_reduce"),
         "overlap of the parameter gather without overlap of the gradient reduction", "The framework overlaps both or the reduction alone",
         "--overlap-grad-reduce"),
    Rule(CORE, lambda o: o.on("overlap_param_gather_with_optimizer_step") and o["cuda_graph_impl"] == "full_iteration",
         "parameters gathered in the optimizer step with CUDA graphs of whole iterations",
         "The gather is started outside the graph", "drop overlap param gather with optimizer step"),
    Rule(CORE, _instances, "{num_distributed_optimizer_instances} instances of the distributed optimizer do not divide the data-parallel ranks",
         "Each instance has a group of ranks of its own, for experts too", "num distributed optimizer instances 1"),
    Rule(LM, lambda o: o.on("overlap_param_gather_with_optimizer_step") and not (o.both("overlap_param_gather",
         "use_distributed_optimizer") and o.on(CHUNK, *VIRTUAL)),
         "overlap of the parameter gather with the optimizer step without an interleaved pipeline",
         "It starts the gather of the first virtual stages during the step, and needs the overlapped gather too", "drop it"),
    Rule((*LM, "ms-swift"), lambda o: o.on("tp_comm_overlap") and not o.facts.get("sp"),
         "overlap of tensor-parallel communication without sequence parallelism",
         "It splits the gathers and reduce-scatters of sequence parallelism", "--sequence-parallel"),
    *FSDP2_RULES,
    Rule(CORE, lambda o: o.on(*MEGATRON_FSDP) and o.on("use_tp_pp_dp_mapping"), "Megatron's FSDP with ranks in the order tp, pp, dp",
         "Its shards need the default order", "drop use tp pp dp mapping"),
    Rule(CORE, lambda o: o.on(*MEGATRON_FSDP, "use_torch_fsdp2") and o["CUDA_DEVICE_MAX_CONNECTIONS"] == 1,
         "FSDP with CUDA_DEVICE_MAX_CONNECTIONS=1",
         "One queue would put the gathers behind the products; the framework refuses it", "unset CUDA_DEVICE_MAX_CONNECTIONS"),
    Rule(CORE, lambda o: o.on(*MEGATRON_FSDP) and o["ckpt_format"] in ("torch", "zarr", "torch_dcp"),
         "Megatron's FSDP with checkpoints of the format {ckpt_format}",
         "It saves distributed tensors", "ckpt format fsdp_dtensor"),
    Rule(CORE, lambda o: o["position_embedding_type"] == "learned_absolute" and o.on("mtp_num_layers"),
         "multi-token prediction with learned positions",
         "Its layers shift the tokens, which needs rotary positions", "position embedding type rope"),
    Rule(("megatron-bridge",),
         lambda o: (o.facts.get("packed_seq") or 0) > 0 and o["enable_offline_packing"] is not False and (o.facts.get("microbatch") or 1) > 1,
         "micro-batches of {microbatch} packed sequences", "A packed sequence has many samples; the framework takes one per micro-batch",
         "micro batch size 1"),
    Rule(("megatron-bridge",), lambda o: o.on("enable_in_batch_packing") and o.facts.get("microbatch") == 1,
         "packing inside a micro-batch of one sequence",
         "At least two sequences are concatenated", "micro batch size 2 or more"),
    Rule(("megatron-bridge",), lambda o: o.both("enable_in_batch_packing", "enable_offline_packing"), "two kinds of packing are set",
         "They exclude each other", "drop one of the two"),
    Rule(("ms-swift",), lambda o: o.on("freeze_parameters_ratio") and o.degree("pp") > 1,
         "a share of frozen parameters in a pipeline of {pp} stages",
         "The share is counted from the first layer of each rank", "pipeline size 1"),
)  # fmt: skip
