"""What a transport does: begin a collective, post sends and receives of tensors, wait for them; and how received data is reduced.

A reduction is applied message by message: into = base ∘ received. `avg` adds, and the result is divided by the number of
ranks at the end; integers are truncated towards zero, as a C division does. torch cannot add the unsigned types of 16 bits and more:
numpy reduces their memory.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import torch

from meshwright.comm.call import Call, CallPlace
from meshwright.errors import MeshwrightError, unknown

Combine = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]  # (base, received, into)

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


def combiner(reduction: str, dtype: torch.dtype) -> Combine:
    """Return the function that combines two tensors of `dtype`; raise if the dtype has no such reduction."""
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
    return partial(combine_arrays if dtype in UNSIGNED else combine_tensors, reduction)


def combine_tensors(reduction: str, base: torch.Tensor, received: torch.Tensor, into: torch.Tensor) -> None:
    TORCH[reduction](base, received, out=into)  # type: ignore[operator]


def combine_arrays(reduction: str, base: torch.Tensor, received: torch.Tensor, into: torch.Tensor) -> None:
    NUMPY[reduction](base.numpy(), received.numpy(), out=into.numpy())


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


class TargetPart(NamedTuple):
    """A range of received elements: stored into `into`, or with a base combined: into = base ∘ received."""

    into: torch.Tensor
    base: torch.Tensor | None


class Destination(NamedTuple):
    """Where the elements of a message go, in order. `direct`: nothing is reduced, and the targets may be written from now on."""

    parts: Sequence[TargetPart]
    combine: Combine | None
    direct: bool

    @property
    def nbytes(self) -> int:
        return sum(part.into.nbytes for part in self.parts)

    def apply(self, received: torch.Tensor, first: int = 0) -> None:
        """Store or combine received elements, from element `first` of the message on."""
        at, count = 0, received.numel()
        for into, base in self.parts:
            size = into.numel()
            low, high = max(at, first), min(at + size, first + count)
            if low < high:
                whole, cut = high - low == size, slice(low - at, high - at)
                data = received if high - low == count else received[low - first : high - first]
                target = into if whole else into[cut]
                if base is None:
                    target.copy_(data)
                else:
                    assert self.combine is not None
                    self.combine(base if whole else base[cut], data, target)
            at += size


class Pending(Protocol):
    """A posted send or receive. A send is complete when its tensors may be overwritten, a receive when its data is applied."""

    def wait(self) -> None: ...


class Transport(Protocol):
    """Messages between the ranks of one group. Messages from one rank to another arrive in the order they were sent.

    `begin` announces a collective with the bytes to and from each peer. A piece of a message is a contiguous one-dimensional tensor. `send`
    sends the same data to one or more ranks. `slice_bytes`: chunks are cut into slices of about this size, so that
    one slice is reduced while the next one is in transfer.
    """

    rank: int
    size: int
    slice_bytes: int

    def begin(self, call: Call, sent: dict[int, int], received: dict[int, int]) -> None: ...

    def send(self, peers: Sequence[int], pieces: Sequence[torch.Tensor], place: CallPlace) -> Sequence[Pending]: ...

    def receive(self, peer: int, to: Destination, place: CallPlace) -> Pending: ...

    def end(self) -> None: ...

    def close(self) -> None: ...


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous one-dimensional tensor, as a view."""
    return tensor.view(torch.uint8) if tensor.dtype != torch.uint8 else tensor
