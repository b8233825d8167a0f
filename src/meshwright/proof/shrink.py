"""A small copy of a configuration that trains on this machine: `train --shrink`.

The copy is the one that `verify` proves (`small`): the same flags and axes at the smallest sizes that still divide. To
train on text it needs a vocabulary for all byte values, or for the tokens of [data], and on CPU processes a cluster and a stack that describe them
(the plan's own cluster, if it is one of CPUs), so that its prediction is for the machine it runs on.
"""

from dataclasses import replace

from meshwright.describe import catalog
from meshwright.describe.config import Config
from meshwright.errors import MeshwrightError
from meshwright.proof.small import small_copy
from meshwright.training.data.token_file import open_tokens
from meshwright.training.hooks import BYTE_VALUES
from meshwright.training.machine import resolve_device

RANKS = 8


def small_config(config: Config, device: str = "cpu", ranks: int = RANKS) -> tuple[Config, tuple[str, ...]]:
    """The small copy on at most `ranks` ranks, and a list of the changes as text."""
    if config.run.start_from:
        raise MeshwrightError(
            "MW-HF-021",
            f"the weights in '{config.run.start_from}' do not fit a small copy of the model",
            fix="--shrink without --from, or --from without --shrink",
        )
    small = small_copy(config, ranks)
    tp, world = small.plan.tp, small.plan.world
    model = small.model
    if model.kind == "transformer":  # a vocabulary that tp does not divide stays so
        needed = max([BYTE_VALUES, *(open_tokens(path).vocabulary for path in config.data.path)])
        model = model.but(vocab=-(-needed // tp) * tp + model.vocab % tp)
    cluster, stack = config.cluster, config.stack
    if resolve_device(device, world) == "cpu":
        stack = catalog.load("stacks", "gloo-cpu")
        if cluster.accelerator.name != "cpu":
            cluster = catalog.load("clusters", "laptop")
    plan = small.plan.but(order=small.order)
    copy = replace(
        config,
        model=model,
        cluster=cluster.with_gpus(world),
        stack=stack,
        workload=small.workload,
        plan=plan,
        origins={},
    )
    return copy.check(), small.changes
