"""Traces of real programs with known faults: parts sum exactly to each step, and the fault is the first cause.

The traces were recorded with `traced_training.py`: on two CPU processes with gloo (torch 2.13, DeepSpeed 0.19.8, Transformers' Trainer), and on one
H200 with Transformers' Llama (torch 2.11); that of our trainer with `train --profile` and a fault of `inject`. Arguments that `explain` does not
read were left out of them, and the operators inside the loader.
"""

import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from meshwright.explain.attribution import COMMUNICATION, COMPUTE, DATA, HOST, SYNCHRONISING, WAITING
from meshwright.explain.beside import RECOGNISED, TraceBesidePlan, beside_plan
from meshwright.explain.explanation import TraceExplanation, explain_traces
from meshwright.explain.folder import read_traces
from meshwright.explain.trace import COPY, KERNEL

TRACES = Path(__file__).parent / "traces"
RUNS = sorted(
    {file.name.partition("-rank-")[0] + ("-rank" if "slow-rank" in file.name else "") for file in TRACES.glob("*.gz")}
)


def files_of(run):
    return sorted(TRACES.glob(f"{run}-rank-[0-9].json.gz"))


@cache
def explained(run) -> TraceExplanation:
    return explain_traces(read_traces(files_of(run)))


@pytest.mark.parametrize("run", RUNS)
def test_each_nanosecond_of_a_step_has_one_part(run):
    e = explained(run)
    for steps in e.steps.values():
        for step in steps:
            assert sum(step.parts.values()) == step.duration > 0
            rows = np.concatenate(list(step.pieces.values()))
            rows = rows[np.argsort(rows[:, 0])]
            assert rows[0, 0] == step.start
            assert (rows[1:, 0] == rows[:-1, 1]).all()  # no gap, nothing twice
            assert step.attributed >= 0.95
    assert e.attributed >= 0.95


@pytest.mark.parametrize(
    ("run", "cause", "words"),
    [
        ("ddp-slow-rank", "slow rank 1", "in every step"),
        ("ddp-item", "synchronising calls", "4 calls per step"),
        ("ddp-no-overlap", "overlap", "start after backward has ended"),
        ("ddp-slow-loader", "data loader", "waits for its next batch"),
        ("ddp-odd-shape", "product", "small products with k = 4"),
        ("fsdp2-slow-rank", "slow rank 1", "arrives last"),
        ("own-slow-rank", "slow rank 1", "100% of the collectives, 602 ms after"),  # it sleeps 0.6 s in every step
        ("trainer-slow-loader", "data loader", "in the data loader"),
        ("gpu-odd-shape", "product", "n = 5461 is not a multiple of 8"),
        ("gpu-item", "synchronising calls", "traced_training.py"),
    ],
)
def test_a_planted_fault_is_the_first_cause(run, cause, words):
    first = explained(run).causes[0]
    assert first.cause == cause
    assert words in first.evidence


def test_collectives_of_gloo_have_their_kind_bytes_and_group():
    fsdp = explained("fsdp2-slow-rank").run.ranks[0].collectives
    assert set(fsdp.kind) == {"all_gather", "reduce_scatter"}  # gloo carries a reduce-scatter out as an all-reduce
    assert set(fsdp.ranks) == {(0, 1)}
    layer = 4 * (2 * 256 * 1024 + 256 + 1024)
    assert set(fsdp.bytes.tolist()) == {layer}
    ddp = explained("ddp-slow-loader").run.ranks[0].collectives
    assert set(ddp.kind) == {"all_reduce"}
    assert sum(ddp.bytes.tolist()) == 2 * 4 * layer  # two steps, four layers


def test_steps_micro_batches_and_layers_are_recognised():
    found = explained("fsdp2-slow-rank").run.ranks[0].found
    assert [s.name for s in found.steps] == ["3", "4"]
    assert found.microbatches == 1
    assert found.layers == ("0", "1")
    llama = explained("gpu-item").run.ranks[0].found
    assert len(llama.layers) == 12
    assert all(0.0015 < seconds < 0.004 for seconds in llama.layer_seconds.values())  # of 95 ms, a third is forward
    assert llama.phases["backward"] == pytest.approx(2 * llama.phases["forward"], rel=0.2)
    unnamed = explained("gpu-odd-shape").run.ranks[0].found  # without modules: from one attention to the next
    assert unnamed.named_layers == ()
    assert unnamed.layers == tuple(map(str, range(12)))
    assert sum(unnamed.layer_seconds.values()) == pytest.approx(unnamed.phases["forward"], rel=0.15)
    busy = explained("gpu-item").steps[0][0].total(COMPUTE) / 1e9
    assert sum(llama.phases.values()) == pytest.approx(busy, rel=0.01)


