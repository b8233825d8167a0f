"""Sharding tables: how tensor parallelism divides a model, as rows (pattern of names, style), read by `tensor.split`.

    region      its input enters column-split products: `copy_in`, or `gather_in` with sequence parallelism
    enter       its output enters such products
    column      a linear layer whose weight and bias are split by output; no communication
    column:1,1  the same for several parts in one weight, in this proportion, each split separately (`cutting`)
    heads:4,2,2 several parts counted in heads, which are never cut; with fewer heads than ranks a head is on several ranks
    per-head    one number per head: each rank has those of its heads
    keys:64     column by whole heads of this width; with fewer heads than ranks a head is on several ranks
    counts:a,b  attributes by which the module counts (its heads, for example) become this rank's; `config.a`: in its own copy of a config
    row         a linear layer whose weight is split by input; outputs are partial sums: `reduce_out` or `scatter_out`, then the whole
                bias, once. In the all-gather form split by output, input and output gathered
    attention   `nn.MultiheadAttention` by heads; its `out_proj` is "row"
    vocabulary  an embedding split by rows: absent tokens look up zero, the sum over ranks is the embedding. With sequence parallelism
                each rank keeps its share of the sequence
    embedding   the same, and the output stays whole
    logits      column over the vocabulary, which need not divide: for a loss that knows where each rank begins
    join        its output, columns of this rank, is gathered, and all ranks continue with the whole
    reduce      its output is a partial sum, since rows of the table cut its parameters so
    replicated  whole, and every rank gives it the same input
    between     whole, and outside the regions: with sequence parallelism it sees a share of the tokens, so its gradient is a partial sum
                over the tp ranks
    inside      whole, and inside a region: it sees this rank's heads or columns only, so its gradient is always a partial sum
    split_sequence  with sequence parallelism its first argument is divided along the sequence
    join_sequence   with sequence parallelism its output is gathered along the sequence, and all ranks continue with the whole
    divided     with sequence parallelism its input is this rank's share already: the caller divides it
    positions   whole; with sequence parallelism a rank keeps its share of the output
    dropout     holds nothing; with sequence parallelism it drops of its share of the tokens
    probabilities   holds nothing; drops of this rank's heads
    gathered    its output, columns of this rank, is gathered from all: the deep MLP's layers
    experts     divided over ep and expert_tp (`expert`); in a module that is not ours, "cut" rows give how tensor parallelism divides it

A row may also name a parameter: "cut:1" splits dimension 1, "cut:1:1,1" a dimension of two parts, each separately.
`*` matches one part of a dotted name. Rows of one module apply in their order; what wraps it later is outside.

A module that holds parameters and matches no row raises, and so does a row that matches nothing: either would silently train
something else.

Tables for known classes of other libraries are found by the name of the class (`table_for`).

Sequence parallelism: the embedding's output stays whole ("embedding"), since these models count positions and build masks off it; the first
layer divides it ("split_sequence"), and what follows the last layer gets the whole again ("enter" before a split product, "join_sequence"
before one that every rank computes).

A mixture of experts is a region in which every rank routes all tokens in the same way and holds some columns of each expert: the router's gradient is
a partial sum ("inside"), the block's output too ("reduce"). "experts" marks what expert parallelism spreads.
"""

from collections.abc import Callable
from typing import Any

from torch import nn

from meshwright.describe.model import Model
from meshwright.describe.sharding import module_styles
from meshwright.describe.variants import ATTENTIONS
from meshwright.errors import MeshwrightError

Table = tuple[tuple[str, str], ...]


def head_width(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


# {head}: the width of a head.
LLAMA = (
    ("model.embed_tokens", "embedding"),
    ("model.layers.0", "split_sequence"),
    ("model.layers.*.input_layernorm", "between"),
    ("model.layers.*.self_attn", "region"),
    ("model.layers.*.self_attn.q_proj", "column"),
    ("model.layers.*.self_attn.[kv]_proj", "keys:{head}"),
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


def llama(config: Any) -> Table:
    """Llama, Mistral and Qwen2."""
    return tuple((name, style.format(head=head_width(config))) for name, style in LLAMA)


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


VIT = (
    ("embeddings", "replicated"),
    ("embeddings.patch_embeddings.projection", "replicated"),
    ("layers.0", "split_sequence"),
    ("layers.*.layernorm_*", "between"),
    ("layers.*.attention", "region"),
    ("layers.*.attention.[qkv]_proj", "column"),
    ("layers.*.attention.o_proj", "row"),
    ("layers.*.mlp", "region"),
    ("layers.*.mlp.fc1", "column"),
    ("layers.*.mlp.fc2", "row"),
    ("layernorm", "between"),
    ("layernorm", "join_sequence"),
)


def vit(config: Any, prefix: str = "") -> Table:
    return tuple((prefix + name, style) for name, style in VIT)


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


# The modules of our models that communicate or drop, besides those with parameters (`describe.sharding.module_styles`).
COMMON: Table = (
    ("embedding.drop", "dropout"),
    ("layers.*.*_drop", "dropout"),
    ("layers.*.ffn", "region"),
    ("layers.*.moe.shared", "region"),
    ("head.project", "region"),
)


def table_of(model: Model) -> Table:
    """The table of one of our models: the style of every parameter as `describe.sharding` has it, and where regions begin."""
    styles = module_styles(model)
    if model.kind == "mlp":
        return (*styles, ("layers.*", "gathered"))
    heads = f"layers.*.{ATTENTIONS[model.attention].heads_in}"
    return (*styles, *COMMON, (heads, "region"), (f"{heads}.probabilities", "probabilities"))
