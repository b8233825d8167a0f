"""accelerate: `accelerate launch` reads the file and sets the environment; its plug-ins read that and check it against the world."""

import os
import tempfile

import parse_common as common


def parse(case):
    import torch
    from accelerate.commands import launch
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils import launch as launch_environment
    from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env

    # The checks of a host with GPUs: accelerate drops FSDP where it sees none.
    torch.cuda.is_available = torch.cuda.is_bf16_supported = lambda *a, **k: True
    launch_environment.is_fp8_available = lambda: True
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "settings.yaml")
        with open(file, "w") as stream:
            stream.write(case["text"])
        parser = launch.launch_command_parser()
        args = parser.parse_args(["--config_file", file, "--num_machines", "1", "train.py"])
        args, _, _ = launch._validate_launch_command(args)
    several = args.multi_gpu or args.use_fsdp
    variables = prepare_multi_gpu_env(args) if several else prepare_simple_launcher_cmd_env(args)[1]
    kept = dict(os.environ)
    os.environ.update({name: str(value) for name, value in variables.items()})
    try:
        plugin = FullyShardedDataParallelPlugin() if args.use_fsdp else None
        degrees = ParallelismConfig()
    finally:
        os.environ.clear()
        os.environ.update(kept)
    if plugin:
        assert plugin.fsdp_version == 2
        assert plugin.auto_wrap_policy is not None, "without a wrap policy only the root is sharded"
    else:
        assert not args.use_parallelism_config or not several, "a parallelism config needs FSDP"
    accelerator = type(
        "Accelerator",
        (),
        {
            "multi_device": args.num_processes > 1,
            "num_processes": args.num_processes,
            "is_fsdp2": bool(plugin),
            "distributed_type": "FSDP",
        },
    )()
    degrees._validate_accelerator(accelerator)
    return {
        "world": args.num_processes, "tp": degrees.tp_size, "cp": degrees.cp_size, "replicate": degrees.dp_replicate_size,
        "shard": degrees.dp_shard_size, "zero": 3 if plugin else 0,
        "recompute": "full" if plugin and plugin.activation_checkpointing else "none",
        "dtype": "bf16" if args.mixed_precision == "fp8" else {"no": "fp32"}.get(args.mixed_precision, args.mixed_precision),
        "fp8": args.mixed_precision == "fp8",
        **({"reshard": plugin.reshard_after_forward} if plugin else {}),
    }  # fmt: skip


common.main(parse)
