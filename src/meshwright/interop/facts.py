"""The facts that settings state, under neutral names.

Frameworks state the same thing in different quantities: a batch per step or per rank, virtual stages or layers per virtual stage. Each
quantity is a fact of its own here; `assemble` makes a plan of any sufficient set of facts, and `write` gives all of them for a plan.
"""

from typing import Any

FACTS: dict[str, str] = {
    # Degrees
    "tp": "tensor-parallel degree",
    "sp": "sequence parallelism",
    "cp": "context-parallel degree",
    "cp_kind": "kind of context parallelism",
    "pp": "pipeline-parallel degree",
    "ep": "expert-parallel degree",
    "expert_tp": "tensor-parallel degree inside experts",
    "replicate": "data-parallel groups with a full copy",
    "shard": "data-parallel ranks that parameters are sharded over; -1: those that are left",
    "shard_with_cp": "the same, where context-parallel ranks count too",
    "dp": "data-parallel degree",
    "gpus": "number of GPUs",
    "nodes": "number of nodes",
    "gpus_per_node": "GPUs of a node",
    # The pipeline
    "virtual": "pipeline stages per rank",
    "schedule": "pipeline schedule",
    "layers_per_chunk": "layers of one pipeline stage",
    "first_less": "layers that the embedding counts as in its stage",
    "last_less": "layers that the head counts as in its stage",
    "first_layers": "layers of the first pipeline rank",
    "last_layers": "layers of the last pipeline rank",
    "stage_layers": "layers of every stage",
    "layout": "the parts of every stage, by name",
    "counts_embedding": "the embedding counts as a layer of the pipeline split",
    "counts_loss": "the loss counts as a layer of the pipeline split",
    "round_stages": "number of stages is rounded to a multiple of pp",
    "pipeline_engine": "the pipeline engine runs the stages; without it the pipeline degree has no effect",
    "sequence_ranks": "ranks that share a sequence by all-to-all (Ulysses)",
    "stated_sp": "sequence parallelism as it was stated",
    "microbatch_group": "micro-batches that an interleaved schedule takes together",
    # Batch and sequence
    "batch": "sequences of a step",
    "microbatch": "sequences of a micro-batch",
    "local_batch": "sequences of a data-parallel rank in one forward pass or pipeline run",
    "pipeline_microbatch": "sequences of a micro-batch of the pipeline",
    "pipeline_microbatches": "micro-batches of one pipeline run",
    "accumulation": "forward and backward passes before an update",
    "microbatch_tokens": "tokens of a micro-batch",
    "batch_tokens": "tokens of a step",
    "seq": "sequence length",
    "packed_seq": "length of packed sequences",
    "decoder_seq": "sequence length of the decoder of an encoder-decoder",
    # Memory and numerics
    "zero": "ZeRO stage",
    "zero_of_optimizer": "optimizer states are sharded, as the optimizer's section states it",
    "sharding": "how data parallelism shards: none, optimizer, gradients, parameters",
    "fsdp": "parameters are sharded by FSDP",
    "cuda_graphs": "kernels are launched by CUDA graphs",
    "graph_scope": "modules that CUDA graphs capture",
    "eager_steps": "steps are not captured in CUDA graphs",
    "by_deepspeed": "DeepSpeed shards, by a file that the settings name or a section of theirs",
    "wrap_policy": "every layer is a unit of FSDP",
    "ring_attention": "the attention kernel that context parallelism needs",
    "expert_plugin": "the plug-in of expert parallelism is on",
    "fsdp_format": "checkpoints have the format of FSDP",
    "precision_aware": "the optimizer that offload is a part of",
    "moe_reshard": "the same, where the model has experts",
    "reshard": "gathered weights are freed after forward",
    "defers_reduction": "FSDP adds up whole gradients of micro-batches, and reduces them once per step",
    "sum_dtype": "dtype in which it adds them up",
    "recompute": "activations recomputed in backward: none, selective or full",
    "shard_recompute": "the same, by FSDP",
    "recompute_every": "every n-th layer is recomputed",
    "recompute_layers": "number of layers that are recomputed",
    "recompute_method": "which layers full recompute takes",
    "recompute_modules": "modules that selective recompute takes",
    "half": "16-bit dtype of parameters and products",
    "half_alternative": "a second 16-bit dtype, which excludes the first",
    "eight": "8- or 4-bit precision of products",
    "param_dtype": "dtype of the stored parameters",
    "grad_dtype": "dtype of gradients",
    "state_dtype": "dtype of optimizer states",
    "master_dtype": "dtype of master weights",
    "converters": "replacements of modules, such as products in fp8",
    "master": "a 32-bit copy of 16-bit parameters is kept",
    "scripted": "the settings are those of a script that sets a pipeline layout itself",
    "optimizer": "optimizer",
    "clip": "largest gradient norm",
    "learning_rate": "learning rate",
    "hub_model": "the model's name on the Hugging Face hub, or its folder",
    "offload_states": "optimizer states in host memory",
    "offload_parameters": "parameters in host memory",
    "offload_activations": "activations in host memory",
    "offload_layers": "layers whose activations go to host memory",
    "offloads_modules": "activations of named modules go to host memory",
    "offload_modules": "modules whose activations go to host memory",
    "outer_optimizer": "optimizer states are sharded over the groups with copies as well",
    "live_parameters": "parameters that DeepSpeed's ZeRO-3 keeps gathered",
    "bucket": "bytes of a gradient bucket",
    "bucket_elements": "elements of a gradient bucket",
    "bucket_mb": "millions of bytes of a gradient bucket",
    "overlap_dp": "gradients are reduced during backward",
    "overlap_gather": "parameters are gathered ahead of their use",
    "overlap_tp": "tensor-parallel messages run behind products",
    "overlap_ep": "messages of experts run behind compute",
    "overlap_p2p": "messages of an interleaved pipeline do not block",
    "async_linears": "a collective of a linear layer runs behind one of its products",
    "prefetch": "ZeRO-3 gathers the next layer ahead; forward: not in backward",
    "eager": "attention stores its scores: no flash attention",
    "pure_half": "gradients and states have the dtype of the 16-bit weights",
    "eight_bit_states": "optimizer states in 8 bits",
    "saves": "who collects the state that is saved",
    "loads": "who reads the state that is loaded",
    "loads_on_host": "every rank loads the weights into host memory",
    "compiled": "parts of the model are compiled",
    "compiled_parts": "which parts are compiled",
    "fused_loss": "the loss is computed without full logits",
    "fused_norm": "norms are one kernel",
    "fused_activation": "the activation and its product are one kernel",
    "wrapped_ends": "the embedding and the head are units of ZeRO-3 of their own",
    "half_loss": "an unfused loss leaves the logits in 16 bits",
    "dynamic_length": "samples are padded to the longest of their batch",
    "unbounded_length": "samples longer than the sequence are not cut",
    "adapters": "rank of low-rank adapters; only they are trained",
    "adapter_kind": "kind of adapters",
    "adapter_alpha": "the output of an adapter is multiplied by alpha / rank",
    "adapter_dropout": "share of an adapter's input that is dropped",
    "adapter_root": "alpha is divided by the root of the rank",
    "adapter_targets": "matrices that have an adapter",
    "adapter_all": "all matrices of layers have an adapter",
    "adapter_shared_rank": "the rank of an expert's adapter is divided by the experts of a token",
    "adapter_trains": "modules that train in full beside adapters",
    "quantised": "bits of frozen weights",
    "quantised_storage": "dtype of the tensors that hold quantised weights",
    "double_quantised": "the scales of quantised weights are quantised",
    "hidden_dropout": "share of what attention and the FFN add that is dropped",
    "attention_dropout": "share of attention's probabilities that is dropped",
    # Experts
    "dispatcher": "how tokens reach their experts",
    "dispatcher_type": "kind of token dispatcher",
    "nvlink_domain": "GPUs that one NVLink domain connects",
    # Contradictions of frameworks that fill values in
    "unfilled": "keys whose value `auto` is never filled in",
    # The model
    "model": "name of the model",
    "flavor": "size of the model",
    "mtp": "layers that predict further tokens",
    "pattern": "kinds of the layers of a hybrid model",
    "encoder_layers": "layers of an encoder",
    "gated": "the FFN has a gate",
    "ffn_multiple": "the FFN width is a multiple of this",
    "ffn_factor": "factor of the FFN width",
    "moe_layout": "which layers have experts",
    "grouped": "several heads share KV heads",
    "without_bias": "products have no bias",
    "state_space": "the model has state-space layers",
    "untied": "input embedding and output projection are separate",
}
# The facts that are fields of [model].
MODEL_FIELDS = (
    "hidden", "layers", "heads", "kv_heads", "head_dim", "ffn", "vocab", "vocab_multiple", "tied", "max_positions", "experts", "top_k",
    "expert_ffn", "shared_experts", "shared_ffn", "dense_layers", "moe_every", "attention", "q_rank", "kv_rank", "rope_dim", "nope_dim",
    "value_dim", "activation", "norm", "positions", "qk_norm", "qkv_bias", "rope_theta", "norm_epsilon",
)  # fmt: skip
FACTS |= {f"model.{name}": f"model.{name}" for name in MODEL_FIELDS}
NUMBERS = {
    "tp", "cp", "pp", "ep", "expert_tp", "replicate", "dp", "gpus", "nodes", "gpus_per_node", "virtual", "layers_per_chunk",
    "first_layers", "last_layers", "microbatch_group", "batch", "microbatch", "local_batch", "pipeline_microbatch",
    "pipeline_microbatches", "accumulation", "microbatch_tokens", "batch_tokens", "seq", "packed_seq", "decoder_seq",
    "bucket", "bucket_elements", "bucket_mb", "live_parameters", "model.hidden", "model.layers", "model.heads", "model.kv_heads", "model.head_dim",
    "model.ffn", "model.vocab", "model.experts", "model.top_k",
}  # fmt: skip
WHOLE = {  # from 0 up
    "first_less", "last_less",
    "sequence_ranks", "recompute_layers", "offload_layers", "adapters", "quantised", "ffn_multiple", "mtp", "encoder_layers", "nvlink_domain",
    "model.vocab_multiple", "model.max_positions", "model.expert_ffn", "model.shared_experts", "model.shared_ffn", "model.dense_layers",
    "model.moe_every", "model.q_rank", "model.kv_rank", "model.rope_dim", "model.nope_dim", "model.value_dim",
}  # fmt: skip
TEXTS = {"model", "hub_model", "flavor", "pattern", "dispatcher", "dispatcher_type", "recompute_method"}
MOST = 2**40


def fact_value(fact: str, value: Any) -> Any:
    """The value of a fact in its type; None if it cannot be that fact: text for a number, a fraction, a number that is too large."""
    if fact in NUMBERS or fact in WHOLE:
        return _whole(value, 1 if fact in NUMBERS else 0)
    if fact == "shard":
        return -1 if value == -1 else _whole(value, 1)
    if fact in ("hidden_dropout", "attention_dropout"):
        return float(value) if isinstance(value, int | float) and 0 <= value < 1 else None
    if fact in ("ffn_factor", "learning_rate", "model.rope_theta", "model.norm_epsilon"):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return float(value) if number and 0 < value < MOST else None
    if fact in TEXTS:
        return value if isinstance(value, str | int) else None
    return value


def _whole(value: Any, least: int) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= MOST:
        return None
    return int(value) if value == int(value) else None
