"""What a transport does: begin a collective, post sends and receives of tensors, wait for them; and how received data is reduced.

A reduction is applied message by message: into = base ∘ received. `avg` adds, and the result is divided by the number of
ranks at the end; integers are truncated towards zero, as a C division does. torch cannot add the unsigned types of 16 bits and more:
numpy reduces their memory.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from meshwright.comm.call import Call, CallPlace
from meshwright.errors import MeshwrightError, unknown

Combine = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]  # (base, received, into)

OPERATORS = {  # torch and numpy have them under one name
    "sum": "add", "avg": "add", "product": "multiply", "min": "minimum", "max": "maximum",
    "band": "bitwise_and", "bor": "bitwise_or", "bxor": "bitwise_xor",
}  # fmt: skip
REDUCTIONS = tuple(OPERATORS)
BITWISE = ("band", "bor", "bxor")
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
COMPLEX = (torch.complex64, torch.complex128)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool, *UNSIGNED)


def combiner(reduction: str, dtype: torch.dtype) -> Combine:
    """Return the function that combines two tensors of `dtype`; raise if the dtype has no such reduction."""
    if reduction not in OPERATORS:
        raise unknown("MW-COMM-002", "reduction", reduction, REDUCTIONS)
    fits = dtype in INTEGERS or (dtype in FLOATS and reduction not in BITWISE)
    if dtype in COMPLEX:
        fits = reduction in ("sum", "avg", "product")
    if not fits:
        what = f"tensors of {name_of(dtype)} have no reduction '{reduction}'"
        why = "Floating point has no bitwise operations, complex numbers have no order, and 8-bit floats are only moved"
        valid = [r for r in REDUCTIONS if dtype in FLOATS and r not in BITWISE] or ["sum", "avg", "product"]
        raise MeshwrightError("MW-COMM-002", what, why=why, valid=valid)
    name = OPERATORS[reduction]
    if dtype in UNSIGNED:
        operator = getattr(np, name)
        return lambda base, received, into: operator(base.numpy(), received.numpy(), out=into.numpy())
    tensors = getattr(torch, name)
    return lambda base, received, into: tensors(base, received, out=into)


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
