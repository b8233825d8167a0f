"""Precision: 16-bit parameters and products, 32-bit master weights and sums, and a loss scale against underflow in fp16.

    parameters   bf16 or fp16 in forward and backward: half the bytes to read, gather and keep
    gradients    computed in 16 bits, summed over micro-batches and ranks in `grad_dtype`, fp32 by default
    messages     in `comm_dtype`, if it is narrower than `grad_dtype`
    masters      an fp32 copy that the optimizer updates: w ← w − η·u with |η·u| < 2⁻⁹|w| would not change a bf16 w
    buffers      in a separate dtype (`cast`): running statistics need more bits than weights

Under ZeRO the shards are the masters, and torch casts the gathered parameters. With unsharded parameters the masters are
copies (`Masters`). In both cases a parameter needs 2 + 4 bytes, and 8 for the moments of Adam.

bf16 has fp32's range and needs nothing else. fp16 ends at 65,504 and at 6·10⁻⁸, and many gradients are smaller. So
the loss is multiplied by a scale S before backward, and gradients are divided by S after it:

    overflow        skip the step, S ← S/2
    n steps without S ← 2S

Either all ranks or no rank must skip a step, else they diverge. The global gradient norm is a sum over all ranks, and one
infinite or NaN square makes it infinite or NaN on every rank. So no extra message is needed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.describe.plan import Plan
from meshwright.models.parts import at_least_single as at_least_single
from meshwright.parallel.pieces import Piece

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def narrow(dtype: torch.dtype) -> bool:
    return dtype.itemsize < 4


def cast(module: nn.Module, parameters: torch.dtype | None, buffers: torch.dtype | None = None) -> nn.Module:
    """Convert the floating-point parameters and buffers of a module. Default: parameters are not converted, and buffers get the
    dtype of the parameters. With `buffers`, a buffer is converted directly, not rounded to the parameters' dtype first."""
    before = [(owner, name, b) for owner in module.modules() for name, b in owner.named_buffers(recurse=False)]
    if parameters is not None:
        module.to(parameters)
    for owner, name, buffer in before if buffers is not None else ():
        if buffer.is_floating_point():
            setattr(owner, name, buffer.to(buffers))
    return module


class Masters:
    """Master weights: wide copies of this rank's pieces, on the device or the host. The optimizer updates them; the model gets
    them rounded. Frozen pieces have none: they are in `pieces` as they are.

    With masters on the host (ZeRO-Offload, Ren et al. 2021) 4 bytes of gradient are copied to the host and 2 bytes of parameter
    back, instead of 8 bytes of Adam's moments in both directions. `moved_bytes` counts the copied bytes. On the device a master
    shares the memory of its gradient with the parameter; a gradient of another dtype is converted, unless the optimizer reads
    it as it is (`reads_narrow`). An optimizer that also writes the rounded parameters sets `rounds`.
    """

    def __init__(self, pieces: Iterable[Piece], dtype: torch.dtype | None = None, device: str | None = None) -> None:
        self.sources = list(pieces)
        self.pieces: list[Piece] = []
        self.moved_bytes = 0
        self.on_host = device == "cpu"
        self.pinned = self.on_host and any(p.local.is_cuda for p in self.sources)
        self.reads_narrow = self.rounds = False
        for piece in self.sources:
            if piece.frozen:
                self.pieces.append(piece)
                continue
            wide = torch.empty_like(piece.local, dtype=dtype, device=device, pin_memory=self.pinned or None)
            wide.copy_(piece.local)
            master = nn.Parameter(wide, requires_grad=piece.parameter.requires_grad)
            if self.on_host:
                master.grad = torch.empty_like(wide, pin_memory=self.pinned or None)
            self.pieces.append(replace(piece, parameter=master))

    @property
    def pairs(self) -> list[tuple[Piece, Piece]]:
        """The pieces of the model that have a master, each with it."""
        return [pair for pair in zip(self.sources, self.pieces, strict=True) if not pair[0].frozen]

    @torch.no_grad()
    def take_gradients(self) -> None:
        for source, master in self.pairs:
            gradient: Any = source.gradient
            if self.on_host:
                host: Any = master.parameter.grad
                host.copy_(gradient, non_blocking=self.pinned)
                self.moved_bytes += gradient.nbytes
            elif source.parameter.requires_grad:
                own = gradient if self.reads_narrow else gradient.to(master.local.dtype)
                master.parameter.grad_dtype, master.parameter.grad = own.dtype, own
        self._wait()

    def finish_update(self) -> None:
        """After a step of the optimizer."""
        if not self.rounds:
            self.give_parameters()
        if not self.on_host:
            for _, master in self.pairs:
                master.parameter.grad = None

    @torch.no_grad()
    def give_parameters(self) -> None:
        """Round the masters into the parameters."""
        for source, master in self.pairs:
            source.local.copy_(master.local, non_blocking=self.pinned)
            self.moved_bytes += source.local.nbytes
        self._wait()

    def rounded(self) -> dict[nn.Parameter, Tensor]:
        """The local tensor of the parameter that each master is rounded to."""
        return {m.parameter: s.local for s, m in self.pairs}

    def _wait(self) -> None:
        if self.pinned:
            torch.cuda.current_stream().synchronize()


def masters_of(pieces: list[Piece], plan: Plan) -> Masters | None:
    """The masters that the optimizer should update, or None if it updates the parameters directly."""
    dtype = next((p.local.dtype for p in pieces if not p.frozen), pieces[0].local.dtype)
    wide = torch.float32 if narrow(dtype) and plan.master else dtype
    if plan.offload in ("states", "both"):
        return Masters(pieces, wide, "cpu")
    # Optimizers need gradients in the dtype of the parameter, so wider gradients are copied to masters of the same dtype.
    wider = (
        narrow(dtype)
        and DTYPES[plan.grad_dtype] != dtype
        and not all(isinstance(p.parameter, DTensor) for p in pieces if not p.frozen)
    )
    return Masters(pieces, wide) if wide != dtype or wider else None


@dataclass
class LossScale:
    """The loss scale S and its update rule. It is `dynamic` only for fp16; for other dtypes S is 1."""

    value: float = 1.0
    dynamic: bool = False
    growth_interval: int = 2000
    good_steps: int = 0
    skipped: int = 0

    @classmethod
    def of(cls, dtype: torch.dtype) -> LossScale:
        return cls(2.0**16, True) if dtype == torch.float16 else cls()

    def accept(self, norm: Tensor) -> bool:
        """Whether to take this step, given the global gradient norm; updates S."""
        return self.adapt(bool(norm.isfinite())) if self.dynamic else True

    def adapt(self, finite: bool) -> bool:
        """Update S after a step whose gradients were finite or not; returns whether S allows the step."""
        if not self.dynamic:
            return True
        if not finite:
            self.value, self.good_steps = self.value / 2, 0
            self.skipped += 1
            return False
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            self.value, self.good_steps = self.value * 2, 0
        return True


@torch.no_grad()
def unscale(pieces: Iterable[Piece], scale: float) -> None:
    if scale != 1.0:
        for piece in pieces:
            if piece.parameter.requires_grad:
                piece.gradient.mul_(1.0 / scale)
