"""OLMo-core: fields of a Python config, read and not written. Batches are counted in tokens: of all ranks, and of one rank's micro-batch.

A value that is the name of a variable of the script, such as `sequence_length`, states nothing.
"""

from __future__ import annotations

from meshwright.interop.frameworks.framework import OPTIMIZERS, Framework
from meshwright.interop.keys import Facts, Key, Table

T, D = "train_module.", "train_module.dp_config."
VARIABLES = ("sequence_length", "bs_config.sequence_length", "bs_config.rank_microbatch_size_tokens", "bs_config.global_batch_size_tokens",
             "bs_config.cp_degree", "cp_config", "dp_config", "ac_config", -1)  # fmt: skip
DTYPES = (("bfloat16", "bf16"), ("float16", "fp16"), ("float32", "fp32"))


def _derive(facts: Facts) -> None:
    seq, tokens = facts.get("seq"), facts.get("microbatch_tokens")
    if seq and tokens:
        facts["microbatch"] = max(1, tokens // seq)
    if seq and facts.get("batch_tokens"):
        facts["batch"] = max(1, facts["batch_tokens"] // seq)
    facts["sp"] = facts.get("tp", 1) > 1
    facts.setdefault("sharding", "none")
    facts.setdefault("replicate", -1)  # hybrid sharding replicates over the ranks that the shards leave


TABLE = Table(
    keys=(
        Key("model.d_model", "model.hidden"), Key("model.n_layers", "model.layers"), Key("model.n_heads", "model.heads"),
        Key("model.n_kv_heads", "model.kv_heads"), Key("model.vocab_size", "model.vocab"), Key("model.num_experts", "model.experts"),
        Key("model.top_k", "model.top_k"), Key("model.expert_hidden_size", "model.expert_ffn"),
        Key("model.shared_expert_hidden_size", "model.shared_ffn"), Key("model.qk_norm", "model.qk_norm", words={True: True, False: False}),
        Key("SEQUENCE_LENGTH", "seq"),
        Key(T + "max_sequence_length", "seq", unset=VARIABLES),
        Key("GLOBAL_BATCH_SIZE", "batch_tokens"),
        Key("data_loader.global_batch_size", "batch_tokens", unset=VARIABLES),
        Key(T + "rank_microbatch_size", "microbatch_tokens", unset=VARIABLES),
        Key(D + "name", "sharding", match=(("fsdp|hsdp", "parameters"), ("ddp", "none"))),
        # Names of classes or variables: their fields are keys.
        Key(T + "dp_config", "sharding", match=((".", None),)), Key(T + "ac_config", "recompute", match=((".", None),)),
        Key(T + "ep_config", "ep", match=((".", None),)),
        Key(D + "shard_degree", "shard"),
        Key(D + "num_replicas", "replicate"),
        Key(D + "param_dtype", "half", match=DTYPES),
        Key(D + "reduce_dtype", "grad_dtype", match=DTYPES),
        Key(T + "tp_config.degree", "tp", unset=VARIABLES),
        Key(T + "tp_config.enable_async", "overlap_tp", words={True: True, False: False}, default=False),
        Key(T + "pp_config.degree", "pp", unset=VARIABLES),
        Key(T + "pp_config.schedule", "schedule", match=(("interleaved_1F1B", "interleaved"), ("1F1B|single", "1f1b"), ("zbv|ZBV", "zbv"))),
        Key(T + "ep_config.degree", "ep", unset=VARIABLES),
        Key(T + "cp_config.degree", "cp", unset=VARIABLES),
        Key(T + "cp_config", "cp_kind", match=(("ulysses", "ulysses"), ("llama3", "all-gather"), ("zig_zag|ring", "ring")), unset=VARIABLES),
        Key(T + "ac_config.mode", "recompute", match=(("full", "full"), ("budget|selected", "selective")), default="none"),
        Key(T + "float8_config.enabled", "eight", words={True: "fp8", False: None}),
        Key(T + "optim", "optimizer", match=OPTIMIZERS),
        Key(T + "optim.type", "optimizer", match=OPTIMIZERS),
    ),
    not_modelled=(
        r"max_grad_norm|MAX_DURATION|lb_loss|z_loss|rope_theta|layer_norm_eps|capacity_factor|reordered_norm|head_stride|label_ignore",
        r"float8_config$|tp_config$|pp_config$|^train_module\.scheduler",
        r"compile|use_flash|wrapping_strategy|prefetch_factor|activation_memory_budget|ac_config\.|float8_config\.|optim\.|attn_backend",
    ),
    derive=_derive,
)  # fmt: skip

OLMO_CORE = Framework(name="olmo-core", title="OLMo-core", stack="torch-compile", form="yaml", table=TABLE)
