"""What the commands share: a configuration from names, files, sizes and `--set`, with the simplest plan where none is said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from meshwright.describe.config import Config, load
from meshwright.errors import MeshwrightError


def configured(
    model: str = "",
    cluster: str = "",
    nodes: int = 0,
    gpus: int = 0,
    plan: str = "",
    stack: str = "",
    batch: int = 0,
    seq: int = 0,
    tokens: str = "",
    settings: Sequence[str] = (),
) -> tuple[Config, list[str]]:
    """The configuration, and what was assumed to complete it."""
    words = [
        f'model="{model}"' if model else "",
        f'cluster="{cluster}"' if cluster else "",
        f'stack="{stack}"' if stack else "",
    ]
    sizes = [
        f"workload.batch={batch}" if batch else "",
        f"workload.seq={seq}" if seq else "",
        f'workload.tokens="{tokens}"' if tokens else "",
    ]
    overrides = [w for w in (*words, *sizes) if w]
    if not plan and model.endswith(".toml"):
        plan, overrides = model, overrides[1:]
    if plan:
        config = load(plan, [*overrides, *settings])
    else:
        sections: dict[str, Any] = {"model": model, "cluster": cluster}
        rest = [o for o in overrides if not o.startswith(("model=", "cluster="))]
        config = Config.from_parts(**sections, overrides=[*rest, *settings])
    if nodes and gpus:
        raise MeshwrightError("MW-CLI-003", "--nodes and --gpus both say how many devices", fix="give one of them")
    if nodes or gpus:
        config = replace(config, cluster=config.cluster.with_nodes(nodes) if nodes else config.cluster.with_gpus(gpus))
    if plan or any(s.strip().startswith("plan.") for s in settings):
        return config, []
    from meshwright.planner.search.first_fit import first_that_fits

    chosen = first_that_fits(config.model, config.cluster, config.workload, config.stack)
    return replace(config, plan=chosen), [f"plan: the simplest that fits ({chosen.title()})"]
