"""Megatron-LM: command-line arguments, also as keys of its test cases (`MODEL_ARGS:` in YAML).

Data parallelism takes the GPUs that tensor, pipeline and context parallelism leave. `--use-distributed-optimizer` is ZeRO-1;
`--use-megatron-fsdp` with `--data-parallel-sharding-strategy` is ZeRO-1 to 3. Layers must divide by pp × virtual stages unless a layout or
the layers of the first and last stage are given.
"""

from meshwright.interop.frameworks.megatron_model import model_settings
from meshwright.interop.keys import Facts
from meshwright.interop.stages import layout_text
from meshwright.interop.tables import framework

BUCKET = (
    40_000_000  # elements of a gradient bucket, unless it is set; more where there are more than 40 data-parallel ranks
)


def derive_sharding(facts: Facts) -> None:
    """ZeRO from the distributed optimizer, or from the strategy of Megatron-FSDP."""
    strategy = facts.pop("sharding", None)
    facts["sharding"] = (strategy or "none") if facts.get("fsdp") else "optimizer" if facts.get("zero") == 1 else "none"
    facts.pop("zero", None)
    if facts.get("overlap_dp"):
        facts.setdefault("bucket_elements", BUCKET)


def restate_sharding(facts: Facts) -> None:
    """The flags of a ZeRO stage: 2 and 3 need Megatron-FSDP."""
    stage = ("none", "optimizer", "gradients", "parameters").index(facts.pop("sharding", "none"))
    facts["zero"] = 1 if stage else 0
    facts["fsdp"] = facts["fsdp_format"] = stage > 1
    facts["precision_aware"] = facts.get("offload_states") or None
    facts["sharding"] = {2: "gradients", 3: "parameters"}.get(stage)
    if stage > 1 and facts.get("saves") == "copied":
        facts["saves"] = "sharded"  # asynchronous saves are of the format torch_dist, which its FSDP does not write
    if not stage:
        facts["replicate"] = None


def derive_saves(facts: Facts) -> None:
    """The format `torch` collects the states of the distributed optimizer on one rank of each data-parallel group; without it no rank has shards."""
    if facts.get("saves") == "group" and facts["sharding"] != "optimizer":
        facts["saves"] = "sharded"


def derive_recompute(facts: Facts) -> None:
    """Full recompute names layers: `uniform` recomputes all of them, `block` the first n of a stage."""
    if facts.get("recompute") != "full" or facts.get("recompute_method") != "block":
        facts.pop("recompute_layers", None)


def restate_recompute(facts: Facts) -> None:
    if facts.get("recompute") == "full":
        facts["recompute_method"] = "block" if facts.get("recompute_layers") else "uniform"
        facts["recompute_layers"] = facts.get("recompute_layers") or 1
    else:
        facts.pop("recompute_layers", None)


def derive_offload(facts: Facts) -> None:
    """Transformer Engine moves what the first n layers save. Megatron-LM has no other switch than n; in Megatron-Bridge n alone moves nothing."""
    layers = facts.pop("offload_layers", None)
    facts["offload_activations"] = bool(layers and facts.get("offload_activations", True))
    if facts["offload_activations"]:
        facts["offload_layers"] = layers


def restate_offload(facts: Facts) -> None:
    """Where all layers are offloaded, all but the last: Transformer Engine keeps that one."""
    if facts.get("offload_activations") and not facts.get("offload_layers") and facts.get("model.layers", 1) > 1:
        facts["offload_layers"] = facts["model.layers"] - 1


def derive_schedule(facts: Facts) -> None:
    """Virtual stages make the schedule interleaved."""
    if facts.get("virtual", 1) > 1 or facts.get("layers_per_chunk"):
        facts["schedule"] = "interleaved"


def restate_schedule(facts: Facts) -> None:
    """Stages of different length need a layout, which also tells the number of virtual stages."""
    if facts.get("stage_layers"):
        facts["layout"] = layout_text(facts["stage_layers"])
    if facts.get("schedule") != "interleaved" or facts.get("pp", 1) == 1 or facts.get("layout"):
        facts.pop("virtual", None)


def default_ffn(hidden: int, gated: bool) -> int:
    """The width of a feed-forward layer that a script does not name: with SwiGLU two thirds of 4 × hidden, in multiples of 64."""
    return int(4 * hidden * 2 / 3 / 64) * 64 if gated else 4 * hidden


