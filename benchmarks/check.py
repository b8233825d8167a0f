"""What `meshwright check record` costs with summaries: the same training with and without it, side by side.

    python benchmarks/check.py [--rounds 7] [--limit 0] [--hidden 512] [--batch 8] [--seq 256]

One transformer trains in this process. Blocks of two steps with the recorder (the step before them, which learns the model, is not counted) and
without it take turns. Printed are the median seconds and processor seconds of a step, and the median of the ratios of a pair. The limit says how many
bytes are stored whole: 0 stores sketches only.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from torch import nn

from meshwright.check.recorder import StepRecorder

STEPS, VOCAB, LAYERS = 2, 2048, 4


class Net(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, hidden), nn.Linear(hidden, VOCAB)
        layer = nn.TransformerEncoderLayer(hidden, 8, 4 * hidden, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embedding(tokens)))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def block(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor, limit: float | None) -> list[float]:
    """Seconds and processor seconds of a step; with a limit, of a recorded one until it is written."""
    recorder = None
    with tempfile.TemporaryDirectory() as out:
        if limit is not None:
            recorder = StepRecorder(str(Path(out) / "recording"), 1 + STEPS, limit)
            recorder.attach()
        train(model, optimizer, tokens, 1)
        if recorder is not None:
            recorder.finish_step()
        began = time.perf_counter(), time.process_time()
        train(model, optimizer, tokens, STEPS)
        if recorder is not None:
            recorder.close()
        return [(time.perf_counter() - began[0]) / STEPS, (time.process_time() - began[1]) / STEPS]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--limit", type=float, default=0.0)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=256)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Net(options.hidden)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, VOCAB, (options.batch, options.seq))
    pairs = []
    for number in range(options.rounds):
        order = (None, options.limit) if number % 2 == 0 else (options.limit, None)
        times = {limit: block(model, optimizer, tokens, limit) for limit in order}
        pairs.append((times[None], times[options.limit]))
    for kind, name in enumerate(("seconds", "processor seconds")):
        usual, recorded = ([pair[which][kind] for pair in pairs] for which in (0, 1))
        ratio = median(b / a for a, b in zip(usual, recorded, strict=True))
        print(f"{name} of a step: {median(usual):.3f} usual, {median(recorded):.3f} recorded, ratio {ratio:.2f}")


if __name__ == "__main__":
    main()
