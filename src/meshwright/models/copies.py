"""Copies of tokens for their experts, and the weighted sum of what the experts return.

    spread     copy r is a copy of token[r]                       backward: the gradients of a token's copies are summed
    combine    y_t = Σ over the copies r of token t: w_r · o_r    backward: do_r = w_r · dy_token[r],  dw_r = o_r · dy_token[r]

A sum of rows to given places is a scatter, for which a GPU needs atomic additions. Where every token has exactly k copies, they can be
looked up instead: `place_TK` lists where the copies of each token are, so every direction is a gather and a sum of k rows. Compiled, each of the
three functions in `Sums` is one kernel (`parallel.compile`); eager, it writes the gathered rows to memory first.

Legend: T tokens, K copies of each, R = T·K copies sorted by expert, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.models.router import Routing


def sum_of_copies(rows_RH: Tensor, place_TK: Tensor) -> Tensor:
    return rows_RH[place_TK].sum(1)


def weighted_sum(outputs_RH: Tensor, weight_R: Tensor, place_TK: Tensor) -> Tensor:
    return (outputs_RH[place_TK] * weight_R[place_TK][..., None]).sum(1)


def weighted_sum_backward(
    gradient_TH: Tensor, outputs_RH: Tensor, weight_R: Tensor, token_R: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of the outputs and of their weights."""
    gradient_RH = gradient_TH[token_R]
    return gradient_RH * weight_R[:, None], (outputs_RH * gradient_RH).sum(1)


@dataclass(frozen=True)
class Sums:
    """The functions that sum copies, eager or compiled."""

    of_copies: Callable[[Tensor, Tensor], Tensor] = sum_of_copies
    weighted: Callable[[Tensor, Tensor, Tensor], Tensor] = weighted_sum
    weighted_backward: Callable[..., tuple[Tensor, Tensor]] = weighted_sum_backward

    @property
    def functions(self) -> tuple[Callable[..., Any], ...]:
        return self.of_copies, self.weighted, self.weighted_backward


@dataclass
class Copies:
    token_R: Tensor
    tokens: int
    place_TK: Tensor | None  # None: tokens differ in their number of copies
    sums: Sums

    @classmethod
    def of(cls, routing: Routing, tokens: int, sums: Sums) -> Copies:
        return cls(routing.token_R, tokens, routing.place_TK, sums)

    def spread(self, x_TH: Tensor) -> Tensor:
        if self.place_TK is None:
            return x_TH[self.token_R]
        return _Spread.apply(x_TH, self.token_R, self.place_TK, self.sums)

    def combine(self, outputs_RH: Tensor, weight_R: Tensor) -> Tensor:
        if self.place_TK is not None:
            return _Combine.apply(outputs_RH, weight_R, self.token_R, self.place_TK, self.sums)
        weighted_RH = outputs_RH * weight_R[:, None]
        return outputs_RH.new_zeros(self.tokens, outputs_RH.shape[1]).index_add(0, self.token_R, weighted_RH)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, token_R: Tensor, place_TK: Tensor, sums: Sums) -> Tensor:
        ctx.save_for_backward(place_TK)
        ctx.sums = sums
        return x_TH[token_R]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_RH: Tensor) -> tuple[Tensor, None, None, None]:
        (place_TK,) = ctx.saved_tensors
        return ctx.sums.of_copies(gradient_RH, place_TK), None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, outputs_RH: Tensor, weight_R: Tensor, token_R: Tensor, place_TK: Tensor, sums: Sums
    ) -> Tensor:
        ctx.save_for_backward(outputs_RH, weight_R, token_R)
        ctx.sums = sums
        return sums.weighted(outputs_RH, weight_R, place_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_TH: Tensor) -> tuple[Tensor | None, ...]:
        return *ctx.sums.weighted_backward(gradient_TH, *ctx.saved_tensors), None, None, None
