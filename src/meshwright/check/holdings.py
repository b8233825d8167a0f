"""What a rank holds of a tensor, read from what PyTorch itself carries: DTensor placements, or nothing, which is a copy of the whole.

Frameworks that carry it elsewhere (Megatron's `partition_dim`, DeepSpeed's fragments) have a reader each in `frameworks`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Shard


@dataclass(frozen=True)
class Holding:
    """The box of a whole tensor that a rank holds. `flat`: only these elements of the box, first and past the last, of its flattened form, as
    optimizers hold that cut parameters without looking at their shape. `partial`: the axes over which values are still to be summed."""

    shape: tuple[int, ...]
    start: tuple[int, ...]
    size: tuple[int, ...]
    flat: tuple[int, int] | None = None
    partial: tuple[str, ...] = ()


def whole(tensor: torch.Tensor) -> Holding:
    return Holding(tuple(tensor.shape), (0,) * tensor.ndim, tuple(tensor.shape))


def local_part(tensor: torch.Tensor) -> tuple[torch.Tensor, Holding]:
    """The values that this rank holds, and which box of the whole they are."""
    if not isinstance(tensor, DTensor):
        return tensor, whole(tensor)
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    local = tensor.to_local()
    local = local.wait() if hasattr(local, "wait") else local
    if coordinate is None:
        return local, Holding(tuple(tensor.shape), (0,) * tensor.ndim, (0,) * tensor.ndim)
    partial = tuple(axis_name(mesh, i) for i, p in enumerate(tensor.placements) if isinstance(p, Partial))
    start = start_of(tensor.shape, [mesh.size(i) for i in range(mesh.ndim)], coordinate, tensor.placements)
    return local, Holding(tuple(tensor.shape), start, tuple(local.shape), partial=partial)


def cut(tensor: torch.Tensor, dim: int, index: int, of: int, stride: int = 1) -> list[tuple[torch.Tensor, Holding]]:
    """The parts of a tensor that is cut along one dimension over ranks; with a stride, each rank has a block of each of as many parts."""
    shape = list(tensor.shape)
    shape[dim] *= of
    out = []
    for k, block in enumerate(tensor.chunk(stride, dim)):
        start = [0] * tensor.ndim
        start[dim] = (k * of + index) * block.shape[dim]
        out.append((block, Holding(tuple(shape), tuple(start), tuple(block.shape))))
    return out


def start_of(
    shape: Sequence[int], sizes: Sequence[int], coordinate: Sequence[int], placements: Sequence[Placement]
) -> tuple[int, ...]:
    """Where a rank's part starts. Placements cut from left to right, a strided one (FSDP over tensor parallelism) after the others."""
    start, length = [0] * len(shape), list(shape)
    cuts = [(i, p) for i, p in enumerate(placements) if getattr(p, "dim", None) is not None]
    for i, placement in sorted(cuts, key=lambda cut: type(cut[1]) is not Shard):
        dim = placement.dim % len(shape)  # type: ignore[attr-defined]
        chunk = -(-length[dim] // sizes[i])
        offset = min(chunk * coordinate[i], length[dim])
        start[dim] += offset
        length[dim] = min(chunk, length[dim] - offset)
    return tuple(start)


def axis_name(mesh: Any, dim: int) -> str:
    return (mesh.mesh_dim_names or ())[dim] if mesh.mesh_dim_names else ("dp" if mesh.ndim == 1 else f"mesh {dim}")


def coordinates_of(tensors: Sequence[torch.Tensor]) -> dict[str, int]:
    """This rank's place along every axis of the meshes that its tensors live on."""
    out: dict[str, int] = {}
    for tensor in tensors:
        if isinstance(tensor, DTensor) and (place := tensor.device_mesh.get_coordinate()) is not None:
            out |= {axis_name(tensor.device_mesh, i): place[i] for i in range(tensor.device_mesh.ndim)}
    return out
