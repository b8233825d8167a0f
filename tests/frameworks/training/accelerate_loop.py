"""accelerate: its usual loop; fsdp2 by its plug-in, otherwise DDP."""

import common
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch import distributed


def main():
    chosen = common.options()
    plugin = None
    if "fsdp2" in chosen.layout:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
        )
    mixed = "bf16" if chosen.dtype == "bf16" else "no"
    accelerator = Accelerator(
        cpu=plugin is None or "silent" in chosen.layout,
        gradient_accumulation_steps=chosen.accumulate,
        fsdp_plugin=plugin,
        mixed_precision=mixed,
    )
    if chosen.bug:
        import bugs_accelerate

        bugs_accelerate.plant(chosen)
    torch.manual_seed(0)
    model = common.Gpt(tied="tied" in chosen.layout)
    if chosen.dtype == "fp64":
        model = model.double()
    optimizer = common.optimizer_of(chosen, model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    for step in range(common.STEPS):
        for inputs, labels in common.micro_batches(chosen, step, accelerator.process_index, accelerator.num_processes):
            with accelerator.accumulate(model):
                loss = common.loss_of(model(inputs), labels)
                accelerator.backward(loss)
                if chosen.clip and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), chosen.clip)
                optimizer.step()
                optimizer.zero_grad()
    if distributed.is_initialized():
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
