"""Helpers of the tests of `lower` and `cost`: small models, lowering in one line, sums over operations, legal plans."""

import functools
from typing import Any

import numpy as np
from hypothesis import assume
from hypothesis import strategies as st

from meshwright.describe import catalog
from meshwright.describe.mixer_options import CompressedOptions, LinearOptions
from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.describe.stack import Stack
from meshwright.describe.workload import Workload
from meshwright.errors import MeshwrightError
from meshwright.lower import sync
from meshwright.lower.program import DATA_PARALLEL, Array, Op, StageBlocks, StepProgram, scalar, sent
from meshwright.lower.stages import rank_blocks
from meshwright.lower.step import step_program
from meshwright.lower.traffic import Record, boundary_calls, records

GPT = Model(
    name="gpt",
    hidden=256,
    layers=8,
    heads=8,
    ffn=1024,
    activation="gelu",
    norm="layernorm",
    vocab=1000,
    positions="none",
    dropout=True,
)
GQA = catalog.load("models", "tiny").but(layers=8, tied=False)
MOE = catalog.load("models", "tiny-moe").but(layers=8)
MLA = catalog.load("models", "tiny-mla").but(layers=8)
MLP = catalog.load("models", "lecture-mlp").but(layers=8)
COUNTS = Model(name="counts", kind="counts", given_parameters=25e6, given_flops=8e9, given_activations=42e6)
# Every kind of layer once: Mamba-2 mixers, gated attention, latent experts.
HYBRID = Model(
    name="hybrid",
    hidden=256,
    layers=8,
    heads=8,
    kv_heads=4,
    ffn=704,
    activation="relu2",
    vocab=4096,
    positions="none",
    output_gate=True,
    pattern="M- *E M - ME * E *-",
    linear=LinearOptions(kind="mamba2", heads=16, head_dim=32, groups=8, state=64, conv=4, conv_bias=True, chunk=64),
    experts=8,
    top_k=2,
    expert_ffn=352,
    expert_hidden=128,
    shared_experts=1,
)
# The three kinds of compressed attention, and two residual streams.
COMPRESSED = Model(
    name="compressed",
    attention="compressed",
    hidden=256,
    layers=8,
    heads=8,
    kv_heads=1,
    head_dim=32,
    q_rank=64,
    window=16,
    compressed=CompressedOptions(ratio=4, far_ratio=64, out_groups=8, out_rank=16),
    index_heads=4,
    index_dim=16,
    index_top_k=32,
    streams=2,
    sinks=True,
    pattern="W- SE CE S-",
    ffn=704,
    experts=8,
    top_k=2,
    expert_ffn=352,
    vocab=4096,
)
MTP = MOE.but(name="mtp", tied=False, mtp_layers=2)
SPARSE = MLA.but(name="sparse", index_heads=4, index_dim=16, index_top_k=32)
MODELS = {"gpt": GPT, "gqa": GQA, "moe": MOE, "mla": MLA, "mlp": MLP}
ALL = MODELS | {m.name: m for m in (HYBRID, COMPRESSED, MTP, SPARSE)}  # with those that are not run
STORED = Stack(name="stored", attention="stored")
WORK = Workload(batch=64, seq=512)


def lowered(model: Model = GPT, workload: Workload = WORK, stack: Stack | None = None, **plan: Any) -> StepProgram:
    """Check and lower one plan, on all of its ranks."""
    return step_program(model, Plan(**plan).check(model, workload), workload, stack, every_rank=True)


def one(value: Any) -> float:
    """The value of an array over a batch of one plan."""
    return float(np.broadcast_to(value, 1)[0])


def calls(
    program: StepProgram, block: str = "dense", phases: str = "FIWR", axis: str = ""
) -> dict[tuple[str, str, str], float]:
    """The number of times that each (phase, collective, axis) runs in a block and micro-batch."""
    out: dict[tuple[str, str, str], float] = {}
    for phase, op in program.ops(block):
        if op.collective and phase in phases and axis in ("", op.axis):
            key = (phase, op.collective, op.axis)
            out[key] = out.get(key, 0.0) + one(op.count)
    return out


def bytes_sent(program: StepProgram, ops: list[Op], axis: str = "") -> float:
    """Bytes that one rank sends for these operations."""
    picked = [op for op in ops if op.collective and axis in ("", op.axis)]
    return sum(one(op.count * sent(op.collective, op.message_bytes, program.batch.size(op.axis))) for op in picked)


def block_bytes(program: StepProgram, axis: str, block: str = "dense", phases: str = "FIWR") -> float:
    return bytes_sent(program, [op for phase, op in program.ops(block) if phase in phases], axis)


