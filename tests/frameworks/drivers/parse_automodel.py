"""NeMo Automodel: its own meshes of the world (a fake process group), its stages of the pipeline and its step scheduler say the values."""

import parse_common as common
import yaml


def parse(case):
    from nemo_automodel.components.distributed.pipelining import functional
    from nemo_automodel.components.training import step_scheduler
    from nemo_automodel.recipes._dist_utils import create_distributed_setup_from_config
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

    settings = yaml.safe_load(case["text"])
    with common.world(case["world"]):
        setup = create_distributed_setup_from_config(settings["distributed"], case["world"])
        mesh, pipeline = setup.mesh_context, setup.pipeline_config
        degrees = {axis: getattr(mesh, f"{axis}_size") for axis in ("tp", "cp", "pp", "ep")}
        replicate, ranks = mesh.dp_replicate_size, mesh.dp_size
    strategy = type(setup.strategy_config).__name__
    dp = ranks if strategy == "FSDP2Config" else case["world"]  # DDP has no mesh: every rank is a replica
    batch = {name: settings["step_scheduler"][name] for name in ("global_batch_size", "local_batch_size")}
    scheduler = step_scheduler.StepScheduler(**batch, dp_size=dp, dataloader=None, max_steps=10, preemption_signal=None)
    virtual, microbatch = 1, batch["local_batch_size"]
    if degrees["pp"] > 1:
        single = issubclass(get_schedule_class(pipeline.pp_schedule), PipelineScheduleSingle)
        _, virtual = functional.calculate_virtual_stages(
            case["shape"]["layers"], pipeline.layers_per_stage, degrees["pp"], single, pipeline.round_virtual_stages_to_pp_multiple
        )  # fmt: skip
        microbatch = pipeline.pp_microbatch_size
        assert batch["local_batch_size"] // microbatch >= degrees["pp"], "as recipes/llm/train_ft.py asserts"
    out = {
        **degrees, "world": case["world"], "dp": dp, "virtual": virtual, "batch": batch["global_batch_size"], "microbatch": microbatch,
        "accumulation": scheduler.grad_acc_steps * (batch["local_batch_size"] // microbatch),
        "recompute": {True: "full", False: "none"}[setup.activation_checkpointing],
    }  # fmt: skip
    if strategy == "FSDP2Config":
        out |= {"replicate": replicate, "sp": setup.strategy_config.sequence_parallel}
        moe = setup.moe_parallel_config
        if dp * degrees["cp"] > 1 and degrees["pp"] == 1:
            stated = moe.reshard_after_forward if moe else setup.strategy_config.reshard_after_forward
            out["reshard"] = True if stated is None else stated  # None: Automodel reshards outside pipelines
    if peft := settings.get("peft"):
        from nemo_automodel.components._peft.lora import PeftConfig

        assert peft.pop("_target_") == f"{PeftConfig.__module__}.{PeftConfig.__name__}"
        made = PeftConfig(**peft)
        out["adapter"] = [made.dim, made.alpha, made.dropout]
    return out | ({"zero": 3 if strategy == "FSDP2Config" else 0} if dp * degrees["cp"] > 1 else {})


common.main(parse)
