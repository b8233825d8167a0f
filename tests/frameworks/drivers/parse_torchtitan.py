"""torchtitan 0.2: its ConfigManager reads the TOML file (or the flags), ParallelDims checks the degrees against the world."""

import dataclasses
import os
import tempfile
import tomllib

import parse_common as common

common.stub("triton", "triton.language")


def parse(case):
    from torchtitan.config import ConfigManager
    from torchtitan.distributed import ParallelDims
    from torchtitan.protocols.train_spec import get_train_spec

    if case["text"]:
        with tempfile.TemporaryDirectory() as folder:
            file = os.path.join(folder, "settings.toml")
            with open(file, "w") as stream:
                stream.write(case["text"])
            config = ConfigManager().parse_args(["--job.config_file", file])
        every_key_is_known(tomllib.loads(case["text"]), dataclasses.asdict(config))
    else:
        config = ConfigManager().parse_args(case["words"])
    degrees, training = config.parallelism, config.training
    dims = ParallelDims(
        dp_shard=degrees.data_parallel_shard_degree, dp_replicate=degrees.data_parallel_replicate_degree, cp=degrees.context_parallel_degree,
        tp=degrees.tensor_parallel_degree, pp=degrees.pipeline_parallel_degree, ep=degrees.expert_parallel_degree,
        etp=degrees.expert_tensor_parallel_degree, world_size=case["world"],
    )  # fmt: skip
    model = get_train_spec(config.model.name).model_args[config.model.flavor]
    model.update_from_config(config)
    if dims.dp_replicate > 1 and dims.dp_shard * dims.cp == 1 and dims.dp_replicate != dims.world_size:
        raise RuntimeError("DDP has not supported > 1D parallelism")  # parallelize_llama, on GPUs only
    if dims.cp > 1 and getattr(model, "attn_type", "sdpa") != "sdpa":
        raise NotImplementedError("Context Parallel only supports SDPA attention")  # the same
    assert training.seq_len % dims.seq_len_divisor == 0
    dp = dims.dp_replicate * dims.dp_shard
    stages = virtual_stages(config, model, dims)
    microbatch = degrees.pipeline_parallel_microbatch_size if dims.pp > 1 else training.local_batch_size
    assert training.global_batch_size % (training.local_batch_size * dp) == 0
    experts = getattr(model, "moe_args", None)
    checkpoint = config.activation_checkpoint
    every = checkpoint.selective_ac_option
    layer_wise = checkpoint.mode == "selective" and every.isdigit()
    out = {
        "world": dims.world_size, "tp": dims.tp, "cp": dims.cp, "pp": dims.pp, "dp": dp, "replicate": dims.dp_replicate, "shard": dims.dp_shard,
        "virtual": stages // dims.pp, "batch": training.global_batch_size, "microbatch": microbatch,
        "accumulation": training.global_batch_size // (microbatch * dp), "seq": training.seq_len,
        "recompute": "full" if layer_wise else checkpoint.mode, "fp8": any(each.endswith((".float8", ".mx")) for each in config.model.converters),
        "dtype": {"bfloat16": "bf16", "float32": "fp32"}[training.mixed_precision_param],
        "layers": model.n_layers, "hidden": model.dim, "vocab": model.vocab_size,
    }  # fmt: skip
    if hasattr(model, "n_heads"):
        out |= {"heads": model.n_heads, "kv_heads": getattr(model, "n_kv_heads", None) or model.n_heads}
    if experts is not None and getattr(model, "moe_enabled", True):
        out |= {"experts": experts.num_experts, "top_k": experts.top_k, "ep": dims.ep}
        out |= {"expert_tp": dims.etp if dims.ep > 1 else dims.tp}
    return out


def virtual_stages(config, model, dims):
    """The number of stages, by torchtitan's own function where it is one."""
    if dims.pp == 1:
        return 1
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class
    from torchtitan.distributed import pipeline_parallel

    names = []
    original = pipeline_parallel.generate_llm_fqn_per_model_part

    class Reached(Exception):
        pass

    def reached(stages, *rest):
        names.extend(original(stages, *rest))
        raise Reached

    pipeline_parallel.generate_llm_fqn_per_model_part = reached
    try:
        pipeline_parallel.pipeline_llm(None, dims_with_mesh(dims), config, "cpu", model, None, None)
    except Reached:
        pass
    finally:
        pipeline_parallel.generate_llm_fqn_per_model_part = original
    single = issubclass(get_schedule_class(config.parallelism.pipeline_parallel_schedule), PipelineScheduleSingle)
    assert single == (len(names) == dims.pp)
    return len(names)


def dims_with_mesh(dims):
    """Degrees whose mesh is not built: there are no processes."""
    return type("Dims", (), {"pp": dims.pp, "get_mesh": lambda self, name: None})()


def every_key_is_known(tables, config, path=""):
    """torchtitan drops keys that it does not know without a word."""
    for name, value in tables.items():
        assert name in config, f"torchtitan has no {path}{name}"
        if isinstance(value, dict):
            every_key_is_known(value, config[name], f"{path}{name}.")
        else:
            assert config[name] == value, f"{path}{name} = {config[name]!r}, not {value!r}"


common.main(parse)
