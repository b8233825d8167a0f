"""What torchtitan, Automodel, nanotron, DeepSpeed, accelerate, axolotl, LLaMA-Factory, ms-swift and TRL refuse."""

import re

from meshwright.describe.schedules import SCHEDULES
from meshwright.interop.rules import Rule, SettingsOptions

TRAINER = ("trl", "llama-factory", "ms-swift")
LORA_KERNELS = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel")
EIGHT_BIT = ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit")
WHOLE_STATES = re.compile(r"muon$|q_galore_adamw8bit$|flash_")
LOSSES = ("cut_cross_entropy", "chunked_cross_entropy", "liger_cross_entropy", "liger_fused_linear_cross_entropy")
TITAN, AUTO, DS, ACC, AXO, LF = (
    ("torchtitan",),
    ("automodel",),
    ("deepspeed", "axolotl"),
    ("accelerate",),
    ("axolotl",),
    ("llama-factory",),
)


def _generations(o: SettingsOptions) -> bool:
    """Whether the completions of a generation batch are not whole groups (GRPO, RLOO)."""
    group, micro, world = o.number("num_generations"), o.facts.get("microbatch"), o.facts.get("gpus")
    steps, total = o.number("steps_per_generation") or o.facts.get("accumulation"), o.number("generation_batch_size")
    if not total and micro and world and steps:
        total = micro * world * steps
    return bool(group and total % group)


SHARDING = ("fsdp", "fsdp2", None)  # strategies of verl
ACTOR, POLICY, OLMO = "actor_rollout_ref.actor.", "policy.", "train_module."
QUANTISED_MODEL = re.compile(r"gptq|awq|aqlm|int[48]|fp8|deepseek-(r1|v3)(?!.*(bf16|distill))", re.IGNORECASE)


def _verl_batches(o: SettingsOptions) -> tuple[int, int]:
    """The mini-batch and the micro-batch of one GPU's group after verl's normalisation; 0 where they are not known."""
    group, ranks = o.count("actor_rollout_ref.rollout.n") or 1, o.count(ACTOR + "ulysses_sequence_parallel_size") or 1
    gpus, mini = o.facts.get("gpus") or 0, o.count(ACTOR + "ppo_mini_batch_size")
    if not gpus or not mini or o.at(ACTOR + "strategy") not in SHARDING:
        return 1, 0
    return mini * group // max(1, gpus // ranks), o.count(ACTOR + "ppo_micro_batch_size_per_gpu")


def _verl_remainder(o: SettingsOptions) -> bool:
    mini, micro = _verl_batches(o)
    return bool(mini and micro and mini % micro)


def _olmo_tokens(o: SettingsOptions) -> bool:
    """Whether a micro-batch is not made of whole sequences."""
    tokens, seq = o.facts.get("microbatch_tokens"), o.facts.get("seq")
    return bool(tokens and seq and tokens % seq)


def _loses_gradients(o: SettingsOptions) -> bool:
    """Whether FSDP frees weights between the forward and the split backward of a pipeline.

    PyTorch's `stage_backward_input` asks the module for its parameters before FSDP has gathered them again. It then finds the shards, which
    are not in the graph, and leaves out their gradients without an error. Seen with PyTorch 2.13."""
    split = o.facts.get("schedule") in {schedule.name for schedule in SCHEDULES.values() if schedule.splits}
    ranks = o.degree("tp") * o.degree("pp") * o.degree("cp")
    sharded = o.facts.get("sharding") == "parameters" and o.facts.get("shard") != 1 and o.facts.get("gpus") != ranks
    return split and o.degree("pp") > 1 and sharded and o.facts.get("reshard") is True


def _is_on_dtensor(o: SettingsOptions) -> bool:
    return o.at(POLICY + "dtensor_cfg.enabled") is True


