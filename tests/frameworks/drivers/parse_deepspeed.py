"""DeepSpeed: DeepSpeedConfig reads the JSON with the number of data-parallel ranks given, and checks the batch against it."""

import json
import os

import parse_common as common

os.environ["DS_ACCELERATOR"] = "cpu"


class Groups:
    """The data-parallel ranks of a world without processes."""

    def __init__(self, ranks):
        self.get_data_parallel_world_size = lambda: ranks


def parse(case):
    from deepspeed.runtime import config as module
    from deepspeed.runtime.config import DeepSpeedConfig

    module.dist.get_rank = lambda *a: 0  # there are no processes

    settings = json.loads(case["text"])
    tp = settings.get("tensor_parallel", {}).get("autotp_size", 1)
    config = DeepSpeedConfig(settings, mpu=Groups(case["world"] // tp))
    every_key_is_known(settings)
    out = {
        "world": config.world_size * tp, "dp": config.world_size, "tp": config.tensor_parallel_config.autotp_size or 1,
        "zero": int(config.zero_optimization_stage), "batch": config.train_batch_size, "microbatch": config.train_micro_batch_size_per_gpu,
        "accumulation": config.gradient_accumulation_steps, "dtype": "bf16" if config.bfloat16_config.enabled else "fp32",
    }  # fmt: skip
    if tp > 1:
        assert out["zero"] < 3, "AutoTP does not run with ZeRO-3"
    return out


def every_key_is_known(settings):
    """DeepSpeed ignores sections that it does not know."""
    from deepspeed.runtime import constants

    known = {value for value in vars(constants).values() if isinstance(value, str)}
    known |= {"zero_optimization", "tensor_parallel", "activation_checkpointing", "data_types", "torch_autocast"}
    assert set(settings) <= known, f"DeepSpeed has no {sorted(set(settings) - known)}"


common.main(parse)
