"""Convert a row of published measurements to a model, cluster, stack, workload and plan, with the list of assumptions.

A blank cell means *not published*, never zero. Missing values come from the stack, or from the catalog entry of the model
family; if recompute is not published, the least recompute that fits is assumed. A row that lacks the
shape of its model, its GPUs or its batch is refused with the reason.

    row_model     name and numbers → catalog entry or built shape, held to the published number of parameters
    row_plan      card and network → catalog cluster; degrees, batch, schedule, ZeRO → plan and workload

What the free text of a row says of its stack and its schedule, where the columns cannot express it.

    DualPipe                     the schedule `dualpipev`, and DeepSeek's own stack
    interleaved, degree unknown  the schedule `interleaved`, with one layer for each virtual stage where the layers divide
    a table of MegaScale         the stack `megascale`; the tables of the same paper for Megatron-LM keep theirs
    ZeRO-3 of DeepSpeed in 2021  the stack `deepspeed-2021`, which gathers parameter by parameter
    FSDP without a named stack   the stack `fsdp`: PyTorch's library with its defaults
    parameters in fp32, autocast no separate master weights; gradients in fp32
    parameters in bf16 only      no master weights; gradients and states of the optimizer in bf16
    Megatron-Bridge's recipes    gradients in bf16 and fp8 by current scaling, as its configurations for performance set them
    llm-foundry                  gradients reduced in bf16, and attention by Triton where it says so, but for its large-scale sweep, which is later
    compiled blocks              the loss is eager, as in torchtitan before February 2025 (train.py: "compiling loss function causes CUDA errors")
    Megatron's functional tests  its defaults: no fused loss, which its performance recipes have
    fms-fsdp, selective          a share of the layers is recomputed whole
    Nemotron-4 340B on 8 stages  12 virtual stages, as the table of configurations of the same README says (`FACTS`)

A reading is used only if the resulting plan is legal.
"""

import csv
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from meshwright.calibrate.runs.row_model import MODEL_COLUMNS, PublishedRun, integer, number, read_model, refusal
from meshwright.calibrate.runs.row_plan import CLUSTER_COLUMNS, read_cluster, read_plan
from meshwright.describe import catalog
from meshwright.describe.adapter import Adapter
from meshwright.describe.config import Config
from meshwright.describe.model import Model
from meshwright.describe.stack import Stack
from meshwright.errors import MeshwrightError
from meshwright.units import Json

__all__ = ["PublishedRun", "case", "number", "read"]

Cells = tuple[str, ...]
LIMIT = 200_000_000
CACHED = 4096  # models, clusters and stacks of rows
UNNAMED = "unnamed"  # a stack that free text does not name either (`left_out.without_stacks`)
KERNELS = {"0": "stored", "1": "flash", "TE auto": "fused", "fused (cuDNN)": "fused"}  # of attention, by published word
NUMBERS = (  # columns whose cells are positive numbers or blank
    *(
        "gpus",
        "gpus_per_node",
        "layers",
        "hidden",
        "heads",
        "vocab",
        "experts",
        "topk",
        "seq_len",
        "tp",
        "cp",
        "pp",
        "vpp",
        "ep",
        "etp",
        "dp",
    ),
    *("micro_batch", "global_batch", "grad_accum", "step_time_s", "tokens_per_s_per_gpu", "memory_gib"),
)
# Of the published runs with LoRA only NVIDIA's performance recipes are left (NeMo and Megatron-Bridge): `peft.target_modules = ["linear_qkv"]`.
ADAPTER = Adapter(rank=16, targets=("linear_qkv",))
ADAPTER_WORDS = "rank 16 on queries, keys and values, as NeMo's performance recipes set it"
REQUIRED = ("row_id", "file", "gpus", "tp", "pp", "global_batch", "seq_len", "step_time_s")


