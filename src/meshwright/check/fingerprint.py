"""Hashes of bits: equal tensors have equal hashes on all ranks and devices, whatever the order of the sums. Random states are only read.

The bits of a tensor are read as 64-bit integers, in rows of `COLUMNS`. Columns are summed, and their sums are multiplied with odd numbers of
their own and summed. Integer sums that wrap are exact in any order, so one changed bit always changes the hash.
"""

import hashlib
from collections.abc import Sequence

import torch

COLUMNS = 1024
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits_hash(tensor: torch.Tensor) -> torch.Tensor:
    """A 64-bit integer, on the tensor's device."""
    flat = tensor.detach().contiguous().view(-1)
    flat = torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
    bits = flat.view(BITS[flat.element_size()])
    each = 8 // bits.element_size()
    if bits.storage_offset() % each:  # not where a 64-bit integer may begin
        bits = bits.clone()
    row = COLUMNS * each
    end = bits.numel() // row * row
    factors = torch.arange(1, COLUMNS * 8 + 1, device=bits.device) * -7046029254386353131 | 1
    columns = bits[:end].view(torch.int64).view(-1, COLUMNS).sum(0)
    rest = bits[end:].long()
    return (columns * factors[:COLUMNS]).sum() * 3 + (rest * factors[: rest.numel()]).sum() + bits.numel()


def tensors_hash(tensors: Sequence[torch.Tensor]) -> str | None:
    """Of several tensors; None of none."""
    if not tensors:
        return None
    values = [bits_hash(tensor).cpu() for tensor in tensors]
    return digest(repr([*torch.stack(values).tolist(), *(tuple(tensor.shape) for tensor in tensors)]).encode())


def random_states() -> dict[str, str]:
    """Of torch's default generators, from which dropout draws: a hash of each."""
    states = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return {name: digest(state.numpy().tobytes()) for name, state in states.items()}


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
