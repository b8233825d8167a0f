"""What offload copies between a device and its host: the bytes, as operations of the step.

    activations   each layer sends what it saves for backward to the host in forward, and fetches it in backward
    states        each step sends the gradients that a rank owns down and the updated parameters up

The copies have no axis: they cross the host's link (`Accelerator.host_bandwidth`), not the network. What a layer saves is counted as in
`footprint.saved`; with full recompute it is the layer's input. Only layers are offloaded, as in `parallel.data.offload`.

Of n of L layers, the copies may run behind the compute of all L: those down until the forward ends, and those up from the start of backward, because
layer i returns while layer i + L - n - 1 computes. So the mean layer has n / L of a layer's copies.
"""

import numpy as np

from meshwright.lower.batch import Batch
from meshwright.lower.program import Array, Op, StepProgram, present

TO_HOST, FROM_HOST = "to-host", "from-host"


def add_activation_copies(program: StepProgram) -> None:
    """Add the copies of saved activations to the layers of plans that offload them."""
    b = program.batch
    if not present(b.offload_activations):
        return
    for kind in b.model.kinds:
        size = sum(program.saved[kind].values()) + _kept_by_some(program, kind)
        for phase, name in (("F", TO_HOST), ("I", FROM_HOST)):
            program.blocks[kind, phase].append(Op(name, "offload", "host", b.offloaded_share, bytes=size))


def _kept_by_some(program: StepProgram, kind: str) -> Array:
    """Bytes that the mean layer saves beyond its input, in plans that recompute some of their layers."""
    b = program.batch
    more = np.zeros(b.n)
    if b.some_recomputed:
        at, row, _, saved = b.partly_recomputed
        share = sum(table.sum(axis=1) for table in saved.values())[row] / b.model.layers
        more[at] = share * b.full(program.recompute_savings.get(kind, 0.0))[at]
    return more


def state_copies(b: Batch, elements: Array) -> list[Op]:
    """The copies of an update on the host: the gradients of `elements` down, the parameters up."""
    if not present(b.offload_states):
        return []
    size = elements * (b.grad_bytes + b.param_bytes)
    return [Op("copy-states", "optimizer", "host", b.offload_states * 1.0, bytes=size)]
