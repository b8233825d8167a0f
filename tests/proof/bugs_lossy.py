"""Bugs of gradients sent with loss, in the manner of `bugs`: what trains on, a little worse, and no exact run would show."""

from __future__ import annotations

from meshwright.describe.sharding import Box
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.numerics.compress import base, quantised, sparse


def error_feedback_forgotten():
    """What was not sent is dropped, not added to the next gradient: small values are never heard of."""
    base.Feedback.keep = lambda self, index, error: None


def decoded_with_the_first_ranks_scale():
    """Integers of all ranks are multiplied by one rank's scale."""
    dequantise = quantised.dequantise

    def alike(payload, kind, dtype):
        payload = payload.clone()
        payload[:, : quantised.SCALE_BYTES] = payload[:1, : quantised.SCALE_BYTES]
        return dequantise(payload, kind, dtype)

    quantised.dequantise = alike


def places_drawn_separately():
    """Each rank draws its own random places, and values of different places are added up."""
    indices = sparse.RandomK.indices

    def own(self, index, length, device):
        from torch import distributed

        self.seed = distributed.get_rank()
        return indices(self, index, length, device)

    sparse.RandomK.indices = own


def partial_sums_compressed():
    """Parts of a sum over the sequence are compressed before they are whole."""
    Box.compressible = property(lambda self: True)


def compressed_experts_summed_over_data_ranks():
    """Gradients of different experts meet in one compressed sum."""
    group = Mesh.group
    Mesh.group = lambda self, axis: group(self, "dp_cp" if axis == "expert_dp" else axis)


def owners_rows_by_neighbour():
    """Each owner adds up the rows its neighbour owns."""
    scatter = quantised.Quantised.scatter

    def shifted(self, index, rows, layout, rank, out):
        yield from scatter(self, index, rows.roll(1, 0), layout, rank, out)

    quantised.Quantised.scatter = shifted
