"""What the free text of a row says of its stack and its schedule, where the columns cannot express it.

    DualPipe                     the schedule `dualpipev`, and DeepSeek's own stack
    interleaved, degree unknown  the schedule `interleaved`, with one layer for each virtual stage where the layers divide
    a table of MegaScale         the stack `megascale`; the tables of the same paper for Megatron-LM keep theirs
    ZeRO-3 of DeepSpeed in 2021  the stack `deepspeed-2021`, which gathers parameter by parameter
    FSDP without a named stack   the stack `fsdp`: PyTorch's library with its defaults
    parameters in fp32, autocast no separate master weights; gradients in fp32
    parameters in bf16 only      no master weights; gradients and states of the optimizer in bf16
    Megatron-Bridge's recipes    gradients in bf16, as its configurations for performance set them
    Triton in llm-foundry        the attention kernel `triton`, but for its large-scale sweep
    compiled blocks              the loss is eager
    Megatron's functional tests  its defaults: no fused loss, which its performance recipes have
    Nemotron-4 340B on 8 stages  12 virtual stages, as the table of configurations of the same README says (`FACTS`)

A reading is used only if the resulting plan is legal.
"""

from __future__ import annotations

import re
from typing import Any

from meshwright.calibrate.runs.rows import UNNAMED, Case
from meshwright.describe import catalog
from meshwright.errors import MeshwrightError

MOST_VIRTUAL = 12
FACTS = (  # (source, model, pipeline stages) → virtual stages that a row does not have, although its source publishes them
    # column VP of nemotron/README.md in NVIDIA/dgxc-benchmarking, H100, 340b: the same in every release
    ("nvidia_dgxc_benchmarking", "Nemotron-4-340B", 8, 12),
)
TRITON = "default was triton flash-attention"  # llm-foundry's harness
NOT_TRITON = "Large Scale"  # the table of its sweep with version 2
BF16_GRADIENTS = "megatron_bridge_perf_summary"  # scripts/performance/configs in NVIDIA-NeMo/Megatron-Bridge: ddp.grad_reduce_in_fp32 = False
EAGER_LOSS = r"compile-block|Megatron-LM functional-test"


def apply_readings(c: Case) -> Case:
    """The case with what its free text says; as it was, if there is nothing to read or the result is not legal."""
    if c.refused or c.plan is None or c.model is None or c.workload is None:
        return c
    stack, plan_changes = _stack_name(c), {**_schedule(c), **_precision(c)}
    eager_loss = re.search(EAGER_LOSS, f"{c.row['source']} {c.row['notes']}") is not None
    triton = re.search(TRITON, c.row["notes"]) is not None and not re.search(NOT_TRITON, c.row["table"])
    if stack is None and not plan_changes and not eager_loss and not triton:
        return c
    new_stack = c.stack if stack is None else catalog.load("stacks", stack)
    if eager_loss:
        new_stack = new_stack.but(fused=tuple(part for part in new_stack.fused if part != "loss"))
    if c.row["flash_attn"]:
        new_stack = new_stack.but(attention="triton" if triton else c.stack.attention)
    plan = c.plan.but(**plan_changes) if plan_changes else c.plan
    try:
        plan.check(c.model, c.workload, c.cluster)
    except MeshwrightError:
        return c
    c.plan, c.stack = plan, new_stack
    c.assumed = _updated(c)
    return c


def _updated(c: Case) -> list[str]:
    """The assumptions with the stack, its attention kernel and the schedule that were read."""
    assert c.plan is not None
    values = {"stack": c.stack.name, "attention": c.stack.attention, "schedule": c.plan.schedule}
    updated = []
    for text in c.assumed:
        what = text.partition(":")[0]
        changed = what in values and not text.startswith(f"{what}: {values[what]}")
        updated.append(f"{what}: {values[what]}" if changed else text)
    return updated


def _text(c: Case) -> str:
    return " ".join(c.row[name] for name in ("source", "table", "zero_fsdp", "recompute", "notes"))


def _stack_name(c: Case) -> str | None:
    text = _text(c)
    if c.row["stack"] == UNNAMED:
        return None
    if "DualPipe" in text:
        return "hai-llm"
    if "MegaScale" in c.row["table"]:
        return "megascale"
    if c.row["stack"] == "megatron-lm" and c.row["zero"] == "3" and "DeepSpeed" in c.row["zero_fsdp"]:
        return "deepspeed-2021"
    unknown = c.row["stack"] not in catalog.names("stacks")
    sharded = c.plan is not None and c.plan.zero == 3
    return "fsdp" if unknown and sharded and re.search(r"\bfsdp|fully.shard", text, re.IGNORECASE) else None


def _precision(c: Case) -> dict[str, Any]:
    states = c.row["zero_fsdp"]
    if c.row["file"] == BF16_GRADIENTS:
        return {"grad_dtype": "bf16", "comm_dtype": "bf16"}
    if "autocast" in states:
        return {"param_dtype": "fp32", "grad_dtype": "fp32", "comm_dtype": "fp32", "master": False}
    if "bf16 parameters and states" in states:
        narrow = dict.fromkeys(("param_dtype", "grad_dtype", "comm_dtype", "state_dtype"), "bf16")
        return {**narrow, "master": False}
    return {}


def _schedule(c: Case) -> dict[str, Any]:
    assert c.plan is not None
    assert c.model is not None
    text, pp = _text(c), c.plan.pp
    if pp < 2 or c.plan.schedule == "interleaved":
        return {}
    if "DualPipe" in text:
        return {"schedule": "dualpipev", "virtual": 2}
    for source, model, stages, virtual in FACTS:
        if (c.row["file"], c.row["model"], pp, c.row["vpp"]) == (source, model, stages, ""):
            return {"schedule": "interleaved", "virtual": virtual}
    if re.search(r"interleaving \(degree not", text) and c.model.layers % pp == 0:
        chunks = [v for v in range(2, MOST_VIRTUAL + 1) if c.model.layers // pp % v == 0]
        return {"schedule": "interleaved", "virtual": chunks[-1]} if chunks else {}
    return {}
