"""Device memory of the buffers of gradient compressors, without the gradients and without the error they keep (`cost.memory`).

In our trainer the collectives of all buckets run during backward and complete after it, so their buffers add up; a unit of ZeRO is reduced
before the next one starts. Frameworks with flat shards free each bucket when it is reduced.
"""

from collections.abc import Sequence

import numpy as np

from meshwright.describe.sharding import DATA_AXES
from meshwright.describe.variants import COMPRESSIONS
from meshwright.lower.batch import Batch
from meshwright.lower.compressed import Request
from meshwright.lower.gradients import GradientMessage
from meshwright.lower.program import Array


def compression_buffers(b: Batch, group: str, messages: Sequence[GradientMessage]) -> tuple[Array, Array]:
    """Return the bytes of the compressors' buffers while all messages are in transit and one is compressed or expanded, and of
    that one message alone."""
    whole, shard, _ = DATA_AXES[group]
    scattered, on = b.sharded(group), (b.size(whole) > 1) & np.equal(b.average_every, 0)
    in_units, running, largest = scattered & b.units, np.zeros(b.n), np.zeros(b.n)
    one_at_a_time = in_units | (not b.units)
    for message in messages:
        mine = on & (in_units if message.unit else ~in_units) & (message.count > 0)
        for wire, chosen in b.wires:
            for kind, here in ((False, mine & chosen & ~scattered), (True, mine & chosen & scattered)):
                if wire == "none" or not here.any():
                    continue
                axis, factors = shard if kind else whole, (message.load.first, message.load.second)
                request = Request(b, message.load.sent, b.grad_bytes, b.size(axis), kind, factors)
                flight, most = buffer_bytes(wire, request)
                here = here & (np.asarray(message.load.sent) > 0)
                running += np.where(here & ~one_at_a_time, message.count * flight, 0.0)
                largest = np.maximum(largest, np.where(here, most - np.where(one_at_a_time, 0.0, flight), 0.0))
    return running + largest, largest


def buffer_bytes(wire: str, request: Request) -> tuple[Array, Array]:
    """Bytes one message takes in device memory besides its gradients and the error kept from the step before: while its collectives
    run, and at most, while it is compressed or expanded."""
    sent = COMPRESSIONS.part(wire, "wire")(request)[-1][1]
    waits, most = COMPRESSIONS.part(wire, "buffers")(request, sent)
    return waits, np.maximum(waits, most)
