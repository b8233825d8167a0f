"""torch.distributed.pipelining: 1f1b, gpipe, interleaved, zerobubble; with fsdp2 or ddp in each stage (`dp2`)."""

import common
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

SCHEDULES = {
    "1f1b": Schedule1F1B,
    "gpipe": ScheduleGPipe,
    "interleaved": ScheduleInterleaved1F1B,
    "zerobubble": ScheduleInterleavedZeroBubble,
}
LAYERS = 4


class Stage(nn.Module):
    """The layers of one stage of the model, which keep their names."""

    def __init__(self, whole, number, stages):
        super().__init__()
        each = LAYERS // stages
        if number == 0:
            self.embedding, self.positions = whole.embedding, whole.positions
        self.layers = nn.ModuleDict({str(i): whole.layers[i] for i in range(number * each, (number + 1) * each)})
        if number == stages - 1:
            self.norm, self.head = whole.norm, whole.head

    def forward(self, x):
        if hasattr(self, "embedding"):
            x = self.embedding(x) + self.positions(torch.arange(x.shape[1]))
        for layer in self.layers.values():
            x = layer(x)
        return self.head(self.norm(x)) if hasattr(self, "head") else x


def main():
    chosen = common.options()
    if chosen.bug:
        import bugs_torch

        bugs_torch.plant(chosen)
    name = next((word for word in chosen.layout if word in SCHEDULES), "1f1b")
    ranks = common.degree(chosen.layout, "pp")
    whole = common.model_of(chosen, layers=LAYERS)
    if chosen.world == 1:
        stages, place, copies = [Stage(whole, 0, 1)], 0, 1
    else:
        distributed.init_process_group("gloo")
        copies = chosen.world // ranks
        mesh = init_device_mesh("cpu", (ranks, copies), mesh_dim_names=("pp", "dp"))
        place, number = mesh["dp"].get_local_rank(), mesh["pp"].get_local_rank()
        of_rank = 2 if name in ("interleaved", "zerobubble") else 1
        numbers = [number + ranks * i for i in range(of_rank)]
        stages = [Stage(whole, i, ranks * of_rank) for i in numbers]
        for stage in stages:
            if "fsdp2" in chosen.layout:
                for layer in stage.layers.values():
                    fully_shard(layer, mesh=mesh["dp"], reshard_after_forward=False)
                fully_shard(stage, mesh=mesh["dp"], reshard_after_forward=False)
        parts = [
            PipelineStage(stage, i, ranks * of_rank, torch.device("cpu"), group=mesh["pp"].get_group())
            for i, stage in zip(numbers, stages, strict=True)
        ]
        schedule = SCHEDULES[name](parts if of_rank > 1 else parts[0], chosen.accumulate, loss_fn=common.loss_of)
    optimizer = common.optimizer_of(chosen, [p for stage in stages for p in stage.parameters()])
    for step in range(common.STEPS):
        optimizer.zero_grad()
        if chosen.world == 1:
            batches = common.micro_batches(chosen, step)
            for inputs, labels in batches:
                (common.loss_of(stages[0](inputs), labels) / len(batches)).backward()
        else:
            inputs, labels = (part.chunk(copies)[place] for part in common.tokens(step))
            first, last = numbers[0] == 0, numbers[-1] == ranks * of_rank - 1
            schedule.step(*((inputs,) if first else ()), **({"target": labels, "losses": []} if last else {}))
        optimizer.step()
    if chosen.world > 1:
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
