"""Megatron-LM: the flags go through the parser of megatron/training; its `get_model` wraps GPTModel, megatron-core's schedule and optimizer train it.

What only a GPU has is switched off after the flags were parsed and checked; the list is OVERRIDES. The rest is what the flags say.
"""

# ruff: noqa: E402
import os
import sys
import zlib

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # read when torch is imported: the compiler would trace the replacements

from meshwright.check import cpu

cpu.install()
import parse_common
import run_common as common

parse_common.stub("triton", "triton.language", "triton.language.extra")
import torch
import torch.distributed as dist
from megatron.core import num_microbatches_calculator as calculator
from megatron.core import parallel_state as mpu
from megatron.core.distributed import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config
from megatron.training import arguments, global_vars, initialize, training

# Arguments that are replaced after they were parsed: each needs a GPU.
OVERRIDES = {
    "transformer_impl": "local",  # Transformer Engine
    "tp_comm_overlap": False,  # its user buffers
    "moe_grouped_gemm": False,  # its grouped products
    "persist_layer_norm": False,  # Apex
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "bias_swiglu_fusion": False,
    "bias_gelu_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "distributed_backend": "gloo",
    "use_cpu_initialization": True,
}


def parse(job):
    """The arguments of the flags, checked by Megatron-LM, then those of OVERRIDES."""
    os.environ.update(job["variables"])
    sys.argv = job["words"]
    args = arguments.parse_args()
    args = arguments.validate_args(args) or args
    replaced = [f"{name}={value}" for name, value in OVERRIDES.items() if getattr(args, name, value) != value]
    for name, value in OVERRIDES.items():
        setattr(args, name, value)
    return args, [*replaced, "deallocate_pipeline_outputs=False"]


def initialize_groups(args):
    """The process groups, by the function of megatron/training that makes them."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    global_vars.set_args(args)
    global_vars._set_timers(args)
    calculator.init_num_microbatches_calculator(
        args.rank, None, args.global_batch_size, args.micro_batch_size, args.data_parallel_size
    )
    initialize._initialize_distributed(None, None, None)


def destroy_groups():
    global_vars.destroy_global_vars()
    calculator.destroy_num_microbatches_calculator()
    mpu.destroy_model_parallel()


def provide(args):
    """A function that makes the GPTModel of one stage, as pretrain_gpt.py does with the local layers."""
    config = arguments.core_transformer_config_from_args(args)
    config.deallocate_pipeline_outputs = (
        False  # gloo may still be sending them: there is no stream that keeps the order
    )

    def provider(pre_process=True, post_process=True, vp_stage=None, config=config, pg_collection=None):
        config = config or provider.config
        if args.num_experts:
            spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=args.normalization, vp_stage=vp_stage)  # fmt: skip
        else:
            spec = get_gpt_layer_local_spec(qk_layernorm=args.qk_layernorm, normalization=args.normalization)
        model = GPTModel(
            config, spec, vocab_size=args.vocab_size, max_sequence_length=args.max_position_embeddings, pre_process=pre_process,
            post_process=post_process, share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
            position_embedding_type=args.position_embedding_type, rotary_base=args.rotary_base, vp_stage=vp_stage,
        )  # fmt: skip
        fill(model, args)
        return model

    provider.config = config
    return provider


def fill(model, args):
    """Weights that depend on their place in the whole model only: drawn by the parameter's name, cut as this rank holds it."""
    offset = model.decoder.layers[0].layer_number - 1
    experts = (args.num_experts or 0) // args.expert_model_parallel_size * mpu.get_expert_model_parallel_rank()
    for name, parameter in model.named_parameters():
        name = global_name(name, offset, experts)
        if "output_layer" in name and not args.untie_embeddings_and_output_weights:
            name = "embedding.word_embeddings.weight"  # the last stage's copy
        in_expert = "experts" in name
        ranks = mpu.get_expert_tensor_parallel_world_size() if in_expert else mpu.get_tensor_model_parallel_world_size()
        rank = mpu.get_expert_tensor_parallel_rank() if in_expert else mpu.get_tensor_model_parallel_rank()
        split = getattr(parameter, "partition_dim", -1) if getattr(parameter, "tensor_model_parallel", False) else -1
        shape = [size * (ranks if axis == split else 1) for axis, size in enumerate(parameter.shape)]
        values = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode()))) * 0.05
        values += float("norm" in name)
        if split >= 0:
            gated = (
                args.swiglu and "linear_fc1" in name
            )  # each rank holds a part of the gate, then a part of the other half
            halves = values.chunk(2, split) if gated else (values,)
            values = torch.cat([half.chunk(ranks, split)[rank] for half in halves], split)
        parameter.data.copy_(values)


