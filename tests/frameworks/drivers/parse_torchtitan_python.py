"""torchtitan 0.3: its ConfigManager imports the function of settings.py, ParallelDims and the model's config check the degrees."""

import importlib
import os
import sys
import tempfile

import parse_common as common

common.stub("triton", "triton.language")


def parse(case):
    import torch
    from torchtitan.config import ConfigManager
    from torchtitan.distributed import ParallelDims

    torch.cuda.is_available = lambda: True  # an H100: the checks of a config ask for it
    torch.cuda.get_device_capability = lambda *a: (9, 0)
    skip_conversion()
    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, "settings.py"), "w") as stream:
            stream.write(case["text"])
        sys.path.insert(0, folder)
        sys.modules.pop("settings", None)
        importlib.invalidate_caches()
        try:
            config = ConfigManager().parse_args(["--module", "settings", "--config", "plan"])
        finally:
            sys.path.remove(folder)
    degrees, training = config.parallelism, config.training
    dims = ParallelDims.from_config(degrees, case["world"])
    spec = config.model_spec
    model = spec.model
    model.update_from_config(config=config)
    if dims.dp_replicate > 1 and dims.dp_shard * dims.cp == 1 and dims.dp_replicate != dims.world_size:
        raise RuntimeError("replicas without sharding are one-dimensional")
    dp = dims.dp_replicate * dims.dp_shard
    microbatch = degrees.pipeline_parallel_microbatch_size if dims.pp > 1 else training.local_batch_size
    assert training.global_batch_size % (training.local_batch_size * dp) == 0
    assert training.seq_len % dims.seq_len_divisor == 0
    attention = model.first_attention
    policy = type(config.activation_checkpoint).__qualname__
    return {
        "world": dims.world_size, "tp": dims.tp, "cp": dims.cp, "pp": dims.pp, "dp": dp, "replicate": dims.dp_replicate, "shard": dims.dp_shard,
        "virtual": virtual_stages(config, model, dims), "batch": training.global_batch_size, "microbatch": microbatch, "ep": dims.ep,
        "accumulation": training.global_batch_size // (microbatch * dp), "seq": training.seq_len,
        "recompute": {"FullAC.Config": "full", "SelectiveAC.Config": "selective", "NoneType": "none"}[policy],
        "fp8": bool(CONVERTED), "dtype": {"bfloat16": "bf16", "float32": "fp32"}[training.mixed_precision_param],
        "layers": len(model.layers), "hidden": model.dim, "vocab": model.vocab_size, "heads": attention.n_heads,
        **({} if spec.name == "deepseek_v3" else {"kv_heads": getattr(attention, "n_kv_heads", None) or attention.n_heads}),
    }  # fmt: skip


CONVERTED = []


def skip_conversion():
    """Quantised layers need torchao's kernels: only their settings are read here."""
    from torchtitan.components.quantization import Float8LinearConverter
    from torchtitan.components.quantization.mx import MXFP8LinearConverter

    CONVERTED.clear()
    for converter in (Float8LinearConverter, MXFP8LinearConverter):
        converter.__init__ = lambda self, config: CONVERTED.append(config)
        converter.convert = lambda self, model: model


def virtual_stages(config, model, dims):
    """Stages per rank, by the function of torchtitan that divides the layers."""
    if dims.pp == 1:
        return 1
    from torchtitan.distributed import pipeline_parallel

    stages, *_ = pipeline_parallel._get_pipeline_metadata(dims, config.parallelism, model)
    return stages // dims.pp


common.main(parse)
