"""A few numbers that stand for a tensor which is too large to store: a linear sketch.

A tensor is seen as a matrix X, its last dimension as columns. Every row and every column has one of 8 groups and a sign, from its index alone; the
sketch is G X C, 64 numbers in float64, where G and C are the matrices of groups and signs. Two products of matrices take a fraction of the time of
the products that made the tensor.

It is linear: the sketch of a sum is the sum of the sketches, and the sketches of the parts that ranks hold sum to that of the whole. So a
factor, a missing sum or the step before are seen in sketches as in the tensors themselves. An element that is off by d is off by d in one number.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import prod

import torch

GROUPS = 8
WIDTH = 1024  # columns of a vector that is seen as a matrix
CHUNK = 1 << 22  # elements at a time


def sketch(
    part: torch.Tensor, shape: Sequence[int], start: Sequence[int], size: Sequence[int], first: int = 0
) -> torch.Tensor:
    """The sketch of a part of a tensor of a shape: of the box at `start`, or of its elements from `first` on."""
    out = torch.zeros(GROUPS, GROUPS, dtype=torch.float64, device=part.device)
    for matrix, rows, column in pieces(part.detach().reshape(-1), shape, start, size, first):
        columns = side(column, matrix.shape[1], 1, matrix.device)
        step = max(CHUNK // matrix.shape[1], 1)
        for begin in range(0, matrix.shape[0], step):
            some = rows[begin : begin + step]
            left = side(some.start, len(some), 0, matrix.device) if isinstance(some, range) else signed(some, 0)
            out += left.T @ matrix[begin : begin + step].double() @ columns
    return out.reshape(-1)


def sketch_each(samples: torch.Tensor) -> torch.Tensor:
    """The sketches of the samples along the first dimension."""
    shape = samples.shape[1:]
    if samples.numel() > CHUNK or (len(shape) < 2 and prod(shape) > WIDTH):
        return torch.stack([sketch(one, shape, (0,) * len(shape), shape) for one in samples])
    matrices = samples.detach().reshape(len(samples), prod(shape[:-1]), shape[-1] if shape else 1).double()
    left = side(0, matrices.shape[1], 0, samples.device).T
    return (left @ matrices @ side(0, matrices.shape[2], 1, samples.device)).reshape(len(samples), -1)


def pieces(
    flat: torch.Tensor, shape: Sequence[int], start: Sequence[int], size: Sequence[int], first: int
) -> Iterator[tuple[torch.Tensor, range | torch.Tensor, int]]:
    """A part as matrices of whole or cut rows: the values, the numbers of the rows, the first column."""
    if len(shape) < 2:
        width, column, position = WIDTH, 0, (start[0] if start else 0) + first
    else:
        width, column, position = size[-1], start[-1], first
    lengths = [min(-position % width, flat.numel())]
    lengths += [n := (flat.numel() - lengths[0]) // width * width, flat.numel() - lengths[0] - n]
    for length, values in zip(lengths, flat.split(lengths), strict=True):
        if length:
            row, at = position // width, position % width
            matrix = values.reshape(-1, min(width, length))
            rows: range | torch.Tensor = range(row, row + len(matrix))
            if len(shape) >= 2 and tuple(size[:-1]) != tuple(shape[:-1]):
                numbers = torch.arange(row, row + len(matrix), device=flat.device)
                rows = index_in_whole(numbers, shape[:-1], start[:-1], size[:-1])
            yield matrix, rows, column + at
        position += length


@lru_cache(maxsize=256)
def side(start: int, count: int, salt: int, device: torch.device) -> torch.Tensor:
    return signed(torch.arange(start, start + count, device=device), salt)


def signed(index: torch.Tensor, salt: int) -> torch.Tensor:
    """Groups and signs of rows or columns: one row for each index, with 1 or -1 in the column of its group."""
    mixed = (index + salt * 0x5851F42D) * -7046029254386353131  # odd: a permutation of the 64-bit integers
    mixed = mixed ^ (mixed >> 29)
    mixed = mixed * -4658895280553007687
    out = torch.zeros(len(index), GROUPS, dtype=torch.float64, device=index.device)
    return out.scatter_(1, ((mixed >> 40) & (GROUPS - 1))[:, None], (1.0 - 2.0 * ((mixed >> 61) & 1))[:, None].double())


def index_in_whole(
    index: torch.Tensor, shape: Sequence[int], start: Sequence[int], size: Sequence[int]
) -> torch.Tensor:
    """The flat index in the whole tensor of elements of a box, given by their flat index in it."""
    out, stride = torch.zeros_like(index), 1
    for n, first, length in zip(reversed(shape), reversed(start), reversed(size), strict=True):
        out += (index % length + first) * stride
        index, stride = index // length, stride * n
    return out
