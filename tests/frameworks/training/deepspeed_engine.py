"""DeepSpeed: zero0 to zero3; twice (a part of the model is used twice); pp2 with its PipelineModule."""

import common
import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import distributed, nn


class Embed(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.positions = (
            nn.Embedding(common.VOCAB, common.HIDDEN),
            nn.Embedding(common.SEQ, common.HIDDEN),
        )

    def forward(self, tokens):
        return self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1]))


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.positions = nn.Embedding(common.SEQ, common.HIDDEN)

    def forward(self, x):
        return x + self.positions(torch.arange(x.shape[1]))


class Twice(common.Gpt):
    """Its first layer computes twice."""

    def forward(self, tokens):
        x = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1]))
        x = self.layers[0](x) + self.layers[0](torch.tanh(x))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def pipeline(chosen, stages):
    torch.manual_seed(0)
    first, last = [LayerSpec(Embed)], LayerSpec(nn.Linear, common.HIDDEN, common.VOCAB, bias=False)
    if "tied" in chosen.layout:
        sizes = common.VOCAB, common.HIDDEN
        first = [TiedLayerSpec("embed", nn.Embedding, *sizes), LayerSpec(Positions)]
        last = TiedLayerSpec("embed", nn.Embedding, *sizes, forward_fn=lambda module, x: x @ module.weight.t())
    layers = [*first, *(LayerSpec(common.Block) for _ in range(2)), LayerSpec(nn.LayerNorm, common.HIDDEN), last]
    made = PipelineModule(
        layers=layers,
        num_stages=stages,
        loss_fn=common.loss_of,
        partition_method="uniform",
        seed_layers=True,
        base_seed=7,
    )
    return made.to(chosen.type)


def settings(chosen):
    stage = next((int(word[4:]) for word in chosen.layout if word.startswith("zero")), 0)
    replicas = chosen.world // common.degree(chosen.layout, "pp")
    out = {
        "train_micro_batch_size_per_gpu": common.BATCH // replicas // chosen.accumulate,
        "gradient_accumulation_steps": chosen.accumulate,
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": chosen.clip,
        "steps_per_print": 1000,
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 3000,
            "stage3_param_persistence_threshold": 100,
            "overlap_comm": "overlap" in chosen.layout,
        },
    }
    if chosen.dtype == "bf16":
        out |= {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    return out


def main():
    chosen = common.options()
    if chosen.bug:
        import bugs_deepspeed

        bugs_deepspeed.plant(chosen)
    stages = common.degree(chosen.layout, "pp")
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    if "pipe" in chosen.layout:
        model = pipeline(chosen, stages)
    else:
        torch.manual_seed(0)
        model = (Twice if "twice" in chosen.layout else common.Gpt)(tied="tied" in chosen.layout)
        model = model.to(chosen.type) if chosen.dtype != "bf16" else model
    optimizer = common.optimizer_of(chosen, [p for p in model.parameters() if p.requires_grad])
    engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings(chosen))
    for step in range(common.STEPS):
        if "pipe" in chosen.layout:
            ranks, place = engine.grid.data_parallel_size, engine.grid.data_parallel_id
            engine.train_batch(iter(common.micro_batches(chosen, step, place, ranks)))
        else:
            for inputs, labels in common.micro_batches(chosen, step, chosen.rank, chosen.world):
                loss = common.loss_of(engine(inputs), labels)
                engine.backward(loss)
                engine.step()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
