"""NeMo Automodel: YAML with `distributed`, `step_scheduler` and a Hugging Face model.

Data parallelism is FSDP2 over the GPUs that tp, cp and pp leave. The local batch is a data-parallel rank's; a pipeline divides it into micro-batches
of `pp_microbatch_size`. Gathered weights stay after forward unless `reshard_after_forward` is true.
"""

from meshwright.interop.keys import OPTIMIZERS, SWITCH, Facts, Framework, Key, Table, flag, rows

D = "distributed."
SCHEDULES = {"1f1b": "1f1b", "interleaved1f1b": "interleaved", "gpipe": "gpipe", "zbvzerobubble": "zbv", "interleavedzerobubble": "interleaved-zb",
             "loopedbfs": "looped-bfs", "dualpipev": "dualpipev"}  # fmt: skip


def _derive(facts: Facts) -> None:
    facts["cp_kind"] = "all-gather"
    facts["sharding"] = {"fsdp2": "parameters", "megatron_fsdp": "parameters", "ddp": "none"}[
        str(facts.pop("fsdp", "fsdp2"))
    ]
    experts, expert_parallel = facts.pop("moe_reshard", None), facts.get("ep", 1) > 1
    stated = experts if expert_parallel and experts is not None else facts.get("reshard")
    by_layer = not expert_parallel and facts.get("pp", 1) == 1  # the default keeps the weights of experts and of stages
    facts["reshard"] = by_layer if stated is None else bool(stated)
    if facts.get("replicate") is None:
        facts["replicate"] = 1
    if facts.get("offload_states"):
        facts["offload_parameters"] = True
    seq = facts.get("packed_seq")
    if seq:
        facts["seq"] = seq
    else:
        facts.pop("packed_seq", None)
        if facts.get("dynamic_length"):  # samples are padded to the longest of their batch: the length is only a limit
            facts.pop("seq", None)
    if facts.get("tp", 1) == 1:
        facts["sp"] = False
    facts.setdefault("half", "bf16")
    facts["sum_dtype"] = facts.get("grad_dtype")
    # Moments have the dtype of the parameters, and so have gradients, unless a pipeline adds them up over micro-batches:
    if facts.get("master") is False and facts["half"] == "bf16":
        facts["state_dtype"] = "bf16"  # FSDP2 does that in the dtype of the reduction, fp32 by default
        if facts.get("pp", 1) == 1:
            facts["grad_dtype"] = "bf16"
    # torchao quantises the input of a product in the kernel before it only if that is compiled.
    facts["fused_activation"] = bool(facts.pop("compiled", False)) or facts.get("eight") != "fp8"
    if facts.get("model.kv_rank") and facts.get("model.nope_dim"):
        facts["model.attention"] = "mla"
    if facts.get("quantised") == 32:
        facts.pop("quantised")
    if facts.get("adapter_kind"):
        facts.setdefault("adapters", 8)  # the defaults of its LoRA
        facts.setdefault("adapter_alpha", 32)


