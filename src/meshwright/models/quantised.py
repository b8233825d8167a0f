"""Frozen weights in 4 or 8 bits: codes, and a scale for each row or for each block of a row.

    nf4    v = table[code] · s      16 levels (QLoRA, Dettmers et al. 2023): quantiles of a normal distribution, scaled to [−1, 1]
                                    s = max|v| of `block` numbers of a row, 64 by default
    int8   v = code · s / 127       s = max|v| of the row
    fp8    v = code · s / 448       code in e4m3, s = max|v| of the row

A block never crosses a row. So the values of a row depend on this row alone, and ranks that hold other rows, or other columns of them, read the
numbers that one device reads. What a rank keeps of a row is one run of bytes: its codes (nf4: two in a byte, the first in the high half), then the
scales of all blocks that its columns touch, in fp32. A weight is a matrix of such bytes, [out, bytes] or [expert, out, bytes]: tensor
parallelism, expert parallelism and ZeRO cut it by rows like any other matrix.

*Double quantisation* (nf4) keeps a scale in one byte: ⌈255 · s / m⌉, with m the largest scale of the row in fp32. Rounding up keeps every number
within its block. It takes 64-value blocks from 4.5 to 4.125 bits per value, and a row's m is spread over its length.

The product multiplies in the dtype of its input: the weight is unpacked for it, and a second time in backward, so that nothing but the
bytes is kept between the two. The base is frozen: it has no gradient.

    y = x Wᵀ        dx = dy W

nf4 is unpacked by an operator (`unpack_nf4`) that `torch.compile` does not look into. Traced, both unpackings of a weight become one, and its codes,
four bytes each, are kept for backward. On a GPU the operator is one kernel (`unpack_kernel`).
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from meshwright.describe.adapter import PACKINGS, SCALE_BYTES, in_words
from meshwright.models.moe import takes_device_counts
from meshwright.models.parts import Product

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
E4M3 = torch.float8_e4m3fn
LARGEST = {"nf4": 1.0, "int8": 127.0, "fp8": torch.finfo(E4M3).max}


@dataclass(frozen=True)
class RowPacking:
    """How the bytes of a row hold `columns` numbers: those from `first` on of a row, in blocks of the format."""

    kind: str
    columns: int
    first: int = 0
    double: bool = False

    @property
    def block(self) -> int:
        return PACKINGS[self.kind].block

    @property
    def offset(self) -> int:
        """The place of the first column in its block."""
        return self.first % self.block if self.block else 0

    @property
    def blocks(self) -> range:
        """The blocks of the row that these columns touch."""
        if not self.block:
            return range(1)
        return range(self.first // self.block, -(-(self.first + self.columns) // self.block))

    @property
    def code_bytes(self) -> int:
        return int(PACKINGS[self.kind].code_bytes(self.columns))

    @property
    def row_bytes(self) -> int:
        return int(PACKINGS[self.kind].row_bytes(self.columns, self.double, self.first))

    def pack(self, rows: Tensor) -> Tensor:
        """The bytes of these columns, given whole rows."""
        codes, scales = quantise(rows, self.kind)
        codes = codes[..., self.first : self.first + self.columns]
        if self.kind == "nf4":
            codes = F.pad(codes, (0, -self.columns % 2))
            codes = codes[..., ::2] << 4 | codes[..., 1::2]
        parts = [F.pad(codes, (0, self.code_bytes - codes.shape[-1]))]
        touched = scales[..., self.blocks.start : self.blocks.stop]
        if self.double:
            largest = scales.amax(-1, keepdim=True)
            steps = (touched * (255.0 / nonzero(largest))).ceil().clamp(max=255.0).to(torch.uint8)
            parts += [F.pad(steps, (0, in_words(len(self.blocks)) - len(self.blocks))), as_bytes(largest)]
        else:
            parts.append(as_bytes(touched))
        return torch.cat(parts, dim=-1)

    def unpack(self, packed: Tensor, dtype: torch.dtype, again: bool = False) -> Tensor:
        """The numbers of packed rows; products of codes and scales are computed in fp32. `again`: in backward."""
        if self.kind == "nf4":
            return unpack_nf4(packed, self.columns, self.first, self.double, dtype, again)
        return self.unpack_by_operators(packed, dtype)

    def unpack_by_operators(self, packed: Tensor, dtype: torch.dtype) -> Tensor:
        values = self.values(packed[..., : self.code_bytes])
        scales = self.scales(packed[..., self.code_bytes :]) / LARGEST[self.kind]
        if not self.block:
            return (values * scales).to(dtype)
        before, after = self.offset, len(self.blocks) * self.block - self.offset - self.columns
        values = F.pad(values, (before, after)) if before or after else values
        wide = (values.unflatten(-1, (-1, self.block)) * scales[..., None]).to(dtype).flatten(-2)
        return wide[..., before : before + self.columns] if before or after else wide

    def values(self, codes: Tensor) -> Tensor:
        """The codes as numbers between −`LARGEST` and `LARGEST`."""
        if self.kind == "nf4":
            pairs = F.embedding(codes.to(torch.int32), pairs_of_codes(codes.device))
            return pairs.flatten(-2)[..., : self.columns]
        return codes[..., : self.columns].view(torch.int8 if self.kind == "int8" else E4M3).to(torch.float32)

    def scales(self, stored: Tensor) -> Tensor:
        if not self.double:
            return stored.contiguous().view(torch.float32)
        steps, largest = stored[..., : len(self.blocks)], stored[..., -SCALE_BYTES:].contiguous().view(torch.float32)
        return steps.to(torch.float32) * (largest / 255.0)


def as_bytes(numbers: Tensor) -> Tensor:
    return numbers.to(torch.float32).contiguous().view(torch.uint8)


def nonzero(scales: Tensor) -> Tensor:
    """The scales, 1 where all numbers of a block are zero."""
    return scales.masked_fill(scales == 0, 1.0)


def quantise(rows: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """The code of each number, one byte each, and the scales [.., blocks] of rows."""
    rows, columns = rows.to(torch.float32), rows.shape[-1]
    size = PACKINGS[kind].block or columns
    blocks = F.pad(rows, (0, -columns % size)).unflatten(-1, (-1, size))
    scales = blocks.abs().amax(-1)
    units = blocks * (LARGEST[kind] / nonzero(scales))[..., None]
    if kind == "nf4":
        codes = torch.bucketize(units, thresholds(rows.device), out_int32=True).to(torch.uint8)
    elif kind == "int8":
        codes = units.round().to(torch.int8).view(torch.uint8)
    else:
        codes = units.clamp(-LARGEST[kind], LARGEST[kind]).to(E4M3).view(torch.uint8)
    return codes.flatten(-2)[..., :columns], scales


@cache
def thresholds(device: torch.device) -> Tensor:
    """The means of neighbouring levels of nf4: a number is rounded to the nearest level, on a threshold to the lower."""
    levels = torch.tensor(NF4, dtype=torch.float32)
    return ((levels[:-1] + levels[1:]) / 2).to(device)


@cache
def levels_of_nf4(device: torch.device) -> Tensor:
    return torch.tensor(NF4, dtype=torch.float32, device=device)


@cache
def pairs_of_codes(device: torch.device) -> Tensor:
    """[256, 2]: the two levels of nf4 in each byte."""
    levels, byte = torch.tensor(NF4, dtype=torch.float32), torch.arange(256)
    return torch.stack((levels[byte >> 4], levels[byte & 15]), dim=1).to(device)


@torch.library.custom_op("meshwright::unpack_nf4", mutates_args=())
def unpack_nf4(packed: Tensor, columns: int, first: int, double: bool, dtype: torch.dtype, again: bool) -> Tensor:
    """`RowPacking.unpack` of nf4. `again` changes nothing but the call: a compiler would make two equal ones one."""
    packing = RowPacking("nf4", columns, first, double)
    if not packed.is_cuda:
        return packing.unpack_by_operators(packed, dtype)
    from meshwright.models import unpack_kernel

    table = levels_of_nf4(packed.device)
    return unpack_kernel.unpack(
        packed, table, columns, packing.code_bytes, packing.offset, packing.block, double, dtype
    )


@unpack_nf4.register_fake
def _(packed: Tensor, columns: int, first: int, double: bool, dtype: torch.dtype, again: bool) -> Tensor:
    return packed.new_empty(*packed.shape[:-1], columns, dtype=dtype)


class _FrozenProduct(torch.autograd.Function):
    """A product with a frozen packed weight, which backward unpacks again. `grouped` products have a weight for each run of rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, packing: RowPacking, product: Product, counts: Any) -> Tensor:
        ctx.save_for_backward(packed)
        ctx.packing, ctx.product, ctx.counts = packing, product, counts
        return product(x, packing.unpack(packed, x.dtype), counts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (packed,) = ctx.saved_tensors
        weight = ctx.packing.unpack(packed, gradient.dtype, again=True)
        return ctx.product(gradient, weight.transpose(-1, -2), ctx.counts), None, None, None, None


class QuantisedProduct:
    """The product of a linear layer, or of stacked experts (with the rows of each expert in place of a bias), whose weight is packed."""

    def __init__(self, packing: RowPacking, product: Product, experts: bool) -> None:
        self.packing, self.product, self.experts = packing, product, experts

    @property
    def takes_device_counts(self) -> bool:
        return takes_device_counts(self.product)

    def __call__(self, x: Tensor, packed: Tensor, bias_or_counts: Any = None) -> Tensor:
        if self.experts:
            return _FrozenProduct.apply(x, packed, self.packing, self.product, bias_or_counts)
        y = _FrozenProduct.apply(x, packed, self.packing, self.product, None)
        return y if bias_or_counts is None else y + bias_or_counts
