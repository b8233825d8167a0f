"""Configurations to start from: examples, typical ones of course material, published case studies and published training runs."""

from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from typing import Any

from meshwright.calibrate.runs.rows import apply_readings, case, read
from meshwright.describe.config import Config
from meshwright.errors import MeshwrightError
from meshwright.planner.cases import studies
from meshwright.units import Json, format_seconds
from meshwright.view.page.opened import PLANNED

A100, H100 = "dgx-a100", "dgx-h100"
MODELER = {
    "name": "modeler",
    "layers": 80,
    "hidden": 8192,
    "heads": 64,
    "ffn": 32768,
    "activation": "gelu",
    "vocab": 32000,
}
TP8 = {"tp": 8, "sp": True, "zero": 1}
NEOX = {**TP8, "pp": 2, "shard": 4, "recompute": "selective"}
MIXTRAL = {"ep": 8, "shard": 64, "zero": 1, "recompute": "selective"}
# By group: title, what it shows, model, cluster, GPUs, batch, sequence, plan, view.
TYPICAL: dict[str, tuple[tuple[Any, ...], ...]] = {
    "Examples": (
        ("Llama 3 70B on 1,024 H100", "tp inside a node, four stages", "llama3-70b", H100, 1024, 1024, 8192, {**TP8, "pp": 4, "shard": 32}),
        ("GPT-NeoX 20B with tp 8", "narrow matrices: less tp is faster", "gpt-neox-20b", A100, 64, 1024, 2048, NEOX),
    ),
    "Course material": (
        ("Modeler: 4 stages × 8 micro-batches", "a published tool, corrected", MODELER, H100, 32, 8, 4096, {"tp": 8, "pp": 4}, "modeler"),
        ("7B with plain data parallelism", "16 bytes of state per parameter on every GPU", "llama2-7b", A100, 8, 64, 2048, {"replicate": 8}),
        ("7B with ZeRO-3 on 8 GPUs", "the same state, cut in eight", "llama2-7b", A100, 8, 64, 2048, {"shard": 8, "zero": 3}),
        ("70B: tp 8 × pp 8 × dp 8", "3D parallelism on 512 GPUs", "llama2-70b", H100, 512, 1024, 4096, {**TP8, "pp": 8, "shard": 8}),
        ("70B: tp 8 × pp 4 × cp 2", "a sequence cut in two on 64 GPUs", "llama2-70b", H100, 64, 128, 16384, {**TP8, "pp": 4, "cp": 2, "zero": 0}),
        ("GPT-3 175B: tp 8 × pp 8 × dp 16", "on 1,024 GPUs", "gpt3-175b", A100, 1024, 1536, 2048, {**TP8, "pp": 8, "shard": 16}),
        ("Mixtral 8×7B with ep 8", "experts across a node", "mixtral-8x7b", H100, 64, 512, 4096, MIXTRAL),
    ),
}  # fmt: skip


@cache
def presets() -> list[Json]:
    """Each preset: its group, its title, one line about it, the state of the page, and the view that it opens."""
    typical_ones = (typical(group, *row) for group, rows in TYPICAL.items() for row in rows)
    return [*typical_ones, *map(case_study, studies.CASES), *published()]


def preset(group: str, title: str, about: str, config: Config, view: str = "") -> Json:
    """A preset with all sections of its configuration: an empty one has the defaults, whatever the page showed before."""
    state = {name: part for name, part in config.to_dict().items() if name in PLANNED}
    cluster = state["cluster"] if isinstance(state["cluster"], dict) else {"extends": state["cluster"]}
    state["cluster"] = {**cluster, "gpus": config.plan.world}
    return {"group": group, "title": title, "about": about, "state": state, "page": {"view": view} if view else {}}


def typical(
    group: str, title: str, about: str, model: str | Json, cluster: str, gpus: int, batch: int, seq: int, plan: Json, view: str = ""
) -> Json:  # fmt: skip
    workload = {"batch": batch, "seq": seq}
    parts: Json = {"model": model, "cluster": {"extends": cluster, "gpus": gpus}, "workload": workload, "plan": plan}
    return preset(group, title, about, Config.from_document(parts | {"stack": "megatron-core"}), view)


def case_study(name: str) -> Json:
    study = studies.load(name)
    return preset("Case studies", study.title, f"as published by {study.by}", study.config)


def published() -> Iterator[Json]:
    """The well-known runs whose settings are complete."""
    for row in read(str(files("meshwright.calibrate.runs").joinpath("headline.csv"))):
        try:
            run = apply_readings(case(row))
            config = Config(run.model, run.cluster, run.plan, run.workload, run.stack).check()
        except MeshwrightError:
            continue
        about = f"{row['source']}; {format_seconds(run.step_time)} per step" if run.step_time else row["source"]
        yield preset("Published runs", f"{config.model.name} on {config.plan.world:,}: {run.row_id}", about, config)
