"""The operations that are timed on a device, forward and backward where they have one: parts of a transformer layer, linear layers,
attention, the optimizer.

Operations run in a chain, so that several of them share the cost of starting a backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from meshwright.models.loss import cross_entropy

CHAIN = 4  # operations of one kind in a row

Call = Callable[[], object]


class Case(NamedTuple):
    """One operation to time: its kind, its sizes, how many of them one call runs, and the call."""

    kind: str
    shape: Mapping[str, float]
    repeats: int
    call: Call
    dtype: str = ""  # if it is not that of the measurement


def part_call(part: str, dtype: torch.dtype, tokens: int, width: int, chain: int = CHAIN) -> Call:
    """Forward and backward of a chain of one part of a transformer layer."""
    x = torch.randn(1, tokens, width, dtype=dtype, requires_grad=True)
    start = torch.randn(1, tokens, width, dtype=dtype)
    if part == "loss":
        target = torch.zeros(tokens, dtype=torch.long)

        def loss() -> None:
            cross_entropy(x * 1.0, target).backward()

        return loss
    steps: list[Callable[[torch.Tensor], torch.Tensor]]
    if part == "norm":
        norms = [nn.RMSNorm(width, dtype=dtype) for _ in range(chain)]
        steps = list(norms)
    elif part == "activation":
        steps = [lambda y: F.silu(y) * y] * chain
    elif part == "residual":
        steps = [lambda y: y + x] * chain
    else:
        steps = [_rotation(tokens, width, dtype)] * chain
    return _chain_call(x, steps, start)


def _chain_call(x: torch.Tensor, steps: Sequence[Callable[[torch.Tensor], torch.Tensor]], start: torch.Tensor) -> Call:
    """Forward through the steps, one after the other, and backward from the gradient `start` of the last output."""

    def run() -> None:
        y = x
        for step in steps:
            y = step(y)
        y.backward(start)

    return run


def _rotation(tokens: int, width: int, dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    """Queries and keys of heads of 16, rotated as RoPE does; their halves of the width are adjacent again afterwards."""
    cosine, sine = torch.randn(2, tokens, 16, dtype=dtype)

    def rotated(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cosine + torch.cat((-second, first), dim=-1) * sine

    def step(y: torch.Tensor) -> torch.Tensor:
        heads = y.view(1, -1, tokens, 16)
        return (rotated(heads) + rotated(heads)).view_as(y)

    return step


def linear_call(dtype: torch.dtype, m: int, n: int, k: int, chain: int = CHAIN) -> Call:
    """Forward and backward of linear layers k → n → k → …; weight gradients accumulate."""
    sizes = [(k, n) if i % 2 == 0 else (n, k) for i in range(chain)]
    layers = [nn.Linear(a, b, bias=False, dtype=dtype) for a, b in sizes]
    for layer in layers:
        layer.weight.grad = torch.zeros_like(layer.weight)
    x = torch.randn(1, m, k, dtype=dtype, requires_grad=True)
    return _chain_call(x, layers, torch.randn(1, m, sizes[-1][1], dtype=dtype))


def attention_call(
    dtype: torch.dtype, batch: int, heads: int, seq: int, width: int, device: str = "cpu", chain: int = 2
) -> Call:
    """Forward and backward of causal attention, twice, with the reshapes into heads and back."""
    shape = (batch, seq, heads * width)
    q, k, v = (torch.randn(shape, dtype=dtype, device=device, requires_grad=True) for _ in range(3))
    start = torch.randn(shape, dtype=dtype, device=device)

    def attend(x: torch.Tensor) -> torch.Tensor:
        in_heads = [y.unflatten(-1, (heads, width)).transpose(1, 2) for y in (x, k, v)]
        mixed = F.scaled_dot_product_attention(in_heads[0], in_heads[1], in_heads[2], is_causal=True)
        return mixed.transpose(1, 2).flatten(2)

    def run() -> None:
        y = q
        for _ in range(chain):
            y = attend(y)
        y.backward(start)

    return run


def tile_call(dtype: torch.dtype, batch: int, heads: int, seq: int, width: int) -> Call:
    """Attention to one block of keys in torch operators, forward and backward, outside autograd: scores, log-sum-exp, probabilities, the
    merge with an earlier block, and the gradients."""
    shape, scale = (batch, heads, seq, width), width**-0.5
    q, k, v, grad = (torch.randn(shape, dtype=dtype) for _ in range(4))
    hidden = torch.ones(seq, seq, dtype=torch.bool).triu(1)
    before, merged = torch.randn(shape[:-1], dtype=dtype), torch.randn(shape, dtype=dtype)

    @torch.no_grad()
    def run() -> None:
        rows = slice(0, seq)
        scores = q[:, :, rows].mul(scale) @ k[:, :, rows].transpose(-1, -2)
        scores.masked_fill_(hidden, -torch.inf)
        lse = scores.logsumexp(-1)
        probability = scores.sub_(lse.unsqueeze(-1)).exp_()
        output = (probability @ v[:, :, rows]).reshape(shape)
        after = torch.logaddexp(before, lse)
        weight = (before - after).exp_().unsqueeze(-1)
        (merged[:, :, rows] * weight).add_(output * (lse - after).exp_().unsqueeze(-1))
        delta = (grad * output).sum(-1)
        ds = grad[:, :, rows] @ v[:, :, rows].transpose(-1, -2)
        ds.sub_(delta.unsqueeze(-1)).mul_(probability).mul_(scale)
        gradients = ds @ k, ds.transpose(-1, -2) @ q, probability.transpose(-1, -2) @ grad
        for gradient in gradients:
            gradient.reshape(shape)[:, :, rows].add_(gradient)

    return run


def count_operators(call: Call) -> float:
    """Torch operators that a call dispatches, views included."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counter(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += 1
            return operator(*args, **(kwargs or {}))

    with Counter() as counter:
        call()
    return float(counter.count)


def update_call(values: list[torch.Tensor], fused: bool | None = None) -> Call:
    """The norm of the gradients, clipping and AdamW, tensor by tensor as the training loop runs them."""
    parameters = [nn.Parameter(value) for value in values]
    for p in parameters:
        p.grad = torch.ones_like(p)
    optimizer = torch.optim.AdamW(parameters, lr=1e-6, fused=fused)

    def update() -> None:
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = nn.utils.get_total_norm([g.to(g.dtype) for g in gradients])
        factor = (1.0 / (norm + 1e-6)).clamp(max=1.0)
        for g in gradients:
            g.mul_(factor)
        optimizer.step()

    return update
