"""The division into pipeline stages that a framework makes itself, where it is not the even one of `describe.stages`.

nanotron balances the matrix products of the layers and of the head (`build_model` in nanotron/models/base.py, `get_block_compute_costs` of its
models). Blocks are placed in order, and the next stage begins after the block with which the running sum passes the share of the stages so far:

    layer = 4·H² + 3·H·F (2·H·F without a gate)        head = V·H        share of s stages = s · (L · layer + head) / P

So the first stage is never shorter than another one, and the last stages have fewer layers than in an even division. A plan has no stage without
layers: where nanotron would leave the last stages to the head, a stage ends early instead.
"""

from __future__ import annotations

from functools import lru_cache

from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.describe.stack import Stack


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
