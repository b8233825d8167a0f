"""The speed of the planner and the accuracy of its ranking.

    python benchmarks/planner.py            speed, growth, ranking
    python benchmarks/planner.py speed      one of them

**Speed**: full spaces searched on one core, each in a separate process (to measure its peak memory), compared with the targets. A plan counts
as searched if it was costed, or proved slower or too large by a bound. **Growth**: seconds by legal plans, for clusters that double in size.
**Ranking**: on random problems, random plans that fit are ranked by the closed forms and by walking each one. *Regret* is the slowdown of the
first choice against the walked best; *overlap* is the share of the twenty walked best among the first twenty. Targets: 1% and 80%.
"""

from __future__ import annotations

import os

os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"))  # one core

import resource
import subprocess
import sys
import time

import numpy as np

from meshwright import planner
from meshwright.describe import catalog
from meshwright.describe.config import Config
from meshwright.describe.plan_fields import PlanArrays
from meshwright.describe.workload import Workload
from meshwright.planner.search.branch_and_bound import Incumbents, Search, SearchOutcome
from meshwright.planner.search.leaders import rank
from meshwright.planner.search.pipeline_walk import walk
from meshwright.planner.search.space import Space

# Calculon's full search of GPT-3 175B on 512 GPUs: core-seconds, and executions by the loops of its search at batch 1,536, without offloading and
# with a second memory to offload to.
CALCULON_S, CALCULON_PLANS = 35 * 3600.0, (1_905_552, 13_165_632)
CASES = {  # model, cluster, devices, batch, sequence, target in seconds
    "GPT-3 175B on 512 A100": ("gpt3-175b", "dgx-a100", 512, 1536, 2048, 5.0),
    "Llama-3 405B on 16,384 H100": ("llama3.1-405b", "dgx-h100", 16384, 2048, 8192, 10.0),
    "Llama-3 70B on 64 H100": ("llama3-70b", "dgx-h100", 64, 1024, 8192, 1.0),
    "Llama-3 8B on 64 H100": ("llama3-8b", "dgx-h100", 64, 1024, 8192, None),
    "Mixtral 8x7B on 64 H100": ("mixtral-8x7b", "dgx-h100", 64, 1024, 4096, None),
    "DeepSeek-V3 on 2,048 H800": ("deepseek-v3", "dgx-h800", 2048, 15360, 4096, None),
}


def search_case(name: str) -> None:
    """Search one case and print its figures for `speed`."""
    model, cluster, gpus, batch, seq, _ = CASES[name]
    cpu, wall = time.process_time(), time.perf_counter()
    result = planner.plan(model, cluster, gpus=gpus, batch=batch, seq=seq)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{result.searched}|{result.found.costed}|{cpu}|{wall}|{peak}|{result.plan.title()}")


def speed() -> None:
    print(
        f"{'':<30}{'legal plans':>18}{'costed':>11}{'CPU s':>8}{'wall s':>8}{'target':>8}{'plans/CPU s':>14}{'GiB':>6}"
    )
    for name, case in CASES.items():
        done = subprocess.run([sys.executable, __file__, "one", name], capture_output=True, text=True, check=True)
        plans, costed, cpu, wall, peak, title = done.stdout.strip().split("|")
        target = f"{case[-1]:g}" if case[-1] else ""
        rate = int(plans) / float(cpu)
        figures = f"{int(plans):>18,}{int(costed):>11,}{float(cpu):>8.2f}{float(wall):>8.2f}{target:>8}{rate:>14,.0f}{float(peak):>6.2f}"
        print(f"{name:<30}{figures}  {title}")
        if name.startswith("GPT-3"):
            against_calculon(int(plans), int(costed), float(cpu))


def against_calculon(plans: int, costed: int, cpu: float) -> None:
    """Plans per CPU-second: decided by the search, and costed one by one as Calculon does."""
    fewest, most = (n / CALCULON_S for n in CALCULON_PLANS)
    print(
        f"{'':<10}Calculon, the same problem: {CALCULON_S:,.0f} core-seconds, {CALCULON_S / cpu:,.0f} times as long, for "
        f"{CALCULON_PLANS[0]:,} executions ({CALCULON_PLANS[1]:,} with offloading): {fewest:.0f} to {most:.0f} a CPU-second"
    )
    for what, rate in (
        ("settled by the search (costed, or proved slower or too large)", plans / cpu),
        ("costed by the search, all else it does included", costed / cpu),
        ("costed in plain batches, every one: time, bracket and memory", costing()),
    ):
        print(
            f"{'':<10}{rate:>12,.0f} plans a CPU-second {what}: {rate / most:,.0f} to {rate / fewest:,.0f} times Calculon's"
        )


def costing(count: int = 100_000) -> float:
    """Plans per CPU-second if every plan is costed."""
    model, cluster, gpus, batch, seq, _ = CASES["GPT-3 175B on 512 A100"]
    space = Space(
        Config(
            catalog.load("models", model),
            catalog.load("clusters", cluster).with_gpus(gpus),
            workload=Workload(batch=batch, seq=seq),
            stack=catalog.load("stacks", "default"),
        )
    )
    parts, total = [], 0
    for part in space.plans(4096):
        parts.append(part)
        total += len(part)
        if total >= count:
            break
    search, start = Search(space, np.inf), time.process_time()
    for part in parts:
        search.cost(part)
    return total / (time.process_time() - start)


