"""Measurements of single ranks (`meshwright measure --out FILE`) as files, and as runs that adjust a stack.

A file has the plan, the measured ranks and their predictions. As a run it is the plan on links that take no time (`predict.one_rank`): its step is
composed of the measured compute alone, so the posterior learns rates and host times from it and nothing of the network.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path

from meshwright.calibrate.runs.from_run import MeasuredRun, adjusted
from meshwright.describe.config import Config, configure
from meshwright.describe.files import read_text
from meshwright.describe.result import GIB
from meshwright.describe.stack import Stack
from meshwright.errors import MeshwrightError
from meshwright.predict.one_rank import (
    RankMeasurement,
    composed,
    predicted_beside,
    without_network,
)
from meshwright.units import Json

KIND, VERSION, LIMIT = "measured ranks", 1, 5_000_000


def content(config: Config, measured: Sequence[RankMeasurement], device: str) -> Json:
    """What `measure --json` prints and `--out` writes."""
    predicted = predicted_beside(config, measured)
    return {
        "kind": KIND,
        "version": VERSION,
        "device": device,
        "title": config.plan.title(),
        "plan": config.to_toml(),
        "ranks": [
            {**asdict(m), "step_s": m.step_s, "predicted": asdict(p)} for m, p in zip(measured, predicted, strict=True)
        ],
        "step": composed(config, measured).as_dict(),
    }


def read(path: str | Path) -> tuple[Config, list[RankMeasurement]]:
    """The plan and the measured ranks of a file."""
    try:
        table = json.loads(read_text(path, LIMIT))
        if table["kind"] != KIND or table["version"] != VERSION or not table["ranks"]:
            raise KeyError("kind")
        names = {field.name for field in fields(RankMeasurement)}
        ranks = [RankMeasurement(**{k: v for k, v in row.items() if k in names}) for row in table["ranks"]]
        import tomllib

        config = Config.from_document(tomllib.loads(table["plan"]))
        if not all(possible(rank, config.plan.pp) for rank in ranks):
            raise ValueError("a rank has a stage that the plan does not have, or a value that is not positive")
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise MeshwrightError(
            "MW-MEASURE-003",
            f"'{path}' is not a file of `meshwright measure`",
            why=f"{type(error).__name__}: {error}",
            fix="meshwright measure PLAN.toml --out FILE",
        ) from None
    return config, ranks


def possible(rank: RankMeasurement, stages: int) -> bool:
    """Whether a rank of a plan with this number of pipeline stages can have measured this."""
    values = rank.backward_s, rank.closing_s, rank.allocated_gib, rank.microbatches
    counts = type(rank.microbatches) is int and type(rank.stage) is int and 0 <= rank.stage < stages
    kept = rank.spread, rank.reserved_gib or 0.0
    return counts and all(math.isfinite(v) and v > 0 for v in values) and all(math.isfinite(v) and v >= 0 for v in kept)


def runs_of(paths: Sequence[str], stack: str = "") -> list[MeasuredRun]:
    """The files as runs on links that take no time."""
    runs = []
    for path in paths:
        config, ranks = read(path)
        if stack:
            config = configure(config, stack=stack)
        bare = config.but(cluster=without_network(config.cluster))
        reserved = max((m.reserved_gib or 0.0 for m in ranks), default=0.0)
        runs.append(MeasuredRun(Path(path).name, bare, composed(bare, ranks).step_time_s, reserved * GIB, "reserved"))
    return runs


def measured_stack(paths: Sequence[str], stack: str = "") -> Stack:
    """The stack adjusted to the measured ranks of some files: `--from-measure`."""
    return adjusted(runs_of(paths, stack), one_device=True).after