TORCH_RULES = (
    Rule(TITAN, lambda o: o.degree("ep") > 1 and o.degree("expert_tp") not in (1, o.degree("tp")),
         "expert tensor parallelism {expert_tp} with tensor parallelism {tp}",
         "Experts are divided over all tensor-parallel ranks or none", "expert tensor parallel degree 1"),
    Rule(TITAN, lambda o: o.degree("replicate") > 1 and o.facts.get("shard") == 1 and o.degree("cp") == 1 and max(o.degree("tp"), o.degree("pp")) > 1,
         "replicas without shards together with another parallelism", "That is DDP, which the framework combines with nothing",
         "data parallel shard degree -1"),
    Rule(TITAN, lambda o: (o.facts.get("seq") or 0) % (o.degree("tp") * (2 * o.degree("cp") if o.degree("cp") > 1 else 1)),
         "a sequence of {tokens} tokens over tensor parallelism {tp} and context parallelism {cp}", "tp × 2·cp divides the sequence",
         "a multiple of tp × 2·cp"),
    Rule(TITAN, lambda o: o.on("enable_async_tensor_parallel") and o.degree("tp") > 1 and not o.facts.get("overlap_tp"),
         "asynchronous tensor parallelism without compiling the model", "The compiler cuts the products", "compile.enable"),
    Rule(TITAN, lambda o: o.on("early_step_in_backward") and (o.degree("pp") > 1 or o.degree("ep") > 1),
         "optimizer steps in backward with a pipeline or experts",
         "Gradients are complete only after the last micro-batch", "drop early step in backward"),
    Rule(TITAN, lambda o: o["expert_parallel_comm_backend"] == "deepep" and (o.degree("ep") == 1 or o.degree("expert_tp") > 1),
         "DeepEP without expert parallelism, or with tensor parallelism inside experts", "It exchanges tokens between whole experts",
         "expert parallel degree 2 or more"),
    Rule(TITAN, lambda o: o["recipe_name"] in ("rowwise", "rowwise_with_gw_hp") and o.on("enable_fsdp_float8_all_gather"),
         "fp8 gathers with scales per row",
         "A gathered weight in fp8 has one scale", "drop enable fsdp float8 all gather"),
    Rule((*TITAN, "torchtitan-0.3", *AUTO), _loses_gradients,
         "weights are freed after forward, with a pipeline schedule that splits the backward pass",
         "PyTorch then leaves out the gradients of the freed weights, without an error", "keep the weights after forward"),
    Rule(AUTO, lambda o: o["strategy"] == "ddp" and max(o.degree(a) for a in ("tp", "pp", "cp", "ep")) > 1,
         "DDP with tensor, pipeline, context or expert parallelism",
         "The framework combines them with FSDP2 only", "strategy fsdp2"),
    Rule(AUTO, lambda o: o["strategy"] == "megatron_fsdp" and max(o.degree("pp"), o.degree("ep")) > 1,
         "Megatron's FSDP with pipeline or expert parallelism",
         "The framework combines them with FSDP2 only", "strategy fsdp2"),
    Rule(AUTO, lambda o: o["strategy"] in ("ddp", "megatron_fsdp") and o.degree("replicate") > 1, "replicas with the strategy {strategy}",
         "Only FSDP2 has groups with copies", "dp replicate size 1"),
    Rule(AUTO, lambda o: o.degree("pp") > 1 and not any("pipeline" in name for name in o.settings),
         "a pipeline of {pp} stages without a section for it",
         "The framework does not choose a schedule", "distributed.pipeline.pp_schedule"),
    Rule(AUTO, lambda o: o.on("enable_async_tensor_parallel") and o["sequence_parallel"] is False,
         "asynchronous tensor parallelism without sequence parallelism",
         "It splits the gathers and reduce-scatters of sequence parallelism", "sequence parallel"),
    Rule(("nanotron",), lambda o: o.on("tp_linear_async_communication") and str(o["tp_mode"]).upper() == "ALL_REDUCE",
         "asynchronous linears with all-reduce",
         "Only gathers and reduce-scatters overlap", "tp mode REDUCE_SCATTER"),
    Rule(DS, lambda o: str(o.settings.get("optimizer.type", "")).lower() in ("onebitadam", "onebitlamb",
         "zerooneadam") and (o.facts.get("zero") or 0) > 1,
         "a 1-bit optimizer with ZeRO-{zero}", "It compresses whole gradients, which ZeRO shards", "stage 0 or 1"),
    Rule(("deepspeed",),
         lambda o: o.degree("pp") > 1 and o.facts.get("pipeline_engine", True) and o.facts.get("zero_config", o.facts.get("zero")) in (2, 3),
         "ZeRO stage {zero} with a pipeline of {pp} stages",
         "The pipeline engine accumulates gradients over micro-batches and refuses to shard them",
         "stage 1, or --no-pipeline-parallel"),
    Rule(("deepspeed",), lambda o: o.facts.get("zero") == 3 and (o.facts.get("model.experts") or 0) > 1 and o.on("num_experts"),
         "ZeRO-3 with DeepSpeed's experts",
         "Native experts have process groups of their own, which stage 3 does not shard over", "stage 2"),
    Rule(DS, lambda o: o.on("fp16_master_weights_and_grads", "bf16_master_weights_and_grads") and o.facts.get("zero") == 0,
         "16-bit master weights without ZeRO",
         "Only ZeRO's optimizers keep them in 16 bits", "ZeRO stage 1 or higher"),
    Rule(ACC, lambda o: o.degree("cp") > 1 and o.degree("sequence_ranks") > 1, "context parallelism and Ulysses are both set",
         "They exclude each other", "cp size 1"),
    Rule(ACC, lambda o: max(o.degree("tp"), o.degree("cp")) > 1 and o.degree("replicate") > 1 and o.facts.get("shard", 1) == 1,
         "tensor or context parallelism with replicas and no shards", "Pure data parallelism combines with neither", "dp shard size 2 or more"),
    Rule(ACC, lambda o: o.fsdp2 and o["parallelism_config_dp_shard_size"] == 1 and o.degree("cp") == 1 and o.degree("sequence_ranks") == 1,
         "FSDP with dp shard size 1 and context parallel size 1", "The mesh has no dimension to shard over", "dp shard size 2 or more, or no FSDP"),
    Rule(ACC, lambda o: o.on("cpu_ram_efficient_loading") and o["sync_module_states"] is False and not o.fsdp2,
         "memory-efficient loading without synchronised states",
         "Rank 0 alone reads the weights: the other ranks would train random ones", "fsdp_sync_module_states true"),
    Rule(ACC, lambda o: o.fsdp2 and o.on("forward_prefetch"), "forward prefetch with FSDP2", "FSDP2 always prefetches and has no such option",
         "fsdp forward prefetch false"),
    Rule(ACC, lambda o: o.fsdp2 and o["state_dict_type"] == "LOCAL_STATE_DICT", "local state dicts with FSDP2", "FSDP2 has none",
         "SHARDED_STATE_DICT"),
    Rule(ACC, lambda o: o.on("activation_checkpointing_offload") and not (o.fsdp2 and o.on("activation_checkpointing")),
         "offloaded checkpoints of activations without FSDP2's activation checkpointing", "It offloads what the checkpoints keep",
         "fsdp activation checkpointing true"),
    Rule(AXO, lambda o: o.degree("cp") > 1 and o["sample_packing"] is True and (o.facts.get("microbatch") or 1) > 1,
         "a micro-batch of {microbatch} packed samples with context parallelism", "Its attention over several ranks takes one packed sequence",
         "micro_batch_size 1"),
    Rule(AXO, lambda o: o.degree("cp") > 1 and not o.on("use_glm_dsa_kernels",
         "flash_attention") and o["attn_implementation"] not in ("flash_attention_2", None),
         "context parallelism with {attn_implementation}", "Ring attention is built on flash attention", "attn_implementation flash_attention_2"),
    Rule(AXO, lambda o: o.on("deepspeed") and o.has_fsdp, "deepspeed and fsdp are both set", "Each of the two shards the model",
         "drop one of the two"),
    Rule(AXO, lambda o: o["optimizer"] in EIGHT_BIT and o.fsdp2, "the optimizer {optimizer} with FSDP2",
         "Its 8-bit states cannot be distributed tensors", "adamw_torch_8bit"),
    Rule(AXO, lambda o: "8bit" in str(o["optimizer"]) and o.on("offload_params") and not o.fsdp2, "the optimizer {optimizer} with FSDP offload",
         "Its kernels run on the GPU only", "adamw_torch"),
    Rule(AXO, lambda o: o["optimizer"] in EIGHT_BIT and o.degree("tp") > 1, "the optimizer {optimizer} with tensor parallelism",
         "Its states cannot be distributed tensors",
         "adamw_torch_8bit"),
    Rule(AXO, lambda o: o.fsdp2 and o.both("cpu_ram_efficient_loading", "load_in_4bit"), "4-bit weights with memory-efficient loading in FSDP2",
         "Rank 0 alone quantises: the other ranks wait for shapes that differ", "cpu_ram_efficient_loading false"),
    Rule(AXO, lambda o: o["model_quantization_config"] == "Mxfp4Config" and o["cpu_ram_efficient_loading"] is True,
         "MXFP4 weights with memory-efficient loading",
         "The weights are dequantised while they load, on every rank", "cpu_ram_efficient_loading false"),
    Rule(AXO, lambda o: o.fsdp2 and o["rl"] in ("dpo", "kto", "orpo", "ipo") and o.on("load_in_8bit", "load_in_4bit"),
         "quantised weights with {rl} in FSDP2",
         "The framework refuses them together", "DeepSpeed, or no quantisation"),
    Rule(AXO, lambda o: o["cpu_offload_pin_memory"] is False and not (o.fsdp2 and o.on("offload_params")),
         "unpinned offload without FSDP2's offload of parameters",
         "It is an option of that offload", "offload_params true"),
    Rule(AXO, lambda o: o["adapter"] == "qlora" and (o.on("load_in_8bit", "gptq") or o["load_in_4bit"] is False), "QLoRA without 4-bit weights",
         "QLoRA trains adapters on weights in 4 bits", "load_in_4bit true"),
    Rule(AXO, lambda o: o.on("load_in_8bit", "load_in_4bit") and not o.on("adapter") and not o.on("inference"),
         "quantised weights without an adapter",
         "Quantised weights cannot be trained themselves", "adapter: qlora"),
    Rule(AXO, lambda o: o["adapter"] == "lora" and o.on("load_in_8bit") and o.on(*LORA_KERNELS), "fused LoRA kernels with 8-bit weights",
         "The kernels read 4 or 16 bits",
         "lora kernels false"),
    Rule(AXO, lambda o: o.on(*LORA_KERNELS) and o.on("trust_remote_code"), "fused LoRA kernels with remote model code",
         "The kernels replace code that they know",
         "trust_remote_code false"),
    Rule(AXO, lambda o: o.on(*LORA_KERNELS) and o.on("lora_dropout") and o["adapter"] == "lora" and o["lora_dropout_kernels"] is False,
         "fused LoRA kernels with dropout",
         "The kernels have no dropout", "lora_dropout 0"),
    Rule(AXO, lambda o: o.both("sample_packing", "rl"), "packed samples with {rl}", "Preference training compares whole samples",
         "sample_packing false"),
    Rule(AXO, lambda o: o.on("fp8_enable_fsdp_float8_all_gather") and not o.fsdp2, "fp8 gathers without FSDP2", "FSDP2 alone gathers in fp8",
         "fsdp_version 2"),
    Rule(AXO, lambda o: sum(o.on(name) for name in LOSSES) > 1, "several fused losses are set", "One loss replaces the model's",
         "keep one of them"),
    Rule(AXO, lambda o: o.on("activation_offloading") and not o.on("gradient_checkpointing", "activation_checkpointing"),
         "offloaded activations without gradient checkpointing",
         "It offloads what the checkpoints keep", "gradient_checkpointing true"),
    Rule(AXO, lambda o: o.on("liger_rms_norm", "liger_fused_linear_cross_entropy") and o.degree("tp") > 1,
         "Liger's norm or fused loss with tensor parallelism {tp}", "Its kernels do not take distributed tensors",
         "liger_rms_norm and liger_fused_linear_cross_entropy false"),
    Rule(AXO, lambda o: WHOLE_STATES.match(str(o["optimizer"])) and (o.on("deepspeed") or (o.has_fsdp and not o.fsdp2)),
         "the optimizer {optimizer} with DeepSpeed or FSDP1", "It needs whole matrices, which the framework has under DDP and FSDP2",
         "fsdp_version 2"),
    Rule(AXO, lambda o: o["optimizer"] == "q_galore_adamw8bit" and o.on("adapter"), "the optimizer {optimizer} with adapters",
         "It projects the gradients of whole weights", "adamw_torch"),
    Rule(AXO, lambda o: o.on("model_quantization_config") and o.on("load_in_8bit", "load_in_4bit"), "two kinds of quantised weights are set",
         "model_quantization_config and load_in_4bit or load_in_8bit exclude each other", "drop model_quantization_config"),
    Rule(AXO, lambda o: o.both("max_memory", "gpu_memory_limit"), "max_memory and gpu_memory_limit are both set", "One follows from the other",
         "drop gpu_memory_limit"),
    Rule(AXO, lambda o: o.on("deepcompile") and not o.on("deepspeed"), "deepcompile without DeepSpeed", "It is a compiler of DeepSpeed's",
         "torch_compile true"),
    Rule(AXO, lambda o: o.on("selective_checkpointing") and not o.on("gradient_checkpointing", "activation_checkpointing"),
         "selective checkpointing without gradient checkpointing", "It chooses what the checkpoints keep", "gradient_checkpointing true"),
    Rule(AXO, lambda o: "falcon" in str(o["base_model"]).lower() and o.on("fsdp"), "FSDP with a Falcon model", "The framework refuses it",
         "deepspeed"),
    Rule(AXO, lambda o: o.on("relora") and (o.has_fsdp or o.on("deepspeed")), "ReLoRA with sharded weights",
         "It merges adapters into whole weights", "drop fsdp and deepspeed"),
    Rule(AXO, lambda o: o.both("gradient_accumulation_steps", "batch_size"), "batch_size and gradient_accumulation_steps are both set",
         "One follows from the other",
         "drop batch_size"),
    Rule(AXO, lambda o: o.number("dp_shard_size") > 1 and not o.has_fsdp, "dp_shard_size without fsdp_config",
         "Shards are FSDP's", "fsdp_config"),
    Rule((*AXO, *TRAINER), lambda o: o["fp16"] is True and o["bf16"] is True, "bf16 and fp16 are both set",
         "The two precisions exclude each other", "drop one of the two",
         "MW-SET-005"),
    Rule((*AXO, *TRAINER), _generations, "generations are not whole groups of {num_generations}",
         "Advantages compare the completions of one prompt",
         "a generation batch that num_generations divides"),
    Rule((*AXO, *TRAINER), lambda o: o["num_generations"] == 1, "one completion per prompt", "An advantage compares several completions",
         "num_generations 2 or more"),
    Rule((*LF, "ms-swift"), lambda o: o.on("quantization_bit", "quant_bits")
         and (o.has("finetuning_type", "full", "freeze") or o.has("tuner_type", "full")),
         "quantised weights with full fine-tuning", "Quantised weights cannot be trained themselves", "finetuning_type lora"),
    Rule(LF, lambda o: o.facts.get("quantised") == 8 and o.facts.get("sharding") == "parameters", "8-bit weights with ZeRO-3 or FSDP",
         "The framework shards quantised weights of 4 bits only", "quantization_bit 4"),
    Rule(LF, lambda o: o.on("pure_bf16") and o.facts.get("sharding") == "parameters" and o.on("deepspeed"), "pure bf16 with DeepSpeed ZeRO-3",
         "DeepSpeed keeps fp32 master weights", "bf16 true"),
    Rule(LF, lambda o: o.on("use_unsloth", "use_kt", "predict_with_generate", "pissa_init")
         and o.facts.get("sharding") == "parameters" and o.on("deepspeed"),
         "Unsloth, KTransformers, generation or PiSSA with ZeRO-3", "They need whole weights on a rank", "ZeRO-2"),
    Rule(LF, lambda o: o.on("use_galore", "use_apollo") and o.on("deepspeed"), "GaLore or APOLLO with DeepSpeed", "They project whole gradients",
         "drop deepspeed"),
    Rule(LF, lambda o: o.both("fp8", "quantization_bit") and not o.on("use_mca"), "fp8 training of quantised weights",
         "The framework refuses them together", "drop one of the two"),
    Rule(LF, lambda o: o.on("use_mca") and o.on("neat_packing") and o.degree("cp") > 1, "neat packing with context parallelism {cp}",
         "The samples of a pack are not aligned to 2·cp tokens", "neat_packing false"),
    Rule(LF, lambda o: o.facts.get("sharding") == "parameters" and QUANTISED_MODEL.search(str(o["model_name_or_path"])),
         "the quantised model {model_name_or_path} with ZeRO-3 or FSDP",
         "Weights that were quantised after training cannot be sharded", "the original weights, with quantization_bit 4"),
    Rule(LF, lambda o: o.on("neat_packing") and o["stage"] not in ("sft", None), "neat packing in the stage {stage}",
         "Only fine-tuning packs samples", "neat_packing false"),
    Rule(("ms-swift",), lambda o: o.on("mlp_padding_free") and o.degree("cp") > 1, "mlp_padding_free with context parallelism {cp}",
         "Each rank has a part of the padding", "mlp_padding_free false"),
    Rule(("olmo-core",), lambda o: o.degree("ep") > 1 and o.degree("tp") > 1, "expert parallelism with tensor parallelism",
         "The framework's meshes exclude each other", "tp_config none"),
    Rule(("olmo-core",), lambda o: o.degree("ep") > 1 and str(o.at(OLMO + "dp_config.name")).rpartition(".")[2] in ("fsdp", "ddp"),
         "expert parallelism without hybrid sharding", "Experts use the shards of HSDP", "dp_config.name hsdp"),
    Rule(("olmo-core",), lambda o: o.degree("ep") > 1 and (o.facts.get("shard") or -1) > 0 and o.facts["shard"] != o.degree("ep"),
         "expert parallelism {ep} with a shard degree of {shard}", "Both use one dimension of the mesh", "shard_degree {ep}"),
    Rule(("olmo-core",), _olmo_tokens, "a micro-batch of {microbatch_tokens} tokens is not a multiple of the sequence of {tokens}",
         "The micro-batch is counted in tokens", "a multiple of the sequence"),
    Rule(("olmo-core",), lambda o: "budget" in str(o.at(OLMO + "ac_config.mode")) and o.at(OLMO + "compile_model") is False,
         "activation checkpointing by budget without compiling the model", "The compiler chooses what is recomputed", "compile_model true"),
    Rule(("olmo-core",), lambda o: "selected_blocks" in str(o.at(OLMO + "ac_config.mode")) and not o.at(OLMO + "ac_config.block_interval"),
         "recompute of selected blocks without their interval", "The framework has no default", "block_interval 2"),
    Rule(("olmo-core",), lambda o: str(o.at(OLMO + "ac_config.mode")).endswith("full") and (o.facts.get("model.experts") or 0) > 1,
         "recompute of whole layers with experts", "Routing would be repeated: the framework refuses it", "mode selected_modules"),
    Rule(("verl",), lambda o: not o.on("use_dynamic_bsz") and 0 < o.count("data.train_batch_size") < o.count(ACTOR + "ppo_mini_batch_size"),
         "a train batch that is smaller than the mini-batch of {ppo_mini_batch_size}",
         "Updates take mini-batches of the train batch", "train_batch_size {ppo_mini_batch_size}"),
    Rule(("verl",), lambda o: _verl_batches(o)[0] == 0, "a mini-batch of {ppo_mini_batch_size} prompts over {gpus} GPUs is less than one sample each",
         "It is multiplied by rollout.n and divided by the data-parallel ranks", "a larger ppo_mini_batch_size"),
    Rule(("verl",), _verl_remainder, "micro-batches of {microbatch} do not divide the mini-batch of a GPU",
         "The mini-batch times rollout.n is divided by the data-parallel ranks first", "a divisor of it"),
    Rule(("verl",), lambda o: o.count(ACTOR + "ulysses_sequence_parallel_size") > 1
         and o.at("actor_rollout_ref.model.use_remove_padding") is False,
         "Ulysses with padded samples", "It divides packed sequences", "use_remove_padding true"),
    Rule(("verl",), lambda o: o.at(ACTOR + "ppo_micro_batch_size") and o.at(ACTOR + "ppo_micro_batch_size_per_gpu"),
         "ppo_micro_batch_size and ppo_micro_batch_size_per_gpu are both set", "The first is the old name", "drop ppo_micro_batch_size"),
    Rule(("nemo-rl",), lambda o: o.at(POLICY + "dtensor_cfg.enabled") is True and o.at(POLICY + "megatron_cfg.enabled") is True,
         "DTensor and Megatron are both enabled", "One of them trains the policy", "megatron_cfg.enabled false"),
    Rule(("nemo-rl",), lambda o: o.at(POLICY + "dynamic_batching.enabled") is True and o.at(POLICY + "sequence_packing.enabled") is True,
         "dynamic batches and sequence packing are both enabled", "Each of them forms the micro-batches", "dynamic_batching.enabled false"),
    Rule(("nemo-rl",), lambda o: o.at(POLICY + "dynamic_batching.enabled") is True and o.degree("pp") > 1,
         "dynamic batches with a pipeline of {pp} stages", "Stages need micro-batches of one size", "sequence_packing"),
    Rule(("nemo-rl",), lambda o: _is_on_dtensor(o) and o.degree("cp") > 1 and o.at(POLICY + "sequence_packing.enabled") is True,
         "sequence packing with context parallelism in DTensor", "The framework refuses them together", "sequence_packing.enabled false"),
    Rule(("nemo-rl",), lambda o: _is_on_dtensor(o) and o.degree("tp") > 1 and o.at(POLICY + "dtensor_cfg.sequence_parallel") is True
         and (o.degree("cp") > 1 or o.at(POLICY + "sequence_packing.enabled") is True),
         "sequence parallelism with context parallelism or sequence packing in DTensor", "The shards of a sequence have different sizes",
         "sequence_parallel false"),
    Rule(("nemo-rl",), lambda o: _is_on_dtensor(o) and o.degree("cp") > 1 and o.number("make_sequence_length_divisible_by") % (2 * o.degree("cp")),
         "sequences padded to a multiple of {make_sequence_length_divisible_by} with context parallelism {cp}", "2·cp divides a sequence",
         "a multiple of 2·cp"),
)  # fmt: skip
