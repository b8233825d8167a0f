"""DeepSpeed: `deepspeed.initialize` with the JSON as the only settings, on CPU processes with gloo (`meshwright.check.cpu`)."""

# ruff: noqa: E402
import argparse

from meshwright.check import cpu

cpu.install()
import deepspeed
import deepspeed_common
import run_common as common


def train(job):
    """Two steps of Transformers' Llama with the engine that `--deepspeed_config` describes."""
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(job["words"][1:])
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    model = common.llama(job)
    rows = common.count_forwards(model.model.layers[0])
    engine, optimizer, _, _ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
    data_ranks, data_rank = engine.dp_world_size, common.dist.get_rank(engine.seq_data_parallel_group)
    losses, norms = [], []
    for step in range(common.STEPS):
        losses.append(0.0)
        for inputs, labels in common.microbatches(job, step, data_rank, data_ranks):
            loss = common.next_token_loss(engine(inputs).logits, labels)
            engine.backward(loss)
            engine.step()
            losses[-1] += float(loss) / engine.gradient_accumulation_steps()
        losses[-1] = common.average(losses[-1])
        norms.append(deepspeed_common.norm_of(engine))
    stage = engine.zero_optimization_stage()
    return {
        "world": common.dist.get_world_size(), "dp": data_ranks, "zero": stage, "tp": engine.autotp_size() or 1,
        "batch": engine.train_batch_size(), "microbatch": engine.train_micro_batch_size_per_gpu(),
        "accumulation": engine.gradient_accumulation_steps(), "dtype": "bf16" if engine.bfloat16_enabled() else "fp32",
        "losses": losses, "norms": norms, "rows": rows, "steps": engine.global_steps,
        "parameters": deepspeed_common.elements_of_parameters(model, stage), "states": deepspeed_common.elements_of_states(optimizer, stage),
        "optimizer": type(optimizer).__name__, "overrides": deepspeed_common.OVERRIDES,
    }  # fmt: skip


common.main(train)
