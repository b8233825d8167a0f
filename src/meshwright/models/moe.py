"""A mixture of experts instead of the feed-forward network of a layer: each token visits k of E experts and all shared experts.

    y = Σ_{e chosen} w_e · FFN_e(x) + g · FFN_shared(x)          g = sigmoid(x v) if the model has a shared gate, else 1

With `weigh_inputs` (Llama 4) the weights multiply the input instead: Σ FFN_e(w_e · x).

All E experts have parameters, but a token uses only k of them: k/E of the arithmetic of a dense network of this size. The
experts are three tensors with the expert as first dimension. Copies of tokens are sorted by expert, so that the copies of
one expert are consecutive rows, multiplied in one matrix product.

On a GPU the products of all experts are one kernel, which reads the number of rows of each expert from the device: the host never waits
for the routing. Copies are gathered and combined without atomic sums: where every token has k copies, both directions are a gather.

This file does not know on which ranks tokens and experts are: it asks an `ExpertPlacement`. On one device all are local.
The routed copies are sent before the shared experts run and received after it, so that their compute hides the transfer.

Legend: B batch, S sequence, T = B·S tokens, H hidden, E experts, F expert width, R copies.

Copies of tokens for their experts, and the weighted sum of what the experts return.

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
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from meshwright.describe.model import Model
from meshwright.models.parts import FeedForward, ProductLinear, activation_of, gated_product
from meshwright.models.router import Router, Routing, Tokens


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


Counts = list[int] | Tensor  # rows of each expert
Product = Callable[[Tensor, Tensor, Any], Tensor]


class Dispatch(Protocol):
    """Copies of tokens that were sent to their experts."""

    def receive(self) -> tuple[Tensor, Tensor]:
        """The copies for the experts of this rank, sorted by expert, and the number of copies of each expert."""
        ...

    def combine(self, outputs: Tensor) -> Tensor:
        """Send the outputs of the experts back; returns the outputs of this rank's copies, in the order in which they were sent."""
        ...


class ExpertPlacement(Tokens, Protocol):
    """The tokens that this rank routes, and the dispatch of their copies to experts."""

    def local_tokens(self, x_BSH: Tensor) -> Tensor: ...
    def restore(self, y_TH: Tensor, like_BSH: Tensor) -> Tensor: ...
    def dispatch(self, copies_RH: Tensor, counts_E: Tensor) -> Dispatch: ...


@dataclass
class LocalDispatch:
    copies_RH: Tensor
    counts_E: Tensor

    def receive(self) -> tuple[Tensor, Tensor]:
        return self.copies_RH, self.counts_E

    def combine(self, outputs: Tensor) -> Tensor:
        return outputs


class LocalPlacement:
    """All tokens and experts are on this device."""

    share: float | Tensor = 1.0

    def local_tokens(self, x_BSH: Tensor) -> Tensor:
        self._shape, self._device = (x_BSH.shape[0], x_BSH.shape[1]), x_BSH.device
        return x_BSH.flatten(0, 1)

    def restore(self, y_TH: Tensor, like_BSH: Tensor) -> Tensor:
        return y_TH.view_as(like_BSH)

    def dispatch(self, copies_RH: Tensor, counts_E: Tensor) -> Dispatch:
        return LocalDispatch(copies_RH, counts_E)

    def sequences(self) -> tuple[Tensor, int]:
        rows, length = self._shape
        return torch.arange(rows).repeat_interleave(length).to(self._device), rows

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        return values

    def gather_tokens(self, rows: Tensor) -> Tensor:
        return rows

    def local_rows(self, rows: Tensor) -> Tensor:
        return rows


def grouped(x_RI: Tensor, weight_EOI: Tensor, counts: Counts) -> Tensor:
    """The rows of each expert times its matrix: in one kernel where the counts are on the device, else run by run. There an expert without
    tokens multiplies zero rows, so that its gradient is zero and not None, on every rank."""
    if not isinstance(counts, list):
        return F.grouped_mm(x_RI, weight_EOI.transpose(-2, -1), offs=counts.cumsum(0, dtype=torch.int32))
    runs = zip(x_RI.split(counts), weight_EOI.unbind(0), strict=True)
    return torch.cat([x @ weight.t() for x, weight in runs])


