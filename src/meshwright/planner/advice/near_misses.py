"""Sizes that narrowly miss a much faster plan: the batch, the number of GPUs, the sequence length, the vocabulary.

A batch of 250 on 32 GPUs cannot be divided over 32 data-parallel ranks; 256 can, and trains 40% more tokens per second. So for each size the
rounder numbers close to it are tried: those divisible by a larger power of two. Each is searched among the common plans
(`search.common_plans`) and compared with the winner, which had all plans to choose from; the gain shown is therefore at least this large.

    batch       up to 12.5% away, same GPUs          tokens per second
    GPUs        up to 15% away  , same batch         tokens per second per GPU
    sequence    up to 6.25% away, same batch         useful FLOPs per second: a longer sequence has more attention per token

The vocabulary is different: the cost model does not see alignment. But matrix products whose width per GPU is not a multiple of 8 elements
cannot use the fast kernels, so such a vocabulary is reported with the cost of padding it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.describe.base import MOST, MOST_DEVICES
from meshwright.describe.plan import Plan
from meshwright.planner.advice.alternatives import PlanTrials, step
from meshwright.planner.advice.infeasible import other
from meshwright.planner.search.common_plans import best_common_plan
from meshwright.planner.search.space import Space
from meshwright.predict.estimate import Estimate

NEAR = {"batch": 0.125, "GPUs": 0.15, "sequence": 0.0625}
MOST_TRIED = 2  # sizes of each kind
WORTH = 0.02  # share of throughput below which nothing is offered
WORTH_GPUS = 0.05  # the same per GPU, for another number of GPUs
ALIGNED = 8  # elements: 16 bytes of bf16
MULTIPLE = 128  # vocabularies are usually padded to this many rows per GPU


@dataclass(frozen=True)
class NearMiss:
    """Another size with the throughput it would give."""

    what: str
    given: int
    offered: int
    setting: str  # the words to type
    gain: float  # share of tokens per second; per GPU for another number of GPUs, of useful FLOPs for another sequence
    note: str
    plan: Plan | None = None  # the common plan that reaches it


def near_misses(space: Space, winner: Estimate, headroom: float) -> list[NearMiss]:
    """Return sizes worth changing: the nearest of each kind, the largest gain first."""
    if winner.model.kind != "transformer":
        return []
    misses = [*_batches(space, winner, headroom), *_gpus(space, winner, headroom), *_sequences(space, winner, headroom)]
    nearest: dict[str, NearMiss] = {}
    for miss in sorted(misses, key=lambda m: abs(m.offered - m.given)):
        nearest.setdefault(miss.what, miss)
    return [*sorted(nearest.values(), key=lambda m: -m.gain), *_vocabulary(winner)]


def rounder(value: int, share: float, most: int = MOST) -> list[int]:
    """Return numbers near `value`, at most `most`, that a larger power of two divides; the roundest first."""
    low, high = int(value * (1 - share)), min(int(value * (1 + share)), most)
    unit = 1 << max(high.bit_length() - 1, 0)
    sizes: list[int] = []
    while unit > value & -value and len(sizes) < MOST_TRIED:
        below = value // unit * unit
        sizes += [n for n in (below + unit, below) if low <= n <= high and n > 0 and n not in sizes]
        unit //= 2
    return sizes[:MOST_TRIED]


def _throughput(space: Space, headroom: float) -> tuple[float, Plan | None]:
    """Tokens per second of the best common plan; 0: none fits."""
    best, _ = best_common_plan(space, headroom)
    return (space.workload.tokens_per_step / best.time, best.plan) if best else (0.0, None)


def _rate(winner: Estimate) -> float:
    return winner.workload.tokens_per_step / step(winner)


def _batches(space: Space, winner: Estimate, headroom: float) -> Iterator[NearMiss]:
    batch = space.workload.batch
    for n in rounder(batch, NEAR["batch"]):
        rate, plan = _throughput(other(space, workload=space.workload.but(batch=n)), headroom)
        gain = rate / _rate(winner) - 1
        if plan is not None and gain >= WORTH:
            note = f"{n} = micro-batch {plan.microbatch} × {plan.microbatches(winner.workload.but(batch=n))} × dp {plan.dp}"
            yield NearMiss("batch", batch, n, f"--batch {n}", gain, note, plan)


def _gpus(space: Space, winner: Estimate, headroom: float) -> Iterator[NearMiss]:
    world, node = space.cluster.world, space.cluster.node_size
    unit = node if world % node == 0 else 1
    if world <= node and len(space.cluster.levels) == 1:
        return
    for n in rounder(world // unit, NEAR["GPUs"], MOST_DEVICES // unit):
        gpus = n * unit
        rate, plan = _throughput(other(space, cluster=space.cluster.with_gpus(gpus)), headroom)
        gain = rate / gpus / (_rate(winner) / world) - 1
        if plan is not None and gain >= WORTH_GPUS and rate >= (1 - WORTH) * _rate(winner):
            note = f"{100 * (rate / _rate(winner) - 1):+.0f}% tokens/s in all with {abs(gpus - world)} GPUs {'more' if gpus > world else 'fewer'}"
            yield NearMiss("GPUs", world, gpus, f"--gpus {gpus}", gain, note, plan)


def _sequences(space: Space, winner: Estimate, headroom: float) -> Iterator[NearMiss]:
    seq = space.workload.seq
    for n in rounder(seq, NEAR["sequence"]):
        rate, plan = _throughput(other(space, workload=space.workload.but(seq=n)), headroom)
        gain = rate * space.model.model_flops(n) / (_rate(winner) * space.model.model_flops(seq)) - 1
        if plan is not None and gain >= WORTH:
            yield NearMiss("sequence", seq, n, f"--seq {n}", gain, f"divides by {n & -n}: {plan.title()}", plan)


def _vocabulary(winner: Estimate) -> Iterator[NearMiss]:
    model, tp = winner.model, winner.plan.tp
    if not model.vocab or model.padded_vocab % (ALIGNED * tp) == 0:
        return
    multiple = MULTIPLE * tp
    padded = model.but(vocab_multiple=multiple)
    trial = PlanTrials(winner.config)
    e, now = trial.with_changes(winner.plan, model=padded), trial.of(winner.plan)
    cost = step(now) / step(e) - 1 if e and now else 0.0
    over = f" over tp {tp}" if tp > 1 else ""
    note = f"{model.padded_vocab:,} rows{over} are no multiple of {ALIGNED}: fast kernels need that (a gain the cost model does not see)"
    setting = f"--set model.vocab_multiple={multiple}"
    yield NearMiss("vocabulary", model.padded_vocab, padded.padded_vocab, setting, cost, note, winner.plan)
