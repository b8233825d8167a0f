"""DeepSpeed: DeepSpeedConfig checks the batch against the world (a fake process group) as in `deepspeed.initialize`; its groups say the degrees.

Recompute and the sequence length are not in its file: the training script has them."""

import importlib
import json
import os

import parse_common as common

os.environ["DS_ACCELERATOR"] = "cpu"


def parse(case):
    import deepspeed.comm as dist
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.sequence_parallel import parallel_state_sp
    from deepspeed.utils import groups

    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # a kernel that would be compiled
    settings = json.loads(case["text"])
    every_key_is_known(settings)
    with common.world(case["world"]):
        dist.init_distributed(dist_backend="fake", verbose=False)
        forget_groups(groups, parallel_state_sp)
        sequence_ranks = settings.get("sequence_parallel_size", 1)
        if sequence_ranks > 1:  # as UlyssesSPAttentionHF.register_with_transformers does, whose mpu the script passes
            parallel_state_sp.initialize_sequence_parallel(sequence_ranks)
        config = DeepSpeedConfig(settings, mpu=parallel_state_sp if sequence_ranks > 1 else None)
        tp = config.tensor_parallel_config.autotp_size or 1
        if tp > 1:  # as DeepSpeedEngine does
            groups._init_tp_mesh_device(tensor_model_parallel_size=tp)
            dp = groups.get_data_parallel_world_size()
            assert groups.get_tensor_model_parallel_world_size() == tp
        else:
            dp = int(config.world_size)
        cp = parallel_state_sp.get_sequence_parallel_world_size() if sequence_ranks > 1 else 1
        world = dist.get_world_size()
    microbatch, accumulation = config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps
    return {
        "world": world, "dp": dp, "tp": tp, "cp": cp, "zero": int(config.zero_optimization_stage), "microbatch": microbatch,
        "accumulation": accumulation, "batch": config.train_batch_size if tp == 1 else microbatch * accumulation * dp,
        "dtype": "bf16" if config.bfloat16_config.enabled else "fp16" if config.float16_config.enabled else "fp32",
    }  # fmt: skip


def forget_groups(*modules):
    """The groups of the case before: module variables of DeepSpeed."""
    for module in modules:
        for name, value in vars(module).items():
            if (
                name.isupper()
                and name.startswith("_")
                and type(value).__name__ in ("ProcessGroup", "DeviceMesh", "int", "list", "range")
            ):
                setattr(module, name, None)


def every_key_is_known(settings):
    """DeepSpeed ignores sections that it does not know."""
    from deepspeed.runtime import constants

    known = {value for value in vars(constants).values() if isinstance(value, str)}
    known |= {
        "zero_optimization",
        "tensor_parallel",
        "activation_checkpointing",
        "data_types",
        "torch_autocast",
        "sequence_parallel_size",
    }
    assert set(settings) <= known, f"DeepSpeed has no {sorted(set(settings) - known)}"


common.main(parse)