class GroupedLinear(nn.Module):
    """One matrix per expert, [E, out, in]; rows are sorted by expert."""

    def __init__(self, experts: int, d_in: int, d_out: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, d_out, d_in))
        self.bias = nn.Parameter(torch.empty(experts, d_out)) if bias else None
        self.bias_share = 1.0  # factor of the bias on this rank, if the outputs of several ranks are summed
        self.product: Product = grouped

    def forward(self, x_RI: Tensor, counts: Counts) -> Tensor:
        # Weights in a wider dtype than the arithmetic are cast here; those of a quantised base are bytes.
        packed = not self.weight.is_floating_point()
        y_RO = self.product(x_RI, self.weight if packed else self.weight.to(x_RI.dtype), counts)
        if self.bias is None:
            return y_RO
        expert_R = torch.arange(len(counts), device=x_RI.device).repeat_interleave(
            torch.as_tensor(counts, device=x_RI.device), output_size=len(x_RI)
        )
        return y_RO + self.bias.to(x_RI.dtype)[expert_R] * self.bias_share


def takes_device_counts(product: Product) -> bool:
    """Whether a product may be computed by torch's grouped kernel: the plain one, or one that is built on it."""
    return product is grouped or getattr(product, "takes_device_counts", False)


@cache
def has_grouped_product() -> bool:
    return hasattr(F, "grouped_mm") and torch.cuda.get_device_capability() >= (9, 0)


class Experts(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        count, hidden, width = model.experts, model.hidden, model.expert_width
        if model.gated:
            self.gate = GroupedLinear(count, hidden, width, model.ffn_bias)
        self.up = GroupedLinear(count, hidden, width, model.ffn_bias)
        self.down = GroupedLinear(count, width, hidden, model.ffn_bias)
        self.gated, self.activation = model.gated, activation_of(model)
        self.product = gated_product(model)

    def forward(self, x_RH: Tensor, counts_E: Tensor) -> Tensor:
        counts = counts_E if self.in_one_kernel(x_RH, counts_E) else counts_E.tolist()
        if self.gated:
            inner_RF = self.product(self.gate(x_RH, counts), self.up(x_RH, counts))
        else:
            inner_RF = self.activation(self.up(x_RH, counts))
        return self.down(inner_RF, counts)

    def in_one_kernel(self, x_RH: Tensor, counts_E: Tensor) -> bool:
        """Whether torch's grouped product supports these rows."""
        return x_RH.is_cuda and isinstance(counts_E, Tensor) and self.has_one_kernel(x_RH.dtype)

    def has_one_kernel(self, dtype: torch.dtype) -> bool:
        """Whether torch's grouped product supports rows of a dtype on this machine's GPU: bf16, since Hopper."""
        return dtype == torch.bfloat16 and has_grouped_product() and takes_device_counts(self.up.product)


class MixtureOfExperts(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.placement: ExpertPlacement = LocalPlacement()
        self.sums = Sums()
        self.router, self.weighs_inputs = Router(model), model.router.weigh_inputs
        self.experts = Experts(model)
        self.shared = FeedForward(model, model.shared_width) if model.shared_experts else None
        self.shared_scale = ProductLinear(model.hidden, 1, bias=False) if model.shared_gate else None

    def forward(self, x_BSH: Tensor) -> Tensor:
        local_TH = self.placement.local_tokens(x_BSH)
        routing = self.router(local_TH, self.placement)
        copies, weight_R = Copies.of(routing, len(local_TH), self.sums), routing.weight_R
        copies_RH = copies.spread(local_TH)
        if self.weighs_inputs:
            copies_RH, weight_R = copies_RH * weight_R[:, None], torch.ones_like(weight_R)
        dispatch = self.placement.dispatch(copies_RH, routing.counts_E)
        shared_BSH = self._shared(x_BSH)
        outputs_RH = dispatch.combine(self.experts(*dispatch.receive()))
        combined_TH = copies.combine(outputs_RH, weight_R)
        routed_BSH = self.placement.restore(combined_TH, x_BSH)
        return routed_BSH if shared_BSH is None else routed_BSH + shared_BSH

    def keeps_counts_on_device(self, dtype: torch.dtype) -> bool:
        """Whether the host never reads how many tokens an expert has, where all experts are on this GPU."""
        return self.router.dropless and self.experts.has_one_kernel(dtype)

    def _shared(self, x_BSH: Tensor) -> Tensor | None:
        if self.shared is None:
            return None
        y_BSH = self.shared(x_BSH)
        return y_BSH if self.shared_scale is None else y_BSH * self.shared_scale(x_BSH).sigmoid()


def routed_experts(module: nn.Module) -> list[Experts]:
    """The routed experts of all layers of a module."""
    return [part for part in module.modules() if isinstance(part, Experts)]