def read(path: str | Path) -> Iterator[dict[str, str]]:
    """Rows of a CSV with the columns of `runs.csv`."""
    path = Path(path)
    if not path.is_file():
        what = f"{str(path)!r} is not a file" if path.exists() else f"the file {str(path)!r} does not exist"
        raise MeshwrightError("MW-VAL-001", what, fix="give a CSV with the columns of runs.csv")
    if path.stat().st_size > LIMIT:
        raise MeshwrightError("MW-VAL-001", f"{str(path)!r} is larger than {LIMIT // 10**6} MB")
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            missing = [c for c in REQUIRED if c not in (reader.fieldnames or [])]
            if missing:
                what = f"{path.name} lacks the column{'s' * (len(missing) > 1)} {', '.join(missing)}"
                raise MeshwrightError("MW-VAL-002", what, valid=REQUIRED)
            for row in reader:
                yield {
                    k: (v or "").strip()
                    for k, v in row.items()
                    if isinstance(k, str) and (v is None or isinstance(v, str))
                }
    except (UnicodeDecodeError, csv.Error) as error:
        raise MeshwrightError("MW-VAL-001", f"{path.name} is not a readable CSV", why=str(error)[:100]) from None


def case(row: dict[str, str]) -> PublishedRun:
    """Read one row; `refused` is the reason if it cannot be predicted."""
    out = PublishedRun(defaultdict(str, row))
    try:
        if out.row["task"] == "latent":
            raise refusal("the ranks of its latent attention are not published")
        _check_numbers(out)
        stack = _stack(out)
        model, assumed = _read(read_model, MODEL_COLUMNS, tuple(out.row[name] for name in MODEL_COLUMNS))
        cluster, more = _read(read_cluster, CLUSTER_COLUMNS, tuple(out.row[name] for name in CLUSTER_COLUMNS))
        out.assumed += (*assumed, *more)
        if out.row["mtp"]:
            model = model.but(mtp_layers=int(out.row["mtp"]))
        if out.row["task"] == "lora":
            model = model.but(adapter=ADAPTER)
            out.assumed.append(f"adapter: {ADAPTER_WORDS}")
        if stack.usual_routing == "consecutive" and model.experts and model.experts % model.top_k == 0:
            model = _with_consecutive_experts(model)
            out.assumed.append(
                f"routing: {model.top_k} consecutive experts for each token, as in its framework's benchmarks"
            )
        out.config = Config(model, cluster, stack=stack)
        read_plan(out)
        out.plan.check(out.model, out.workload, out.cluster)
    except MeshwrightError as error:
        out.refused = error.what
    return out


