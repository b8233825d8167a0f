"""Bugs of lossy gradient reduction, as in `bugs`: training continues, slightly worse, and no exact run shows them."""

from meshwright.describe.sharding import Box
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.numerics.compress import base, schemes


def error_feedback_dropped():
    """The unsent part is dropped instead of added to the next gradient, so small values are never sent."""
    base.Feedback.keep = lambda self, index, error: None


def decoded_with_the_first_ranks_scale():
    """The integers of all ranks are multiplied by the scale of one rank."""
    dequantise = schemes.dequantise

    def with_first_scale(payload, kind, dtype):
        payload = payload.clone()
        payload[:, : schemes.SCALE_BYTES] = payload[:1, : schemes.SCALE_BYTES]
        return dequantise(payload, kind, dtype)

    schemes.dequantise = with_first_scale


def positions_drawn_separately():
    """Each rank draws different random positions, and values of different positions are summed."""
    indices = schemes.RandomK.indices

    def own(self, index, length, device):
        from torch import distributed

        self.seed = distributed.get_rank()
        return indices(self, index, length, device)

    schemes.RandomK.indices = own


def partial_sums_compressed():
    """Partial sums over the sequence are compressed before they are complete."""
    Box.compressible = property(lambda self: True)


def compressed_experts_summed_over_data_ranks():
    """Gradients of different experts are summed in one compressed message."""
    group = Mesh.group
    Mesh.group = lambda self, axis: group(self, "dp_cp" if axis == "expert_dp" else axis)


def owners_rows_by_neighbour():
    """Each owner sums the rows of the next owner."""
    scatter = schemes.Quantised.scatter

    def shifted(self, index, rows, layout, rank, out):
        yield from scatter(self, index, rows.roll(1, 0), layout, rank, out)

    schemes.Quantised.scatter = shifted
