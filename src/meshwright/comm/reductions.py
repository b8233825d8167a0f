"""The reductions of a collective: sum, avg, product, min, max and the bitwise ones, for every dtype that has them.

A reduction is applied message by message: out = base ∘ received. `avg` adds, and the result is divided by the number of
ranks at the end; integers are truncated towards zero, as a C division does.

Buffers are tensors or numpy arrays of the same memory (`array_of`). torch cannot add the unsigned types of 16 bits and more:
they are reduced as arrays in both cases. numpy has no bfloat16 and is slow with float16: they are reduced as tensors in
both cases.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

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
