"""Three lines to a plan:

from meshwright import planner
result = planner.plan("llama3-70b", "dgx-h100", nodes=8)
result                                # in a notebook or a terminal; result.plan is the winner, result.to_toml() a plan file
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from meshwright.describe.config import Config, configure
from meshwright.describe.plan import Plan
from meshwright.errors import MeshwrightError
from meshwright.planner import goodput
from meshwright.planner.advice.infeasible import no_plan, nothing_fits
from meshwright.planner.result import Result
from meshwright.planner.search import choices as chosen
from meshwright.planner.search.branch_and_bound import Progress
from meshwright.planner.search.leaders import solve
from meshwright.planner.search.space import Space
from meshwright.units import parse_rate

HEADROOM = 0.05
# Of a plan file's own plan these are not kept: they belong to its degrees, or (local SGD) to another algorithm.
UNSEARCHED = ("layers_per_stage", "recompute_every", "recompute_layers", "recompute_budget", "average_every")
Words = Sequence[str] | Mapping[str, Any]


def plan(
    model: Any,
    cluster: Any = "",
    *,
    nodes: int = 0,
    gpus: int = 0,
    batch: int = 0,
    seq: int = 0,
    tokens: str | float = "",
    stack: Any = "",
    fix: Words = (),
    most: Words = (),
    least: Words = (),
    without: Sequence[str] = (),
    allow: Words = (),
    headroom: str | float = HEADROOM,
    settings: Sequence[str] = (),
    mtbf: str | float = "",
    checkpoint: str | float = "",
    restart: str | float = "",
    sites: int = 0,
    line: str | float = "",
    top: int = 10,
    progress: Progress | None = None,
) -> Result:
    """The fastest plan that fits, with why. Names, tables, objects or files for model, cluster and stack.

    `fix={"tp": 8}`, `most={"pp": 4}`, `without=["zero3"]` constrain the search; `headroom="10%"` is memory to leave free. `mtbf="3h"`,
    `checkpoint="60s"`, `restart="5min"` add what failures leave of the time; `sites=2, line="100Gb/s"` what several such clusters would cost.
    """
    said, fixed = split_settings(settings)
    config, base, assumed = problem(model, cluster, nodes, gpus, batch, seq, tokens, stack, said)
    constraints = chosen.read([*words(fix), *fixed], words(most), words(least), without, words(allow))
    options = chosen.choices(base, constraints, tuple(config.stack.order))
    habits = goodput.asked(config.cluster.world, mtbf, checkpoint, restart) if mtbf or checkpoint or restart else None
    between = joined(sites, line)
    result = run(
        config,
        Space(config.model, config.cluster, config.workload, config.stack, options, base, said_bucket(config)),
        share(headroom),
        assumed,
        top,
        progress,
    )
    return replace(result, reliability=habits, line=between, sites=sites)


def joined(sites: int, line: str | float) -> float:
    """Bytes/s of the line between sites; 0: one site."""
    if not sites and not line:
        return 0.0
    if sites < 2 or not line:
        raise MeshwrightError(
            "MW-GOOD-002",
            f"{sites} sites over a line of {str(line)[:20] or 'no bandwidth'}",
            why="Several sites need a line between them, and a line several sites",
            fix="--sites 2 --line 100Gb/s",
        )
    return parse_rate(line)


def run(
    config: Config, space: Space, headroom: float, assumed: list[str], top: int = 10, progress: Progress | None = None
) -> Result:
    """Search a space; raise, in words, where no plan is legal or nothing fits."""
    start = time.perf_counter()
    if not len(space.frames):
        raise no_plan(space)
    found, ranking = solve(space, headroom, progress)
    if ranking is None:
        raise nothing_fits(space, found, headroom)
    seconds = time.perf_counter() - start
    return Result(
        replace(config, plan=ranking.best.plan), space, found, ranking, headroom, seconds, assumed, max(1, top)
    )


def problem(
    model: Any,
    cluster: Any,
    nodes: int,
    gpus: int,
    batch: int,
    seq: int,
    tokens: str | float,
    stack: Any,
    settings: Sequence[str],
) -> tuple[Config, Plan, list[str]]:
    """The configuration, the fields of the plan that are not searched, and what was assumed."""
    config = configure(
        model, cluster, stack=stack, nodes=nodes, gpus=gpus, batch=batch, seq=seq, tokens=tokens, overrides=settings
    )
    kept = {
        name: value
        for name, value in config.plan.as_dict().items()
        if name not in chosen.SEARCHED or name in (*chosen.DTYPES, "overlap")
    }
    for name in UNSEARCHED:
        kept.pop(name, None)
    if "plan.grad_dtype" not in config.origins:
        kept["grad_dtype"] = config.stack.gradient_dtype
    assumed = [
        f"{what}: {getattr(config.workload, name):,}"
        for name, what in (("batch", "batch"), ("seq", "sequence length"))
        if f"workload.{name}" not in config.origins
    ]
    assumed += [f"training stack: {config.stack.name}"] if "stack.name" not in config.origins or not stack else []
    return config, Plan(**kept), assumed


def said_bucket(config: Config) -> float:
    """The bucket a person said; 0: each plan's own."""
    return config.plan.bucket if "plan.bucket" in config.origins else 0.0


def split_settings(settings: Sequence[str]) -> tuple[list[str], list[str]]:
    """`--set plan.tp=8` is a constraint here; everything else describes the problem."""
    searched = {f"plan.{name}" for name in chosen.SEARCHED}
    fixed = [word.strip().removeprefix("plan.") for word in settings if word.partition("=")[0].strip() in searched]
    return [word for word in settings if word.partition("=")[0].strip() not in searched], fixed


def words(said: Words) -> list[str]:
    """`{"tp": 8}` as `tp=8`; words stay as they are."""
    if isinstance(said, str):
        return [said]
    if isinstance(said, Mapping):
        return [f"{name}={_word(value)}" for name, value in said.items()]
    return list(said)


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def share(text: str | float) -> float:
    """A share from "10%", "0.1" or 0.1."""
    try:
        value = float(text[:-1]) / 100 if isinstance(text, str) and text.strip().endswith("%") else float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise MeshwrightError(
            "MW-PLANNER-006",
            f"memory headroom {str(text)[:40]!r} is not a share",
            valid=["0%", "5%", "10%", "0.1"],
            fix="--memory-headroom 10%",
        )
    return value