def _restate(facts: Facts) -> None:
    if facts.get("adapter_kind"):
        facts["adapter_kind"] = "lora"
        facts["adapter_targets"] = [f"*.{word}" for word in facts.get("adapter_targets") or ()] or None
    if facts.get("eight") == "fp8":
        facts["compiled"] = True  # as the stack is predicted
    replicas = facts.pop("sharding", "none") == "none"
    only_data = all((facts.get(axis) or 1) == 1 for axis in ("tp", "cp", "pp", "ep"))
    facts["fsdp"] = "ddp" if replicas and only_data else "fsdp2"
    facts["dp"] = None
    if facts["fsdp"] == "ddp":  # it refuses the options of FSDP, and other axes
        facts["replicate"] = facts["sp"] = facts["overlap_tp"] = facts["grad_dtype"] = facts["defers_reduction"] = None
    if facts.get("pp", 1) == 1:
        for name in ("schedule", "pipeline_microbatch", "layers_per_chunk"):
            facts.pop(name, None)
    if (facts.get("ep") or 1) > 1:
        facts["moe_reshard"] = facts.pop("reshard", None)
    facts.pop("layers_per_chunk", None)
    if facts.get("schedule") in ("interleaved", "looped-bfs", "interleaved-zb") and facts.get("model.layers"):
        facts["layers_per_chunk"] = -(-facts["model.layers"] // (facts["pp"] * facts["virtual"]))
        facts["round_stages"] = "up"


TABLE = Table(
    known_as="automodel",
    keys=(
        *rows((
            (("model.pretrained_model_name_or_path", "model.config.pretrained_model_name_or_path", "model.config.name_or_path"), "model"),
            ("model.config.num_hidden_layers", "model.layers"), ("model.config.hidden_size", "model.hidden"),
            ("model.config.num_attention_heads", "model.heads"), ("model.config.num_key_value_heads", "model.kv_heads"),
            ("model.config.intermediate_size", "model.ffn"), ("model.config.vocab_size", "model.vocab"),
            (("model.config.n_routed_experts", "model.config.num_experts"), "model.experts"),
            ("model.config.num_experts_per_tok", "model.top_k"), ("model.config.moe_intermediate_size", "model.expert_ffn"),
            ("model.config.n_shared_experts", "model.shared_experts"), ("model.config.first_k_dense_replace", "model.dense_layers"),
            ("model.config.q_lora_rank", "model.q_rank"), ("model.config.kv_lora_rank", "model.kv_rank"),
            ("model.config.qk_nope_head_dim", "model.nope_dim"), ("model.config.qk_rope_head_dim", "model.rope_dim"),
            ("model.config.v_head_dim", "model.value_dim"), ("model.config.tie_word_embeddings", "model.tied"),
        ), read_only=True),
        *rows((("model.pretrained_model_name_or_path", "hub_model"), ("optimizer.lr", "learning_rate"))),
        Key(D + "strategy", "fsdp", words={"fsdp2": "fsdp2", "megatron_fsdp": "megatron_fsdp", "ddp": "ddp"}, default="fsdp2", always=True),
        *rows((("tp_size", "tp"), ("cp_size", "cp"), ("pp_size", "pp"), ("ep_size", "ep")), prefix=D, default=1, always=True),
        Key(D + "dp_size", "dp", unset=("none",), read_only=True),
        Key(D + "dp_replicate_size", "replicate", unset=("none",)),
        flag("sp", D + "sequence_parallel", always=True),
        Key(D + "pipeline.pp_schedule", "schedule", words=SCHEDULES, was=("autopipeline.pp_schedule", D + "pp_schedule")),
        Key(D + "pipeline.pp_microbatch_size", "pipeline_microbatch", was=("autopipeline.pp_microbatch_size",), default=1),
        *rows((
            (("distributed.pipeline.layers_per_stage", "autopipeline.layers_per_stage"), "layers_per_chunk"),
            (("distributed.pipeline.round_virtual_stages_to_pp_multiple", "autopipeline.round_virtual_stages_to_pp_multiple"),
             "round_stages", {"down": "down", "up": "up", None: None}),
        )),
        Key(D + "activation_checkpointing", "recompute", words={True: "full", False: "none", "full": "full", "selective": "selective"},
            was=("parallelizer.activation_checkpointing", "model.base_activation_checkpointing"), default="none"),
        Key(D + "defer_fsdp_grad_sync", "defers_reduction", words=SWITCH, default=True),
        Key(D + "reshard_after_forward", "reshard", words={True: True, False: False, None: None}),
        Key(D + "moe.reshard_after_forward", "moe_reshard", words=SWITCH, was=("parallelizer.reshard_after_forward",)),
        flag("overlap_tp", D + "enable_async_tensor_parallel"),
        *rows((
            ("overlap_grad_reduce", "overlap_dp"),  # of megatron_fsdp, on by default
            ("overlap_param_gather", "overlap_gather"),
        ), prefix=D, words=SWITCH, read_only=True),
        Key("checkpoint.is_async", "saves", words={True: "copied", False: "sharded"}, default="sharded"),
        *rows((
            ("step_scheduler.global_batch_size", "batch"), ("step_scheduler.local_batch_size", "local_batch"),
            (("dataset.seq_len", "dataset.seq_length", "dataset.max_length", "autopipeline.pp_seq_len"), "seq"),
        ), always=True),
        Key("packed_sequence.packed_sequence_size", "packed_seq", was=("packed_sequence.pack_size",), unset=(0,), read_only=True),
        Key("model.torch_dtype", "half", words={"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}, default="bf16", match=(("bf16|bfloat16", "bf16"), ("fp16|float16", "fp16"), ("float32|fp32", "fp32"), ("auto", "bf16"))),
        *rows((
            ("fp8.enabled", "eight", {True: "fp8", False: None}),
            ("optimizer._target_", "master", ((r"torch\.optim", False), (".", None))),
            ("distributed.offload_policy", "offload_states", ((".", True),)),
            ("loss_fn._target_", "fused_loss", (("linear_ce|fused", True), (".", False))),
        )),
        *rows((
            ("model.backend.te_fp8.recipe", "eight", {"mxfp8": "mxfp8", "current": "fp8", "block": "fp8", "delayed": "fp8"}),
            ("optimizer._target_", "eight_bit_states", (("flashoptim|8bit", True), (".", None))),
            ("dataset.truncation", "unbounded_length", {False: True}, ((".", None),)),
            ("dataset.padding", "dynamic_length", {"do_not_pad": True}, ((".", None),)),
            ("loss_fn.fp32_upcast", "half_loss", {True: False, False: True}),
            (("model.attn_implementation", "model.backend.attn"), "eager", {"eager": True}, ((".", None),)),
            ("model.backend.dispatcher", "dispatcher"),
            (("ci.nodes", "benchmark.num_nodes", "skypilot.num_nodes"), "nodes"),
            ("ci.nproc_per_node", "gpus_per_node"),
        ), read_only=True),
        *rows((
            ("distributed.mp_policy.reduce_dtype", "grad_dtype", {"float32": "fp32", "bfloat16": "bf16"}),
            ("optimizer.exp_avg_dtype", "state_dtype", {"torch.float32": "fp32", "torch.bfloat16": "bf16"}),
        ), default="fp32"),
        Key("optimizer._target_", "optimizer", match=OPTIMIZERS),
        Key("optimizer.master_weights", "master", words=SWITCH, read_only=True),
        Key("compile.enabled", "compiled", words={True: True, False: None}, default=None),
        *rows((
            ("peft._target_", "adapter_kind", {"nemo_automodel.components._peft.lora.PeftConfig": "lora"}, ((".", "lora"),)),
            ("peft.dim", "adapters"), ("peft.alpha", "adapter_alpha"), ("peft.dropout", "adapter_dropout"),
            ("peft.target_modules", "adapter_targets"),
            ("peft.match_all_linear", "adapter_all", {True: True, False: None}),
            ("peft.moe_rank_scaling", "adapter_shared_rank", {True: True, False: None}),
            ("quantization.load_in_4bit", "quantised", {True: 4, False: 32}),
            ("quantization.load_in_8bit", "quantised", {True: 8, False: None}),
            ("quantization.bnb_4bit_use_double_quant", "double_quantised", {True: True, False: None}),
        )),
    ),
    not_modelled=(
        r"^recipe$|^model\._target_$|^distributed\._target_$|^(autopipeline|parallelizer)\._target_$|^ci\.|^benchmark\.|^skypilot\.|^autocast\.|^wandb",
        r"^(dataset|validation|checkpoint|dataloader|tokenizer|rng|lr_scheduler|dist_env)\.?", r"pipeline\.(patch|scale|dtype)|autopipeline\.(patch|scale)",
        r"^packed_sequence\.", r"^optimizer\.(foreach|fused|compress|master|store|lr|betas|weight|eps|exp_avg_sq)", r"^peft\.", r"^quantization\.", r"^qat\.",
        r"^teacher_|max_steps|ckpt_every|val_every|num_epochs", r"^freeze_config|^freeze", r"model\.(use_liger|output_hidden|num_nextn|trust|text_config|force_hf)",
        r"^model\.config\.", r"^loss_fn\.", r"^fp8\.",
        r"^compile\.|^model\.backend|^model\.attn_implementation|attn_implementation|^distributed\.moe|multimodal|mp_policy|async_tensor|enable_compile|prefetch",
        r"defer_fsdp|patch_is_packed|enable_fsdp2",
        r"^(optimizer|packed_sequence|loss_fn|peft|quantization|profiling|kd_|clip_grad|callbacks|logger|comet|mlflow|model|parallelizer|autopipeline)[._]",
        r"^distributed\.(?!.*_size)",
    ),
    derive=_derive,
    restate=_restate,
)  # fmt: skip

AUTOMODEL = Framework(
    name="automodel",
    title="Automodel",
    usual_cluster="dgx-h100",
    stack="automodel",
    form="yaml",
    table=TABLE,
    torch_pipeline=True,
    defers_reduction=True,
    names=("NeMo Automodel", "NeMo-Automodel"),
    comment="NeMo Automodel settings: the sections that follow from the plan",
    package="nemo-automodel",
    tried=("0.7.0",),
)
