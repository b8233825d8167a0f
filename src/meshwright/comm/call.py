"""The description of a collective that travels with its messages, so that ranks which disagree raise an error.

gloo checks nothing: it accepts a message that is shorter than the receive buffer, and ends the process at one that is
longer. Here every pair of ranks exchanges a header (with shared memory every message has one) with the call's number,
operation, algorithm, dtype, reduction, root and elements, and with the bytes. A rank compares the header
with the call it executes.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from meshwright.errors import MeshwrightError

HEADER_BYTES = 128


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
    def description(self) -> str:
        """All of it but the number, the same for equal calls."""
        parts = [self.operation, f"({self.algorithm})" if self.algorithm else ""]
        parts += [f"of {self.elements} elements" if self.elements else "", self.dtype, self.reduction]
        return " ".join(filter(None, parts)) + (f" root {self.root}" if self.root else "")

    @cached_property
    def packed(self) -> bytes:
        """The header: the words of an error that names the call."""
        return str(self).encode()[:HEADER_BYTES].ljust(HEADER_BYTES)

    def __str__(self) -> str:
        return f"collective {self.sequence}: {self.description}"


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
        raise disagreement(place, f"rank {peer} runs {theirs.decode().strip()}")


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
