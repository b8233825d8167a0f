"""The training stack of Meshwright's own trainer.

A plan file, `--stack` or `--for` names the stack of a prediction. A plan without one is predicted with the stack `default`: the typical
framework, with a wide band, since it is not known what will run the plan. Our own trainer is a stack that is known. `train` predicts such a
plan with it, and so does `launch` where it starts our trainer; `plan` and `estimate` print this prediction below the typical one.

    gloo-cpu          on CPU processes
    meshwright-eager  on GPUs, with `run.compile = "off"`
    meshwright        on GPUs
"""

from meshwright.describe import catalog
from meshwright.describe.config import Config
from meshwright.describe.stack import Stack

OURS = "meshwright"  # our trainer, where a framework is named (`--for`), and its stack on GPUs
OWN_STACKS = (OURS, f"{OURS}-eager", "gloo-cpu")  # stacks that describe nothing but our trainer


def is_typical(stack: Stack) -> bool:
    """Whether nothing is known of a stack: the default, none of its numbers changed."""
    return stack.name == Stack().name and stack in (catalog.load("stacks", Stack().name), Stack())


def own_stack(device: str, compiled: bool = True) -> Stack:
    """Return the stack of our trainer on a kind of device: "cpu", or the name of a GPU."""
    name = "gloo-cpu" if device == "cpu" else OURS if compiled else f"{OURS}-eager"
    stack: Stack = catalog.load("stacks", name)
    return stack


def with_own_stack(config: Config) -> Config:
    """Give a configuration the stack of our trainer, unless it names a stack."""
    if not is_typical(config.stack):
        return config
    stack = own_stack(config.cluster.accelerator.name, config.run.compiled)
    return config.but(stack=stack.but(graphs=("step",)) if config.run.graphs == "step" else stack)