def _derive(facts: Facts) -> None:
    derive_sharding(facts)
    derive_saves(facts)
    derive_recompute(facts)
    derive_offload(facts)
    derive_schedule(facts)
    if facts.pop("grad_half", False):
        facts["grad_dtype"] = "bf16"
    if facts.get("gated") is not None and "model.activation" not in facts:
        facts["model.activation"] = "swiglu" if facts["gated"] else "gelu"
    if facts.get("model.hidden") and not (facts.get("model.ffn") or facts.get("model.expert_ffn")):
        facts["model.ffn"] = default_ffn(facts["model.hidden"], bool(facts.get("gated")))
    if "untied" in facts:
        facts["model.tied"] = not facts["untied"]
    if facts.get("model.q_rank") and facts.get("model.kv_rank"):
        facts["model.attention"] = "mla"
    facts["stated_sp"] = facts.get("sp")
    if facts.get("tp", 1) == 1:
        facts["sp"] = False


def _restate(facts: Facts) -> None:
    facts["async_linears"] = None  # on by default
    restate_sharding(facts)
    restate_recompute(facts)
    restate_offload(facts)
    restate_schedule(facts)
    facts.pop("layers_per_chunk", None)
    facts["grouped"] = bool(facts.get("model.kv_heads"))
    if dense := facts.get("model.dense_layers"):
        facts["moe_layout"] = f"([0]*{dense}+[1]*{facts['model.layers'] - dense})"


MEGATRON = framework(
    "megatron-lm",
    not_modelled=(
        r"router-(dtype|group|num-groups|load|pre-softmax|enable-expert|fusion|std|beta|gbs|inter)", r"^--test-mode$", r"ckpt", r"--vocab-extra-ids",
        r"^--(apply-layernorm-1p|attention-softmax-in-fp32|transformer-impl|use-mcore-models|multi-latent-attention)$",
        r"gloo|straggler|experimental|--export|--budget|--slice|--soft-mask|--binary-mask|int-list|tau-|linear-scaler|hard-sample|loss-alpha|temperature",
        r"original-model-sample|flextron|enable-router|is-hybrid-model|--use-mup|mamba", r"^(CUDA_|NCCL_|PYTORCH_|NVTE_)", r"--DDP-impl|--ddp-average",
        r"--use-tp-pp-dp-mapping|--squared-relu|meta-device|use-tokenizer|layer-wise-param-layout|step-batch-size|rotary-|--rope",
        r"--(main|megatron-fsdp-main)-(grads|params)-dtype|exp-avg-sq-dtype|grad-comm-dtype|outer-dp|fp8-(amax|interval|margin|param|wgrad)|mtp-use",
        r"moe-(aux|z-loss|loss|router-(score|topk-scaling|bias)|eval|min|train-capacity|expert-capacity|pad|input-jitter)|create-moe|mlp-type",
        r"curriculum|rampup|teacher|dropout|init-method|hidden-dropout|no-(masked|bias|rope)|tokenizer|--num-workers|--seed|--log|--save|--load|--train-|--lr",
        r"overlap|cuda-graph|use-flash|flash-attn|attention-backend|fusion|fuser|fused|wgrad|tp-comm|grouped-gemm|first-last-layers|bf16$|offload|hierarchical",
        r"--(no-|disable-|use-(?!megatron-fsdp|custom-fsdp|distributed|torch-fsdp)|moe-(?!.*(size|topk|freq|backend|type))|mamba|hybrid|dsa|mla|fp8-|fp4-|mtp-)",
        r"--(optimizer-|decoupled|dist-|distributed-|inference|rl-|grpo|te-|tp-|cp-|rotary|vision|img|patch|encoder-|retro|vit|dino|swin|biencoder|ict|bert)",
        r"activation-func|clamp|embedding|dropout|init|bias|norm|rampup|decay|tokens?$|sample|eval|exit|timeout|log|profil|memory-snapshot|nvtx|wandb|tensorboard",
        r"double-buffer|manual-registration|nccl-ub|num-buckets|shared-expert|async-tensor|zbh1|sequence-parallel-fpdt",
    ),
    derive=_derive,
    restate=_restate,
    model_settings=model_settings,
)  # fmt: skip