def test_compute_of_a_gpu_is_the_time_in_which_a_kernel_runs():
    """The oracle: a walk over the starts and ends of kernels in plain Python."""
    step, rank = explained("gpu-odd-shape").steps[0][0], explained("gpu-odd-shape").run.ranks[0]
    e = rank.found.events
    kernels = np.flatnonzero((e.category == KERNEL) | (e.category == COPY))
    marks = sorted([(t, 1) for t in e.start[kernels].tolist()] + [(t, -1) for t in e.end[kernels].tolist()])
    busy = depth = last = 0
    for time, change in marks:
        if depth:
            busy += max(0, min(time, step.start + step.duration) - max(last, step.start))
        depth, last = depth + change, time
    assert step.total(COMPUTE) == busy


def test_the_kernels_of_a_gpu_are_joined_with_the_shapes_of_their_operators():
    products = explained("gpu-odd-shape").products[0]
    per_layer = {(p.m, p.n, p.k): p.count for p in products}
    assert per_layer[8192, 5461, 2048] == 2 * 12 + 12  # gate and up in forward, and the input gradient of down
    assert per_layer[8192, 2048, 2048] == 4 * 12  # q and o, and their input gradients
    healthy = [p for p in products if 5461 not in (p.m, p.n, p.k) and p.k >= 2048]
    assert all(
        0.8 < p.usual_s / p.seconds < 1.3 for p in healthy
    )  # the model's rates, on another day than they were fitted


def test_the_plan_of_a_trace_is_recognised_and_set_beside_it():
    beside = beside_plan(explained("gpu-item"))
    assert isinstance(beside, TraceBesidePlan)
    assert beside.source == RECOGNISED
    model, workload = beside.config.model, beside.config.workload
    assert (model.hidden, model.layers, model.heads, model.kv_heads, model.ffn, model.vocab) == (
        2048,
        12,
        16,
        8,
        5632,
        32000,
    )
    assert (workload.batch, workload.seq, workload.precision) == (4, 2048, "bf16")
    assert beside.config.cluster.accelerator.name == "h200"
    predicted, measured = (sum(getattr(row, side) for row in beside.rows) for side in ("predicted_s", "measured_s"))
    assert predicted == pytest.approx(beside.estimate.prediction.step_time_s)
    assert measured == pytest.approx(beside.explanation.step_s)
    assert predicted == pytest.approx(measured, rel=0.15)
    assert len(beside.largest) == 5
    assert all(row.reason for row in beside.largest)
    operators = {row.name.partition(" (")[0]: row for row in beside.operators}
    assert operators["ffn-down, ffn-up"].measured_s == pytest.approx(
        operators["ffn-down, ffn-up"].predicted_s, rel=0.25
    )


def test_an_odd_shape_is_the_largest_difference_from_the_prediction():
    beside = beside_plan(explained("gpu-odd-shape"))
    assert "5461" in beside.largest[0].reason
    assert beside.largest[0].difference_s > 0.1


def test_a_trace_without_attention_says_why_there_is_no_prediction():
    beside = beside_plan(explained("ddp-item"))
    assert beside.code == "MW-EXPL-004"


def test_parts_of_a_slow_loader_and_of_waiting_are_their_sizes():
    loader = explained("ddp-slow-loader").parts
    assert all(parts[DATA, "loader"] > 0.1 for parts in loader.values())  # it sleeps 0.1 s in every step
    waiting = explained("ddp-slow-rank").parts
    assert waiting[0][WAITING, "rank 1"] > 0.3 * sum(waiting[0].values())
    assert (WAITING, "rank 0") not in waiting[1]
    assert (
        explained("ddp-item").parts[0][HOST, SYNCHRONISING] > 4 * 0.009
    )  # two layers sleep a tenth of 0.3 s behind .item()
    assert explained("ddp-no-overlap").parts[0][COMMUNICATION, "dp"] > 0


@pytest.mark.slow
def test_a_slow_loader_is_named_in_a_run_of_today(tmp_path):
    """The whole way: a program on two processes, its traces, and their explanation."""
    script = Path(__file__).parent / "traced_training.py"
    words = [
        script,
        tmp_path,
        "--parallel",
        "ddp",
        "--fault",
        "slow-loader",
        "--delay",
        "0.6",
        "--steps",
        "2",
        "--layers",
        "2",
    ]
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *map(str, words)],
        check=True, capture_output=True, timeout=240,
    )  # fmt: skip
    e = explain_traces(read_traces([tmp_path]))
    assert e.causes[0].cause == "data loader"
    assert 0.5 < e.causes[0].seconds < e.step_s
