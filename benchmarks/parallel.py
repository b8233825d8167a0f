"""Our step compared with plain torch on the same ranks: time in interleaved pairs, and the collectives and bytes of both.

    python benchmarks/parallel.py [--pairs 100] [--ranks 2] [--only ddp] [--memory]

Each case builds both trainings in the same processes and alternates their steps, so that other load on the machine affects
both. It prints the median over pairs of the ratio ours / plain with a bootstrap 95% interval, and the collectives of one step
of each, counted independently. Plain torch does the same work: forward, backward, gradient reduction, clipping by the global
norm, AdamW, and the loss averaged over ranks for the log.

Memory (only this: `--memory`): each side runs its steps in separate processes, on a larger model, with an allocator that
returns large tensors immediately. It prints the ratio of the peak resident memory of a rank, less its memory before the model
was built.

    ddp   DistributedDataParallel              zero3  fully_shard, one unit per layer
    tp    parallelize_module (DTensor)         1f1b   Schedule1F1B
"""

import argparse
import gc
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.describe.workload import Workload
from meshwright.training.launch import local

MODEL = Model(name="bench", hidden=128, layers=4, heads=4, ffn=384, vocab=512)
CASES = {"ddp": "replicate", "zero3": "shard", "tp": "tp", "1f1b": "pp"}
LARGER = MODEL.but(hidden=512, layers=8, heads=8, ffn=1536, vocab=2048)
FREE_IMMEDIATELY = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}


def plan_of(case: str, ranks: int) -> Plan:
    zero = {"zero": 3, "reduce": "step"} if case == "zero3" else {}
    return Plan(**{CASES[case]: ranks}, microbatch=4 if case != "1f1b" else 1, param_dtype="fp32", master=False, **zero)


