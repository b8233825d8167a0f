"""The cost of recording communication on timed steps: step times with and without the recorder, in interleaved pairs.

    python benchmarks/record_comm.py [--ranks 2] [--pairs 40] [--seconds 20]

Both halves of a pair train the same model on the same processes, one directly after the other, in alternating order. Printed are the
median step without recorder, the median over pairs of the difference, as a share of it, and the number of recorded calls.
A pair's difference has the noise of two steps, so the interval that holds the median with 95% (by the order of the differences) is printed;
the same of the seconds in which the rank's main thread computed, which waiting for the other rank does not disturb.
The limit is 1% of a step. The last column is an upper bound that has no noise: calls times the cost of one recorded call of
an empty operation.
"""

import argparse
import time
from typing import Any

import numpy as np

from meshwright.describe.config import Config
from meshwright.training.launch import local

MODEL = {"hidden": 256, "layers": 4, "heads": 4, "ffn": 512, "vocab": 256}
EXPERTS = {**MODEL, "experts": 4, "top_k": 2, "expert_ffn": 256}
WORKLOAD = {"batch": 4, "seq": 128, "precision": "fp32"}
PLANS: dict[str, tuple[dict, dict]] = {
    "dp": (MODEL, {"replicate": 2}),
    "zero 3": (MODEL, {"shard": 2, "zero": 3}),
    "tp": (MODEL, {"tp": 2}),
    "pp": (MODEL, {"pp": 2}),
    "cp": (MODEL, {"cp": 2}),
    "ep": (EXPERTS, {"replicate": 2, "ep": 2}),
}
LIMIT = 0.01
STEPS = 2  # timed, with and without recorder, in each pair


Pair = tuple[float, float]  # seconds on the clock, and seconds in which the rank's main thread computed


def affordable(pairs: int, step: float, seconds: float) -> int:
    """Pairs that all ranks run in about `seconds`, at least six: on a slow or busy machine fewer than asked for."""
    import torch
    from torch import distributed

    slowest = torch.tensor(step)
    distributed.all_reduce(slowest, distributed.ReduceOp.MAX)
    return min(pairs, max(6, int(seconds / (2 * (1 + STEPS) * slowest.item()))))


def work(context: Any, config: Config, pairs: int, seconds: float) -> tuple[list[Pair], list[Pair], int, float]:
    """The steps without and with recorder, recorded calls in a step, and seconds of one recorded empty call."""
    from meshwright.parallel.apply import apply
    from meshwright.training.data.samples import RandomSamples
    from meshwright.training.loop import Trainer
    from meshwright.training.measure.record_comm import CommRecorder

    parallel = apply(config.model, config.plan, config.workload, context.rank)
    trainer = Trainer(parallel, RandomSamples(config.model, config.workload.seq, 0))
    trainer.train(2)
    pairs = affordable(pairs, trainer.train_step().seconds, seconds)
    plain, recorded, calls = [], [], 0
    for pair in range(pairs):
        for records in (False, True) if pair % 2 else (True, False):
            # Ranks start a step together: making a recorder takes milliseconds, which the other rank's step would wait for.
            if not records:
                plain.append(step_seconds(trainer))
                continue
            with CommRecorder(trainer) as recorder:
                recorded.append(step_seconds(trainer))
            calls = len(recorder.steps[-1].events)
    return plain, recorded, calls, empty_call(trainer)


def step_seconds(trainer: Any) -> Pair:
    """The mean of some steps after one that is not timed: a training has one recorder from its first step to its last, and Python runs code
    slower at first whose classes were just changed, as a recorder does at its begin and its end."""
    from torch import distributed

    clock, computed = [], []
    for _ in range(1 + STEPS):
        distributed.barrier()
        start = time.thread_time()
        clock.append(trainer.train_step().seconds)
        computed.append(time.thread_time() - start)
    return sum(clock[1:]) / STEPS, sum(computed[1:]) / STEPS


def empty_call(trainer: Any, times: int = 2000) -> float:
    """Seconds that the recorder adds to a call that does nothing, and to its wait."""
    import torch
    from torch import distributed

    from meshwright.training.measure.record_comm import CommRecorder

    class Handle:
        def wait(self) -> None:
            pass

    recorder, handle, group, tensor = CommRecorder(trainer), Handle(), distributed.group.WORLD, [torch.zeros(1)]
    options = distributed.AllreduceOptions()
    options.asyncOp = False

    def issue(_: Any, *args: Any) -> Handle:
        return handle

    seconds = []
    for call, wait in (
        (issue, Handle.wait),
        (recorder._recorded(issue, "all_reduce", 0), recorder._timed(Handle.wait)),
    ):
        started = time.perf_counter()
        for _ in range(times):
            wait(call(group, tensor, options))
        seconds.append((time.perf_counter() - started) / times)
    return seconds[1] - seconds[0]


def interval(differences: np.ndarray) -> tuple[float, float]:
    """The order statistics that enclose the median with 95%."""
    ordered, n = np.sort(differences), len(differences)
    reach = int(np.ceil(0.98 * np.sqrt(n)))
    return float(ordered[max(0, n // 2 - reach)]), float(ordered[min(n - 1, n // 2 + reach)])


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--ranks", type=int, default=2)
    options.add_argument("--pairs", type=int, default=40)
    options.add_argument("--plans", nargs="*", default=list(PLANS))
    options.add_argument("--seconds", type=float, default=20.0, help="per plan: fewer pairs run if they take longer")
    chosen = options.parse_args()
    print(f"{'plan':8} {'step':>10} {'adds, clock (95%)':>28} {'adds, CPU (95%)':>28} {'calls':>6} {'bound':>8}")
    for name in chosen.plans:
        model, plan = PLANS[name]
        degrees = {axis: chosen.ranks if n == 2 and axis != "zero" else n for axis, n in plan.items()}
        fp32 = {"param_dtype": "fp32", "master": False}
        config = Config.from_parts(model, "laptop", "gloo-cpu", WORKLOAD, {**fp32, **degrees})
        results = local.run("__main__:work", chosen.ranks, config, chosen.pairs, chosen.seconds, silence=120.0)
        plain, recorded, calls, each = results[0]
        step = float(np.median(plain, axis=0)[0])
        cells = []
        for differences in (np.array(recorded) - np.array(plain)).T:
            low, high = interval(differences)
            cells.append(f"{np.median(differences) / step:9.2%} ({low / step:6.2%} to {high / step:6.2%})")
        print(
            f"{name:8} {1e3 * step:7.1f} ms {cells[0]:>28} {cells[1]:>28} {calls:6d} {calls * each / step:8.3%}",
            flush=True,
        )
    print(f"limit {LIMIT:.0%} of a step; bound: recorded calls × the cost of recording an empty call")


if __name__ == "__main__":
    main()
