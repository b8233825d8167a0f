"""The gradient compressions: their names, the fields of a plan that each one reads, and what it costs on the device.

`COMPRESSIONS` is the only table of compressions. The other parts join by name:

    part       room                  arguments                what it returns
    wire       lower.compressed      a Request                the collectives of one message, with the bytes of the full buffer
    buffers    lower.compressed      a Request, bytes sent    bytes of device memory: while collectives run, and at most
    make       parallel.numerics     options                  a Compressor, which the trainer runs
    emulate    proof.emulation       a plan, backwards        a CompressedSum: the same sum on one device, written a second time
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from meshwright.describe.variants import NameIn, Registry


@dataclass(frozen=True)
class Compression:
    """One way to send gradients, and its parts."""

    name: str
    about: str
    passes: float = 0.0  # over the gradients in device memory, to compress and expand them
    operators: tuple[float, float] = (
        4.0,
        0.0,
    )  # torch operators to compress and expand: of each message, of each parameter
    keeps_error: bool = True  # the unsent part of a gradient is added to the next one
    proportional: bool = False  # bytes are proportional to the elements, however they are cut into messages
    selects: bool = False  # selects the largest values of a message
    by_matrix: bool = False  # sends factors of each matrix, so that a message holds whole parameters
    counts_values: bool = False  # how many values are sent depends on the gradients: ranks first exchange a count
    options: tuple[str, ...] = ()  # fields of a plan that it reads
    wire: Callable[..., Any] | None = None
    buffers: Callable[..., Any] | None = None
    make: Callable[..., Any] | None = None
    emulate: Callable[..., Any] | None = None


RATIO, RANK, THRESHOLD = "compression_ratio", "compression_rank", "compression_threshold"
QUANTISED = (35.0, 0.0)
COMPRESSIONS: Registry[Compression] = Registry(
    "gradient compression",
    Compression("none", "gradients as they are", keeps_error=False, proportional=True),
    Compression("fp16", "a cast; summed in 16 bits", 1.5, keeps_error=False, proportional=True),
    Compression("bf16", "a cast; summed in 16 bits", 1.5, keeps_error=False, proportional=True),
    Compression("int8", "x ≈ q·s with s = max|x| / 127", 3.0, QUANTISED),
    Compression("int4", "x ≈ q·s with s = max|x| / 7", 3.0, QUANTISED),
    Compression("top-k", "the largest values and their indices", 8.0, (23.0, 0.0), selects=True, options=(RATIO,)),
    Compression("powersgd", "two factors of each matrix", 4.0, (6.0, 25.0), by_matrix=True, options=(RANK,)),
    Compression("fp8", "x ≈ q·s with q in E4M3", 3.0, QUANTISED),
    Compression("random-k", "values at indices that are equal on all ranks", 4.0, options=(RATIO,)),
    Compression(
        "threshold", "the values above τ times the root mean square", 5.0, counts_values=True, options=(THRESHOLD,)
    ),
)
CompressionName = Annotated[str, NameIn(COMPRESSIONS)]
