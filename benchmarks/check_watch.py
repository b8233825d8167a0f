"""What `meshwright check watch` costs: the same training with and without it, side by side.

    python benchmarks/check_watch.py [--blocks 20] [--every 50] [--ranks 2]

Two equal models of the size of examples/demo-dp2-tp2.toml train in the same processes under DDP (gloo); one is watched. Blocks of `every` steps,
each with one check, take turns, and who begins a pair of blocks takes turns too. Printed are the median seconds of a block with and without the
watch, the median of the ratios of a pair, the same of the processor time of rank 0, which other programs on the machine disturb less, and the time
that rank 0 spent inside of the watch.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from statistics import median
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from meshwright.check import watch
from meshwright.describe import catalog
from meshwright.training.launch import local

BATCH, SEQ = 16, 64
TIMES = ("seconds", "processor seconds of rank 0")


class Net(nn.Module):
    """A transformer of the size of the demo's model, in plain PyTorch, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        shape = catalog.load("models", "nano")
        self.embedding = nn.Embedding(shape.vocab, shape.hidden)
        layer = nn.TransformerEncoderLayer(
            shape.hidden, shape.heads, shape.ffn, dropout=0.1, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, shape.layers, enable_nested_tensor=False)
        self.head = nn.Linear(shape.hidden, shape.vocab)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embedding(tokens)))


def block(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[torch.Tensor]) -> tuple[float, float]:
    distributed.barrier()
    began = time.perf_counter(), time.process_time()
    for tokens in batches:
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return time.perf_counter() - began[0], time.process_time() - began[1]


def work(context: Any, out: str, blocks: int, every: int) -> tuple[list[tuple[tuple[float, float], ...]], float]:
    torch.set_num_threads(1)
    trainings = []
    for watched in (False, True):
        torch.manual_seed(0)
        model = DistributedDataParallel(Net())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        trainings.append((model, optimizer))
        if watched:
            live = watch(model, optimizer, every, out)
    torch.manual_seed(context.rank)
    vocabulary = trainings[0][0].module.head.out_features
    each = BATCH // distributed.get_world_size()
    batches = [torch.randint(0, vocabulary, (each, SEQ)) for _ in range(every)]
    for training in trainings:
        block(*training, batches)  # the first block of both is not counted
    pairs: list[tuple[tuple[float, float], ...]] = []
    before = live.spent
    for number in range(blocks):
        order = (0, 1) if number % 2 else (1, 0)
        times = {which: block(*trainings[which], batches) for which in order}
        pairs.append((times[0], times[1]))
    return pairs, live.spent - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--blocks", type=int, default=20)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as out:
        pairs, spent = local.run(
            "check_watch:work", options.ranks, out, options.blocks, options.every, backend="gloo", silence=7200.0
        )[0]
    for kind, name in enumerate(TIMES):
        without, watched = ([pair[which][kind] for pair in pairs] for which in (0, 1))
        ratio = median(b / a for a, b in zip(without, watched, strict=True))
        print(
            f"{name} of {options.every} steps: {median(without):.4f} without, {median(watched):.4f} with one check, ratio {ratio:.4f}"
        )
    seconds = sum(watched[0] for _, watched in pairs)
    print(
        f"inside the watch: {spent / len(pairs) * 1e3:.2f} ms of {options.every} steps, {spent / seconds:.3%} of their time"
    )


if __name__ == "__main__":
    main()
