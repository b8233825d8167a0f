"""The plan: how the work is divided over the devices.

    world size = replicate · shard · tp · cp · pp

`replicate × shard` is data parallelism: ZeRO shards its state over `shard` ranks and repeats that `replicate` times (both
above 1: hybrid sharding). Expert parallelism adds no devices: it re-factorises the ranks of one pipeline stage,
expert_tp · ep · (expert data parallel) = tp · cp · replicate · shard.

A plan validates itself alone (`Plan(...)`) and against a model, a workload and a cluster (`check`), with the arithmetic and
the legal values in the message.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from meshwright.describe.base import Bytes, Described, Size, Whole
from meshwright.describe.cluster import Cluster
from meshwright.describe.legal import check
from meshwright.describe.legal import divisors as divisors
from meshwright.describe.model import Model
from meshwright.describe.stack import Axis
from meshwright.describe.workload import Workload
from meshwright.errors import MeshwrightError

Schedule = Literal[
    "naive",
    "gpipe",
    "1f1b",
    "interleaved",
    "looped-bfs",
    "zb-h1",
    "zb-h2",
    "interleaved-zb",
    "zbv",
    "dualpipev",
    "auto",
]
VIRTUAL_SCHEDULES = ("interleaved", "looped-bfs", "interleaved-zb", "zbv", "dualpipev", "auto")
V_SHAPED = ("zbv", "dualpipev")
Recompute = Literal["none", "selective", "full", "auto"]
ContextKind = Literal["ring", "ulysses", "all-gather"]
Compression = Literal["none", "fp16", "bf16", "int8", "int4", "top-k", "powersgd", "fp8", "random-k", "threshold"]
Dtype = Literal["fp64", "fp32", "fp16", "bf16", "fp8"]
Offload = Literal["none", "states", "activations", "both"]
AXES = ("tp", "cp", "pp", "dp")


class Plan(Described):
    replicate: Size = 1
    shard: Size = 1
    tp: Size = 1
    sp: bool = Field(default=False, description="sequence parallel: with tp, shard the regions between the products")
    tp_form: Literal["megatron", "all-gather"] = Field(default="megatron", description="all-gather: the lecture's form")
    cp: Size = 1
    cp_kind: ContextKind = "ring"
    pp: Size = 1
    virtual: Size = 1
    schedule: Schedule = "1f1b"
    layers_per_stage: tuple[Size, ...] = Field(
        default=(), description="per virtual stage, in order; empty: as even as can be"
    )
    ep: Size = 1
    expert_tp: Whole = Field(default=0, description="tensor parallel degree inside experts; 0: tp")
    microbatch: Size = 1
    zero: int = Field(default=0, ge=0, le=3)
    reshard: bool = Field(
        default=True, description="ZeRO-3: free gathered weights after forward, gather again in backward"
    )
    prefetch: bool = Field(default=True, description="ZeRO-3: gather the next layer during this one")
    wrap: Whole = Field(default=1, description="ZeRO: layers gathered and reduced together; 0: all of a stage")
    reduce: Literal["auto", "step", "microbatch"] = Field(
        default="auto",
        description="when gradients are reduced; auto: each micro-batch under ZeRO-2 and 3, else once a step",
    )
    bucket: Bytes = Field(default=25e6, gt=0)
    average_every: Whole = Field(
        default=0, description="local SGD: replicas train alone and average every n steps; 0: sum gradients each step"
    )
    recompute: Recompute = "none"
    recompute_every: Size = Field(default=1, description="full: every n-th layer of a stage")
    recompute_layers: Whole = Field(default=0, description="full: so many layers of a stage at most; 0: all")
    recompute_budget: Bytes = Field(
        default=0.0,
        description="auto: bytes a rank's layers may keep for backward, the fewest are recomputed; 0: what the device has",
    )
    param_dtype: Dtype = "bf16"
    grad_dtype: Dtype = "fp32"
    state_dtype: Dtype = "fp32"
    master: bool = Field(default=True, description="keep an fp32 copy of 16-bit parameters")
    comm_dtype: Dtype | None = Field(default=None, description="dtype of gradient reduction; unsaid: grad_dtype")
    overlap: tuple[Axis, ...] | None = Field(
        default=None, description="axes overlapped with compute; unsaid: as the stack"
    )
    compression: Compression = "none"
    compression_ratio: float = Field(default=0.01, gt=0, le=1, description="top-k, random-k: the share kept")
    compression_threshold: float = Field(
        default=2.0, gt=0, description="threshold: values above this many times their root mean square are sent"
    )
    compression_rank: Size = Field(default=4, description="PowerSGD: rank of the approximation")
    offload: Offload = "none"
    order: tuple[Literal["tp", "cp", "pp", "dp"], ...] = Field(
        default=(), description="axes, fastest first; empty: the stack's"
    )

    @model_validator(mode="after")
    def _coherent(self) -> Plan:
        if self.shard > 1 and self.zero == 0:
            raise MeshwrightError(
                "MW-PLAN-001",
                f"shard={self.shard} with zero=0 shards nothing",
                why="ZeRO stage 1, 2 or 3 says what is sharded; plain data parallelism is `replicate`",
                valid=["zero=1", "zero=2", "zero=3", "shard=1"],
                fix="--set plan.zero=3",
            )
        if self.order and sorted(self.order) != sorted(AXES):
            raise MeshwrightError(
                "MW-PLAN-002",
                f"order {list(self.order)} must name each axis once",
                valid=AXES,
                fix='--set plan.order=["tp","cp","pp","dp"]',
            )
        if self.sp and self.tp_form == "all-gather":
            raise MeshwrightError(
                "MW-PLAN-013",
                "sp with tp_form=all-gather",
                fix="--set plan.sp=false",
                why="Sequence parallelism is the other form's: it gathers before and scatters after",
            )
        self._coherent_recompute()
        self._coherent_averages()
        if self.virtual > 1 and self.schedule not in VIRTUAL_SCHEDULES:
            raise MeshwrightError(
                "MW-PLAN-003",
                f"schedule {self.schedule} runs one stage a rank, not virtual={self.virtual}",
                valid=VIRTUAL_SCHEDULES,
                fix="--set plan.schedule=interleaved",
            )
        if self.schedule in V_SHAPED and self.pp > 1 and self.virtual != 2:
            raise MeshwrightError(
                "MW-PLAN-003",
                f"schedule {self.schedule} is V-shaped: two stages a rank",
                why=f"virtual={self.virtual}",
                valid=["virtual=2"],
                fix="--set plan.virtual=2",
            )
        if self.layers_per_stage and len(self.layers_per_stage) != self.stages:
            raise MeshwrightError(
                "MW-PLAN-007",
                f"layers_per_stage has {len(self.layers_per_stage)} entries for "
                f"pp × virtual = {self.pp} × {self.virtual} = {self.stages} stages",
            )
        return self

    def _coherent_recompute(self) -> None:
        if (self.recompute_every > 1 or self.recompute_layers) and self.recompute != "full":
            raise MeshwrightError(
                "MW-PLAN-014",
                f"layers to recompute are chosen, yet recompute={self.recompute}",
                why="Of whole layers alone some can be chosen",
                fix="--set plan.recompute=full",
            )
        if self.recompute_budget > 0 and self.recompute != "auto":
            raise MeshwrightError(
                "MW-PLAN-014",
                f"recompute={self.recompute} with recompute_budget={self.recompute_budget:g}",
                why="auto fits a budget, and nothing else has one",
                valid=["recompute=auto with recompute_budget=20GiB"],
                fix="--set plan.recompute=auto",
            )

    def _coherent_averages(self) -> None:
        if not self.average_every:
            return
        together = {
            "zero": self.zero,
            "cp": self.cp > 1 and self.cp,
            "ep": self.ep > 1 and self.ep,
            "compression": self.compression != "none" and self.compression,
        }
        said = [f"{field}={value}" for field, value in together.items() if value]
        if said or self.replicate == 1:
            field = next((field for field, value in together.items() if value), "average_every")
            raise MeshwrightError(
                "MW-PLAN-015",
                f"average_every={self.average_every} with {said[0] if said else 'one replica'}",
                why="Replicas that train alone must be several and whole: they exchange no gradients",
                fix=f"--set plan.{field}={type(self).model_fields[field].default}",
            )

    # Derived

    @property
    def dp(self) -> int:
        return self.replicate * self.shard

    @property
    def world(self) -> int:
        return self.dp * self.tp * self.cp * self.pp

    @property
    def stages(self) -> int:
        return self.pp * self.virtual

    @property
    def etp(self) -> int:
        return self.expert_tp or self.tp

    @property
    def reduces_each(self) -> bool:
        """Whether every micro-batch reduces its gradients: ZeRO-2 and 3 keep them only as shards, unless told otherwise."""
        return self.zero >= 2 if self.reduce == "auto" else self.reduce == "microbatch"

    @property
    def reduce_dtype(self) -> str:
        return self.comm_dtype or self.grad_dtype

    @property
    def wire(self) -> str:
        """What gradients are sent as, if not as they are: a compression, or a narrower dtype of communication."""
        narrow = self.comm_dtype in ("fp16", "bf16", "fp8") and self.comm_dtype != self.grad_dtype
        return str(self.comm_dtype) if self.compression == "none" and narrow else self.compression

    @property
    def lossy(self) -> bool:
        """Whether gradients are summed with loss, so that one device must emulate the ranks and their loss; copies of
        an expert may be on tensor-parallel ranks too."""
        return self.wire != "none" and (self.dp * self.cp > 1 or self.tp > self.etp * self.ep)

    def microbatches(self, workload: Workload) -> int:
        return workload.batch // (self.microbatch * self.dp)

    def stage_layers(self, layers: int) -> tuple[int, ...]:
        """Layers of each stage in model order: as said, or as even as can be with the short stages at both ends,
        where the embedding and the head add their own work."""
        if self.layers_per_stage:
            return self.layers_per_stage
        base, extra = divmod(layers, self.stages)
        counts = [base] * self.stages
        first = (self.stages - extra) // 2
        for i in range(extra):
            counts[first + i] += 1
        return tuple(counts)

    def made_again(self, stage: range) -> range:
        """Of one stage's layers those that full recompute makes again."""
        return (
            stage[:: self.recompute_every][: self.recompute_layers or None] if self.recompute == "full" else stage[:0]
        )

    def title(self) -> str:
        """The plan in one short line: `dp 4 (ZeRO-3) · tp 8 · pp 2 (1f1b)`."""
        words = []
        if self.dp > 1:
            kind = f" (ZeRO-{self.zero})" if self.zero else ""
            words.append(
                f"dp {self.replicate}×{self.shard}{kind}"
                if self.replicate > 1 and self.shard > 1
                else f"dp {self.dp}{kind}"
            )
        if self.tp > 1:
            words.append(f"tp {self.tp}{'+sp' if self.sp else ''}")
        if self.cp > 1:
            words.append(f"cp {self.cp} ({self.cp_kind})")
        if self.pp > 1:
            words.append(f"pp {self.pp}{f'×{self.virtual}' if self.virtual > 1 else ''} ({self.schedule})")
        if self.ep > 1:
            words.append(f"ep {self.ep}")
        words.append(f"micro-batch {self.microbatch}")
        if self.average_every:
            words.append(f"averaged every {self.average_every} steps")
        if self.recompute != "none":
            words.append(f"recompute {self.recompute}{self._chosen_layers()}")
        if self.wire != "none":
            words.append(f"{self.wire} gradients")
        if self.offload != "none":
            words.append(f"offload {'states and activations' if self.offload == 'both' else self.offload}")
        return " · ".join(words)

    def _chosen_layers(self) -> str:
        every = f"every {self.recompute_every}" if self.recompute_every > 1 else ""
        most = f"{self.recompute_layers} a stage" if self.recompute_layers else ""
        return f" ({', '.join(filter(None, (every, most)))})" if every or most else ""

    def check(self, model: Model, workload: Workload, cluster: Cluster | None = None) -> Plan:
        """Raise the first thing that makes this plan impossible here; return it otherwise."""
        check(self, model, workload, cluster)
        return self

    def as_dict(self) -> dict[str, Any]:
        said = super().as_dict()
        return {k: list(v) if isinstance(v, tuple) else v for k, v in said.items()}
