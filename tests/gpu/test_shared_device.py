"""Strategies on one GPU at 2 and 4 ranks: their streams, prefetches and kernels train what one rank on the same GPU trains.

The ranks share the GPU (`--share-device`), and the backend meshwright moves their tensors through the host. Layouts of one number of
ranks train one after the other in the same processes, in float64, so that sums in another order differ in the last digits only; fp8 is
compared in the same products. Skipped without a GPU.
"""

import os
from dataclasses import replace

import pytest
import torch

import ranks
from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.describe.workload import Workload
from meshwright.proof.compare import compare
from meshwright.proof.prove import one_device
from meshwright.proof.records import Job

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(220),
]
SHAPE = {"hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 96, "vocab": 128}
DENSE, STAGES = Model(**SHAPE), Model(**{**SHAPE, "layers": 4})
EXPERTS = Model(**SHAPE, experts=4, top_k=2, expert_ffn=32, shared_experts=1)
FEW_EXPERTS = EXPERTS.but(experts=2, top_k=1)  # ZeRO-3 cuts each of them
DROPS = Model(**SHAPE, dropout_rate=0.1)
WORKLOAD = Workload(batch=8, seq=32)
SP, Z3 = {"tp": 2, "sp": True}, {"shard": 2, "zero": 3}
# title → (model, plan, compile, precision)
TWO = {
    "dp": (DENSE, {"replicate": 2, "bucket": 20_000}, "off", "bf16"),
    "zero 1": (DENSE, {"shard": 2, "zero": 1}, "off", "bf16"),
    "zero 2": (DENSE, {"shard": 2, "zero": 2}, "off", "bf16"),
    "zero 3": (DENSE, Z3, "off", "bf16"),
    "zero 3, no prefetch": (DENSE, {**Z3, "prefetch": False}, "off", "bf16"),
    "tp": (DROPS, {"tp": 2}, "off", "bf16"),
    "tp with sp": (DENSE, SP, "off", "bf16"),
    "pp 1f1b": (STAGES, {"pp": 2}, "off", "bf16"),
    "pp zero-bubble": (STAGES, {"pp": 2, "schedule": "zb-h1"}, "off", "bf16"),
    "cp ring": (DENSE, {"cp": 2}, "off", "bf16"),
    "cp ulysses": (DENSE, {"cp": 2, "cp_kind": "ulysses"}, "off", "bf16"),
    "ep": (EXPERTS, {"replicate": 2, "ep": 2}, "off", "bf16"),
    "offload": (DENSE, {**Z3, "offload": "both"}, "off", "bf16"),
    "recompute": (DROPS, {**SP, "recompute": "full"}, "off", "bf16"),
    "fp8": (DENSE, SP, "off", "fp8"),
    "fp8 zero 3, weights gathered in fp8": (DENSE, {**Z3, "gather_dtype": "fp8"}, "off", "fp8"),
    "fp8 zero 3, experts gathered in fp8": (EXPERTS, {**Z3, "gather_dtype": "fp8"}, "off", "fp8"),
}
FOUR = {
    "zero 3 and tp with sp": (DENSE, {**Z3, **SP}, "off", "bf16"),
    "hybrid zero 3": (DENSE, {"replicate": 2, **Z3}, "off", "bf16"),
    "pp and tp": (STAGES, {"pp": 2, "tp": 2}, "off", "bf16"),
    "cp ring and zero 3": (DENSE, {"cp": 2, **Z3}, "off", "bf16"),
    "ep and zero 3": (EXPERTS, {"shard": 4, "zero": 3, "ep": 2}, "off", "bf16"),
    "fp8 zero 3 and tp with sp, weights gathered in fp8": (DENSE, {**Z3, **SP, "gather_dtype": "fp8"}, "off", "fp8"),
    "fp8 zero 3 and ep, experts gathered in fp8": (
        FEW_EXPERTS,
        {"shard": 4, "zero": 3, "ep": 2, "gather_dtype": "fp8"},
        "off",
        "fp8",
    ),
}
# Muon, a matrix on each rank in a round: messages, products and AdamW on a second stream overlap.
MUON = {
    "muon zero 1": (DENSE, {"shard": 4, "zero": 1}, "off", "bf16"),
    "muon zero 3 and tp with sp": (DENSE, {**Z3, **SP}, "off", "bf16"),
    "muon zero 2 with experts": (EXPERTS, {"shard": 4, "zero": 2, "ep": 2}, "off", "bf16"),
}
COMPILED = {
    "compiled zero 3": (DENSE, Z3, "blocks", "bf16"),
    "compiled fp8 zero 3, weights gathered in fp8": (DENSE, {**Z3, "gather_dtype": "fp8"}, "blocks", "fp8"),
    "compiled fp8 zero 3, experts gathered in fp8": (EXPERTS, {**Z3, "gather_dtype": "fp8"}, "blocks", "fp8"),
    "compiled tp with sp and recompute": (DENSE, {**SP, "recompute": "selective"}, "blocks", "bf16"),
}
GROUPS = {"two ranks": (2, TWO), "four ranks": (4, FOUR), "compiled": (2, COMPILED), "muon": (4, MUON)}
BOUND = 1e-9


def job_of(case, optimizer):
    model, fields, compiled, precision = case
    plan = Plan(microbatch=2, **fields)
    workload = WORKLOAD.but(precision=precision, optimizer=optimizer)
    return Job(model, plan, workload, steps=2, dtypes=("fp64",), compile=compiled)


def train_all(context, jobs):
    """The traces of several jobs on this rank, one after the other, each with new groups; the error of one that failed."""
    from importlib import import_module

    from torch import distributed

    from meshwright.proof.trace import record_one

    import_module("meshwright.describe.sharding.boxes").ROUND = 1  # the package exports a function of this name
    out = []
    for job in jobs:
        out.append(record_one(context, job, "fp64"))
        distributed.barrier()
        for group in list(distributed.distributed_c10d._world.pg_map):
            if group is not distributed.group.WORLD:
                distributed.destroy_process_group(group)
    return out


def run(world, jobs):
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")  # ranks share the cores
    options = {"device": "cuda-shared", "silence": 150.0, "group_timeout": 100.0}
    return ranks.run(world, train_all, jobs, **options)


@pytest.mark.parametrize("group", GROUPS)
def test_layouts_train_what_one_rank_trains(group):
    world, cases = GROUPS[group]
    jobs = [job_of(case, "muon" if group == "muon" else "adamw") for case in cases.values()]
    # fp8 rounds to other numbers if the order of a sum moves it over a boundary: its reference emulates the ranks' micro-batches.
    references = run(1, [replace(one_device(job), reference=False) for job in jobs])[0]
    by_rank = run(world, jobs)
    failed = []
    for i, (title, one) in enumerate(zip(cases, references, strict=True)):
        traces = [rank[i] for rank in by_rank]
        agreement = compare(one, traces)
        errors = {name: error for name, error in agreement.errors.items() if error > BOUND}
        if errors and cases[title][3] != "fp8":
            failed.append((title, errors))
        elif agreement.errors["loss"] > 1e-3:
            failed.append((title, agreement.errors))
        assert {trace.compiled for trace in traces} == {cases[title][2]}, title
    assert failed == []