def global_name(name, layers_before, experts_before):
    """A parameter's name with the number of the layer in the whole model, and of the expert."""
    parts = name.split(".")
    if parts[:2] == ["decoder", "layers"]:
        parts[2] = str(int(parts[2]) + layers_before)
    if "local_experts" in parts:
        place = parts.index("local_experts") + 1
        parts[place] = str(int(parts[place]) + experts_before)
    return ".".join(parts)


def forward_step(iterator, model):
    """One micro-batch, and the function that turns its losses into one number."""
    inputs, labels = next(iterator)
    positions = torch.arange(inputs.shape[1]).expand_as(inputs)
    mask = torch.ones(1, 1, inputs.shape[1], inputs.shape[1], dtype=torch.bool).triu(1)
    losses = model(inputs, positions, mask, labels=labels)
    return losses, lambda output: (output.mean(), {"loss": output.mean().detach()})


def prepare_config(args, models, optimizer):
    """What Megatron-LM's `train` sets before its loop."""
    config = get_model_config(models[0])
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    if args.overlap_grad_reduce:
        config.no_sync_func = one_or_all([model.no_sync for model in models])
        if args.align_grad_reduce:
            config.grad_sync_func = one_or_all([model.start_grad_sync for model in models])
    if args.overlap_param_gather and args.align_param_gather:
        config.param_sync_func = one_or_all([model.start_param_sync for model in models])


def one_or_all(functions):
    return functions[0] if len(functions) == 1 else functions


def train(job):
    """Two steps with the arguments that Megatron-LM parsed."""
    args, replaced = parse(job)
    initialize_groups(args)
    provider = provide(args)
    models = training.get_model(provider)
    optimizer_config = training.get_megatron_optimizer_config(args)
    optimizer_config = optimizer_config[0] if isinstance(optimizer_config, tuple) else optimizer_config
    optimizer = get_megatron_optimizer(optimizer_config, models)
    prepare_config(args, models, optimizer)
    rows = [common.count_forwards(model) for model in models]
    schedule = get_forward_backward_func()
    losses, norms = [], []
    for step in range(common.STEPS):
        for model in models:
            model.zero_grad_buffer()
        optimizer.zero_grad()
        batch = common.microbatches(job, step, mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size())
        done = schedule(
            forward_step_func=forward_step, data_iterator=one_or_all([iter(batch) for _ in models]), model=one_or_all(models),
            num_microbatches=calculator.get_num_microbatches(), seq_length=args.seq_length, micro_batch_size=args.micro_batch_size,
            forward_only=False,
        )  # fmt: skip
        _, norm, _ = optimizer.step()
        norms.append(float(norm))
        losses.append(mean_over_last_stage([float(each["loss"]) for each in done]))
    out = report(args, models, optimizer, provider.config, schedule)
    destroy_groups()
    return out | {"losses": losses, "norms": norms, "rows": rows[0], "overrides": replaced}


def mean_over_last_stage(losses):
    """The mean of the losses of all ranks that have some: those of the last stage."""
    total = torch.tensor([sum(losses), float(len(losses))], dtype=torch.float64)
    dist.all_reduce(total)
    return float(total[0] / total[1])


def report(args, models, optimizer, config, schedule):
    """The layout that the process groups, the wrapped model and the optimizer have."""
    optimizers = getattr(optimizer, "chained_optimizers", [optimizer])
    return {
        "world": dist.get_world_size(), "tp": mpu.get_tensor_model_parallel_world_size(), "pp": mpu.get_pipeline_model_parallel_world_size(),
        "stage": mpu.get_pipeline_model_parallel_rank(), "dp": mpu.get_data_parallel_world_size(), "ep": mpu.get_expert_model_parallel_world_size(),
        "cp": mpu.get_context_parallel_world_size(), "sp": config.sequence_parallel, "virtual": len(models),
        "zero": int(models[0].ddp_config.use_distributed_optimizer), "accumulation": calculator.get_num_microbatches(),
        "schedule": schedule.__name__, "parameters": sum(p.numel() for model in models for p in model.parameters()),
        "states": sum(common.elements_of_states(each.optimizer) for each in optimizers),
        "optimizer": type(optimizers[0]).__name__, "microbatch": args.micro_batch_size, "batch": args.global_batch_size,
    }  # fmt: skip


common.main(train)
