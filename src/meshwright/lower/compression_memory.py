"""Device memory that gradient compressors need beside the gradients: their buffers, and not the error they keep (`cost.memory`).

The collectives of all buckets run during backward and complete after it, so their buffers add up; a unit of ZeRO is reduced before the
next one starts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshwright.describe.sharding import DATA_AXES
from meshwright.lower.batch import Batch
from meshwright.lower.compressed import INDEX_BYTES, LINEAR, Options, on_the_wire
from meshwright.lower.gradients import Message, sharded
from meshwright.lower.op import Array


def compression_buffers(b: Batch, group: str, messages: Sequence[Message]) -> tuple[Array, Array]:
    """Bytes of the compressors' buffers: of all messages whose collectives may run at once, and the largest of one message.

    Buckets are sent during backward and completed after it, so all of them are in flight together; a unit of ZeRO is reduced before
    the next one starts. Casts to 16 bits have no buffers beyond those of uncompressed gradients.
    """
    whole, shard, _ = DATA_AXES[group]
    scattered, on = sharded(b, group), (b.size(whole) > 1) & np.equal(b.average_every, 0)
    in_units, running, largest = scattered & b.units, np.zeros(b.n), np.zeros(b.n)
    for message in messages:
        mine = on & (in_units if message.unit else ~in_units) & (message.count > 0)
        for wire, chosen in b.wires:
            for kind, here in ((False, mine & chosen & ~scattered), (True, mine & chosen & scattered)):
                if wire in LINEAR or not here.any():
                    continue
                axis, factors = shard if kind else whole, (message.load.first, message.load.second)
                flight, most = buffer_bytes(b, wire, message.load.sent, b.grad_bytes, b.size(axis), kind, factors)
                here = here & (np.asarray(message.load.sent) > 0)
                running += np.where(here & ~in_units, message.count * flight, 0.0)
                largest = np.maximum(largest, np.where(here, most - np.where(in_units, 0.0, flight), 0.0))
    return running + largest, largest


def buffer_bytes(
    options: Options,
    wire: str,
    elements: Array,
    width: Array,
    ranks: Array,
    scattered: bool,
    factors: tuple[Array, Array],
) -> tuple[Array, Array]:
    """Bytes one message takes in device memory beside its gradients and the error kept from the step before: while its collectives
    run, and at most, while it is compressed or expanded.

        int8, int4, fp8   the new error, what is sent and what arrives; at most two copies of the gradients (three of padded rows under
                          ZeRO) and two bytes of integers for each
        top-k, threshold  gradient + error, and pairs; at most a second copy for magnitudes (a third for squares)
        random-k          gradient + error, and the values sent; at most a permutation of 8-byte indices, or the new error
        powersgd          gradient + error, and the factors; at most the new error as well (under ZeRO a copy without padding too)
    """
    whole, sent = elements * width, on_the_wire(options, wire, elements, width, ranks, scattered, factors)[-1][1]
    match wire:
        case "int8" | "int4" | "fp8":
            return whole + 2 * sent, (3 if scattered else 2) * whole + 2 * elements
        case "top-k" | "threshold":
            pairs = sent / ranks  # made as values, indices and one message; chosen by indices of 8 bytes
            waiting = whole + sent + 2 * pairs + 8 * pairs / (width + INDEX_BYTES)
            return waiting, waiting + (2 if wire == "threshold" else 1) * whole
        case "random-k":
            values = sent + 8 * sent / width
            return whole + values, whole + np.maximum(8 * elements, whole + values)
        case "powersgd":
            first, second = factors
            return whole + first * width, (3 if scattered else 2) * whole + 2 * (first + second) * width
    return 0.0, 0.0
