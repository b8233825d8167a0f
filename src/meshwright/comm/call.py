"""The description of a collective that travels with its messages, so that ranks which disagree raise an error.

gloo checks nothing: it accepts a message that is shorter than the receive buffer, and ends the process at one that is
longer. Here every pair of ranks exchanges a header (with shared memory every message has one) with the call's number,
operation, algorithm, dtype, reduction, root and elements, and with the bytes. A rank compares the header
with the call it executes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from meshwright.errors import MeshwrightError
from meshwright.programs.collectives import ALGORITHMS, OPERATIONS

LAYOUT = struct.Struct("<IIQHHBBBx")
NAMES = ("", *OPERATIONS)
PROGRAMS = ("", *sorted({name for programs in ALGORITHMS.values() for name in programs}))
DTYPES = (
    "", "float64", "float32", "bfloat16", "float16", "uint8", "int8", "int16", "int32", "int64", "bool", "uint16", "uint32",
    "uint64", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
)  # fmt: skip
REDUCTIONS = ("", "sum", "avg", "product", "min", "max", "band", "bor", "bxor")


def index(names: tuple[str, ...], name: str) -> int:
    return names.index(name) if name in names else 0


@dataclass(frozen=True)
class Call:
    """One collective of a group. `elements` is 0 where ranks may have different numbers (all-to-all with splits)."""

    sequence: int
    operation: str
    algorithm: str
    dtype: str
    reduction: str
    root: int
    elements: int

    @cached_property
    def packed(self) -> bytes:
        return LAYOUT.pack(
            self.sequence & 0xFFFFFFFF,
            0,
            self.elements,
            self.root,
            index(PROGRAMS, self.algorithm),
            index(NAMES, self.operation),
            index(DTYPES, self.dtype),
            index(REDUCTIONS, self.reduction),
        )

    @classmethod
    def unpack(cls, data: bytes) -> Call:
        sequence, _, elements, root, algorithm, operation, dtype, reduction = LAYOUT.unpack(data)
        names = (
            table[number] if number < len(table) else "?"
            for table, number in ((NAMES, operation), (PROGRAMS, algorithm), (DTYPES, dtype), (REDUCTIONS, reduction))
        )
        operation, algorithm, dtype, reduction = names
        return cls(sequence, operation, algorithm, dtype, reduction, root, elements)

    def __str__(self) -> str:
        parts = [f"collective {self.sequence}: {self.operation}", f"({self.algorithm})" if self.algorithm else ""]
        parts += [f"of {self.elements} elements" if self.elements else "", self.dtype, self.reduction]
        return " ".join(filter(None, parts)) + (f" root {self.root}" if self.root else "")


class CallPlace(NamedTuple):
    """The position of a rank in a collective: for errors, and to compare with the sender's place."""

    rank: int
    call: Call
    step: int = 0
    lane: int = 0

    def __str__(self) -> str:
        return f"rank {self.rank}, step {self.step} of {self.call}"


def check_header(place: CallPlace, peer: int, theirs: bytes) -> None:
    """Raise if a peer's message belongs to another collective than ours."""
    if theirs != place.call.packed:
        raise disagreement(place, f"rank {peer} runs {Call.unpack(theirs)}")


def check_bytes(place: CallPlace, peer: int, sent: int, expected: int) -> None:
    """Raise if a peer sends another number of bytes than this rank expects."""
    if sent != expected:
        raise disagreement(place, f"rank {peer} sends {sent} bytes, and rank {place.rank} expects {expected}")


def disagreement(place: CallPlace, what: str) -> MeshwrightError:
    return MeshwrightError(
        "MW-COMM-003",
        f"{place}: {what}",
        why="All ranks of a group must call the same collectives in the same order, with the same sizes and dtypes",
    )


class Lost(MeshwrightError):
    """The error for a peer that ended or does not answer."""

    def __init__(self, place: CallPlace, peer: int, what: str) -> None:
        super().__init__("MW-COMM-004", f"{place}: rank {peer} {what}", exit_code=70)
        self.place, self.peer, self.cause = place, peer, what
