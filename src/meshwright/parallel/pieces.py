"""The local parameters of a rank, each with its row of the sharding table.

A *piece* is a parameter of this rank's module and the `Box` that `describe.sharding` gives for it: which part of the full
tensor it is, who holds copies, over which axis its gradient is a partial sum. Four things are read from the box: initial
weights (`models.initialise.Weights`: the box of a drawn tensor, or of one in a file), the sums that complete gradients, the
global norm (each element of the model is counted once, however many ranks hold it), and the proof of parity (compare the
box with one device's). A weight that holds several matrices, each cut separately, has a box for each (`fused`).
"""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.describe.sharding import Box
from meshwright.models.initialise import DrawnWeights, Weights, box_of
from meshwright.models.quantised import RowPacking

LARGE, DRAWN_AT_ONCE = 2**20, 8  # numbers of a tensor that a thread draws, and threads


@dataclass(frozen=True)
class Piece:
    """A parameter of this rank, its box of the full tensor, and the names under which the module uses it: a tied embedding
    has two where both ends of the model are on this stage."""

    box: Box
    parameter: nn.Parameter
    uses: tuple[str, ...]
    packing: RowPacking | None = None  # of a quantised weight: the tensor holds bytes, and the box counts numbers
    fused: tuple[Box, ...] = ()  # several boxes, one after the other along `fused_dim`, of which `box` is the first
    fused_dim: int = 0

    @property
    def boxes(self) -> tuple[Box, ...]:
        return self.fused or (self.box,)

    def views(self, local: Tensor) -> list[tuple[Box, Tensor]]:
        """Each box with its part of this rank's tensor: the parameter, its gradient or a state of the optimizer."""
        if not self.fused:
            return [(self.box, local)]
        lengths = [box.local_shape[self.fused_dim] for box in self.fused]
        return list(zip(self.fused, local.split(lengths, self.fused_dim), strict=True))

    @property
    def name(self) -> str:
        """In the whole model: a tied head's copy is named like the embedding."""
        return self.box.source

    @property
    def frozen(self) -> bool:
        """Whether it belongs to the base of an adapter: no step changes it, and checkpoints do not contain it."""
        return self.box.parameter.frozen

    @property
    def full_shape(self) -> tuple[int, ...]:
        return self.box.full_shape

    @property
    def start(self) -> tuple[int, ...]:
        return self.box.local_start

    @property
    def local(self) -> Tensor:
        return local_tensor(self.parameter)

    @property
    def numbers(self) -> Tensor:
        """The values of this rank's box: the tensor itself, or the numbers that its bytes stand for."""
        return self.local if self.packing is None else self.packing.unpack(self.local, torch.float32)

    @property
    def gradient(self) -> Tensor:
        gradient = self.parameter.grad
        return torch.zeros_like(self.numbers) if gradient is None else local_tensor(gradient)

    def read(self, weights: Weights) -> Tensor:
        """The box of initial weights; of a quantised weight whole rows, on which its scales depend."""
        start, shape = self.start, self.box.local_shape
        if self.packing is not None:
            start, shape = (*start[:-1], 0), (*shape[:-1], self.full_shape[-1])
        return weights.read(self.name, self.full_shape, start, shape)

    @torch.no_grad()
    def take(self, value: Tensor) -> None:
        """Set the tensor to what `read` returned."""
        if self.packing is not None:
            value = self.packing.pack(value.to(self.local.device))
        self.local.copy_(value)

    def part_of(self, full: Tensor) -> Tensor:
        """This piece of a full tensor."""
        return box_of(full, self.start, self.local.shape)


class PlainPieces:
    """The tensors that the optimizer updates if there are no masters: the pieces, with the local shard of a DTensor as a plain parameter that shares
    its memory. torch takes several times as long to run an operator on a DTensor as on its shard."""

    def __init__(self, pieces: list[Piece]) -> None:
        self.shards = [(p, replace(p, parameter=shard_of(p))) for p in pieces if isinstance(p.parameter, DTensor)]
        plain_of = {id(p): plain for p, plain in self.shards}
        self.plain = [plain_of.get(id(p), p) for p in pieces]

    @property
    def pieces(self) -> list[Piece]:
        self._share_memory()
        return self.plain

    def take_gradients(self) -> None:
        self._share_memory()
        for piece, plain in self.shards:
            plain.parameter.grad = None if piece.parameter.grad is None else piece.gradient

    def _share_memory(self) -> None:
        """Once more, because `fully_shard` moves a shard that it pads, in the first forward."""
        for piece, plain in self.shards:
            plain.parameter.data = piece.local.detach()

    def finish_update(self) -> None:
        """The parameters share the memory of what was updated. Gradients are let go: the model frees them too."""
        for _, plain in self.shards:
            plain.parameter.grad = None


def shard_of(piece: Piece) -> nn.Parameter:
    return nn.Parameter(piece.local.detach(), requires_grad=piece.parameter.requires_grad)


def local_tensor(tensor: Tensor) -> Tensor:
    """The part of a DTensor on this rank. Outside autograd: within it each call costs 25 µs, which a step pays for each parameter several times."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def pieces_of(module: nn.Module, boxes: Sequence[Box], packings: Mapping[str, RowPacking] | None = None) -> list[Piece]:
    """The pieces of one stage, in the order in which the module registers its parameters; `packings` of quantised weights, by name."""
    table = {box.name: box for box in boxes}
    uses: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        uses.setdefault(parameter, []).append(name)
    packings = packings or {}
    pieces = [Piece(table[n[0]], parameter, tuple(n), packings.get(n[0])) for parameter, n in uses.items()]
    for piece in pieces:
        local, expected = tuple(piece.local.shape), piece.box.local_shape
        expected = expected if piece.packing is None else (*expected[:-1], piece.packing.row_bytes)
        assert local == expected, f"{piece.name} is {local}; the table says {expected}"
    return pieces


def cut_to_boxes(module: nn.Module, boxes: Iterable[Box]) -> None:
    """Replace the parameters of a module on the meta device that have a box by parameters of the box's shape."""
    table = {box.name: box for box in boxes}
    for prefix, owner in module.named_modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            box = table.get(f"{prefix}.{name}")
            if box is not None:
                cut = nn.Parameter(parameter.new_empty(box.shape), requires_grad=parameter.requires_grad)
                owner.register_parameter(name, cut)


def materialise(module: nn.Module, device: str) -> None:
    """Allocate the memory of a module on the meta device. Unlike `to_empty`, a weight shared by two modules stays shared."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for owner in module.modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            if parameter not in made:
                empty = torch.empty_like(parameter, device=device)
                made[parameter] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            owner.register_parameter(name, made[parameter])


@torch.no_grad()
def initialise(pieces: list[Piece], weights: Weights) -> None:
    """Set every piece to its box of the initial weights. Drawing large tensors takes seconds per billion numbers, so some are drawn at once, by
    threads."""
    drawn, large = isinstance(weights, DrawnWeights), list[Piece]()
    for piece in pieces:
        if drawn and prod(piece.full_shape) >= LARGE:
            large.append(piece)
        else:
            piece.take(piece.read(weights))
    with ThreadPoolExecutor(DRAWN_AT_ONCE) as pool:
        for some in (large[i : i + DRAWN_AT_ONCE] for i in range(0, len(large), DRAWN_AT_ONCE)):
            for piece, value in zip(some, pool.map(lambda piece: piece.read(weights), some), strict=True):
                piece.take(value)
