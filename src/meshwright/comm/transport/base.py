"""What a transport does: begin a collective, post sends and receives of pieces of buffers, wait for them.

A piece is a contiguous one-dimensional tensor, or a numpy array if the transport has `arrays`: slicing an array takes a
tenth of the time of slicing a tensor, and shared memory needs nothing else.

The reductions of a collective: sum, avg, product, min, max and the bitwise ones, for every dtype that has them.

A reduction is applied message by message: out = base ∘ received. `avg` adds, and the result is divided by the number of
ranks at the end; integers are truncated towards zero, as a C division does.

Buffers are tensors or numpy arrays of the same memory (`array_of`). torch cannot add the unsigned types of 16 bits and more:
they are reduced as arrays in both cases. numpy has no bfloat16 and is slow with float16: they are reduced as tensors in
both cases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from meshwright.comm.call import Call, Place
from meshwright.errors import MeshwrightError, unknown

Combine = Callable[[Any, Any, Any], object]  # (base, received, out): tensors or arrays

TORCH = {
    "sum": torch.add, "avg": torch.add, "product": torch.mul, "min": torch.minimum, "max": torch.maximum,
    "band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor,
}  # fmt: skip
NUMPY = {
    "sum": np.add, "avg": np.add, "product": np.multiply, "min": np.minimum, "max": np.maximum,
    "band": np.bitwise_and, "bor": np.bitwise_or, "bxor": np.bitwise_xor,
}  # fmt: skip
REDUCTIONS = tuple(TORCH)
BITWISE = ("band", "bor", "bxor")
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
COMPLEX = (torch.complex64, torch.complex128)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool, *UNSIGNED)
HALVES = (torch.bfloat16, torch.float16)
CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes, of dtypes that numpy lacks


def has_arrays(dtype: torch.dtype) -> bool:
    """Whether numpy reduces the dtype, and not slower than torch."""
    return dtype in INTEGERS or dtype in COMPLEX or (dtype in FLOATS and dtype not in HALVES)


def array_of(tensor: torch.Tensor) -> np.ndarray:
    """The memory of a tensor as an array: of its dtype, or of integers of the same size where numpy lacks the dtype."""
    if has_arrays(tensor.dtype):
        return tensor.numpy()
    return tensor.view(CARRIERS[tensor.element_size()]).numpy()


def combiner(reduction: str, dtype: torch.dtype, arrays: bool = False) -> Combine:
    """Return the function that combines two buffers of `dtype`; raise if the dtype has no such reduction."""
    if reduction not in TORCH:
        raise unknown("MW-COMM-002", "reduction", reduction, REDUCTIONS)
    fits = dtype in INTEGERS or (dtype in FLOATS and reduction not in BITWISE)
    if dtype in COMPLEX:
        fits = reduction in ("sum", "avg", "product")
    if not fits:
        raise MeshwrightError(
            "MW-COMM-002",
            f"tensors of {name_of(dtype)} have no reduction '{reduction}'",
            why="Floating point has no bitwise operations, complex numbers have no order, and 8-bit floats are only moved",
            valid=[r for r in REDUCTIONS if dtype in FLOATS and r not in BITWISE] or ["sum", "avg", "product"],
        )
    on_arrays, on_tensors = NUMPY[reduction], TORCH[reduction]
    if arrays and dtype not in HALVES:
        if reduction in ("min", "max"):  # numpy wants the output of these two by name
            return lambda base, received, out: on_arrays(base, received, out=out)
        return on_arrays
    if arrays:

        def combine(base: np.ndarray, received: np.ndarray, out: np.ndarray) -> None:
            a, b, c = (torch.from_numpy(array).view(dtype) for array in (base, received, out))
            on_tensors(a, b, out=c)  # type: ignore[operator]

        return combine
    if dtype in UNSIGNED:
        return lambda base, received, out: on_arrays(base.numpy(), received.numpy(), out=out.numpy())
    return lambda base, received, out: on_tensors(base, received, out=out)  # type: ignore[operator]


def divide(tensor: torch.Tensor, ranks: int) -> None:
    """Turn a sum into an average, in place."""
    if tensor.dtype in UNSIGNED:
        array = tensor.numpy()
        np.floor_divide(array, ranks, out=array)
    elif tensor.dtype in INTEGERS:
        tensor.copy_(torch.div(tensor, ranks, rounding_mode="trunc"))
    else:
        tensor.div_(ranks)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


Piece = Any  # a tensor or an array
Store = Callable[[Piece, Piece], object]  # (into, received)


class Pending(Protocol):
    """A posted send or receive. A send is complete when its tensors may be overwritten, a receive when its data is applied."""

    def wait(self) -> None: ...


class PendingGroup(NamedTuple):
    """Sends of the same data to several ranks."""

    sends: Sequence[Pending]

    def wait(self) -> None:
        for send in self.sends:
            send.wait()


class Destination(NamedTuple):
    """The destination of received elements: stored into `into`, or with a base combined: into = base ∘ received."""

    into: Piece
    base: Piece | None


class Begin(NamedTuple):
    """A collective that begins: the call, how it combines and stores, the bytes to and from each peer, the largest message.

    `largest` is over all ranks, and the same on all ranks; negative if a rank cannot know it (all-to-all with splits).
    """

    call: Call
    combine: Combine | None
    store: Store
    sent: dict[int, int]
    received: dict[int, int]
    largest: int


class Transport(Protocol):
    """Messages between the ranks of one group. Messages from one rank to another arrive in the order they were sent.

    `receive` may be called before the data may be applied. With `direct` the target may be written at any time from then
    on; without it the data is applied by `wait`. `send` sends the same data to one or more ranks, and returns None if it is complete.
    `posts_early`: a receive that is posted early makes the transfer faster. `arrays`: pieces are numpy arrays.
    """

    rank: int
    size: int
    posts_early: bool
    arrays: bool

    def begin(self, begin: Begin) -> None: ...

    def send(self, peers: Sequence[int], pieces: Sequence[Piece], place: Place) -> Pending | None: ...

    def receive(self, peer: int, pieces: Sequence[Destination], place: Place, direct: bool) -> Pending: ...

    def end(self) -> None: ...

    def close(self) -> None: ...


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous one-dimensional tensor, as a view."""
    return tensor.view(torch.uint8) if tensor.dtype != torch.uint8 else tensor


def apply(
    received: Piece, pieces: Sequence[Destination], combine: Combine | None, store: Store, first: int = 0
) -> None:
    """Store or combine received elements into the pieces, from element `first` of the message on."""
    whole = len(pieces) == 1 and received.nbytes == pieces[0].into.nbytes
    parts = ((pieces[0], received),) if whole else overlapping(pieces, first, received)
    for (into, base), part in parts:
        if base is None:
            store(into, part)
        else:
            combine(base, part, into)  # type: ignore[misc]


def overlapping(pieces: Sequence[Destination], first: int, received: Piece) -> Iterator[tuple[Destination, Piece]]:
    """Cut the elements [first, first + n) of a message at the borders of its pieces."""
    at, last = 0, first + len(received)
    for into, base in pieces:
        low, high = max(at, first), min(at + len(into), last)
        if low < high:
            cut = slice(low - at, high - at)
            yield Destination(into[cut], None if base is None else base[cut]), received[low - first : high - first]
        at += len(into)