class Plain:
    """A training step as the torch tutorials write it."""

    def __init__(self, case: str, rank: int, ranks: int, workload: Workload, model: Model) -> None:
        import torch
        from torch import distributed

        from meshwright.models import build, initial_value, loss_function
        from meshwright.training.data.samples import RandomSamples

        self.case, self.rank, self.ranks, self.workload, self.model = case, rank, ranks, workload, model
        self.torch, self.distributed = torch, distributed
        self.samples, self.loss = RandomSamples(model, workload.seq, 0), loss_function(model)
        layers = range(model.layers)
        if case == "1f1b":
            share = model.layers // ranks
            layers = range(rank * share, (rank + 1) * share)
        self.module = build(model, layers).to_empty(device="cpu")
        with torch.no_grad():
            for name, parameter in self.module.named_parameters():
                parameter.copy_(initial_value(model, name, parameter.shape, 0))
        self.wrap()
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
        self.step = 0

    def wrap(self) -> None:
        if self.case == "ddp":
            from torch.nn.parallel import DistributedDataParallel

            self.module = DistributedDataParallel(self.module, bucket_cap_mb=25)
        elif self.case == "zero3":
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            mesh = init_device_mesh("cpu", (self.ranks,))
            module: Any = self.module
            for unit in (*module.layers.values(), module.embedding, module.head, module):
                fully_shard(unit, mesh=mesh)
        elif self.case == "tp":
            self.wrap_tensor_parallel()
        else:
            from torch.distributed.pipelining import PipelineStage, Schedule1F1B

            stage = PipelineStage(self.module, self.rank, self.ranks, self.torch.device("cpu"))
            self.schedule = Schedule1F1B(stage, self.workload.batch, self.summed, scale_grads=False)

    def wrap_tensor_parallel(self) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        mesh = init_device_mesh("cpu", (self.ranks,))
        table: dict[str, Any] = {
            "embedding.tokens": RowwiseParallel(input_layouts=Replicate()),
            "head.project": ColwiseParallel(output_layouts=Replicate()),
        }
        for i in range(self.model.layers):
            columns = ("attention.q", "attention.k", "attention.v", "ffn.gate", "ffn.up")
            table |= {f"layers.{i}.{name}": ColwiseParallel() for name in columns}
            table |= {f"layers.{i}.{name}": RowwiseParallel() for name in ("attention.o", "ffn.down")}
        parallelize_module(self.module, mesh, table)

    def summed(self, output: Any, target: Any) -> Any:
        return self.loss(output, target) / self.tokens

    def clip(self) -> Any:
        """Clip by the global norm; a pipeline sums the squares of its stages, and DTensors do not mix with plain gradients."""
        torch, utils = self.torch, self.torch.nn.utils
        if self.case in ("ddp", "zero3"):
            return utils.clip_grad_norm_(self.module.parameters(), 1.0)
        parameters = list(self.module.parameters())
        kinds = [[p for p in parameters if type(p.grad) is kind] for kind in {type(p.grad) for p in parameters}]
        norms = [utils.get_total_norm([p.grad for p in kind]) for kind in kinds]
        square = sum((n.full_tensor() if hasattr(n, "full_tensor") else n) ** 2 for n in norms)
        if self.case == "1f1b":
            self.distributed.all_reduce(square)
        for parameter in parameters:
            gradient: Any = parameter.grad
            local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
            local.mul_((1.0 / (torch.sqrt(square) + 1e-6)).clamp(max=1.0))
        return square

    def train_step(self) -> None:
        from meshwright.training.data.samples import batch_of

        torch, distributed = self.torch, self.distributed
        data = self.ranks if self.case in ("ddp", "zero3") else 1
        share = self.workload.batch // data
        start = self.rank * share if data > 1 else 0
        batch = batch_of(self.samples, self.step, range(start, start + share), "cpu", torch.float32)
        self.tokens = batch.valid
        if data > 1:  # DDP and fully_shard average over ranks, but the loss is a mean over all valid tokens
            distributed.all_reduce(self.tokens)
            self.tokens = self.tokens / data
        if self.case == "1f1b":
            arguments = (batch.inputs,) if self.rank == 0 else ()
            losses: list = []
            last = self.rank == self.ranks - 1
            self.schedule.step(*arguments, target=batch.targets if last else None, losses=losses, return_outputs=False)
            loss = torch.stack([x.detach() for x in losses]).sum() if losses else torch.zeros(())
        else:
            chunks = zip(batch.inputs.split(4), batch.targets.split(4), strict=True)
            loss = torch.zeros(())
            for x, y in chunks:
                part = self.summed(self.module(x), y)
                part.backward()
                loss += part.detach()
        norm = self.clip()
        distributed.all_reduce(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        loss.item(), norm


def workload_of(case: str, ranks: int) -> Workload:
    """One micro-batch per step and data-parallel rank, so that DDP needs no `no_sync`; eight in a pipeline."""
    return Workload(batch={"tp": 4, "1f1b": 8}.get(case, 4 * ranks), seq=64, precision="fp32")


def our_step(case: str, context: Any, model: Model) -> Any:
    from meshwright.parallel.apply import apply
    from meshwright.training.data.samples import RandomSamples
    from meshwright.training.loop import Trainer

    workload = workload_of(case, context.world)
    parallel = apply(model, plan_of(case, context.world), workload, context.rank)
    return Trainer(parallel, RandomSamples(model, workload.seq, 0)).train_step


def plain_step(case: str, context: Any, model: Model) -> Any:
    return Plain(case, context.rank, context.world, workload_of(case, context.world), model).train_step


SIDES = {"ours": our_step, "plain": plain_step}


def work(context: Any, case: str, pairs: int) -> dict[str, Any]:
    import torch

    from meshwright.training.measure.observe import COLLECTIVES

    sides = {name: make(case, context, MODEL) for name, make in SIDES.items()}
    times: dict[str, list[float]] = {name: [] for name in sides}
    for i in range(pairs + 5):
        for name in sorted(sides, reverse=bool(i % 2)):
            torch.distributed.barrier()
            started = time.perf_counter()
            sides[name]()
            times[name].append(time.perf_counter() - started)
    counts = {name: count_collectives(step, COLLECTIVES) for name, step in sides.items()}
    return {"times": {name: values[5:] for name, values in times.items()}, "counts": counts}


def hold(context: Any, case: str, side: str) -> int:
    """Peak bytes of this process in three steps, less its bytes before the model was built."""
    SIDES[side](case, context, MODEL)()  # load libraries and create the transport buffers
    gc.collect()
    before = resident("VmRSS")
    step = SIDES[side](case, context, LARGER)
    step()
    Path("/proc/self/clear_refs").write_text("5")  # reset the recorded peak
    for _ in range(3):
        step()
    return resident("VmHWM") - before


def resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))


