"""levanter (JAX): YAML, read and not written. `train_batch_size` is global; the parameters are sharded over the data axis where `fsdp_axis` is named."""

from __future__ import annotations

from meshwright.interop.frameworks.framework import OPTIMIZERS, Framework
from meshwright.interop.keys import Facts, Key, Table

M, T = "model.", "trainer."


def _derive(facts: Facts) -> None:
    facts.setdefault("sharding", "none")
    facts["sp"] = False
    facts["model.activation"] = "gelu" if str(facts.get("flavor", "")).startswith(("gpt2", "backpack")) else "swiglu"
    facts.pop("flavor", None)


TABLE = Table(
    keys=(
        Key("model.type", "flavor"),
        Key("initialize_from_hf", "model", unset=(True, False)),
        Key(M + "hidden_dim", "model.hidden"), Key(M + "num_layers", "model.layers"), Key(M + "num_heads", "model.heads"),
        Key(M + "num_kv_heads", "model.kv_heads"), Key(M + "intermediate_dim", "model.ffn"), Key(M + "vocab_size", "model.vocab"),
        Key(M + "tie_word_embeddings", "model.tied", words={True: True, False: False}),
        Key(M + "n_routed_experts", "model.experts", was=(M + "num_experts",)), Key(M + "num_experts_per_tok", "model.top_k"),
        Key(M + "seq_len", "seq"),
        Key("max_train_length", "seq", was=("max_seq_len", "max_tune_length")),
        Key(T + "train_batch_size", "batch", unset=(-1,)),
        Key(T + "per_device_parallelism", "microbatch", unset=(-1,)),
        Key(T + "model_axis_size", "tp", default=1),
        Key(T + "replica_dcn_axis_size", "replicate"),
        Key(T + "fsdp_axis", "sharding", match=((".", "parameters"),)),
        Key(T + "parameter_axis_resources.embed", "sharding", match=((".", "parameters"),)),
        Key(M + "gradient_checkpointing", "recompute", words={True: "full", False: "none", "nested": "full", "offload": "full"}, default="full"),
        Key(T + "mp", "half", match=(("c=bf|c=bfloat16|^bf", "bf16"), ("c=f16|^f16", "fp16"), ("f32", "fp32"))),
        Key(T + "quantization.fp8", "eight", words={True: "fp8", False: None}),
        Key("optimizer.type", "optimizer", match=(*OPTIMIZERS, ("sophia", "adamw"))),
    ),
    not_modelled=(
        r"num_train_steps|batch_axis|tensor_parallel_axes|axis_resources|use_hf|max_eval|^data\.|initialize_from|num_senses|sense_|hyena|checkpointer",
        r"flash_attention|attn_backend|scan_layers|upcast",
    ),
    derive=_derive,
)  # fmt: skip

LEVANTER = Framework(name="levanter", title="levanter", stack="maxtext", form="yaml", table=TABLE)
