"""The plan: how the work is divided over the devices.

    world size = replicate · shard · tp · cp · pp

`replicate × shard` is data parallelism: ZeRO shards its state over `shard` ranks and repeats that `replicate` times (both
above 1: hybrid sharding). Expert parallelism adds no devices: it re-factorises the ranks of one pipeline stage,
expert_tp · ep · (expert data parallel) = tp · cp · replicate · shard.

`describe.legality` checks a plan: its fields when it is created (`Plan(...)`), and against a model, a workload, a cluster and a
training stack by `check`.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import groupby

from pydantic import model_validator

from meshwright.describe import legality
from meshwright.describe.cluster import Cluster
from meshwright.describe.legality.case import divisors
from meshwright.describe.model import Model
from meshwright.describe.plan_fields import AXES, PlanFields
from meshwright.describe.stack import Stack
from meshwright.describe.variants import COMPRESSIONS
from meshwright.describe.workload import Workload
from meshwright.units import format_decimal_bytes

__all__ = ["AXES", "Plan", "divisors"]

MOST_LISTED = 8  # stages whose lengths a title lists one by one


class Plan(PlanFields):
    @model_validator(mode="after")
    def _legal_by_itself(self) -> Plan:
        legality.check(self)
        return self

    def check(
        self, model: Model, workload: Workload, cluster: Cluster | None = None, stack: Stack | None = None
    ) -> Plan:
        """Raise the first rule of `describe.legality` that this plan breaks here; return the plan otherwise."""
        legality.check(self, model, workload, cluster, stack)
        return self

    def is_legal(
        self, model: Model, workload: Workload, cluster: Cluster | None = None, stack: Stack | None = None
    ) -> bool:
        """Whether the plan breaks no rule here."""
        return bool(legality.legal(legality.Case(self, model, workload, cluster, stack)))

    def title(self) -> str:
        """Describe the plan in one line: `dp 4 (ZeRO-3) · tp 8 · pp 2 (1f1b) · micro-batch 1`.

        The degrees and the micro-batch always; every other field where it differs from its default and has an effect, so that two plans of
        different cost have different titles.
        """
        words = [*self._degrees(), f"micro-batch {self.microbatch}"]
        if self.average_every:
            words.append(f"averaged every {self.average_every} steps")
        if self.recompute != "none":
            words.append(f"recompute {self.recompute}{self._chosen_layers()}")
        if self.wire != "none":
            words.append(f"{self.wire} gradients")
        if self.offload != "none":
            layers = (
                f" ({self.offload_layers} layer{'s' * (self.offload_layers > 1)} per stage)"
                if self.offload_layers
                else ""
            )
            words.append(f"offload {'states and activations' if self.offload == 'both' else self.offload}{layers}")
        return " · ".join([*words, *self._options()])

    def _degrees(self) -> list[str]:
        words = []
        if self.dp > 1 or (self.zero and self.cp > 1):
            hybrid = self.replicate > 1 and self.shard > 1
            zero = f" ({self._zero()})" if self.zero else ""
            words.append(f"dp {f'{self.replicate}×{self.shard}' if hybrid else self.dp}{zero}")
        if self.tp > 1:
            gathered = " (all-gather)" if self.tp_form == "all-gather" else ""
            words.append(f"tp {self.tp}{'+sp' if self.sp else ''}{gathered}")
        if self.cp > 1:
            words.append(f"cp {self.cp} ({self.cp_kind})")
        if self.pp > 1:
            stages = f"×{self.virtual}" if self.virtual > 1 else ""
            layers = f", layers {stage_lengths(self.layers_per_stage)}" if self.layers_per_stage else ""
            words.append(f"pp {self.pp}{stages} ({self.schedule}{layers})")
        if self.ep > 1 or (self.expert_tp and self.expert_tp != self.tp):
            words.append(f"ep {self.ep}{f' (expert tp {self.expert_tp})' if self.etp != self.tp else ''}")
        return words

    def _zero(self) -> str:
        """The ZeRO stage, and what differs from its usual form."""
        words = [f"ZeRO-{self.zero}"]
        if self.zero == 3 and not self.reshard and self.pp == 1:
            words.append("weights kept after forward")
        if self.zero and self.prefetch is not True:
            words.append("prefetch in forward" if self.prefetch else "no prefetch")
        if self.wrap != 1:
            words.append(f"units of {self.wrap} layers" if self.wrap else "one unit per stage")
        return ", ".join(words)

    def _options(self) -> list[str]:
        """Fields that change the cost and are not part of the degrees."""
        words = []
        if self.reduces_each != (self.zero >= 2):
            words.append(f"gradients reduced once per {'micro-batch' if self.reduces_each else 'step'}")
        names: dict[str, list[str]] = {}
        for name, what in (("param_dtype", "parameters"), ("grad_dtype", "gradients"), ("state_dtype", "states")):
            if getattr(self, name) != type(self).model_fields[name].default:
                names.setdefault(getattr(self, name), []).append(what)
        words += [f"{' and '.join(parts)} kept in {dtype}" for dtype, parts in names.items()]
        if not self.master and self.param_dtype in ("fp16", "bf16"):
            words.append("no fp32 master weights")
        if self.comm_dtype and self.wire == "none" and self.comm_dtype != self.grad_dtype:
            words.append(f"reduced in {self.comm_dtype}")
        if self.gather_dtype == "fp8" and self.gathers:
            words.append("fp8 all-gathers")
        if self.recompute_budget:
            words.append(f"activations up to {format_decimal_bytes(self.recompute_budget)}")
        options = COMPRESSIONS[self.compression].options
        absolute = self.compression == "absolute-threshold"
        if "compression_ratio" in options:
            words.append(f"{self.compression_ratio:.3g} of them {'expected' if absolute else 'sent'}")
        if "compression_rank" in options:
            words.append(f"rank {self.compression_rank}")
        if "compression_threshold" in options:
            words.append(f"above {self.compression_threshold:g}{'' if absolute else '× their root mean square'}")
        if self.overlap is not None:
            words.append(f"overlap {'+'.join(self.overlap) or 'nothing'}")
        if self.order:
            words.append(f"order {'-'.join(self.order)}")
        return words

    def _chosen_layers(self) -> str:
        every = f"every {self.recompute_every}" if self.recompute_every > 1 else ""
        most = f"{self.recompute_layers} per stage" if self.recompute_layers else ""
        return f" ({', '.join(filter(None, (every, most)))})" if every or most else ""


def stage_lengths(lengths: tuple[int, ...]) -> str:
    """Layers of each stage in a line: `5/6/6/1`, and for more than eight stages with equal neighbours counted: `1/2×14/1`."""
    if len(lengths) <= MOST_LISTED:
        return "/".join(map(str, lengths))
    runs = [(length, len(list(same))) for length, same in groupby(lengths)]
    return "/".join(f"{length}×{count}" if count > 1 else f"{length}" for length, count in runs)


# --- The division into pipeline stages that a framework makes itself, where it is not the even one of `describe.schedules`.
#
# nanotron balances the matrix products of the layers and of the head (`build_model` in nanotron/models/base.py, `get_block_compute_costs` of its
# models). Blocks are placed in order, and the next stage begins after the block with which the running sum passes the share of the stages so far:
#
#     layer = 4·H² + 3·H·F (2·H·F without a gate)        head = V·H        share of s stages = s · (L · layer + head) / P
#
# So the first stage is never shorter than another one, and the last stages have fewer layers than in an even division. A plan has no stage without
# layers: where nanotron would leave the last stages to the head, a stage ends early instead.


def framework_stages(model: Model, stack: Stack, pp: int) -> tuple[int, ...]:
    """Layers of each stage as the stack's framework divides them; empty where it divides them evenly."""
    if stack.can.stages_by != "products" or pp == 1 or model.kind != "transformer" or model.layers < pp:
        return ()
    attention = 4 * model.heads * (model.hidden // model.heads) * model.hidden
    layer = attention + (3 if model.gated else 2) * model.ffn * model.hidden
    return balanced_products(model.layers, layer, model.vocab * model.hidden, pp)


@lru_cache(maxsize=256)
def balanced_products(layers: int, layer: int, head: int, pp: int) -> tuple[int, ...]:
    """Divide layers into `pp` stages of about equal multiplications; `layer` and `head` are those of one layer and of the head."""
    share = (layers * layer + head) / pp
    stages = [0]
    for done in range(layers):
        if done * layer > share * len(stages) or layers - done == pp - len(stages):
            stages.append(0)
        stages[-1] += 1
    return tuple(stages)


def in_framework(plan: Plan, model: Model, stack: Stack) -> Plan:
    """Set `layers_per_stage` as the stack's framework divides the layers, unless the plan states it or the division is even."""
    if plan.pp == 1 or plan.layers_per_stage or plan.virtual > 1:
        return plan
    stages = framework_stages(model, stack, plan.pp)
    return plan.but(layers_per_stage=stages) if stages else plan
