"""The modules that hold the parameters of a block: the names of matrices and vectors of `describe.anatomy` as the network registers them."""

from meshwright.describe.shape import ModelShape
from meshwright.describe.tensors import Linear, Vector
from meshwright.describe.variants import ATTENTIONS

TOKENS, PROJECT = "embedding.tokens.weight", "head.project.weight"
NORMS = {
    "norm-1": "attention_norm",
    "norm-2": "ffn_norm",
    "norm-3": "attention_post_norm",
    "norm-4": "ffn_post_norm",
    "q-norm": "attention.q_a_norm",
    "kv-norm": "attention.kv_a_norm",
    "embedding-norm": "embedding.norm",
    "final-norm": "head.norm",
    "mtp-norm-1": "mtp.hidden_norm",
    "mtp-norm-2": "mtp.embedding_norm",
    "mtp-norm-3": "mtp.norm",
}
FLAT = {  # vectors that are one flat parameter: convolutions and decays of linear mixers, norms that are not `Model.norm`
    "conv": "linear.conv",
    "decay": "linear.decay",
    "steps-norm": "linear.steps_norm",
    "scan-norm": "linear.norm",
    "index-norm": "attention.index_norm",
    "sinks": "attention.sinks",
    "compress-bias": "attention.compress_bias",
    "compress-norm": "attention.compress_norm",
    "index-bias": "attention.index_bias",
    "streams-1-base": "mixer_streams_base",
    "streams-2-base": "channel_streams_base",
    "streams-out-base": "head.streams_base",
}
STREAMS = {"streams-1": "mixer_streams", "streams-2": "channel_streams", "streams-out": "head.streams"}


def module_of(model: ModelShape, linear: Linear) -> str:
    """The module of a block that holds a matrix."""
    if linear.name in STREAMS:
        return STREAMS[linear.name]
    if linear.part == "extra":
        return f"extra.{linear.name}"
    if linear.part == "attention":
        heads_in = ATTENTIONS[model.attention].heads_in
        return f"{'attention' if linear.style == 'between' else heads_in}.{linear.name}"
    if linear.name in ("router", "shared-scale", "latent-down", "latent-up"):
        return f"moe.{linear.name.replace('-', '_')}"
    if linear.name == "head":
        return "head.project"
    if linear.name in ("embedding-in", "embedding-out"):
        return f"{linear.part}.project_{linear.name.rpartition('-')[2]}"
    if linear.part in ("linear", "mtp"):
        return linear.name.replace("-", ".")
    part, _, kind = linear.name.partition("-")
    return linear.name if not kind else f"{'' if part == 'ffn' else 'moe.'}{part}.{kind}"


def vector_module(model: ModelShape, vector: Vector) -> str:
    """The module of a block that holds a vector; of norms of queries and keys that of the queries."""
    if vector.part == "extra":
        return f"extra.{vector.name}"
    if vector.name in ("qk-norm", "q-only-norm"):
        return "attention.q_norm"
    if vector.name in ("tokens", "positions"):
        return f"embedding.{vector.name}"
    if vector.name == "balance-bias":
        return "moe.router"
    if vector.name in FLAT or vector.part == "attention":  # a plug-in's vector bears the name of its module
        return FLAT.get(vector.name) or f"{ATTENTIONS[model.attention].heads_in}.{vector.name}"
    return NORMS[vector.name]
