"""Lightning's Trainer with DDP; its FSDP refuses processes on CPUs."""

import common
import lightning
import torch


class Module(lightning.LightningModule):
    def __init__(self, chosen):
        super().__init__()
        self.chosen, self.net = chosen, common.model_of(chosen, tied="tied" in chosen.layout)

    def training_step(self, batch, number):
        return common.loss_of(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return common.optimizer_of(self.chosen, self.parameters())


class Batches(torch.utils.data.Dataset):
    """The micro-batches of this rank."""

    def __init__(self, chosen):
        self.batches = [
            b for step in range(common.STEPS) for b in common.micro_batches(chosen, step, chosen.rank, chosen.world)
        ]

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, number):
        return self.batches[number]


def main():
    chosen = common.options()
    if chosen.bug:
        import bugs_lightning

        bugs_lightning.plant(chosen)
    strategy = "fsdp" if "fsdp" in chosen.layout else "ddp" if chosen.world > 1 else "auto"
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=chosen.world,
        strategy=strategy,
        max_steps=common.STEPS,
        accumulate_grad_batches=chosen.accumulate,
        gradient_clip_val=chosen.clip or None,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        precision={"fp32": "32-true", "fp64": "64-true", "bf16": "bf16-mixed"}[chosen.dtype],
    )
    chosen.type = torch.float32 if chosen.dtype == "bf16" else chosen.type
    module = Module(chosen)
    trainer.fit(module, torch.utils.data.DataLoader(Batches(chosen), batch_size=None))


if __name__ == "__main__":
    main()
