"""NeMo Automodel: YAML with `distributed`, `step_scheduler` and a Hugging Face model.

Data parallelism is FSDP2 over the GPUs that tp, cp and pp leave. The local batch is a data-parallel rank's; a pipeline divides it into micro-batches
of `pp_microbatch_size`. Gathered weights stay after forward unless `reshard_after_forward` is true.
"""

from meshwright.interop.keys import Facts
from meshwright.interop.tables import framework


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


AUTOMODEL = framework(
    "automodel",
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
