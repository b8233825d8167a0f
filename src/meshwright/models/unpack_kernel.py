"""`RowPacking.unpack` of nf4 on a GPU, in one pass: a thread reads bytes, finds both levels of each in a table of 64 bytes, and writes the products.

In torch operators the codes of every weight are tensors of their own, of four bytes per code, and a compiler keeps them for backward: more than
the weights themselves. The numbers are bit for bit those of the operators.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BYTES = 1024  # of codes per program


@triton.jit
def _kernel(  # type: ignore[no-untyped-def]
    packed, levels, out, columns, row_bytes, code_bytes, offset, double: tl.constexpr, block: tl.constexpr, size: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    codes = packed + row * row_bytes
    scales = codes + code_bytes
    byte = tl.program_id(1) * size + tl.arange(0, size)
    inside = 2 * byte < columns
    code = tl.load(codes + byte, mask=inside, other=0).to(tl.int32)
    first = (offset + 2 * byte) // block
    second = tl.where(2 * byte + 1 < columns, (offset + 2 * byte + 1) // block, first)
    if double:
        largest = tl.load((codes + row_bytes - 4).to(tl.pointer_type(tl.float32)))
        unit = tl.div_rn(largest, 255.0)
        scale_1 = tl.load(scales + first, mask=inside, other=0).to(tl.float32) * unit
        scale_2 = tl.load(scales + second, mask=inside, other=0).to(tl.float32) * unit
    else:
        scale_1 = tl.load(scales.to(tl.pointer_type(tl.float32)) + first, mask=inside, other=0.0)
        scale_2 = tl.load(scales.to(tl.pointer_type(tl.float32)) + second, mask=inside, other=0.0)
    value_1 = tl.load(levels + (code >> 4)) * scale_1
    value_2 = tl.load(levels + (code & 15)) * scale_2
    column = tl.program_id(1) * 2 * size + tl.arange(0, 2 * size)
    value = tl.interleave(value_1, value_2).to(out.dtype.element_ty)
    tl.store(out + row * columns + column, value, mask=column < columns)


def unpack(
    packed: Tensor, levels: Tensor, columns: int, code_bytes: int, offset: int, block: int, double: bool, dtype: torch.dtype
) -> Tensor:  # fmt: skip
    """The numbers of packed rows [.., bytes], of which the first is `offset` numbers behind the beginning of a block."""
    packed = packed.contiguous()
    out = packed.new_empty(*packed.shape[:-1], columns, dtype=dtype)
    rows, row_bytes = packed.numel() // packed.shape[-1], packed.shape[-1]
    if out.numel():
        grid = (rows, triton.cdiv(columns, 2 * BYTES))
        _kernel[grid](packed, levels, out, columns, row_bytes, code_bytes, offset, double, block, BYTES)
    return out
