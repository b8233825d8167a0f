"""Convert a row of published measurements to a model, cluster, stack, workload and plan, with the list of assumptions.

A blank cell means *not published*, never zero. Missing values come from the stack, or from the catalog entry of the model
family; if recompute is not published, the least recompute that fits is assumed. A row that lacks the
shape of its model, its GPUs or its batch is refused with the reason.

    row_model     name and numbers → catalog entry or built shape, held to the published number of parameters
    row_cluster   card and network → catalog cluster
    row_plan      degrees, batch, schedule, ZeRO → plan and workload
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from meshwright.calibrate.runs.case import Case, number, refusal
from meshwright.calibrate.runs.row_cluster import CLUSTER_COLUMNS, read_cluster
from meshwright.calibrate.runs.row_model import MODEL_COLUMNS, read_model
from meshwright.calibrate.runs.row_plan import read_plan
from meshwright.describe import catalog
from meshwright.describe.cluster import Cluster
from meshwright.describe.model import Model
from meshwright.describe.stack import Stack
from meshwright.errors import MeshwrightError

__all__ = ["Case", "case", "number", "read"]

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
REQUIRED = ("row_id", "file", "gpus", "tp", "pp", "global_batch", "seq_len", "step_time_s")


def read(path: str | Path) -> Iterator[dict[str, str]]:
    """Rows of a CSV with the columns of `runs.csv`."""
    path = Path(path)
    if not path.is_file():
        raise MeshwrightError(
            "MW-VAL-001",
            f"{str(path)!r} is not a file" if path.exists() else f"the file {str(path)!r} does not exist",
            fix="give a CSV with the columns of runs.csv",
        )
    if path.stat().st_size > LIMIT:
        raise MeshwrightError("MW-VAL-001", f"{str(path)!r} is larger than {LIMIT // 10**6} MB")
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            missing = [c for c in REQUIRED if c not in (reader.fieldnames or [])]
            if missing:
                raise MeshwrightError(
                    "MW-VAL-002",
                    f"{path.name} lacks the column{'s' * (len(missing) > 1)} {', '.join(missing)}",
                    valid=REQUIRED,
                )
            for row in reader:
                yield {
                    k: (v or "").strip()
                    for k, v in row.items()
                    if isinstance(k, str) and (v is None or isinstance(v, str))
                }
    except (UnicodeDecodeError, csv.Error) as error:
        raise MeshwrightError("MW-VAL-001", f"{path.name} is not a readable CSV", why=str(error)[:100]) from None


def case(row: dict[str, str]) -> Case:
    """Read one row; `refused` is the reason if it cannot be predicted."""
    out = Case(defaultdict(str, row))
    try:
        if out.row["task"] == "lora":
            raise refusal("LoRA trains adapters only, which a plan cannot express")
        _check_numbers(out)
        out.stack = _stack(out)
        out.model, assumed = _model(tuple(out.row[name] for name in MODEL_COLUMNS))
        out.cluster, more = _cluster(tuple(out.row[name] for name in CLUSTER_COLUMNS))
        out.assumed += (*assumed, *more)
        read_plan(out)
        assert out.plan is not None
        assert out.workload is not None
        out.plan.check(out.model, out.workload, out.cluster)
    except MeshwrightError as error:
        out.refused = error.what
    return out


def _check_numbers(c: Case) -> None:
    """Refuse a row with a negative number; a cell without a number counts as blank, and is listed."""
    for name in NUMBERS:
        text = c.row[name]
        if text and number(text) is None:
            c.assumed.append(f"{name}: not published ({text[:20]!r} is not a number)")
        elif text.startswith(("-", "\u2212")):
            raise refusal(f"{name} = {text[:20]} is negative")


@lru_cache(CACHED)
def _model(cells: tuple[str, ...]) -> tuple[Model, tuple[str, ...]]:
    """The model of a row with these cells, and what it assumes. Most rows of a source share few models."""
    c = Case(dict(zip(MODEL_COLUMNS, cells, strict=True)))
    model = read_model(c)
    return model, tuple(c.assumed)


@lru_cache(CACHED)
def _cluster(cells: tuple[str, ...]) -> tuple[Cluster, tuple[str, ...]]:
    """The cluster of a row with these cells, and what it assumes."""
    c = Case(dict(zip(CLUSTER_COLUMNS, cells, strict=True)))
    cluster = read_cluster(c)
    return cluster, tuple(c.assumed)


def _stack(c: Case) -> Stack:
    name, kernel = c.row["stack"], KERNELS.get(c.row["flash_attn"], "")
    known = name in catalog.names("stacks")
    stack = _stack_with(name if known else "default", kernel)
    if not known:
        c.assumed.append(f"stack: default ({name!r} is not in the catalog)" if name else "stack: default")
    if not kernel:
        c.assumed.append(f"attention: {stack.attention}")
    return stack


@lru_cache(CACHED)
def _stack_with(name: str, kernel: str) -> Stack:
    """A stack of the catalog with another attention kernel, if it is published."""
    stack: Stack = catalog.load("stacks", name)
    return stack.but(attention=kernel) if kernel else stack
