"""The step program: what one rank does in one training step, as plain data.

    blocks   {(block, phase): [Op]}   one micro-batch through one embedding, layer of a kind, head or multi-token prediction
    sync     {name: [Op]}             what a pipeline stage sends to the next one and back
    loads    what data parallelism gathers and reduces of each block; `sync.step_ops` turns it into the operations of one step

Phases: F forward, I gradient of the inputs, W gradient of the weights (B = I + W), R what backward recomputes, and where I and W run
apart S what backward does once more, G what layers that are not recomputed gather once more.

Numeric fields are arrays over a batch of plans; `count` is how often the operation happens in its block (0 where a plan does not have
it). Traffic, memory, time, traces and proofs are all computed from these operations. Which blocks a pipeline rank holds is `stages`'.

Streams: `compute`; `comm:<axis>` for communication that may overlap with compute; `host` for launches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from meshwright.describe.plan_fields import Array, Column
from meshwright.lower.batch import Batch, present

__all__ = ["Array", "Column", "Op", "StepProgram", "present", "scalar", "sent"]

PHASES = ("F", "I", "W", "R", "S", "G")
NARROW = ("fp8", "mxfp8", "fp4")  # arithmetic narrower than the 16 bits in which activations are kept


@dataclass(slots=True)
class Op:
    """One operation: compute, memory traffic or communication."""

    name: str
    part: (
        str  # attention | linear | ffn | norm | head | mtp | embedding | router | latent | experts | shared | optimizer
    )
    kind: str  # gemm | attention | scan | tile | memory | collective | p2p | host
    count: Array = 1.0
    flops: Array = 0.0
    bytes: Array = 0.0  # moved through device memory
    shape: tuple[Array, ...] = ()  # gemm: (products, m, n, k); attention: (batch·heads, s_q, s_kv, d)
    dtype: str = ""  # of the arithmetic; "" = the workload's
    collective: str = ""  # all_reduce | all_gather | reduce_scatter | all_to_all | send
    axis: str = ""
    message_bytes: Array = 0.0  # n, the full unsharded buffer
    stream: str = "compute"
    launches: Array = 1.0
    copies: float = 1.0  # of each token in the message of an expert dispatch: the experts of a token
    selected_from: Array = 0.0  # elements of which a top-k keeps the largest
    exponentials: Array = 0.0  # elements through exp, erf or tanh; those of attention follow from its shape
    elementwise: str = ""  # norm | activation | residual | rotation | loss: what a calibration measures separately
    product: str = ""  # the product of the same phase in a linear layer, behind which its collective may run (`Stack.async_linears`)
    own_shard: bool = (
        False  # the product reads what the collective gathers: only that of the rank's own shard can run meanwhile
    )


@dataclass
class StepProgram:
    """One training step of a batch of plans."""

    batch: Batch
    blocks: dict[tuple[str, str], list[Op]] = field(default_factory=dict)
    sync: dict[str, list[Op]] = field(default_factory=dict)
    saved: dict[str, dict[str, Array]] = field(default_factory=dict)  # block → part → bytes kept per micro-batch
    parameters: dict[str, dict[str, Array]] = field(
        default_factory=dict
    )  # block → dense|expert → elements on this rank
    loads: dict[str, dict[str, Any]] = field(default_factory=dict)  # block → dense|expert → `gradients.Load`
    compressed: dict[str, dict[str, list[tuple[Array, Array, Array]]]] = field(
        default_factory=dict
    )  # block → dense|expert → (elements, PowerSGD's two sums) of each compressed parameter in order
    partial: dict[str, dict[str, Array]] = field(
        default_factory=dict
    )  # block → axis over which gradients are partial sums → elements of one rank, after ZeRO
    matrices: dict[str, list[Any]] = field(default_factory=dict)  # block → `muon.MatrixShare` of what Muon updates
    tied: Array = 0.0  # elements of one rank, after ZeRO, of a tied embedding that two stages hold
    gathered: dict[str, Array] = field(default_factory=dict)  # block → bytes of its gathered weights under ZeRO-3
    unit_elements: dict[str, Array] = field(
        default_factory=dict
    )  # block → elements of these weights, and of their gradients
    recompute_savings: dict[str, Array] = field(
        default_factory=dict
    )  # block → bytes recompute spares in one such layer
    output_gradients: dict[str, Array] = field(
        default_factory=dict
    )  # block → bytes that a split backward keeps between its halves
    transient: Array = 0.0  # bytes one layer would save without recompute: alive while it is recomputed
    element: float = 2.0  # bytes of an activation

    def ops(self, block: str) -> Iterator[tuple[str, Op]]:
        for phase in PHASES:
            for op in self.blocks.get((block, phase), ()):
                yield phase, op

    def kinds(self) -> list[str]:
        return list(dict.fromkeys(block for block, _ in self.blocks))


def scalar(value: object) -> float:
    """The value of a batch of one plan."""
    return float(np.broadcast_to(value, 1)[0])  # type: ignore[call-overload]


def sent(collective: str, n: Array, size: Array) -> Array:
    """Bytes one rank **sends** for a collective over `size` ranks of a full buffer of n bytes, bandwidth-optimally.

    all-reduce 2(P−1)/P·n; all-gather, reduce-scatter and all-to-all (P−1)/P·n; send n.
    """
    if collective == "send":
        return n * np.minimum(size - 1, 1)
    return (2.0 if collective == "all_reduce" else 1.0) * (size - 1) / np.maximum(size, 1) * n
