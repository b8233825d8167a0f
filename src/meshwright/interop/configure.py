"""A configuration of the arguments of a command, where a settings file of another framework may stand for a plan file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshwright.describe import catalog
from meshwright.describe.config import Config, load_cluster
from meshwright.describe.config import configure as configure_plan_file
from meshwright.describe.plan import Plan
from meshwright.describe.run_folder import PLAN
from meshwright.errors import MeshwrightError
from meshwright.interop.files import is_settings_file, read_settings
from meshwright.interop.names import catalog_cluster
from meshwright.interop.reading import SettingsReading


def configure(
    model: Any = "",
    cluster: Any = "",
    *,
    plan: Any = None,
    stack: Any = "",
    workload: Any = None,
    nodes: int = 0,
    gpus: int = 0,
    batch: int = 0,
    seq: int = 0,
    tokens: str | float = "",
    overrides: Sequence[str] = (),
) -> Config:
    """As `describe.config.configure`; `model` or `plan` may be a settings file too, whose keys then give model, plan, workload and stack."""
    sizes: dict[str, Any] = {"nodes": nodes, "gpus": gpus, "batch": batch, "seq": seq, "tokens": tokens}
    source = plan if is_settings_file(plan) else model if is_settings_file(model) else None
    if source is None:
        refuse_folder(model)
        return configure_plan_file(
            model, cluster, plan=plan, stack=stack, workload=workload, overrides=overrides, **sizes
        )
    named = "" if model is source else model
    reading = read_settings(source, gpus=gpus or nodes * _node(cluster) or _gpus_of(cluster))
    raise_first(reading)
    cluster = cluster or catalog_cluster(reading.hardware)
    if reading.gpus and not nodes and not gpus and cluster and not _gpus_of(cluster):
        sizes["gpus"] = reading.gpus
    return configure_plan_file(
        named or model_part(reading, source, overrides),
        cluster,
        plan=reading.assembled.plan,
        stack=stack or reading.stack_section,
        workload=reading.assembled.workload | (workload if isinstance(workload, dict) else {}),
        overrides=overrides,
        **sizes,
    )


def refuse_folder(model: object) -> None:
    """Raise if the argument `model` is a folder, for example that of a run or of Transformers; the error names the file in it to give."""
    if not isinstance(model, str | Path) or not os.path.isdir(model) or str(model) in catalog.names("models"):
        return
    files = [name for name in (PLAN, "config.json") if (Path(model) / name).is_file()]
    raise MeshwrightError(
        "MW-CONF-004",
        f"'{model}' is a folder",
        why="A plan file, a config.json or a name of the catalog is needed",
        fix=str(Path(model) / files[0]) if files else "",
    )


def sections(reading: SettingsReading) -> dict[str, Any]:
    """The sections of a plan file that settings describe; without [model] where they do not give its shape."""
    raise_first(reading)
    found: dict[str, Any] = {
        "stack": reading.stack_section,
        "workload": reading.workload.as_dict(),
        "plan": reading.plan.as_dict(),
    }
    return found | ({"model": model_part(reading, "the file")} if reading.shape.complete else {})


def load_user_plan(path: str | Path, gpus: int) -> Plan:
    """The plan of a settings file, for a number of GPUs."""
    reading = read_settings(path, gpus=gpus)
    raise_first(reading)
    return reading.plan


def raise_first(reading: SettingsReading) -> None:
    """Raise the first error among the problems of settings."""
    for problem in reading.errors:
        raise MeshwrightError(problem.code, problem.what, why=problem.why, fix=problem.fix)


def model_part(reading: SettingsReading, source: object, overrides: Sequence[str] = ()) -> str | dict[str, Any]:
    """The model of settings as a plan file has it. `overrides` may state what the settings do not."""
    shape = reading.shape
    given = {word.partition("=")[0].strip() for word in overrides}
    missing = [f"model.{name}" for name in shape.missing if f"model.{name}" not in given]
    if missing:
        estimate = f"meshwright estimate MODEL --plan {source}"
        raise MeshwrightError(
            "MW-SET-013",
            f"'{source}' does not give the shape of its model: {', '.join(missing)}",
            why=f"{reading.facts.get('model') or 'The model'} is not in the catalog, and the settings do not state all of its shape",
            fix=estimate if len(missing) > 2 else " ".join(f"--set {name}=N" for name in missing) + f", or {estimate}",
        )
    entry = shape.source.removeprefix("catalog ")
    return (
        entry
        if shape.source.startswith("catalog ") and shape.model.name == entry and not shape.changed
        else shape.model.as_dict()
    )


def _node(cluster: Any) -> int:
    return (
        load_cluster(cluster).node_size
        if isinstance(cluster, str | Path) and cluster
        else getattr(cluster, "node_size", 0)
    )


def _gpus_of(cluster: Any) -> int:
    if isinstance(cluster, str | Path) and cluster:
        return load_cluster(cluster).gpus
    return int(getattr(cluster, "gpus", 0) or 0)
