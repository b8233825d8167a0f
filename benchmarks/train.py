"""The trainer against a bare PyTorch loop that does the same, and what its hooks and its batches cost.

    python benchmarks/train.py [--ranks 4] [--pairs 15] [--block 5]

Loop      A loop in plain PyTorch (DistributedDataParallel, AdamW with decay groups, clipping, warm-up, the mean loss over all ranks) and
          the trainer with everything that `train` adds: recorder of communication, metrics, rows in a run folder. Both train the same
          model from the same weights on the same batches; their losses are compared. The limit is 3% over the bare loop.
Hooks     The same trainer with and without these hooks.
Batches   How often a step found its batch not ready, after the first block.
Save      An asynchronous checkpoint every `--every` steps: the time that the loop stands still for it, on average over its steps, of a
          step. The limit is 5%. Blocks with and without saves alternate too: their ratio also has what the writing thread takes from
          the cores that compute. These blocks are long, so there are half as many pairs of them.

Blocks of steps alternate on the same processes: of each pair, the bare loop goes first in every second one. Printed are the median of the
ratios and the interval that holds it with 95%.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.describe.config import Config
from meshwright.training.launch import local

MODEL = {"hidden": 128, "layers": 4, "heads": 4, "ffn": 512, "vocab": 256}
LIMIT, SAVE_LIMIT = 0.03, 0.05


def bare_loop(config: Config, weights: dict[str, Any], samples: Any, indices: Any) -> Callable[[int], float]:
    """A training step in plain PyTorch, as a user would write it."""
    import torch
    from torch import distributed
    from torch.nn import functional as F
    from torch.nn.parallel import DistributedDataParallel

    from meshwright.models import build

    module = build(config.model).to_empty(device="cpu")
    module.load_state_dict(weights)
    model, settings = DistributedDataParallel(module), config.optimizer
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.epsilon,
    )
    micro = config.plan.microbatch
    count = len(indices) // micro

    def step(number: int) -> float:
        rows = [samples.sample(number, i) for i in indices]
        inputs, targets = (torch.from_numpy(np.stack(side)).long() for side in zip(*rows, strict=True))
        total = torch.zeros(())
        for i, (x, y) in enumerate(zip(inputs.split(micro), targets.split(micro), strict=True)):
            model.require_backward_grad_sync = i == count - 1
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten()) / count
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * min(1.0, (number + 1) / max(1, settings.warmup))
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        distributed.all_reduce(total)
        return total.item() / distributed.get_world_size()

    return step


def work(context: Any, config: Config, pairs: int, block: int, every: int, folder: str) -> dict[str, Any]:
    """Seconds of alternating blocks of bare steps, trainer steps without hooks and trainer steps with all hooks."""
    from torch import distributed

    from meshwright.parallel.apply import apply
    from meshwright.predict.prediction import predict
    from meshwright.training.data.samples import training_samples
    from meshwright.training.folder import RunFolder, StepWriter
    from meshwright.training.loop import Trainer
    from meshwright.training.measure.record_comm import CommRecorder
    from meshwright.training.measure.reports import Metrics

    parallel = apply(config.model, config.plan, config.workload, context.rank)
    samples = training_samples(config, 0)
    trainer = Trainer(parallel, samples, config.optimizer, ahead=2)
    weights = {name: value.clone() for name, value in parallel.stages[0].state_dict().items()}
    bare, number = bare_loop(config, weights, samples, trainer.indices), iter(range(10**9))
    losses: dict[str, list[float]] = {"bare": [], "trainer": []}
    written = RunFolder.create(Path(folder), config, predict(config)) if context.rank == 0 else None

    def bare_steps() -> None:
        losses["bare"] += [bare(next(number)) for _ in range(block)]

    def trainer_steps() -> None:
        losses["trainer"] += [record.loss for record in trainer.train(block)]

    def timed(steps: Callable[[], None]) -> float:
        distributed.barrier()
        started = time.perf_counter()
        steps()
        distributed.barrier()
        return (time.perf_counter() - started) / block

    def with_hooks() -> float:
        with ExitStack() as stack:
            recorder = stack.enter_context(CommRecorder(trainer))
            trainer.hooks.append(Metrics(config, recorder))
            trainer.hooks += [StepWriter(written)] if written is not None else []
            seconds = timed(trainer_steps)
            del trainer.hooks[1:]
        return seconds

    times: dict[str, list[float]] = {"bare": [], "hooks": [], "plain": []}
    runs: dict[str, Callable[[], float]] = {
        "bare": lambda: timed(bare_steps),
        "hooks": with_hooks,
        "plain": lambda: timed(trainer_steps),
    }
    for kind in runs:  # warm up
        runs[kind]()
    waits, steps = trainer.loader.waits, trainer.loader.steps
    for pair in range(pairs):
        for kind in list(runs) if pair % 2 else list(runs)[::-1]:
            times[kind].append(runs[kind]())
        context.send(pair)  # the parent ends ranks that are silent for long
    waited = trainer.loader.waits - waits, trainer.loader.steps - steps
    stall = saving(context, trainer, config, (pairs + 1) // 2, every, Path(folder))
    return {"times": times, "losses": losses, "waits": waited, "stall": stall}


def saving(context: Any, trainer: Any, config: Config, pairs: int, every: int, folder: Path) -> dict[str, Any]:
    """Seconds of a step in blocks of `every` steps without and with a save after the first one, and what a save costs the loop."""
    from torch import distributed

    from meshwright.training.checkpoint.save import Saver, checkpoint_group

    saver = Saver(trainer, folder / "checkpoints", checkpoint_group())
    saver.check()
    saver.save(wait=True)  # the copies are made once, and reused
    saver.stalled_s, saves = 0.0, 0
    times: dict[str, list[float]] = {"without": [], "with": []}
    for pair in range(pairs):
        for kind in ("without", "with") if pair % 2 else ("with", "without"):
            distributed.barrier()
            started = time.perf_counter()
            trainer.train(1)
            if kind == "with":
                saver.save()
                saves += 1
            trainer.train(every - 1)
            distributed.barrier()
            times[kind].append((time.perf_counter() - started) / every)
            saver.finish()  # outside of the blocks: a save that takes longer than a block must not fall into the next one
        context.send(pair)
    return {"times": times, "each_s": saver.stalled_s / saves}


def interval(values: np.ndarray) -> tuple[float, float]:
    """The order statistics that enclose the median with 95%."""
    ordered, n = np.sort(values), len(values)
    reach = int(np.ceil(0.98 * np.sqrt(n)))
    return float(ordered[max(0, n // 2 - reach)]), float(ordered[min(n - 1, n // 2 + reach)])


def compare(name: str, ours: list[float], base: list[float]) -> None:
    ratios = np.array(ours) / np.array(base) - 1
    low, high = interval(ratios)
    middle, step = float(np.median(ratios)), 1e3 * float(np.median(base))
    print(f"{name:44} {step:8.1f} ms {middle:+8.1%}   {low:+.1%} to {high:+.1%}", flush=True)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--ranks", type=int, default=4)
    options.add_argument("--pairs", type=int, default=15)
    options.add_argument("--block", type=int, default=5)
    options.add_argument("--every", type=int, default=20, help="steps between two checkpoints")
    chosen = options.parse_args()
    workload = {"batch": 4 * chosen.ranks, "seq": 64, "precision": "fp32"}
    plan = {"replicate": chosen.ranks, "microbatch": 4, "param_dtype": "fp32", "master": False}
    config = Config.from_parts(MODEL, "laptop", "gloo-cpu", workload, plan)
    with tempfile.TemporaryDirectory() as folder:
        arguments = (config, chosen.pairs, chosen.block, chosen.every, folder)
        found = local.run("__main__:work", chosen.ranks, *arguments, silence=150.0)
    times, losses = found[0]["times"], found[0]["losses"]
    both = min(len(side) for side in losses.values())
    largest = max(abs(a - b) for a, b in zip(losses["bare"][:both], losses["trainer"][:both], strict=True))
    print(f"{'':44} {'base step':>11} {'median':>8}   95% interval")
    compare("trainer with hooks over the bare loop", times["hooks"], times["bare"])
    compare("trainer without hooks over the bare loop", times["plain"], times["bare"])
    compare("hooks over the trainer without them", times["hooks"], times["plain"])
    print(
        f"limit: {LIMIT:.0%} over the bare loop. Largest difference of the losses in the first {both} steps: {largest:.1e}"
    )
    waits = [result["waits"] for result in found]
    print(f"steps that waited for their batch: {sum(w for w, _ in waits)} of {sum(s for _, s in waits)}")
    stall = [result["stall"] for result in found]
    step = float(np.median(stall[0]["times"]["without"]))
    each = max(one["each_s"] for one in stall)
    compare(f"a save every {chosen.every} steps over none", stall[0]["times"]["with"], stall[0]["times"]["without"])
    print(
        f"the loop stands still for {1e3 * each:.2f} ms per save: {each / step:.1%} of a step once, "
        f"{each / step / chosen.every:.2%} of every step; limit: {SAVE_LIMIT:.0%}"
    )


if __name__ == "__main__":
    main()
