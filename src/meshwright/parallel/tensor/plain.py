"""What must be known of a module before it is cut: how a weight lies, that a layer does no more than its product, and that the
ranks draw alike what they drop.

A row-split product and an embedding split by vocabulary are computed anew, with a sum over ranks in the middle. A layer that
does something else besides, as an embedding that scales what it looks up, would silently lose it. So a class with a `forward` of
its own is tried: it must give what its weight and bias alone give.

Between the split layers all ranks of a group hold the same activations. `nn.Dropout` draws from each rank's own generator: seeded
apart, ranks would go on with different ones, in silence. Seeded alike they stay together (and in each rank's heads drop the same
places, which is another draw than one device's, not a wrong one).
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from meshwright.errors import MeshwrightError

TRIED = 3  # rows


def is_transposed(part: Any) -> bool:
    """Hugging Face's Conv1D of GPT-2: a linear layer whose weight is [in, out]."""
    return type(part).__name__ == "Conv1D" and hasattr(part, "nf") and part.weight.ndim == 2


def output_dim(part: Any) -> int:
    """Of a linear layer's weight."""
    return int(is_transposed(part))


def product(part: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return F.linear(x, part.weight.T if is_transposed(part) else part.weight, bias)


@torch.no_grad()
def check_plain(name: str, part: Any) -> None:
    """Refuse a linear layer or an embedding that computes something else than its product."""
    known = type(part).forward in (nn.Linear.forward, nn.Embedding.forward) or is_transposed(part)
    if known and "forward" not in vars(part):
        return
    weight = part.weight
    if weight.is_meta:
        raise MeshwrightError(
            "MW-TP-004",
            f"'{name}' is a {type(part).__name__} with a forward of its own, on the meta device",
            why="Whether it does more than its product cannot be tried",
            fix="split it with its weights",
        )
    if isinstance(part, nn.Embedding):
        given = torch.arange(min(TRIED, len(weight)), device=weight.device)
        expected = F.embedding(given, weight)
    else:
        inner = weight.shape[1 - output_dim(part)]
        given = torch.linspace(-1, 1, TRIED * inner, device=weight.device).view(TRIED, inner).to(weight.dtype)
        expected = product(part, given, part.bias)
    got = part.forward(given)
    close = 16 * torch.finfo(weight.dtype).eps
    if got.shape != expected.shape or not torch.allclose(
        got, expected, rtol=close, atol=close * float(expected.abs().max())
    ):
        raise MeshwrightError(
            "MW-TP-004",
            f"'{name}', a {type(part).__name__}, does more than its product",
            why="Split, it is its product summed over ranks: what else it does would be lost",
            fix="do that in a module around it",
        )


def check_drawn_alike(module: nn.Module, group: ProcessGroup) -> None:
    """Refuse a module that drops on ranks whose generators differ."""
    drops = next((name for name, part in module.named_modules() if drop_rate(part) > 0), None)
    if drops is None:
        return
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
    drawn = float(zlib.crc32(state.numpy().tobytes()))
    ends = torch.tensor([drawn, -drawn], dtype=torch.float64, device=device if device.type == "cuda" else "cpu")
    distributed.all_reduce(ends, distributed.ReduceOp.MAX, group)
    if float(ends.sum()) != 0:
        raise MeshwrightError(
            "MW-TP-007",
            f"'{drops}' drops, and the ranks of the group would draw other places",
            why="Between split layers they hold the same activations, and must drop the same of them",
            fix="torch.manual_seed(…), the same on all ranks of a tensor-parallel group",
        )


def drop_rate(part: nn.Module) -> float:
    if isinstance(part, nn.MultiheadAttention):
        return part.dropout
    return part.p if isinstance(part, nn.Dropout) else 0.0
