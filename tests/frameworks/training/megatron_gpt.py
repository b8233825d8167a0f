"""megatron-core's GPTModel under its own DDP, optimizer and schedules: tp2, sp2 (tp with sequence parallelism), pp2, vpp2, ep2, a2a, dopt, tied."""

import zlib

import common
import torch
from megatron.core import parallel_state as state
from megatron.core import tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import distributed

EXPERTS = 4


def config_of(chosen, cuts, stages, chunks, experts):
    more = {}
    if experts:
        more = {
            "num_moe_experts": EXPERTS,
            "moe_router_topk": 2,
            "moe_token_dispatcher_type": "alltoall" if "a2a" in chosen.layout else "allgather",
            "moe_ffn_hidden_size": 48,
            "moe_aux_loss_coeff": 0.0,
            "moe_router_load_balancing_type": "none",
            "moe_permute_fusion": False,
        }
    if "recompute" in chosen.layout:
        more |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if "gqa" in chosen.layout:
        more |= {"num_query_groups": 2}
    if "qknorm" in chosen.layout:
        more |= {"qk_layernorm": True}
    if "swiglu" in chosen.layout:
        more |= {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
    if "sink" in chosen.layout:
        more |= {"softmax_type": "learnable"}
    config = TransformerConfig(
        num_layers=4,
        hidden_size=32,
        num_attention_heads=4,
        ffn_hidden_size=64,
        use_cpu_initialization=True,
        params_dtype=chosen.type,
        pipeline_dtype=chosen.type,
        bf16=chosen.dtype == "bf16",
        tensor_model_parallel_size=cuts,
        pipeline_model_parallel_size=stages,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        expert_model_parallel_size=experts or 1,
        expert_tensor_parallel_size=1,
        sequence_parallel="sp2" in chosen.layout and cuts > 1,
        gradient_accumulation_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        persist_layer_norm=False,
        deallocate_pipeline_outputs=False,
        batch_p2p_comm=chunks == 1,
        batch_p2p_sync=False,
        add_bias_linear=(not experts or "biases" in chosen.layout) and "swiglu" not in chosen.layout,
        **more,
    )
    config.finalize_model_grads_func = finalize_model_grads
    return config


def fill(model):
    """Weights that depend on their place in the whole model only: drawn by the parameter's name, cut as this rank holds it."""
    for name, parameter in model.named_parameters():
        for path, module in model.named_modules():
            number = getattr(module, "layer_number", None)
            if isinstance(number, int) and path and name.startswith(path + ".") and path.split(".")[-1].isdigit():
                name = name.replace(path, f"{path.rpartition('.')[0]}.{number - 1}", 1)
        parts = name.split(".")
        if "local_experts" in parts:
            at = parts.index("local_experts") + 1
            parts[at] = str(
                int(parts[at])
                + EXPERTS // state.get_expert_model_parallel_world_size() * state.get_expert_model_parallel_rank()
            )
        marked = getattr(parameter, "tensor_model_parallel", False) and "local_experts" not in parts
        dim = parameter.partition_dim if marked else 0 if parts[-1] == "softmax_offset" else -1
        ranks = state.get_tensor_model_parallel_world_size() if dim >= 0 else 1
        shape = [n * (ranks if i == dim else 1) for i, n in enumerate(parameter.shape)]
        name = (
            "embedding.word_embeddings.weight" if name == "output_layer.weight" and "tied" in TIED else ".".join(parts)
        )
        values = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode()))) * 0.05
        values += float("norm" in name and name.endswith("weight"))
        if ranks > 1:
            halves = values.chunk(2 if "linear_fc1" in name and GATED else 1, dim)
            values = torch.cat([half.chunk(ranks, dim)[state.get_tensor_model_parallel_rank()] for half in halves], dim)
        parameter.data.copy_(values)


TIED: list = []
GATED: list = []


def forward_step(batches, model):
    inputs, labels = next(batches)
    positions = torch.arange(common.SEQ).expand_as(inputs)
    mask = torch.ones(1, 1, common.SEQ, common.SEQ, dtype=torch.bool).triu(1)
    losses = model(inputs, positions, mask, labels=labels)
    return losses, lambda output: (output.float().mean(), {"loss": output.detach().mean()})


def main():
    chosen = common.options()
    if chosen.bug:
        import bugs_megatron

        bugs_megatron.plant(chosen)
    layout = chosen.layout
    TIED[:], GATED[:] = [w for w in layout if w == "tied"], [w for w in layout if w == "swiglu"]
    alone = chosen.world == 1
    cuts = 1 if alone else max(common.degree(layout, "tp"), common.degree(layout, "sp"))
    stages = 1 if alone else common.degree(layout, "pp")
    chunks = 1 if alone else common.degree(layout, "vpp")
    experts = (1 if alone else common.degree(layout, "ep")) if "moe" in layout else 0
    distributed.init_process_group("gloo")
    state.initialize_model_parallel(
        tensor_model_parallel_size=cuts,
        pipeline_model_parallel_size=stages,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        expert_model_parallel_size=experts or 1,
        expert_tensor_parallel_size=1,
    )
    config = config_of(chosen, cuts, stages, chunks, experts)
    spec = get_gpt_layer_local_spec(
        num_experts=EXPERTS if experts else None, moe_grouped_gemm=False, qk_layernorm="qknorm" in layout
    )
    models = []
    for chunk in range(chunks):
        first, last = (
            (
                state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=chunk),
                state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=chunk),
            )
            if chunks > 1
            else (state.is_pipeline_first_stage(), state.is_pipeline_last_stage())
        )
        model = GPTModel(
            config,
            spec,
            vocab_size=common.VOCAB,
            max_sequence_length=common.SEQ,
            pre_process=first,
            post_process=last,
            share_embeddings_and_output_weights="tied" in layout,
            position_embedding_type="rope" if "rope" in layout else "learned_absolute",
            vp_stage=chunk if chunks > 1 else None,
        )
        fill(model)
        if "marked" in layout:  # what pull request 7530 does
            for name, parameter in model.named_parameters():
                if name.endswith("softmax_offset"):
                    tensor_parallel.set_tensor_model_parallel_attributes(parameter, True, 0, 1)
        models.append(Float16Module(config, model) if chosen.dtype == "bf16" else model)
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce="overlap" in layout,
        use_distributed_optimizer="dopt" in layout and not alone,
        bucket_size=4000 if "overlap" in layout else None,
    )
    models = [DistributedDataParallel(config, ddp, model) for model in models]
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-3,
            weight_decay=0.01,
            clip_grad=chosen.clip,
            bf16=chosen.dtype == "bf16",
            params_dtype=chosen.type,
            use_distributed_optimizer="dopt" in layout and not alone,
        ),
        models,
    )
    config.grad_scale_func = optimizer.scale_loss
    if "overlap" in layout:
        syncs = [model.no_sync for model in models]
        config.no_sync_func = syncs if chunks > 1 else syncs[0]
    copies, place = state.get_data_parallel_world_size(), state.get_data_parallel_rank()
    schedule = get_forward_backward_func()
    for step in range(common.STEPS):
        for model in models:
            model.zero_grad_buffer()
        optimizer.zero_grad()
        batches = common.micro_batches(chosen, step, place, copies)
        streams = [iter(batches) for _ in models]
        schedule(
            forward_step_func=forward_step,
            data_iterator=streams if chunks > 1 else streams[0],
            model=models if chunks > 1 else models[0],
            num_microbatches=len(batches),
            seq_length=common.SEQ,
            micro_batch_size=len(batches[0][0]),
            forward_only=False,
        )
        optimizer.step()
    state.destroy_model_parallel()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
