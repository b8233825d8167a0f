"""Gradient compression: bytes saved, compression time, the break-even bandwidth, and the effect on convergence.

    python benchmarks/compress.py [--steps 60] [--elements 4000000] [--ranks 2] [--device cpu]

For each compressor, on a gradient of `elements` float32 in layers of 1024 × 1024:

    ratio       bytes that one rank sends in a ring all-reduce, over the bytes that it sends compressed, at 2 and 8 ranks;
                and of a reduce-scatter at 8 ranks (ZeRO)
    γ           seconds to compress and decompress without sending, best of five, on this machine
    break-even  the link bandwidth below which sending the saved bytes takes longer than γ, at 2 ranks
    loss        of a small transformer after `steps` steps on `ranks` ranks, and the difference to the exact run

γ on a CPU does not predict γ on a GPU: use `--device cuda`.
"""

import argparse
import time
from typing import Any

from meshwright.cost.advice import compression_break_even
from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.describe.workload import Workload
from meshwright.lower.compressed import exchanges
from meshwright.lower.program import sent
from meshwright.training.launch import local
from meshwright.units import format_decimal_bytes

NAMES = ("none", "fp16", "bf16", "int8", "int4", "fp8", "top-k", "random-k", "threshold", "powersgd")
MODEL = Model(name="bench", hidden=64, layers=2, heads=4, ffn=192, vocab=256)
WORKLOAD = Workload(batch=16, seq=32, precision="fp32")
SIDE = 1024


def train(context: Any, name: str, steps: int) -> float:
    """The mean loss of the last five steps."""
    from meshwright.parallel.apply import apply
    from meshwright.training.data.sources import Corpus
    from meshwright.training.loop import Trainer

    plan = Plan(
        replicate=context.world,
        microbatch=WORKLOAD.batch // context.world,
        param_dtype="fp32",
        master=False,
        bucket=2e5,
        compression=name,
    )
    parallel = apply(MODEL, plan, WORKLOAD, context.rank, device=context.device)
    trainer = Trainer(parallel, Corpus(MODEL, WORKLOAD.seq, 0))
    return sum(record.loss for record in trainer.train(steps)[-5:]) / 5


def spent(name: str, elements: int, device: str) -> tuple[float, dict[str, float]]:
    """The shortest time of five runs, and the bytes that one rank sends at 2 and 8 ranks, and with ZeRO at 8."""
    import torch

    from meshwright.parallel.numerics.compress.compressors import make_compressor

    layout = [(i, torch.Size([SIDE, SIDE])) for i in range(0, elements, SIDE * SIDE)]
    message = torch.randn(elements, device=device, generator=torch.Generator(device).manual_seed(0))
    compressor = make_compressor(name)
    if compressor is None:
        plain = {"2": ("all_reduce", 2), "8": ("all_reduce", 8), "zero": ("reduce_scatter", 8)}
        return 0.0, {key: float(sent(kind, message.nbytes, p)) for key, (kind, p) in plain.items()}
    best = float("inf")
    for _ in range(5):
        gradient = message.clone()
        _wait(device)
        started = time.perf_counter()
        exchanged = 0.0
        for asked in compressor.reduce(0, gradient, layout, 0, 1):
            at = time.perf_counter()
            exchange_alone(asked)
            _wait(device)
            exchanged += time.perf_counter() - at
        _wait(device)
        best = min(best, time.perf_counter() - started - exchanged)
    sizes = {}
    for key, p, scattered in (("2", 2, False), ("8", 8, False), ("zero", 8, True)):
        messages = exchanges(
            Plan(replicate=p, compression=name), elements, 4, [(SIDE, SIDE)] * len(layout), p, scattered
        )
        sizes[key] = sum(float(sent(operation, n, p)) for operation, n in messages)
    return best, sizes


def exchange_alone(asked: Any) -> None:
    """One collective of a single rank: a copy of what it gives."""
    asked.out.view(-1).copy_(asked.given.flatten().clone())


def _wait(device: str) -> None:
    import torch

    if device != "cpu":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--elements", type=int, default=4 * SIDE * SIDE)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    elements = max(1, options.elements // (SIDE * SIDE)) * SIDE * SIDE
    print(f"{elements:,} float32 on {options.device}; convergence on {options.ranks} ranks, {options.steps} steps")
    print(f"{'':<10} {'ratio P=2':>10} {'P=8':>7} {'ZeRO':>7} {'γ ms':>8} {'break-even':>12} {'loss':>8} {'excess':>8}")
    exact, plain = 0.0, dict[str, float]()
    for name in NAMES:
        gamma, sizes = spent(name, elements, options.device)
        loss = local.run("__main__:train", options.ranks, name, options.steps, silence=600)[0]
        if name == "none":
            exact, plain = loss, sizes
        ratio = {key: plain[key] / sizes[key] for key in sizes}
        shards = f"{ratio['zero']:>6.1f}×"
        even = compression_break_even(4.0 * elements, ratio["2"], gamma, factor=1.0) if gamma else float("inf")
        bandwidth = f"{format_decimal_bytes(even)}/s" if gamma else "—"
        print(
            f"{name:<10} {ratio['2']:>9.1f}× {ratio['8']:>6.1f}× {shards} {1e3 * gamma:>8.1f} {bandwidth:>12} {loss:>8.4f} "
            f"{loss - exact:>+8.4f}"
        )


if __name__ == "__main__":
    main()
