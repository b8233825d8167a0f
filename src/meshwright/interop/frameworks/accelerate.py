"""accelerate: the YAML of `accelerate config`: FSDP, DeepSpeed or DDP by `distributed_type`, and a ParallelismConfig. The batch is the script's."""

from __future__ import annotations

from meshwright.interop.frameworks.axolotl import LOADING, PREFETCH, STATE_DICTS, STRATEGIES, derive_fsdp, restate_fsdp
from meshwright.interop.frameworks.framework import Framework
from meshwright.interop.keys import Facts, Key, Table

F, P, Z = "fsdp_config.fsdp_", "parallelism_config.parallelism_config_", "deepspeed_config."


def _derive(facts: Facts) -> None:
    kind = facts.pop("adapter_kind", None)
    stage = facts.pop("zero", None)
    if kind == "DEEPSPEED" or stage is not None:
        facts["sharding"] = ("none", "optimizer", "gradients", "parameters")[stage or 0]
        facts["overlap_dp"] = stage == 3  # DeepSpeed's default: accelerate's file has no such key
        facts["saves"] = "weights" if stage == 3 and facts.get("saves") == "weights" else "sharded"
    elif kind == "FSDP":
        facts["fsdp"] = facts.get("fsdp") or 1
        derive_fsdp(facts)
    else:
        facts["sharding"], facts["saves"], facts["loads"] = "none", "sharded", "every-rank"
    if facts.get("half") in ("fp8", "no"):
        facts["half"], facts["eight"] = ("bf16", "fp8") if facts["half"] == "fp8" else ("fp32", None)


def _restate(facts: Facts) -> None:
    facts["adapter_kind"] = "MULTI_GPU" if facts.get("sharding") == "none" else "FSDP"
    facts["half"] = "fp8" if facts.get("eight") == "fp8" else "no" if facts.get("half") == "fp32" else facts.get("half")
    restate_fsdp(facts)


TABLE = Table(
    keys=(
        Key("distributed_type", "adapter_kind", words={name: name for name in ("FSDP", "DEEPSPEED", "MULTI_GPU", "NO", "MULTI_CPU", "MEGATRON_LM", "XLA")},
            always=True),
        Key("num_processes", "gpus", always=True),
        Key(P + "dp_replicate_size", "replicate", was=("parallelism_config_dp_replicate_size",), default=1, always=True),
        Key(P + "dp_shard_size", "shard", was=("parallelism_config_dp_shard_size",), always=True),
        Key(P + "tp_size", "tp", was=("parallelism_config_tp_size",), default=1, always=True),
        Key(P + "cp_size", "cp", was=("parallelism_config_cp_size",), default=1, always=True),
        Key(P + "cp_comm_strategy", "cp_kind", words={"allgather": "all-gather", "alltoall": "ring"}, default="all-gather"),
        Key(F + "version", "fsdp", words={1: 1, 2: 2}),
        Key(F + "reshard_after_forward", "reshard", words={True: True, False: False}, always=True),
        Key(F + "sharding_strategy", "sharding", words=STRATEGIES, match=(("1", "parameters"), ("2", "gradients"), ("3", "none")), read_only=True),
        Key(F + "offload_params", "offload_parameters", words={True: True, False: False}, default=False),
        Key(F + "activation_checkpointing", "recompute", words={True: "full", False: "none"}, default="none"),
        Key(F + "backward_prefetch", "prefetch", words=PREFETCH, read_only=True),
        Key(F + "state_dict_type", "saves", words=STATE_DICTS),
        Key(F + "cpu_ram_efficient_loading", "loads", words=LOADING, read_only=True),
        Key(Z + "zero3_save_16bit_model", "saves", words={True: "weights", False: None}, read_only=True),
        Key(Z + "zero_stage", "zero", words={0: 0, 1: 1, 2: 2, 3: 3}, read_only=True),
        Key(Z + "offload_optimizer_device", "offload_states", words={"cpu": True, "nvme": True, "none": False}, read_only=True),
        Key(Z + "offload_param_device", "offload_parameters", words={"cpu": True, "nvme": True, "none": None}, read_only=True),
        Key(Z + "gradient_accumulation_steps", "accumulation", was=("gradient_accumulation_steps",), unset=("auto",), read_only=True),
        Key("mixed_precision", "half", words={"bf16": "bf16", "fp16": "fp16", "no": "no", "fp8": "fp8"}, default="no", always=True),
    ),
    not_modelled=(
        r"^fsdp_config", r"^deepspeed_config", r"^fp8_config", r"^megatron_lm_config$", r"num_machines|machine_rank|downcast|same_network|use_cpu|debug|rdzv|main_",
        r"compute_environment|tpu|enable_cpu_affinity|^parallelism_config$|dynamo",
    ),
    derive=_derive,
    restate=_restate,
)  # fmt: skip

ACCELERATE = Framework(
    name="accelerate",
    title="accelerate",
    stack="accelerate",
    form="yaml",
    table=TABLE,
    comment="accelerate settings: `accelerate launch --config_file FILE`",
    left_to_script=("workload.batch", "workload.seq", "workload.optimizer", "plan.microbatch"),
)
