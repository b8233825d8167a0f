"""nanotron: YAML with `parallelism`, `tokens`, `optimizer` and the shape of the model. dp × tp × pp × cp must equal the number of GPUs."""

from __future__ import annotations

from meshwright.interop.frameworks.framework import OPTIMIZERS, Framework
from meshwright.interop.keys import Facts, Key, Table, flag

C, P = "model.model_config.", "parallelism."


def _derive(facts: Facts) -> None:
    facts["sharding"] = "optimizer" if facts.pop("zero", 0) else "none"
    if facts.get("half") == "fp8":
        facts["half"], facts["eight"] = "bf16", "fp8"
    facts["sp"] = bool(facts.get("sp")) and facts.get("tp", 1) > 1
    facts["model.activation"] = "swiglu"


def _restate(facts: Facts) -> None:
    facts["zero"] = 0 if facts.pop("sharding", "none") == "none" else 1
    if facts.get("eight") == "fp8":
        facts["half"] = "fp8"
    if facts.get("tp", 1) == 1:
        facts["sp"] = False
    facts["recompute"] = facts.get("recompute", "none")
    if facts.get("pp", 1) == 1:
        facts["schedule"] = "1f1b"


TABLE = Table(
    keys=(
        Key(C + "num_hidden_layers", "model.layers"), Key(C + "hidden_size", "model.hidden", was=(C + "d_model",)),
        Key(C + "intermediate_size", "model.ffn"), Key(C + "num_attention_heads", "model.heads"), Key(C + "num_key_value_heads", "model.kv_heads"),
        Key(C + "vocab_size", "model.vocab"), Key("model.make_vocab_size_divisible_by", "model.vocab_multiple", default=1),
        Key(C + "max_position_embeddings", "model.max_positions"),
        Key(C + "tie_word_embeddings", "model.tied", words={True: True, False: False}),
        Key(C + "moe_config.num_experts", "model.experts", was=(C + "moe_num_experts",)),
        Key(C + "moe_config.top_k", "model.top_k", was=(C + "num_experts_per_tok",)),
        Key(C + "moe_config.moe_intermediate_size", "model.expert_ffn"),
        Key(C + "is_mamba_config", "state_space", words={True: True, False: False}, read_only=True),
        Key(P + "dp", "dp", always=True),
        Key(P + "tp", "tp", default=1, always=True),
        Key(P + "tp_mode", "sp", words={"REDUCE_SCATTER": True, "ALL_REDUCE": False, "reduce_scatter": True, "all_reduce": False}, default=False, always=True),
        Key(P + "pp", "pp", default=1, always=True),
        Key(P + "pp_engine", "schedule", words={"1f1b": "1f1b", "afab": "gpipe"}, default="1f1b", always=True),
        Key(P + "context_parallel_size", "cp", default=1),
        Key(P + "expert_parallel_size", "ep", default=1, always=True),
        flag("async_linears", P + "tp_linear_async_communication"),  # in the reduce-scatter mode
        Key(P + "recompute_layer", "recompute", words={True: "full", False: "none"}, default="none"),
        Key("tokens.micro_batch_size", "microbatch", always=True),
        Key("tokens.batch_accumulation_per_replica", "accumulation", always=True),
        Key("tokens.sequence_length", "seq", always=True),
        Key("optimizer.zero_stage", "zero", words={0: 0, 1: 1}, default=0, always=True),
        Key("optimizer.accumulate_grad_in_fp32", "grad_dtype", words={True: "fp32", False: "bf16"}, always=True),
        Key("optimizer.optimizer_factory.name", "optimizer", match=OPTIMIZERS),
        Key("model.dtype", "half", words={"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float8": "fp8"}, default="bf16", always=True),
        Key("model.ddp_bucket_cap_mb", "bucket_mb", always=True),
    ),
    not_modelled=(
        r"^model\.model_config\.", r"^general\.|^logging|^checkpoints|^data_stages|^lighteval|^profiler|^tokenizer|^model\.(init|make)",
        r"^optimizer\.(optimizer_factory|learning|weight|clip)", r"train_steps|val_check|limit_|^fp8\.", r"tp_recompute_allgather|moe_layer_recompute",
        r"^(?!parallelism\.|tokens\.|optimizer\.zero)",
    ),
    derive=_derive,
    restate=_restate,
)  # fmt: skip

NANOTRON = Framework(
    name="nanotron",
    title="nanotron",
    stack="nanotron",
    form="yaml",
    table=TABLE,
    comment="nanotron settings: the sections that follow from the plan",
    package="git+https://github.com/huggingface/nanotron",
)
