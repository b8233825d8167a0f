"""Sharding tables for known classes of other libraries, found by the name of the class.

    table_for(module)      a table, or an error that shows how to write one

Sequence parallelism: the embedding's output stays whole ("embedding"), since these models count positions and build masks off it; the first
layer divides it ("split_sequence"), and what follows the last layer gets the whole again ("enter" before a split product, "join_sequence"
before one that every rank computes).

A mixture of experts is a region in which every rank routes all tokens in the same way and holds some columns of each expert: the router's gradient is
a partial sum ("inside"), the block's output too ("reduce"). "experts" marks what expert parallelism spreads.
"""

from collections.abc import Callable
from typing import Any

from torch import nn

from meshwright.errors import MeshwrightError
from meshwright.parallel.tensor.tables import Table


def head_width(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def llama(config: Any) -> Table:
    """Llama, Mistral and Qwen2."""
    head = head_width(config)
    return (
        ("model.embed_tokens", "embedding"),
        ("model.layers.0", "split_sequence"),
        ("model.layers.*.input_layernorm", "between"),
        ("model.layers.*.self_attn", "region"),
        ("model.layers.*.self_attn.q_proj", "column"),
        ("model.layers.*.self_attn.[kv]_proj", f"keys:{head}"),
        ("model.layers.*.self_attn.o_proj", "row"),
        ("model.layers.*.post_attention_layernorm", "between"),
        ("model.layers.*.mlp", "region"),
        ("model.layers.*.mlp.gate_proj", "column"),
        ("model.layers.*.mlp.up_proj", "column"),
        ("model.layers.*.mlp.down_proj", "row"),
        ("model.norm", "between"),
        ("model.norm", "enter"),
        ("lm_head", "logits"),
        ("lm_head", "join"),
    )


def qwen3(config: Any) -> Table:
    """Llama's, with norms of queries and keys inside each head."""
    return (*llama(config), ("model.layers.*.self_attn.[qk]_norm", "inside"))


def phi3(config: Any) -> Table:
    """Llama's, with queries, keys and values in one weight, and gate and up in another."""
    fused = ("q_proj", "[kv]_proj", "gate_proj", "up_proj")
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    return (
        *(row for row in llama(config) if not row[0].endswith(fused)),
        ("model.layers.*.self_attn", "counts:config.num_attention_heads,num_key_value_heads"),
        ("model.layers.*.self_attn.qkv_proj", f"heads:{heads},{kv_heads},{kv_heads}"),
        ("model.layers.*.mlp.gate_up_proj", "column:1,1"),
    )


def mixtral(config: Any) -> Table:
    """Llama's attention; stacked experts, each cut by columns of gate and up and by rows of down."""
    return (
        *(row for row in llama(config) if ".mlp" not in row[0]),
        ("model.layers.*.mlp", "region"),
        ("model.layers.*.mlp", "reduce"),
        ("model.layers.*.mlp.gate", "inside"),
        ("model.layers.*.mlp.experts", "experts"),
        ("model.layers.*.mlp.experts.gate_up_proj", "cut:1:1,1"),
        ("model.layers.*.mlp.experts.down_proj", "cut:2"),
    )


def gpt2(config: Any) -> Table:
    return (
        ("transformer.wte", "embedding"),
        ("transformer.wpe", "replicated"),
        ("transformer.h.0", "split_sequence"),
        ("transformer.h.*.ln_[12]", "between"),
        ("transformer.h.*.attn", "region"),
        ("transformer.h.*.attn", "counts:split_size,num_heads"),
        ("transformer.h.*.attn.c_attn", "column:1,1,1"),
        ("transformer.h.*.attn.c_proj", "row"),
        ("transformer.h.*.mlp", "region"),
        ("transformer.h.*.mlp.c_fc", "column"),
        ("transformer.h.*.mlp.c_proj", "row"),
        ("transformer.ln_f", "between"),
        ("transformer.ln_f", "enter"),
        ("lm_head", "logits"),
        ("lm_head", "join"),
    )


def vit(config: Any, prefix: str = "") -> Table:
    return (
        (f"{prefix}embeddings", "replicated"),
        (f"{prefix}embeddings.patch_embeddings.projection", "replicated"),
        (f"{prefix}layers.0", "split_sequence"),
        (f"{prefix}layers.*.layernorm_*", "between"),
        (f"{prefix}layers.*.attention", "region"),
        (f"{prefix}layers.*.attention.[qkv]_proj", "column"),
        (f"{prefix}layers.*.attention.o_proj", "row"),
        (f"{prefix}layers.*.mlp", "region"),
        (f"{prefix}layers.*.mlp.fc1", "column"),
        (f"{prefix}layers.*.mlp.fc2", "row"),
        (f"{prefix}layernorm", "between"),
        (f"{prefix}layernorm", "join_sequence"),
    )


def vit_classifier(config: Any) -> Table:
    return (*vit(config, "vit."), ("classifier", "replicated"))


def transformer_encoder(encoder: nn.TransformerEncoder) -> Table:
    """torch's own; its input and output are whole sequences."""
    norms = ("layers.*.norm[12]", *(("norm",) if encoder.norm is not None else ()))
    return (
        ("", "split_sequence"),
        ("", "join_sequence"),
        ("layers.*.self_attn", "attention"),
        ("layers.*.self_attn.out_proj", "row"),
        ("layers.*.linear1", "region"),
        ("layers.*.linear1", "column"),
        ("layers.*.linear2", "row"),
        *((norm, "between") for norm in norms),
    )


BY_CONFIG: dict[str, Callable[[Any], Table]] = {
    "LlamaForCausalLM": llama, "MistralForCausalLM": llama, "Qwen2ForCausalLM": llama, "Qwen3ForCausalLM": qwen3,
    "Phi3ForCausalLM": phi3, "MixtralForCausalLM": mixtral, "GPT2LMHeadModel": gpt2, "ViTForImageClassification": vit_classifier,
}  # fmt: skip
BY_MODULE: dict[str, Callable[[Any], Table]] = {"TransformerEncoder": transformer_encoder}


def find_table(module: nn.Module) -> Table | None:
    """The table of a known class, or of a class derived from one."""
    for kind in (base.__name__ for base in type(module).__mro__):
        if kind in BY_CONFIG and hasattr(module, "config"):
            return BY_CONFIG[kind](module.config)
        if kind in BY_MODULE:
            return BY_MODULE[kind](module)
    return None


def table_for(module: nn.Module) -> Table:
    table = find_table(module)
    if table is None:
        holder = next((name for name, part in module.named_modules() if isinstance(part, nn.Linear)), "layers.*.up")
        raise MeshwrightError(
            "MW-TP-009",
            f"tensor parallelism needs a sharding table for {type(module).__name__}",
            why="Which products are split by columns and which by rows cannot be seen from their shapes",
            valid=sorted([*BY_CONFIG, *BY_MODULE]),
            fix=f'parallelize(module, plan, table=[("{holder}", "region"), ("{holder}", "column"), …]): docs/parallel.md lists the styles',
        )
    return table
