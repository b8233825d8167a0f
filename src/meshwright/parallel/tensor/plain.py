"""Checks before a module is cut: the layout of its weight, that a layer computes only its product, and that ranks draw the same
dropout masks.

The forward of a row-split linear layer and of an embedding split by vocabulary is replaced by one with a sum over ranks. A layer that
computes more, such as an embedding that scales its output, would silently lose it. So a subclass with its own `forward` is tried: its
output must be that of its weight and bias alone.

Between the split layers all ranks of a group hold the same activations. `nn.Dropout` draws from each rank's generator: with different
seeds the ranks would silently continue with different activations. With equal seeds they stay equal (and drop the same positions of
each rank's heads, which is another draw than one device's, but a valid one).
"""

import zlib
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from meshwright.errors import MeshwrightError
from meshwright.models.parts import ProductLinear

TRIED = 3  # rows in the trial


def is_transposed(part: Any) -> bool:
    """Hugging Face's Conv1D of GPT-2: a linear layer whose weight is [in, out]."""
    return type(part).__name__ == "Conv1D" and hasattr(part, "nf") and part.weight.ndim == 2


def output_dim(part: Any) -> int:
    """The output dimension of a linear layer's weight."""
    return int(is_transposed(part))


def product(part: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    compute = part.product if isinstance(part, ProductLinear) else F.linear
    return compute(x, part.weight.T if is_transposed(part) else part.weight, bias)


@torch.no_grad()
def check_plain(name: str, part: Any) -> None:
    """Raise for a linear layer or an embedding that computes more than its product."""
    plain = (nn.Linear.forward, ProductLinear.forward, nn.Embedding.forward)
    if "forward" not in vars(part) and (type(part).forward in plain or is_transposed(part)):
        return
    weight = part.weight
    if weight.is_meta:
        raise MeshwrightError(
            "MW-TP-004",
            f"'{name}' is a {type(part).__name__} with its own forward, on the meta device",
            why="Without weights it cannot be checked whether it computes more than its product",
            fix="load its weights before splitting",
        )
    if isinstance(part, nn.Embedding):
        given = torch.arange(min(TRIED, len(weight)), device=weight.device)
        expected = F.embedding(given, weight)
    else:
        inner = weight.shape[1 - output_dim(part)]
        given = torch.linspace(-1, 1, TRIED * inner, device=weight.device).view(TRIED, inner).to(weight.dtype)
        expected = product(part, given, part.bias)
    got, close = part.forward(given), 16 * torch.finfo(weight.dtype).eps
    atol = close * float(expected.abs().max())
    if got.shape != expected.shape or not torch.allclose(got, expected, rtol=close, atol=atol):
        raise MeshwrightError(
            "MW-TP-004",
            f"'{name}', a {type(part).__name__}, computes more than its product",
            why="Split, it is replaced by its product summed over ranks: anything else would be lost",
            fix="compute the additional part in a module around it",
        )


def check_dropout_seeds(module: nn.Module, group: ProcessGroup) -> None:
    """Raise for a module with dropout on ranks whose random states differ."""
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
            f"'{drops}' has dropout, and the random states of the ranks differ",
            why="Between split layers all ranks hold the same activations and must draw the same dropout masks",
            fix="call torch.manual_seed with the same number on all ranks of a tensor-parallel group",
        )


def drop_rate(part: nn.Module) -> float:
    if isinstance(part, nn.MultiheadAttention):
        return part.dropout
    return part.p if isinstance(part, nn.Dropout) else 0.0
