"""The step program: what a training step does, as plain data. This file has its types; `lower.step` makes the value.

    blocks    {(block, phase): [Op]}   one micro-batch through one embedding, layer of a kind, head or multi-token prediction
    sync      {name: [Op]}             what a pipeline stage sends to the next one and back
    ranks     [RankProgram]            the evaluated pipeline ranks: their blocks, elements, sends, bytes kept for backward
    stages    [StageBlocks]            the blocks of every stage, where the pipeline is walked
    closing   [Op]                     once per step: gradients reduced, clipped, the update, parameters gathered

Phases: F forward, I gradient of the inputs, W gradient of the weights (B = I + W), R what backward recomputes, and where I and W run
apart S what backward does once more, G what layers that are not recomputed gather once more. In the block in which backward ends, because nothing
before it is trained, E is what remains of I.

Numeric fields are arrays over a batch of plans; `count` is how often the operation happens in its block (0 where a plan does not have
it). Traffic, memory, time, traces and proofs are all computed from this value: `cost` imports nothing else of `lower`.

Streams: `compute`; `comm:<axis>` for communication that may overlap with compute; `host` for launches.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, NamedTuple

import numpy as np

from meshwright.describe.plan_fields import Array, Column
from meshwright.describe.sharding.boxes import ROUND
from meshwright.lower.batch import Batch, present

__all__ = ["Array", "Batch", "Column", "Op", "RankProgram", "StageBlocks", "StepProgram", "present", "scalar", "sent"]

PHASES = ("F", "I", "E", "W", "R", "S", "G")
# Groups of parameters, and the parts of ZeRO's operations: reduced over dp·cp, and over expert_dp
DATA_PARALLEL = ("dense", "expert")
ENDS = ("embedding", "head")
AFTER_LAYERS = ("head", "mtp")  # blocks that run backward directly after forward
EXCHANGE, ORTHOGONALISE = "exchange-matrices", "orthogonalise"  # Muon's operations once per step
NARROW = ("fp8", "mxfp8", "fp4")  # arithmetic narrower than the 16 bits in which activations are kept


@dataclass(slots=True)
class Op:
    """One operation: compute, memory traffic or communication."""

    name: str
    # Attention | linear | ffn | norm | head | mtp | embedding | router | latent | experts | shared | optimizer
    part: str
    kind: str  # gemm | attention | scan | tile | memory | collective | p2p | host
    count: Array = 1.0
    flops: Array = 0.0
    bytes: Array = 0.0  # moved through device memory; of a collective: by copies before and after it
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
    elementwise: str = (
        ""  # norm | activation | residual | rotation | loss | quantise: what a calibration measures separately
    )
    product: str = ""  # the product of the same phase in a linear layer, behind which its collective may run (`Stack.async_linears`)
    own_shard: bool = False  # the product reads what the collective gathers, of which only the rank's own shard is there, or writes what it reduces


def collective_op(
    name: str, part: str, collective: str, axis: str, count: Array, n: Array, stream: str = "comm:dp"
) -> Op:
    """A collective, or a send, of a buffer of n bytes."""
    kind = "p2p" if collective == "send" else "collective"
    return Op(name, part, kind, count, collective=collective, axis=axis, message_bytes=n, stream=stream)


class Load(NamedTuple):
    """Elements of some parameters on one rank, as ZeRO pads them: all of them, and of their gradients those sent as the plan
    compresses them, those sent exactly, and PowerSGD's two sums; and of the elements held those that fp8 products multiply by, those that are
    frozen, and of these the quantised ones."""

    held: Array = 0.0
    sent: Array = 0.0
    exact: Array = 0.0
    first: Array = 0.0
    second: Array = 0.0
    fp8: Array = 0.0
    frozen: Array = 0.0
    packed: Array = 0.0
    packed_bytes: Array = 0.0  # of the quantised ones

    @property
    def updated(self) -> Array:
        """Elements that the optimizer updates."""
        return self.held - self.frozen


class MatrixShare(NamedTuple):
    """One kind of matrix on the fullest rank, of each plan: elements of its box, of its shard, of the whole matrix (of a stack: of the
    experts on one rank), the FLOPs of its update, over which axes it is cut, and the number of ranks that divide such matrices among them."""

    group: str
    size: Array  # elements of the box before ZeRO
    box: Array  # those that are brought together on one rank of the ZeRO axis
    own: Array
    whole: Array
    flops: Array
    by_zero: Array
    by_tensor: Array
    owners: Array
    copies: Array  # ranks of the tensor-parallel axis that hold the same part

    @property
    def together(self) -> Array:
        """Number of matrices that a rank updates in one round."""
        return np.maximum(np.floor(ROUND / np.maximum(self.whole, 1.0)), 1.0)


@dataclass
class StageBlocks:
    """Numbers of blocks of each kind on a pipeline rank, or in one of its stages."""

    rank: Array
    counts: dict[str, Array]
    # Of these, recomputed in backward; None: all, where the plan recomputes
    recomputed: dict[str, Column] | None = None
    split: dict[str, Array] | None = None  # the number of these per micro-batch that run I and W separately; None: none
    regathered: dict[str, Column] | None = None  # of the split ones, those not recomputed; None: as the plan recomputes
    unreached: dict[str, Array] | None = None  # those that backward does not run through; None: none
    ending: dict[str, Array] | None = None  # those in which backward ends

    def times(self, block: str, phase: str) -> Array:
        """Number of times a phase of a block runs here per micro-batch."""
        table = {"S": self.split, "G": self.regathered, "E": self.ending}
        if phase in table:
            return 0.0 if (numbers := table[phase]) is None else numbers[block]
        count = self.counts[block] if phase != "R" or self.recomputed is None else self.recomputed[block]
        if phase == "F" or self.unreached is None or self.ending is None:
            return count
        reached = self.counts[block] - self.unreached[block]
        return reached - self.ending[block] if phase == "I" else np.minimum(count, reached)

    def total(self, sizes: dict[str, Array]) -> Array:
        """The sum over these blocks of a size of each."""
        counted = (self.counts[block] * size for block, size in sizes.items() if present(size))
        return sum(counted, 0.0 * self.counts["embedding"])


@dataclass(kw_only=True)
class RankProgram(StageBlocks):
    """One pipeline rank of each plan: its blocks, and what follows from them once per step. Of the ranks that share its stages it is the
    fullest, the first of its tensor-parallel and ZeRO groups. Groups of parameters are `DATA_PARALLEL`."""

    elements: dict[str, Array]  # parameters by group that are not frozen, before ZeRO
    padded: dict[str, Array]  # the same with the rows that ZeRO adds
    frozen: dict[str, Array]  # bytes of frozen parameters by group, before ZeRO and with the rows that it adds
    by_muon: dict[str, tuple[Array, Array]]  # of these by group, what Muon updates: before ZeRO, and after it
    sums: dict[str, Array]  # elements that it reduces besides its gradients, by axis
    # Messages to other stages, and gathers of their parts, with their number per micro-batch
    sends: list[tuple[Op, Array]]
    in_flight: Array  # micro-batches whose activations it holds at its peak, in units of all its stages together
    kept: Array  # bytes that its layers save for backward, of all micro-batches in flight
    gathered: Array = 0.0  # bytes of all weights that ZeRO-3 gathers, if none were freed
    # Bytes of compressors' buffers: of all messages together, of the largest one
    compression: tuple[Array, Array] = (0.0, 0.0)
    matrix_buffers: Array = 0.0  # bytes that Muon sends, receives and multiplies
    closing: list[Op] = field(default_factory=list)  # what it does once per step: of a single plan, with its stages


@dataclass
class StepProgram:
    """One training step of a batch of plans. The dictionaries have an entry for each kind of block."""

    batch: Batch
    element: float = 2.0  # bytes of an activation
    blocks: dict[tuple[str, str], list[Op]] = field(default_factory=dict)
    sync: dict[str, list[Op]] = field(default_factory=dict)
    saved: dict[str, dict[str, Array]] = field(default_factory=dict)  # by part, bytes kept per micro-batch
    parameters: dict[str, dict[str, Array]] = field(default_factory=dict)  # by group, elements on this rank, not frozen
    # By group, bytes of frozen parameters on this rank
    frozen: dict[str, dict[str, Array]] = field(default_factory=dict)
    # Bytes of the largest quantised matrix, as products read it
    unpacked: dict[str, Array] = field(default_factory=dict)
    # By group, what data parallelism gathers and reduces
    loads: dict[str, dict[str, Load]] = field(default_factory=dict)
    # By group, (elements, PowerSGD's two sums) of each compressed parameter in order.
    compressed: dict[str, dict[str, list[tuple[Array, Array, Array]]]] = field(default_factory=dict)
    # By axis over which gradients are partial sums, elements of one rank after ZeRO.
    partial: dict[str, dict[str, Array]] = field(default_factory=dict)
    matrices: dict[str, list[MatrixShare]] = field(default_factory=dict)  # what Muon updates
    unsaved: dict[str, Array] = field(default_factory=dict)  # bytes that the block in which backward ends does not save
    tied: Array = 0.0  # elements of one rank, after ZeRO, of a tied embedding that two stages hold
    gathered: dict[str, Array] = field(default_factory=dict)  # bytes of its gathered weights under ZeRO-3
    unit_elements: dict[str, Array] = field(default_factory=dict)  # elements of these weights, and of their gradients
    recompute_savings: dict[str, Array] = field(default_factory=dict)  # bytes recompute spares in one such layer
    output_gradients: dict[str, Array] = field(default_factory=dict)  # bytes a split backward keeps between its halves
    transient: Array = 0.0  # bytes one layer would save without recompute: alive while it is recomputed
    tile: Array = 0.0  # bytes of the running tile of attention with dropout
    # Fractions of blocks: the mean of all ranks
    mean: StageBlocks = field(default_factory=lambda: StageBlocks(0.0, {}))
    ranks: list[RankProgram] = field(default_factory=list)  # those that can be the slowest or the fullest, or all
    averaged: list[StageBlocks] = field(default_factory=list)  # all ranks, where their times are averaged one by one
    every_rank: bool = False  # whether `ranks` are all; of a plan with fewer than others the last one is repeated
    stages: list[StageBlocks] = field(default_factory=list)
    closing: list[Op] = field(default_factory=list)  # of the rank with the most elements: it finishes last

    def as_dict(self, at: int = 0) -> dict[str, Any]:
        """The program of the plan at index `at` as words and numbers: what `show step --json` prints. Operations that the plan does not run are
        left out; `groups` has the ranks of each group that an operation names."""
        ops = [op for some in (*self.blocks.values(), *self.sync.values(), self.closing) for op in some if op.axis]
        groups = {op.axis: number_at(self.batch.size(op.axis), at) for op in ops}
        return {"microbatches": int(self.batch.rounds[at]), "groups": groups, **plain(self, at)}

    def ops(self, block: str) -> Iterator[tuple[str, Op]]:
        for phase in PHASES:
            for op in self.blocks.get((block, phase), ()):
                yield phase, op

    def kinds(self) -> list[str]:
        return list(dict.fromkeys(block for block, _ in self.blocks))

    def elements(self, blocks: StageBlocks) -> dict[str, Array]:
        """Parameters of some blocks by group that are not frozen, before ZeRO."""
        return {
            group: blocks.total({block: sizes[group] for block, sizes in self.parameters.items()})
            for group in DATA_PARALLEL
        }

    def padded_elements(self, blocks: StageBlocks) -> dict[str, Array]:
        """The same with the rows that ZeRO adds."""
        return {
            group: blocks.total({block: loads[group].updated for block, loads in self.loads.items()})
            for group in DATA_PARALLEL
        }

    def frozen_bytes(self, blocks: StageBlocks) -> dict[str, Array]:
        """Bytes of frozen parameters of some blocks by group."""
        return {
            group: blocks.total({block: sizes[group] for block, sizes in self.frozen.items()})
            for group in DATA_PARALLEL
        }


def plain(value: Any, at: int) -> Any:
    """A part of a program as words, numbers, lists and tables, for the plan at index `at`."""
    if is_dataclass(value):
        return {f.name: plain(getattr(value, f.name), at) for f in fields(value) if f.name != "batch"}
    if isinstance(value, dict):
        return {" ".join(key) if isinstance(key, tuple) else key: plain(x, at) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [plain(x, at) for x in value if not isinstance(x, Op) or number_at(x.count, at)]
    return value if value is None or isinstance(value, str | bool) else number_at(value, at)


def number_at(value: Array, at: int) -> float:
    """The number of the plan at index `at`; a number that all plans share is not an array over them."""
    numbers = np.ravel(value)
    return float(numbers[at if len(numbers) > 1 else 0])


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
