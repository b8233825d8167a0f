"""What a training framework can run: the part of a stack that limits the search for a plan.

An empty tuple is no limit. `source` says where each limit comes from: the framework's code or documentation.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from meshwright.describe.base import Described
from meshwright.describe.schedules import ScheduleName

Stage = Literal[0, 1, 2, 3]


class Abilities(Described):
    """Limits of a framework; the defaults are no limits."""

    framework: str = Field(
        default="", description="the framework that these limits belong to; empty: no framework is known"
    )
    schedules: tuple[ScheduleName, ...] = Field(default=(), description="pipeline schedules")
    zero: tuple[Stage, ...] = Field(default=(), description="ZeRO stages")
    zero_in_pipeline: tuple[Stage, ...] = Field(default=(), description="ZeRO stages together with a pipeline")
    zero_in_tensor: tuple[Stage, ...] = Field(
        default=(), description="ZeRO stages together with tensor and data parallelism"
    )
    cp_kinds: tuple[Literal["ring", "ulysses", "all-gather"], ...] = Field(
        default=(), description="kinds of context parallelism"
    )
    recomputes: tuple[Literal["none", "selective", "full"], ...] = Field(default=(), description="kinds of recompute")
    without: tuple[Literal["tp", "cp", "pp", "ep", "expert_tp", "sp", "hsdp", "reshard", "reduce", "order"], ...] = (
        Field(
            default=(),
            description="axes and features that the framework does not have, or whose value it chooses itself",
        )
    )
    even_stages: bool = Field(default=False, description="layers must divide by pp × virtual")
    own_stages: bool = Field(
        default=False, description="the framework itself divides the model over stages (`stages_by`)"
    )
    stages_by: Literal["layers", "products"] = Field(
        default="layers",
        description="what the framework divides evenly over stages: layers, or the matrix products of layers and head (`framework_stages`)",
    )
    tensor_divides_kv: bool = Field(default=False, description="tp must divide the KV heads")
    shards_context: bool = Field(default=False, description="context-parallel ranks always shard the weights (ZeRO-3)")
    source: str = Field(default="", description="where these limits are stated")
