"""`send`, `recv` and `recv` from any rank, over gloo, with the size compared.

A message is an envelope with its size and dtype, and the data if it fits; larger data follows under a tag that contains
its size. So data never meets a receive of another size: gloo would accept it if it is shorter, and end the process if
it is longer. Both are posted at once, and gloo transfers them while the rank computes.

Tensors of a GPU on their way through the backend, which moves tensors of the CPU: copied to pinned host memory and back.

    call    waits until the caller's stream has written the tensor, and copies it to the host: the program runs on the copy
    wait    waits for the program and copies its result to the device; when it returns, every stream can read it

So several ranks can share one GPU (`train --share-device`): the strategies run their GPU code, with its streams and kernels, and
exchange tensors as on several GPUs, slower by the copies. It is for tests; between GPUs NCCL moves tensors without the host.
"""

import struct
from collections.abc import Callable
from typing import Any

import torch

from meshwright.comm.transport.base import bytes_of, name_of
from meshwright.comm.transport.point_to_point import reason
from meshwright.comm.work import Deferred
from meshwright.errors import MeshwrightError


def is_staged(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on a device and has to be copied to the host."""
    return not tensor.is_cpu


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy on the host of what the current stream has written."""
    host = host_buffer(tensor)
    host.copy_(tensor.detach())
    return host


def host_buffer(tensor: torch.Tensor) -> torch.Tensor:
    """An uninitialised contiguous host tensor of the same shape."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")


HEAD = struct.Struct("<Q16s")  # bytes of the tensor, and its dtype
ENVELOPE = 1024
FITS = ENVELOPE - HEAD.size
TAGS, TAG_SPACE, SIZE_SPACE = 2**27, 2**20, 2**29


class PeerMessages:
    """The point-to-point operations of a group. `fail` publishes an error and returns the one to raise."""

    def __init__(self, gloo: Any, rank: int, timeout: Any, fail: Callable[[MeshwrightError], MeshwrightError]) -> None:
        self.gloo, self.rank, self.timeout, self.fail = gloo, rank, timeout, fail

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Deferred:
        flat = to_host(tensor) if is_staged(tensor) else tensor.detach().contiguous()
        data = bytes_of(flat.view(-1))
        box = torch.zeros(ENVELOPE, dtype=torch.uint8)
        head = HEAD.pack(data.numel(), name_of(tensor.dtype).encode())
        box.numpy()[: HEAD.size] = memoryview(head)
        if data.numel() <= FITS:
            box[HEAD.size : HEAD.size + data.numel()].copy_(data)
        works = [self.gloo.send([box], peer, envelope_tag(tag))]
        if data.numel() > FITS:
            works.append(self.gloo.send([data], peer, data_tag(tag, data.numel())))

        def complete() -> None:
            for work in works:
                self.wait(work, peer, "send")
            works.append((box, data))  # gloo reads them until here

        return Deferred(complete, [tensor])

    def receive(self, tensor: torch.Tensor, peer: int | None, tag: int) -> Deferred:
        """Receive from one rank, or from any if `peer` is None."""
        box = torch.empty(ENVELOPE, dtype=torch.uint8)
        staged = is_staged(tensor)
        flat = (host_buffer(tensor) if staged else tensor.detach().contiguous()).view(-1)
        data = bytes_of(flat)
        large = data.numel() > FITS
        following: Any = None
        if peer is None:
            work = self.gloo.recv_anysource([box], envelope_tag(tag))
        else:
            work = self.gloo.recv([box], peer, envelope_tag(tag))
            following = self.gloo.recv([data], peer, data_tag(tag, data.numel())) if large else None

        def complete() -> None:
            self.wait(work, peer, "recv")
            source = work._source_rank() if peer is None else peer
            handle.source = source
            size, dtype = HEAD.unpack_from(box.numpy().tobytes())
            self.compare(size, dtype.decode().rstrip("\0"), tensor, source)
            if large:
                then = following or self.gloo.recv([data], source, data_tag(tag, size))
                self.wait(then, source, "recv")
            else:
                data.copy_(box[HEAD.size : HEAD.size + size])
            if flat.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(flat.view(tensor.shape))

        handle = Deferred(complete, [tensor])
        return handle

    def compare(self, size: int, dtype: str, tensor: torch.Tensor, source: int) -> None:
        expected = tensor.numel() * tensor.element_size()
        if size != expected or dtype != name_of(tensor.dtype)[:16]:
            needed = f"rank {self.rank} expects {expected} bytes of {name_of(tensor.dtype)}"
            what = f"rank {self.rank}, recv: rank {source} sends {size} bytes of {dtype}, and {needed}"
            why = "The tensors of a send and its recv must have the same size and dtype"
            raise self.fail(MeshwrightError("MW-COMM-003", what, why=why))

    def wait(self, work: Any, peer: int | None, name: str) -> None:
        try:
            work.wait(self.timeout)
        except RuntimeError as error:
            who = "no rank" if peer is None else f"rank {peer}"
            what = f"rank {self.rank}, {name}: {who} {reason(error)}"
            raise self.fail(MeshwrightError("MW-COMM-004", what, exit_code=70)) from error


def envelope_tag(tag: int) -> int:
    return TAGS + tag % TAG_SPACE


def data_tag(tag: int, size: int) -> int:
    """A tag for messages of one size: messages of different sizes cannot meet."""
    return SIZE_SPACE + (tag * 1_000_003 + size) % SIZE_SPACE
