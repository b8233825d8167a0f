"""Helpers of all tables: models and hardware from the catalog, lowered plans, sums over their operations, and walked programs."""

from functools import cache
from typing import Any

import numpy as np

from meshwright.cost.step import StepCost
from meshwright.describe import catalog
from meshwright.describe.cluster import Accelerator, Cluster, Link, uniform
from meshwright.describe.config import Config
from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.describe.stack import Stack
from meshwright.describe.workload import Workload
from meshwright.lower.compressed import exchanges
from meshwright.lower.program import StepProgram, sent
from meshwright.lower.step import step_program
from meshwright.predict.prediction import cost_of
from meshwright.programs.collectives import Program, Walk, build, walk

GB, MB, KB, TB = 1e9, 1e6, 1e3, 1e12
TERA, MIB, GIB = 1e12, 2.0**20, 2.0**30
STORED = Stack(name="stored", attention="stored")
FLAT = Stack(name="flat", flat_shards=True)  # the texts count ZeRO shards without padding
POINT = (8, 80e6, 5e-6, 50e9)  # P, n bytes, α, bytes/s: where formulas are evaluated


@cache
def model(name: str) -> Model:
    return catalog.load("models", name)


@cache
def device(name: str) -> Accelerator:
    return catalog.load("accelerators", name)


@cache
def link(name: str) -> Link:
    return catalog.load("links", name)


def gpt_like(hidden: int, layers: int, heads: int) -> Model:
    """The textbook's layer: GELU, layer norms, dropout; a vocabulary of one, so embeddings count for nothing."""
    return Model(
        name="textbook",
        hidden=hidden,
        layers=layers,
        heads=heads,
        ffn=4 * hidden,
        activation="gelu",
        norm="layernorm",
        vocab=1,
        positions="none",
        dropout=True,
    )


def lowered(
    which: Model | str, seq: int, batch: int = 1, stack: Stack | None = None, precision: Any = "bf16", **plan: Any
) -> StepProgram:
    """One plan, checked and lowered."""
    shape = model(which) if isinstance(which, str) else which
    work = Workload(batch=batch, seq=seq, precision=precision)
    return step_program(shape, Plan(**plan).check(shape, work), work, stack)


def costed(which: Model | str, seq: int, batch: int = 1, **plan: Any) -> StepCost:
    """The cost of one plan on H100 nodes; the tables read only its traffic, which does not depend on the hardware."""
    shape = model(which) if isinstance(which, str) else which
    layout = Plan(**plan)
    work = Workload(batch=batch, seq=seq)
    cluster: Cluster = catalog.load("clusters", "dgx-h100").with_gpus(layout.world)
    return cost_of(Config(shape, cluster, layout.check(shape, work), work, FLAT))


def one(value: Any) -> float:
    """The number in an array over a batch of one."""
    return float(np.broadcast_to(value, 1)[0])


def traffic(axis: str, *case: Any, **plan: Any) -> float:
    """Bytes one rank sends along an axis in one step."""
    return one(costed(*case, **plan).traffic.get(axis, 0.0))


def volume(parameters: Model | str, ranks: int = 1024, **plan: Any) -> float:
    """Elements of data-parallel traffic over parameters, in 16 bits, one micro-batch per step."""
    shape = model(parameters) if isinstance(parameters, str) else parameters
    return traffic("dp", shape, 1, ranks, grad_dtype="bf16", **plan) / (2 * shape.total)


def calls(program: StepProgram, phases: str, axis: str = "tp", block: str = "dense", part: str = "") -> float:
    """Collectives of an axis in one layer and micro-batch."""
    ops = [op for phase, op in program.ops(block) if phase in phases and op.collective and op.axis == axis]
    return sum(one(op.count) for op in ops if part in ("", op.part))


def layer_bytes(program: StepProgram, axis: str, block: str = "dense", phases: str = "FIWR") -> float:
    """Bytes that a rank sends along an axis for one layer and micro-batch."""
    ops = [op for phase, op in program.ops(block) if phase in phases and op.collective and op.axis == axis]
    return sum(one(op.count * sent(op.collective, op.message_bytes, program.batch.size(axis))) for op in ops)


def layer_flops(program: StepProgram, phases: str, block: str = "dense", kind: str = "gemm") -> float:
    return sum(one(op.count * op.flops) for phase, op in program.ops(block) if phase in phases and op.kind == kind)


def saved(program: StepProgram, block: str = "dense") -> float:
    """Bytes one layer keeps for backward."""
    return sum(one(size) for size in program.saved[block].values())


def boundary(program: StepProgram) -> float:
    """Bytes of one message between stages."""
    return one(program.sync["boundary-F"][0].message_bytes)


def walked(operation: str, algorithm: str, point: tuple[int, float, float, float] = POINT, **options: Any) -> Walk:
    """A program walked over one ideal switch at a point (P, n, α, bytes/s), n the full buffer."""
    ranks, n, alpha, rate = point
    return walk(build(operation, algorithm, ranks, int(n) // 4, **options), uniform(ranks, alpha, rate))


def slow_steps(program: Program, per_node: int) -> int:
    """Steps in which something crosses between nodes of `per_node` consecutive ranks."""
    crosses = program.moves.source // per_node != program.moves.target // per_node
    return len(np.unique(program.moves.step[crosses]))


def compression_ratio(name: str, side: int = 1000, rank: int = 4) -> float:
    """Compression of the fp32 gradient of a square matrix among 8 ranks.

    Only the all-to-all is counted: the all-gather sends the same bytes once more, as the second phase of a ring all-reduce does.
    """
    sent_by = exchanges(Plan(replicate=8, compression=name, compression_rank=rank), side**2, 4, [(side, side)], 8)
    return 4 * side**2 / sum(n for operation, n in sent_by if operation != "all_gather")
