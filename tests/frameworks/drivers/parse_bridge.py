"""Megatron-Bridge: its recipe takes the file or the overrides of the command line, and its ConfigContainer validates them for a world size.

A recipe reads the shape of its model from the Hub, which is not reachable: the shape here is that of the catalog, so it is not reported."""

import importlib
import os
import tempfile
import typing

import parse_common as common
import typing_extensions

typing.override = typing_extensions.override  # of Python 3.12
common.stub("triton", "triton.language", "triton.language.extra")


def import_bridge():
    """Megatron-Core first, which goes on without Transformer Engine; then Megatron-Bridge, which does not: its place is taken by an empty module."""
    from packaging.version import Version

    for name in (
        "models.gpt",
        "transformer",
        "tensor_parallel",
        "distributed",
        "optimizer",
        "dist_checkpointing",
        "extensions.transformer_engine",
    ):
        importlib.import_module(f"megatron.core.{name}")
    common.stub("transformer_engine", "transformer_engine.pytorch", "mamba_ssm", "megatron.energon", "PIL")
    common.stub(
        *(f"megatron.bridge.recipes.{name}" for name in ("qwen_vl", "gemma3_vl", "glm_vl", "ministral3", "nemotron_vl"))
    )  # of images
    from megatron.core import utils

    common.stub("transformer_engine.pytorch.optimizers")
    moe_utils = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    for name in (
        "fused_permute",
        "fused_permute_with_probs",
        "fused_sort_chunks_by_index",
        "fused_sort_chunks_by_index_with_probs",
        "fused_unpermute",
    ):
        setattr(moe_utils, name, getattr(moe_utils, name, None) or object())
    utils.get_te_version = lambda: Version("2.9.0")
    utils._te_version = Version("2.9.0")
    return importlib.import_module("megatron.bridge.recipes"), importlib.import_module(
        "megatron.bridge.training.utils.omegaconf_utils"
    )


def provider_of(shape):
    """The model of a recipe, with the shape of the catalog."""
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from megatron.bridge.models.mla_provider import MLAModelProvider

    kind = MLAModelProvider if shape["attention"] == "mla" else GPTModelProvider
    experts = (
        {"num_moe_experts": shape["experts"], "moe_router_topk": shape["top_k"], "moe_ffn_hidden_size": shape["ffn"]}
        if shape["experts"]
        else {}
    )
    return kind(
        num_layers=shape["layers"], hidden_size=shape["hidden"], ffn_hidden_size=shape["ffn"], num_attention_heads=shape["heads"],
        num_query_groups=shape["kv_heads"], vocab_size=shape["vocab"], add_bias_linear=False, **experts,
    )  # fmt: skip


def parse(case):
    import torch

    recipes, overrides = import_bridge()
    from megatron.bridge.models.conversion.auto_bridge import AutoBridge
    from megatron.bridge.training.config import runtime_config_update

    torch.cuda.get_device_capability = lambda *a: (9, 0)  # an H100
    torch.cuda.get_device_properties = lambda *a: type("Device", (), {"major": 9, "minor": 0, "name": "NVIDIA H100"})()
    AutoBridge.from_hf_pretrained = lambda *a, **k: type(
        "Bridge", (), {"to_megatron_provider": lambda self, **k: provider_of(case["shape"])}
    )()
    os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    os.environ.update(case["variables"], WORLD_SIZE=str(case["world"]), RANK="0")
    config = getattr(recipes, f"{case['recipe']}_pretrain_config")()
    if "peft" in case["text"] or any("peft." in word for word in case["words"]):
        config.checkpoint.pretrained_checkpoint = "none"  # a plan has none
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "settings.yaml")
        with open(file, "w") as stream:
            stream.write(case["text"])
        words = case["words"][case["words"].index("--recipe") + 2 :] if case["words"] else []
        config = overrides.process_config_with_overrides(config, file if case["text"] else None, words)
    runtime_config_update(config)  # validates, with the settings of precision and overlap applied
    model, ddp, train, dp = config.model, config.ddp, config.train, config.data_parallel_size
    zero = (
        {"optim": 1, "optim_grads": 2, "optim_grads_params": 3}[ddp.data_parallel_sharding_strategy]
        if ddp.use_megatron_fsdp
        else int(ddp.use_distributed_optimizer)
    )
    assert train.global_batch_size % (train.micro_batch_size * dp) == 0
    return {
        "world": dp * model.tensor_model_parallel_size * model.pipeline_model_parallel_size * model.context_parallel_size, "dp": dp,
        "tp": model.tensor_model_parallel_size, "pp": model.pipeline_model_parallel_size, "cp": model.context_parallel_size,
        "ep": model.expert_model_parallel_size, "sp": model.sequence_parallel, "virtual": model.virtual_pipeline_model_parallel_size or 1,
        "zero": zero if dp * model.context_parallel_size > 1 else 0, "replicate": ddp.num_distributed_optimizer_instances if zero else dp,
        "batch": train.global_batch_size, "microbatch": train.micro_batch_size, "seq": model.seq_length,
        "accumulation": train.global_batch_size // (train.micro_batch_size * dp), "recompute": model.recompute_granularity or "none",
        "dtype": "bf16" if model.bf16 else "fp32", "fp8": bool(model.fp8),
        "adapter": [config.peft.dim, config.peft.alpha, config.peft.dropout] if config.peft else None,
        **({"expert_tp": model.expert_tensor_parallel_size} if model.num_moe_experts else {}),
    }  # fmt: skip


common.main(parse)
