"""Megatron-LM's own parser: `parse_args` and `validate_args` of the wheel of megatron-core, with the world size given."""

import os
import sys
import typing

import parse_common as common
import typing_extensions

typing.override = typing_extensions.override  # of Python 3.12
common.stub("triton", "triton.language", "triton.language.extra")


def transformer_engine_is_here():
    """The checks of a transformer's configuration, as they are where Transformer Engine is installed."""
    from megatron.core import utils
    from megatron.core.models.common.embeddings import rope_utils
    from packaging.version import Version

    utils.get_te_version = lambda: Version("2.9.0")
    utils._te_version = Version("2.9.0")
    rope_utils.fused_apply_rotary_pos_emb = rope_utils.fused_apply_rotary_pos_emb_thd = object()


def parse(case):
    import torch
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
    from megatron.training import arguments

    torch.cuda.get_device_capability = lambda *a: (9, 0)  # an H100
    torch.cuda.get_device_properties = lambda *a: type("Device", (), {"major": 9, "minor": 0})()
    transformer_engine_is_here()
    os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    os.environ.update(case["variables"], WORLD_SIZE=str(case["world"]), RANK="0")
    sys.argv = ["pretrain_gpt.py", *case["words"]]
    args = arguments.parse_args()
    args = arguments.validate_args(args) or args
    config_of = arguments.core_transformer_config_from_args
    config = config_of(args, MLATransformerConfig if args.multi_latent_attention else TransformerConfig)
    model_parallel = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    dp = args.world_size // model_parallel
    strategy = args.data_parallel_sharding_strategy if args.use_megatron_fsdp else None
    zero = {"optim": 1, "optim_grads": 2, "optim_grads_params": 3}.get(
        strategy, 1 if args.use_distributed_optimizer else 0
    )
    frequency = config.moe_layer_freq
    only_experts = config.num_moe_experts and not isinstance(frequency, list)
    ffn = config.moe_ffn_hidden_size if only_experts else config.ffn_hidden_size
    return {
        "world": args.world_size, "tp": config.tensor_model_parallel_size, "cp": config.context_parallel_size,
        "pp": config.pipeline_model_parallel_size,
        "dp": dp, "ep": config.expert_model_parallel_size, "sp": config.sequence_parallel, "zero": zero,
        "expert_tp": config.expert_tensor_parallel_size,
        "virtual": config.virtual_pipeline_model_parallel_size or 1,
        "replicate": args.num_distributed_optimizer_instances if zero else dp,
        "batch": args.global_batch_size, "microbatch": args.micro_batch_size, "accumulation": args.global_batch_size // (args.micro_batch_size * dp),
        "seq": args.seq_length, "recompute": args.recompute_granularity or "none", "dtype": "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32",
        "fp8": bool(config.fp8), "layers": config.num_layers, "hidden": config.hidden_size, "heads": config.num_attention_heads,
        "kv_heads": config.num_query_groups, "ffn": ffn,
        "vocab": args.vocab_size, "experts": config.num_moe_experts or 0,
        "top_k": config.moe_router_topk if config.num_moe_experts else 0, "rotary_base": args.rotary_base,
        "hidden_dropout": args.hidden_dropout, "norm_epsilon": config.layernorm_epsilon, "balancing": config.moe_router_load_balancing_type,
        "aux_loss": config.moe_aux_loss_coeff, "dense_layers": frequency.index(1) if isinstance(frequency, list) and 1 in frequency else 0,
    }  # fmt: skip


common.main(parse)