def count_collectives(step: Any, known: dict) -> dict[str, tuple[int, int]]:
    """Number and bytes by operation, including scalars and bookkeeping of the ranks."""
    import torch
    from torch.distributed.tensor import DTensor
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    seen: dict[str, tuple[int, int]] = {}

    class Counter(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if any(issubclass(t, DTensor) for t in types):
                return NotImplemented
            out = func(*args, **(kwargs or {}))
            name = func.name().partition(".")[0]
            if name in known:
                operation, which = known[name]
                tensors = [t for t in tree_leaves(out if which is None else args[which]) if isinstance(t, torch.Tensor)]
                before = seen.get(operation, (0, 0))
                seen[operation] = before[0] + 1, before[1] + sum(t.nbytes for t in tensors)
            return out

    with Counter():
        step()
    return seen


def interval(ours: np.ndarray, plain: np.ndarray) -> tuple[float, float, float]:
    """Median ratio of the pairs and its bootstrap 95% interval."""
    ratios = ours / plain
    draws = np.random.default_rng(0).integers(0, len(ratios), (2000, len(ratios)))
    low, high = np.percentile(np.median(ratios[draws], axis=1), (2.5, 97.5))
    return float(np.median(ratios)), float(low), float(high)


def print_time(case: str, ranks: int, pairs: int) -> None:
    results = local.run("__main__:work", ranks, case, pairs, silence=600)
    times = {name: np.max([r["times"][name] for r in results], axis=0) for name in SIDES}
    ratio, low, high = interval(times["ours"], times["plain"])
    medians = " against ".join(f"{1e3 * np.median(times[name]):.1f}" for name in SIDES)
    print(f"{case:<6} {ratio:.3f}× of the time ({low:.3f} to {high:.3f})  {medians} ms, {pairs} pairs, {ranks} ranks")
    counts = results[0]["counts"]
    for operation in sorted({*counts["ours"], *counts["plain"]}):
        ours, plain = (counts[name].get(operation, (0, 0)) for name in SIDES)
        print(
            f"         {operation:<15} ours {ours[0]:>4} of {ours[1]:>9,} B   plain {plain[0]:>4} of {plain[1]:>9,} B"
        )


def print_memory(case: str, ranks: int) -> None:
    ours, plain = (max(local.run("__main__:hold", ranks, case, side, silence=600)) for side in SIDES)
    print(f"{case:<6} {ours / plain:.3f}× of peak memory, {ours / 1e6:.0f} against {plain / 1e6:.0f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", choices=CASES)
    parser.add_argument("--memory", action="store_true", help="memory only")
    options = parser.parse_args()
    cases = [options.only] if options.only else CASES
    if options.memory:
        os.environ.update(FREE_IMMEDIATELY)  # for the processes that this one starts
        for case in cases:
            print_memory(case, options.ranks)
        return
    for case in cases:
        print_time(case, options.ranks, options.pairs)
    sys.stdout.flush()
    subprocess.run(
        [sys.executable, *sys.argv, "--memory"], check=True
    )  # in new processes, because the allocator differs


if __name__ == "__main__":
    main()