def _with_consecutive_experts(model: Model) -> Model:
    """The model with groups of k experts, of which a token takes one whole: with duplicates removed it is sent to one node (or rank) of at least k
    experts, where learned routing reaches several."""
    return model.but(router=model.router.but(groups=model.experts // model.top_k, groups_kept=1))


def _check_numbers(c: PublishedRun) -> None:
    """Refuse a row with a negative number; a cell without a number counts as blank, and is listed."""
    for name in NUMBERS:
        text = c.row[name]
        if text and number(text) is None:
            c.assumed.append(f"{name}: not published ({text[:20]!r} is not a number)")
        elif text.startswith(("-", "\u2212")):
            raise refusal(f"{name} = {text[:20]} is negative")


@lru_cache(CACHED)
def _read(part: Callable[[PublishedRun], Any], columns: Cells, cells: Cells) -> tuple[Any, Cells]:
    """The model or the cluster of a row with these cells, and what it assumes. Most rows of a source share few."""
    c = PublishedRun(dict(zip(columns, cells, strict=True)))
    return part(c), tuple(c.assumed)


def _stack(c: PublishedRun) -> Stack:
    name, kernel = c.row["stack"], KERNELS.get(c.row["flash_attn"], "")
    known = catalog.stack_of(name)
    stack = _stack_with(known or "default", kernel)
    if not known:
        c.assumed.append(f"stack: default ({name!r} is not in the catalog)" if name else "stack: default")
    if not kernel:
        c.assumed.append(f"attention: {stack.attention}")
    if c.row["graphs"]:  # the settings of the recipe are known
        graphs = () if c.row["graphs"] == "none" else tuple(c.row["graphs"].split())
        fused = (*stack.fused, *c.row["fused"].split())
        stack = stack.but(
            graphs=graphs,
            dispatch=c.row["dispatch"] or stack.dispatch,
            fused=fused,
            reruns=tuple(c.row["recompute_modules"].split()),
            wide_layers=integer(c.row["wide_layers"]),
        )
    if c.row["file"] == BRIDGE:
        stack = stack.but(fp8_scaling="current")
    return stack


@lru_cache(CACHED)
def _stack_with(name: str, kernel: str) -> Stack:
    """A stack of the catalog with another attention kernel, if it is published."""
    stack: Stack = catalog.load("stacks", name)
    return stack.but(attention=kernel) if kernel else stack


MOST_VIRTUAL = 12
FACTS = (  # (source, model, pipeline stages) → virtual stages that a row does not have, although its source publishes them
    # column VP of nemotron/README.md in NVIDIA/dgxc-benchmarking, H100, 340b: the same in every release
    ("nvidia_dgxc_benchmarking", "Nemotron-4-340B", 8, 12),
)
TRITON = "default was triton flash-attention"  # llm-foundry's harness
FOUNDRY = "llm_foundry"
LATER_SWEEP = "Large Scale"  # its table of January 2024: flash attention 2, and Composer with gradients reduced in fp32 (mosaicml/composer#2628)
# scripts/performance in NVIDIA-NeMo/Megatron-Bridge: ddp.grad_reduce_in_fp32 = False; fp8 is bf16_with_fp8_current_scaling_mixed
BRIDGE = "megatron_bridge_perf_summary"
EAGER_LOSS = r"compile-block|Megatron-LM functional-test|torchtitan docs/performance|llama3_h100_202412"


def apply_readings(c: PublishedRun) -> PublishedRun:
    """The case with what its free text says; as it was, if there is nothing to read or the result is not legal."""
    if c.refused:
        return c
    stack, plan_changes = _stack_name(c), {**_schedule(c), **_precision(c), **_recompute(c)}
    eager_loss = re.search(EAGER_LOSS, f"{c.row['source']} {c.row['notes']}") is not None
    triton = re.search(TRITON, c.row["notes"]) is not None and not re.search(LATER_SWEEP, c.row["table"])
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
    c.config = c.config.but(plan=plan, stack=new_stack)
    c.assumed = _updated(c)
    return c


def _updated(c: PublishedRun) -> list[str]:
    """The assumptions with the stack, its attention kernel and the schedule that were read."""
    values = {"stack": c.stack.name, "attention": c.stack.attention, "schedule": c.plan.schedule}
    updated = []
    for text in c.assumed:
        what = text.partition(":")[0]
        changed = what in values and not text.startswith(f"{what}: {values[what]}")
        updated.append(f"{what}: {values[what]}" if changed else text)
    return updated


def _text(c: PublishedRun) -> str:
    return " ".join(c.row[name] for name in ("source", "table", "zero_fsdp", "recompute", "notes"))


def _stack_name(c: PublishedRun) -> str | None:
    text = _text(c)
    if c.row["stack"] == UNNAMED:
        return None
    if "DualPipe" in text:
        return "hai-llm"
    if "MegaScale" in c.row["table"]:
        return "megascale"
    if c.row["stack"] == "megatron-lm" and c.row["zero"] == "3" and "DeepSpeed" in c.row["zero_fsdp"]:
        return "deepspeed-2021"
    unknown = catalog.stack_of(c.row["stack"]) is None
    sharded = c.plan.zero == 3
    return "fsdp" if unknown and sharded and re.search(r"\bfsdp|fully.shard", text, re.IGNORECASE) else None


def _precision(c: PublishedRun) -> Json:
    states = c.row["zero_fsdp"]
    if c.row["file"] == BRIDGE:
        return {"grad_dtype": "bf16", "comm_dtype": "bf16"}
    if c.row["file"] == FOUNDRY and not re.search(LATER_SWEEP, c.row["table"]):
        return {"comm_dtype": "bf16"}
    if "autocast" in states:
        return {"param_dtype": "fp32", "grad_dtype": "fp32", "comm_dtype": "fp32", "master": False}
    if "bf16 parameters and states" in states:
        narrow = dict.fromkeys(("param_dtype", "grad_dtype", "comm_dtype", "state_dtype"), "bf16")
        return {**narrow, "master": False}
    return {}


def _recompute(c: PublishedRun) -> Json:
    """The layers that fms-fsdp recomputes where it says `selective`: as many as the FLOPs of its hardware say, which are a third of the model's more
    where all are recomputed; all of them where it does not publish both."""
    if c.stack.name != "fms-fsdp" or c.plan.recompute != "selective":
        return {}
    model, hardware = number(c.row["mfu_pct"]), number(c.row["hfu_pct"])
    share = min(max(3 * (hardware / model - 1), 0.0), 1.0) if model and hardware else 1.0
    layers = round(share * max(c.plan.stage_layers(c.model.layers)))
    return {"recompute": "full", "recompute_layers": layers} if layers else {"recompute": "none"}


def _schedule(c: PublishedRun) -> Json:
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
