"""Device memory of the buffers of gradient compressors, without the gradients and without the error they keep (`cost.memory`).

In our trainer the collectives of all buckets run during backward and complete after it, so their buffers add up; a unit of ZeRO is reduced
before the next one starts. Frameworks with flat shards free each bucket when it is reduced.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshwright.describe.sharding import DATA_AXES
from meshwright.lower.batch import Batch
from meshwright.lower.compressed import INDEX_BYTES, Options, on_the_wire
from meshwright.lower.gradients import Message, sharded
from meshwright.lower.op import Array


def compression_buffers(b: Batch, group: str, messages: Sequence[Message]) -> tuple[Array, Array]:
    """Bytes of the compressors' buffers: while the collectives of all messages run and one message is compressed or expanded, and
    of that one message alone."""
    whole, shard, _ = DATA_AXES[group]
    scattered, on = sharded(b, group), (b.size(whole) > 1) & np.equal(b.average_every, 0)
    in_units, running, largest = scattered & b.units, np.zeros(b.n), np.zeros(b.n)
    one_at_a_time = in_units | (not b.units)
    for message in messages:
        mine = on & (in_units if message.unit else ~in_units) & (message.count > 0)
        for wire, chosen in b.wires:
            for kind, here in ((False, mine & chosen & ~scattered), (True, mine & chosen & scattered)):
                if wire == "none" or not here.any():
                    continue
                axis, factors = shard if kind else whole, (message.load.first, message.load.second)
                flight, most = buffer_bytes(b, wire, message.load.sent, b.grad_bytes, b.size(axis), kind, factors)
                here = here & (np.asarray(message.load.sent) > 0)
                running += np.where(here & ~one_at_a_time, message.count * flight, 0.0)
                largest = np.maximum(largest, np.where(here, most - np.where(one_at_a_time, 0.0, flight), 0.0))
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
    """Bytes one message takes in device memory besides its gradients and the error kept from the step before: while its collectives
    run, and at most, while it is compressed or expanded. x is gradient + error; when it is compressed it becomes the next error.

        fp16, bf16        waits: the 16-bit copy of wider gradients
        int8, int4, fp8   waits: what is sent and what arrives. At most x, x / scale in fp32 or wider, and two bytes of integers for
                          each value; fp8 is converted through fp32
        top-k             waits: pairs sent, and those of all ranks. At most x, its magnitudes, and the values and indices chosen
        threshold         waits: x and 8-byte indices (a mask under ZeRO) until all counts are known, then like top-k
        random-k          waits: values sent and their 8-byte indices. At most x and a permutation of 8-byte indices
        powersgd          waits: x and the first factors. At most a copy of the largest matrix as well, counted as all of x
    """
    whole, sent = elements * width, on_the_wire(options, wire, elements, width, ranks, scattered, factors)[-1][1]
    match wire:
        case "fp16" | "bf16":
            waits = most = np.where(np.asarray(width) > 2, sent, 0.0) + (sent / ranks if scattered else 0.0)
        case "int8" | "int4" | "fp8":
            waits = 2 * sent
            through = np.where((wire == "fp8") & (np.asarray(width) != 4), 4 * elements, 0.0)
            most = whole + 2 * elements + np.maximum(np.maximum(width, 4) * elements, whole + through)
        case "top-k" | "threshold":
            pairs = sent if scattered else sent / ranks  # of this rank
            count, waits = pairs / (width + INDEX_BYTES), sent + pairs
            most = 2 * whole + (count * (width + 8) if wire == "top-k" else elements)
            most = np.maximum(most, waits + sent / ranks)
            if wire == "threshold":
                waits = np.maximum(waits, whole + (elements if scattered else 8 * count))
        case "random-k":
            count = sent / width / (ranks if scattered else 1)
            waits = sent + 8 * count + (sent / ranks if scattered else 0.0)
            most = whole + 8 * count + np.maximum(8 * elements / (ranks if scattered else 1), 2 * sent)
        case "powersgd":
            first, second = factors
            waits = whole + first * width
            most = 2 * whole + 2 * (first + second) * width
        case _:
            return 0.0, 0.0
    return waits, np.maximum(waits, most)
