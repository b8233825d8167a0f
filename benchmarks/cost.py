"""The number of distinct plans per second that lowering and the cost model evaluate on one core.

    python benchmarks/cost.py           evaluate the committed list
    python benchmarks/cost.py --make    rewrite the list (deterministic)

The list, `plans-100k.npz`, holds 100,000 distinct legal plans of llama3-70b on 1,024 H100 at a batch of 4,096 sequences.
For comparison it prints the reported rates of other planners, in plans per CPU-second: Calculon 33 as shipped and 264 without output,
llm-analysis 2,063, SimuMax 7 to 13.
"""

import itertools
import sys
import time
from pathlib import Path

import numpy as np

from meshwright.cost.step import step_cost
from meshwright.describe import catalog
from meshwright.describe.plan import Plan, divisors
from meshwright.describe.workload import Workload
from meshwright.errors import MeshwrightError
from meshwright.lower.batch import Batch
from meshwright.lower.step import lower

LIST = Path(__file__).with_name("plans-100k.npz")
CHOICES = {"schedule": ("1f1b", "gpipe", "interleaved", "zb-h1"), "recompute": ("none", "selective", "full")}
FIELDS = (
    "replicate",
    "shard",
    "zero",
    "tp",
    "sp",
    "cp",
    "pp",
    "virtual",
    "microbatch",
    "schedule",
    "recompute",
    "order",
)
ORDERS = (("tp", "cp", "pp", "dp"), ("tp", "cp", "dp", "pp"))
WORLD, COUNT, CHUNK = 1024, 100_000, 20_000
WORK = Workload(batch=4096, seq=8192)


def candidates() -> list[tuple[int, ...]]:
    """Every combination of a grid, in a fixed order; legality is checked afterwards."""
    out: list[tuple[int, ...]] = []
    for tp, cp, pp in itertools.product((1, 2, 4, 8), (1, 2, 4), (1, 2, 4, 5, 8, 10, 16, 20)):
        if WORLD % (tp * cp * pp):
            continue
        dp = WORLD // (tp * cp * pp)
        for shard, zero in itertools.product(divisors(dp), (0, 1, 2, 3)):
            if (shard > 1) != (zero > 0):
                continue
            for micro, virtual, schedule in itertools.product((1, 2, 4, 8), (1, 2, 4, 5), range(4)):
                if (virtual > 1) != (CHOICES["schedule"][schedule] == "interleaved") or (pp == 1 and schedule):
                    continue
                for sp, recompute, order in itertools.product((0, 1), range(3), range(2)):
                    if not (sp and tp == 1) and pp * virtual <= 80:
                        out.append(
                            (dp // shard, shard, zero, tp, sp, cp, pp, virtual, micro, schedule, recompute, order)
                        )
    return out


def plan_of(row: tuple[int, ...]) -> Plan:
    named = dict(zip(FIELDS, (int(x) for x in row), strict=True))
    words = {name: CHOICES[name][named[name]] for name in CHOICES}
    return Plan(**{**named, **words, "sp": bool(named["sp"]), "order": ORDERS[named["order"]]})


def make() -> None:
    model = catalog.load("models", "llama3-70b")
    rows = candidates()
    picked = []
    for index in np.random.default_rng(0).permutation(len(rows)):
        try:
            plan_of(rows[index]).check(model, WORK)
        except MeshwrightError:
            continue
        picked.append(rows[index])
        if len(picked) == COUNT:
            break
    array = np.array(picked, dtype=np.uint16)
    np.savez_compressed(LIST, plans=array)
    print(f"wrote {len(array):,} plans of {len(rows):,} candidates")


def main() -> None:
    model, cluster = catalog.load("models", "llama3-70b"), catalog.load("clusters", "dgx-h100").with_gpus(WORLD)
    rows = np.load(LIST, allow_pickle=False)["plans"]
    if len(np.unique(rows, axis=0)) != len(rows):
        sys.exit("the list repeats a plan")
    stack = catalog.load("stacks", "megatron-core")
    batches = [
        Batch.of([plan_of(tuple(r)) for r in rows[i : i + CHUNK]], model, WORK, stack)
        for i in range(0, len(rows), CHUNK)
    ]
    rates = []
    for _ in range(5):
        began = time.process_time()
        best = min(float(step_cost(lower(batch), cluster).time.min()) for batch in batches)
        rates.append(len(rows) / (time.process_time() - began))
    print(f"{len(rows):,} distinct plans, lowered and timed: {np.median(rates):,.0f} plans per CPU-second")
    print(f"(median of five; {min(rates):,.0f} to {max(rates):,.0f}); fastest plan {best:.2f} s per step")
    print("reported for others: llm-analysis 2,063; Calculon 264 without output, 33 as shipped; SimuMax 7 to 13")


if __name__ == "__main__":
    make() if "--make" in sys.argv else main()
