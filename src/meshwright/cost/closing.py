"""The time of the end of a step, once per step: the reduction of gradients behind the last backward, clipping, the update, and the gather of
sharded parameters."""

import numpy as np

from meshwright.cost import compute
from meshwright.cost.collective import CollectiveTimes
from meshwright.cost.phase import AXIS_OF, RankTime, in_units, together, unit_overlap
from meshwright.describe.accelerator import Accelerator
from meshwright.describe.cluster import Cluster
from meshwright.describe.sharding import DATA_AXES
from meshwright.describe.sharding.boxes import TENSOR_AXES, axes_of
from meshwright.describe.stack import Stack
from meshwright.lower.program import DATA_PARALLEL, EXCHANGE, ORTHOGONALISE, Array, Batch, Op, StepProgram, present

HOST_RATE = 25e9  # bytes/s of an optimizer that runs on the host


def closing_time(program: StepProgram, cluster: Cluster, network: CollectiveTimes, slow: RankTime) -> dict[str, Array]:
    """Seconds of the gradient reduction behind the last backward, clipping, the update, and the gather of sharded parameters."""
    b, device = program.batch, cluster.accelerator
    reduce, gather, compress, update, last, hooks = (np.zeros(b.n) for _ in range(6))
    matrices = MuonTime()
    after: dict[str, Array] = {"tp": 0.0, "pp": 0.0, "ep": 0.0}  # reductions that wait for the data-parallel ones
    for op in program.closing:
        seconds = network.time(op) if op.axis else compute.memory_time(device, op) * b.stack.elementwise
        if b.stack.unit_launch and not b.stack.asynchronous and op.part in DATA_PARALLEL and op.axis:
            hooks = hooks + op.count * np.where(in_units(b, op.part), b.stack.unit_launch, 0.0)
        if op.kind == "host":
            update = update + op.count * compute.host_copy_time(device, op)
        elif op.part == "optimizer":
            took = op.count * _update_time(b, op, seconds if op.axis else _on_device(b, device, op))
            update = update + took
            matrices.add(op, took)
        elif op.name in ("compress", "average-parameters"):  # never overlaps
            compress = compress + op.count * (seconds + _compress_time(b.stack, device, op))
        elif op.part == "closing":
            after[AXIS_OF[op.axis]] = after[AXIS_OF[op.axis]] + op.count * seconds
        elif op.name == "gather-parameters":
            gather = gather + op.count * seconds
            if b.stack.shard_copy:
                gather = b.full(together(b.stack, gather, (op.count > 0) * op.launches * b.stack.shard_copy))
        else:
            reduce = reduce + op.count * seconds
            last = np.maximum(last, np.where(op.count > 0, seconds, 0.0))
    rounds = np.where(b.reduce_each, np.maximum(b.microbatches, 1.0), 1.0)
    blocks = present(b.zero >= 1) and not unit_overlap(b.stack)
    overlaps = b.overlap["dp"] * np.where(in_units(b, "dense"), 0.0, 1.0) if blocks else b.overlap["dp"]
    if b.stack.zero_reduction == "whole":
        overlaps = overlaps * ~b.reduced_whole
    window = b.stack.hides * (slow.i + slow.w) * overlaps * rounds
    hidden = np.minimum(reduce, window)
    tail = np.maximum(last - (reduce - hidden), 0.0)
    exposed = reduce - hidden + tail + b.stack.compute_slowdown * hidden
    late = gather - np.minimum(gather, b.stack.hides * slow.f * overlaps * b.prefetch * b.stack.gathers_ahead)
    exposed = exposed + late + compress + hooks
    return {
        **after,
        "after": sum(after.values()),
        "dp": exposed,
        "optimizer": update - matrices.hidden(b) * (1 - b.stack.compute_slowdown),
        "reduce": reduce + gather,
        "tail": tail,
        "unhidden": reduce - hidden + late,
    }


class MuonTime:
    """Seconds of Muon's messages over each axis and of its products. Messages run behind the products of other rounds:

        hidden = min(Σ messages · (R − d) / R, hides · products)

    of R rounds, of which the first d have nothing to hide behind on the way there, and the last d on the way back."""

    def __init__(self) -> None:
        self.messages: dict[str, Array] = {}
        self.rounds: dict[str, Array] = {}
        self.products: Array = 0.0

    def add(self, op: Op, seconds: Array) -> None:
        if op.name == EXCHANGE:
            self.messages[op.axis], self.rounds[op.axis] = seconds, op.count / 2  # there and back
        elif op.name == ORTHOGONALISE:
            self.products = self.products + seconds

    def hidden(self, b: Batch) -> Array:
        """Seconds of messages that cost no time."""
        behind = np.zeros(b.n)
        for shard, tensor in map(axes_of, DATA_AXES):
            by_tensor = self.rounds.get(tensor, np.zeros(b.n)) > 0
            for axis in {shard, tensor} & {*self.messages}:
                rounds = np.maximum(self.rounds[axis], 1.0)
                share = np.maximum(1 - turns_ahead(axis, by_tensor) / rounds, 0.0)
                behind = behind + self.messages[axis] * share
        return np.minimum(behind, b.stack.hides * self.products) * b.overlap["dp"]


def turns_ahead(axis: str, by_tensor: Array) -> Array:
    """Return how many rounds before its products a round's boxes leave over an axis, and how many rounds later they are back. ZeRO's boxes then still
    have to cross the tensor-parallel axis, if the matrix is cut there too."""
    return 1.0 if axis in TENSOR_AXES.values() else np.where(by_tensor, 2.0, 1.0)


def _on_device(b: Batch, device: Accelerator, op: Op) -> Array:
    """Seconds of an optimizer operation without its launches: a pass over the states, or the products of Muon."""
    if op.kind == "gemm":
        return compute.gemm_time(device, op.dtype or b.workload.precision, op) / b.stack.products
    return compute.update_time(device, op) * b.stack.elementwise


def _update_time(b: Batch, op: Op, seconds: Array) -> Array:
    """Seconds of an optimizer operation: launched on the device, or run by the host if the states are offloaded."""
    stack = b.stack
    host = op.launches * (stack.update_launch or stack.launch)
    launched = seconds if op.axis else np.maximum(seconds, host) if stack.asynchronous else seconds + host
    return np.where(b.offload_states & (op.name == "update"), op.bytes / HOST_RATE, launched)


def _compress_time(stack: Stack, device: Accelerator, op: Op) -> Array:
    """Seconds of compressing besides its memory traffic: selecting, and the host's launches where the host computes."""
    host = 0.0 if stack.asynchronous or op.axis else op.launches * (stack.update_launch or stack.launch)
    return host + op.selected_from * device.efficiency.selection


def host_update_time(device: Accelerator, ops: list[Op]) -> Array:
    """Seconds of an update that the host runs: the update itself, and the copies of gradients and parameters."""
    copied = sum(op.bytes for op in ops if op.kind == "host")
    return sum(op.bytes for op in ops if op.name == "update") / HOST_RATE + copied / device.host_bandwidth