def flops(program: StepProgram, block: str, phases: str = "FIWR", kind: str = "gemm") -> float:
    """FLOPs of one kind of operation in a block and micro-batch."""
    return sum(one(op.count * op.flops) for phase, op in program.ops(block) if phase in phases and op.kind == kind)


@functools.cache
def stack(name: str) -> Stack:
    plain = Stack(
        name="plain", fused=(), attention="stored", overlap=(), blocking_p2p=True, order=("tp", "pp", "cp", "dp")
    )
    graphs = Stack(
        name="graphs", graphs=("step",), overlap=("dp", "tp", "cp", "ep"), fused=("norm", "loss", "accumulate")
    )
    return {"default": Stack(), "plain": plain, "graphs": graphs}[name]


POWERS = st.sampled_from([1, 1, 2, 4])
SCHEDULES = [
    "1f1b",
    "gpipe",
    "zb-h1",
    "zb-h2",
    "naive",
    "interleaved",
    "looped-bfs",
    "interleaved-zb",
    "zbv",
    "dualpipev",
]


@st.composite
def plans(draw: st.DrawFn, model: Model, workload: Workload = WORK) -> Plan:
    """A legal plan for a model: degrees first, then all other fields."""
    shard = draw(POWERS)
    schedule = draw(st.sampled_from(SCHEDULES))
    twice = schedule in ("zbv", "dualpipev") or (schedule not in SCHEDULES[:5] and draw(st.booleans()))
    fields: dict[str, Any] = {
        "replicate": draw(POWERS), "shard": shard, "zero": draw(st.integers(1 if shard > 1 else 0, 3)), "tp": draw(POWERS),
        "pp": draw(POWERS), "schedule": schedule, "virtual": 2 if twice else 1, "microbatch": draw(st.sampled_from([1, 2])),
        "recompute": draw(st.sampled_from(["none", "selective", "full"])), "reshard": draw(st.booleans()),
        "prefetch": draw(st.booleans()), "reduce": draw(st.sampled_from(["auto", "step", "microbatch"])),
        "bucket": draw(st.sampled_from([1e5, 25e6])), "wrap": draw(st.sampled_from([1, 1, 0, 2, 3])),
        "grad_dtype": draw(st.sampled_from(["fp32", "bf16"])),
        "compression": draw(st.sampled_from(["none", "none", "fp16", "int8", "int4", "top-k", "powersgd"])),
        "overlap": draw(st.sampled_from([None, (), ("dp",), ("dp", "tp", "cp", "ep")])),
        "offload": draw(st.sampled_from(["none", "none", "states", "activations"])),
    }  # fmt: skip
    if model.kind == "transformer":
        fields |= {
            "sp": draw(st.booleans()),
            "cp": draw(POWERS),
            "cp_kind": draw(st.sampled_from(["ring", "ulysses", "all-gather"])),
        }
    if model.experts:
        fields |= {"ep": draw(POWERS), "expert_tp": draw(st.sampled_from([0, 1]))}
    try:
        return Plan(**fields).check(model, workload)
    except MeshwrightError:
        assume(False)
        raise


def batch_traffic(program: StepProgram, held: StageBlocks) -> dict[tuple[str, str], tuple[Array, Array]]:
    """(messages, bytes) of the pipeline rank of each plan that holds these blocks."""
    b = program.batch
    out: dict[tuple[str, str], tuple[Array, Array]] = {}
    for op, times in _operations(program, held):
        count = times * op.count * (b.size(op.axis) > 1)
        messages, total = out.get((op.axis, op.collective), (0.0, 0.0))
        out[op.axis, op.collective] = messages + count, total + count * op.message_bytes
    return out


def traffic(program: StepProgram, rank: int = 0) -> list[Record]:
    """All messages of one pipeline rank in a step, for a program of one plan."""
    held = rank_blocks(program.batch, np.full(program.batch.n, float(rank)))
    found = [
        (op.name, op.axis, op.collective, scalar(times * op.count), scalar(times * op.count * op.message_bytes))
        for op, times in _operations(program, held)
    ]
    return records(row for row in found if row[3])


def _operations(program: StepProgram, held: StageBlocks) -> list[tuple[Op, Array]]:
    """Every operation with communication, and the number of times that the step runs it."""
    b = program.batch
    m = np.maximum(b.microbatches, 1.0)
    out: list[tuple[Op, Array]] = []
    for key, ops in program.blocks.items():
        out += [(op, m * held.times(*key)) for op in ops if op.axis and op.part not in DATA_PARALLEL]
    out += [(op, 1.0) for op in sync.step_ops(program, held, zero_3=True) if op.axis]
    return out + [(op, m * times) for op, times in boundary_calls(program, held.rank)]