def growth() -> None:
    print(f"\n{'Llama-3 70B':<16}{'legal plans':>18}{'costed':>12}{'CPU s':>8}{'costed/CPU s':>14}")
    seen = []
    for gpus in (64, 128, 256, 512, 1024, 2048):
        start = time.process_time()
        result = planner.plan("llama3-70b", "dgx-h100", gpus=gpus, batch=2048, seq=8192)
        cpu = time.process_time() - start
        seen.append((result.searched, cpu))
        print(
            f"{gpus:>6} GPUs     {result.searched:>18,}{result.found.costed:>12,}{cpu:>8.2f}{result.found.costed / cpu:>14,.0f}"
        )
    plans, seconds = np.log(np.array(seen)).T
    print(f"CPU seconds grow as (legal plans)^{np.polyfit(plans, seconds, 1)[0]:.2f}; linear would be 1")


def ranking(cases: int = 60, plans: int = 160) -> None:
    rng = np.random.default_rng(1)  # seed 0 gave the plans to which the estimate was fitted
    models = ("gpt3-13b", "llama3-8b", "llama2-70b", "mixtral-8x7b", "gpt3-175b", "llama3.1-405b")
    clusters = ("dgx-a100", "dgx-h100", "aws-p4d", "gb200-nvl72")
    seen: list[tuple[PlanArrays, np.ndarray, float]] = []
    while len(seen) < cases:
        gpus = int(rng.choice([64, 128, 256, 512]))
        cluster = catalog.load("clusters", str(rng.choice(clusters))).with_gpus(gpus)
        work = Workload(batch=int(rng.choice([256, 512, 1024])), seq=int(rng.choice([2048, 4096])))
        model, stack = str(rng.choice(models)), str(rng.choice(["default", "megatron-core"]))
        space = Space(
            Config(catalog.load("models", model), cluster, workload=work, stack=catalog.load("stacks", stack)),
            bucket=25e6,
        )
        rows = sample(space, rng, plans)
        if rows is not None:
            seen.append((rows, walk(space, rows)[1], chosen(space, rows)))
    print(f"\nestimate against walk, {cases} random problems of up to {plans} plans that fit, all with pipelines")
    print(f"{'':<38}{'regret of the first':<36}{'overlap of the twenty best':<30}error")
    for name, label in (("closed", "closed form of equal stages"), ("estimate", "the planner's estimate")):
        report(label, [(rows.columns[name], walked) for rows, walked, _ in seen])
    regrets = np.array([best / walked.min() - 1 for _, walked, best in seen])
    print(f"{'the planner, its leaders walked':<38}{regretted(regrets)}  (up to 0.5% is given for a simpler plan)")


def report(label: str, pairs: list[tuple[np.ndarray, np.ndarray]]) -> None:
    regrets = np.array([walked[estimated.argmin()] / walked.min() - 1 for estimated, walked in pairs])
    best = [[set(times.argsort()[:20].tolist()) for times in pair] for pair in pairs]
    overlaps = [len(a & b) / 20 for a, b in best]
    error = np.abs(np.concatenate([estimated / walked - 1 for estimated, walked in pairs]))
    shares = f"mean {np.mean(overlaps):.0%}, worst {np.min(overlaps):.0%}"
    errors = f"median {np.median(error):.2%}, 90th percentile {np.quantile(error, 0.9):.2%}, worst {error.max():.0%}"
    print(f"{label:<38}{regretted(regrets)}  {shares:<28}  {errors}")


def regretted(regrets: np.ndarray) -> str:
    return f"mean {regrets.mean():.2%}, ≤1% in {np.mean(regrets <= 0.01):.0%}, worst {regrets.max():.1%}"


def sample(space: Space, rng: np.random.Generator, count: int) -> PlanArrays | None:
    """Random costed plans with pipelines that fit; None if too few fit."""
    frames = space.frames.take(space.frames.pp > 1)

    def some(rows: PlanArrays, n: int) -> PlanArrays:
        return rows.take(np.sort(rng.permutation(len(rows))[:n]))

    if not len(frames):
        return None
    shapes = space.shaped(some(frames, 200))
    shapes = shapes.take(space.microbatches(shapes) <= 128)  # long pipelines walk slowly and add no information
    rows = some(space.scheduled(some(space.sharded(some(space.placed(shapes), 2000)), 3000)), 6000)
    rows = Search(space, np.inf).cost(rows)
    rows = rows.take(rows.memory <= space.cluster.accelerator.memory)
    return some(rows, count) if len(rows) >= 60 else None


def chosen(space: Space, rows: PlanArrays) -> float:
    """Seconds of the plan that the planner would choose: it walks some of them, in waves."""
    best = Incumbents(space.cluster.accelerator.memory)
    best.offer(rows)
    ranking = rank(space, SearchOutcome(best.found(), best, {}, set(), len(rows), len(rows)))
    return ranking.best.time if ranking else np.inf


if __name__ == "__main__":
    if sys.argv[1:2] == ["one"]:
        search_case(sys.argv[2])
    else:
        for part in sys.argv[1:] or ("speed", "growth", "ranking"):
            {"speed": speed, "growth": growth, "ranking": ranking}[part]()
