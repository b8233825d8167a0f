"""axolotl: `validate_config` reads the YAML with the capabilities of H100 and the number of GPUs given."""

import os

import parse_common as common
import yaml

common.stub("triton", "triton.language", "ring_flash_attn", "deep_ep")
os.environ["AXOLOTL_DO_NOT_TRACK"] = "1"


def parse(case):
    import torch
    from axolotl.utils.config import validate_config
    from axolotl.utils.dict import DictDefault
    from axolotl.utils.schemas import config as schema

    schema.is_fp8_available = lambda: True
    settings = yaml.safe_load(case["text"])
    torch.cuda.get_device_capability = lambda *a: (9, 0)
    os.environ["WORLD_SIZE"] = str(case["world"])
    settings |= {
        "base_model": "none",
        "datasets": [{"path": "none", "type": "alpaca"}],
        "learning_rate": 1e-4,
    }  # a plan has none
    if settings.get("plugins"):
        from axolotl.integrations.base import PluginManager

        for name in settings["plugins"]:
            PluginManager.get_instance().register(name)
    capabilities = {
        "bf16": True,
        "fp8": True,
        "tf32": True,
        "n_gpu": case["world"],
        "n_node": 1,
        "compute_capability": "sm_90",
    }
    config = validate_config(
        DictDefault(settings), capabilities=capabilities, env_capabilities={"torch_version": "2.11.0"}
    )
    tp, cp, ep = (config.get(f"{axis}_parallel_size") or 1 for axis in ("tensor", "context", "expert"))
    replicate = config.get("dp_replicate_size") or 1
    sharded = bool(config.get("fsdp_config"))
    shard = (config.get("dp_shard_size") or 1) * ep if sharded else 1
    dp = replicate * shard if sharded else case["world"] // (tp * cp)
    assert not sharded or dp * tp * cp == case["world"]
    return {
        "tp": tp, "cp": cp, "ep": ep, "dp": dp, "zero": 3 if sharded else 0, "microbatch": config.micro_batch_size,
        "accumulation": config.gradient_accumulation_steps, "seq": config.sequence_len,
        "batch": config.micro_batch_size * config.gradient_accumulation_steps * dp, "recompute": "full" if config.gradient_checkpointing else "none",
        "dtype": "bf16" if config.bf16 else "fp32", "fp8": bool(config.get("fp8")),
        "adapter": [config.lora_r, config.lora_alpha, config.lora_dropout or 0.0] if config.adapter else None,
        "base_bits": 4 if config.load_in_4bit else 8 if config.load_in_8bit else None,
    }  # fmt: skip


common.main(parse)
