"""The gradient of each rank, computed on one device: every token uses a copy of the parameters that belongs to its rank.

Ranks that hold the same weights have different gradients, each from its tokens, even if attention and routers read all tokens.
One device has only their sum. But our networks use every parameter token by token, so the sum separates once each rank's tokens
use a separate copy:

    y_t = f(x_t, w_r(t))          ∂L/∂w_r = Σ_{t of r} (∂f/∂w)ᵀ ∂L/∂y_t          Σ_r ∂L/∂w_r = ∂L/∂w

Copies share memory, so an update changes all of them. Operations between the uses (attention, routing, the loss) see all tokens:
one forward and one backward compute the gradients of all ranks.

Tokens that are sent to experts belong to the rank that routed them: with tensor parallelism, its share of the tokens of the tp group.
A weight with two uses, such as a tied embedding, has copies for each use. Attention sinks are used query by query; under Ulysses, where
ranks exchange queries for heads, head by head.

An fp8 product has one scale for all tokens of a data-parallel rank, over its context-parallel ranks, so these run as one product; the
gradient of its weight, ĝᵀx̂, still separates by tokens.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from meshwright.describe.layout import Layout
from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.host import replaced
from meshwright.models.attention import SelfAttention, Sinks
from meshwright.models.moe import GroupedLinear, MixtureOfExperts
from meshwright.models.parts import ProductLinear, ProjectionNorm
from meshwright.models.router import Router
from meshwright.models.transformer import LearnedPositions
from meshwright.parallel.context.sequence import token_order
from meshwright.proof.emulation import fp8_products as fp8

Source = tuple[int, ...]  # a rank's place on these axes: whose tokens
AXES = ("replicate", "shard", "cp", "tp")
Rows = dict[Source, torch.Tensor]


def source(layout: Layout, rank: int, *, tp: bool) -> Source:
    """The ranks whose tokens a rank has; without `tp`, those of its full tp group."""
    at = layout.coordinates(rank)
    return tuple(at[axis] if tp or axis != "tp" else 0 for axis in AXES)


def tokens_of(layout: Layout, model: Model, seq: int) -> Rows:
    """The positions of the tokens of each rank in the micro-batch of one device; all ranks have equal shares."""
    plan = layout.plan
    order = token_order(layout, 0, model, plan.microbatch, seq // plan.cp // (plan.tp if plan.sp else 1))
    ranks = layout.group_of("stage", 0)
    return {source(layout, rank, tp=True): rows for rank, rows in zip(ranks, order, strict=True)}


class PerRankGradients:
    """A network in which the tokens of each rank use copies of the parameters: `copies[source][name]`."""

    def __init__(
        self, module: nn.Module, layout: Layout, model: Model, seq: int, device: str = "cpu", scaled: bool = False
    ) -> None:
        self.copies: dict[Source, dict[str, nn.Parameter]] = {}
        length = seq if model.kind == "transformer" else 1
        data = Layout(layout.plan.but(tp=1, sp=False, ep=1, expert_tp=0), layout.order)
        rows = {s: r.to(device) for s, r in tokens_of(data, model, length).items()}
        for path, owner in module.named_modules():
            if isinstance(owner, MixtureOfExperts):
                self._experts(path, owner, {s: r.to(device) for s, r in tokens_of(layout, model, length).items()})
            elif scaled and layout.plan.cp > 1 and isinstance(owner, nn.Linear) and path.startswith("layers."):
                self._replace_scaled(path, owner, rows)
            elif isinstance(owner, Sinks) and layout.plan.cp > 1 and layout.plan.cp_kind == "ulysses":
                self._sinks_by_heads(path, owner, rows, layout.plan)
            elif isinstance(owner, LearnedPositions):
                self._replace(path, owner, "forward", lambda x: rows, of_positions)
            elif not isinstance(owner, GroupedLinear):
                used = "logits" if isinstance(owner, Router) else "forward"
                self._replace(path, owner, used, lambda x: rows, of_tokens)

    def _experts(self, path: str, layer: MixtureOfExperts, rows: Rows) -> None:
        token_R = torch.empty(0, dtype=torch.long)

        def remember(router: nn.Module, given: Any, routing: Any) -> None:
            nonlocal token_R
            token_R = routing.token_R

        def rows_of(x_RI: torch.Tensor) -> Rows:
            return {s: torch.isin(token_R, own_rows).nonzero()[:, 0] for s, own_rows in rows.items()}

        layer.router.register_forward_hook(remember)
        for kind, linear in layer.experts.named_children():
            self._replace(f"{path}.experts.{kind}", linear, "forward", rows_of, of_experts)

    def _sinks_by_heads(self, path: str, owner: Sinks, rows: Rows, plan: Plan) -> None:
        """Under Ulysses a rank has the tokens of all ranks of its cp group, and some heads: those that use its copy."""
        heads = torch.arange(len(owner.weight)) % (len(owner.weight) // plan.tp)
        holder_N = (heads // (len(owner.weight) // plan.tp // plan.cp)).to(owner.weight.device)

        def run(x: torch.Tensor) -> torch.Tensor:
            out_TN = x.new_zeros(x.shape[:-1].numel(), len(holder_N))
            for whose in rows:
                together = torch.cat([own for other, own in rows.items() if other[:2] == whose[:2]])
                tokens_T = x.new_zeros(len(out_TN)).index_fill(0, together, 1.0)
                weight = self._copy(whose, f"{path}.weight", owner.weight)
                out_TN = out_TN + tokens_T[:, None] * (holder_N == whose[2]) * weight
            return out_TN.unflatten(0, x.shape[:-1])

        setattr(owner, "forward", run)  # noqa: B010  mypy takes it for a method

    def _replace(self, path: str, owner: nn.Module, used: str, rows_of: Callable[[Any], Rows], part: Callable) -> None:
        """Make a method of a module run once per rank, on the rows of the rank and with its copies."""
        own = {name: p for name, p in owner.named_parameters(recurse=False) if p.requires_grad}
        use = getattr(owner, used)

        def run(x: Any, *more: Any) -> torch.Tensor:
            rows = rows_of(x)
            order = torch.cat(list(rows.values()))
            shape = (-1, x) if isinstance(x, int) else leading(x, len(order))
            flat = x if isinstance(x, int) else x.flatten(0, len(shape) - 1)
            parts = []
            for whose, own_rows in rows.items():
                with replaced(*((owner, name, self._copy(whose, f"{path}.{name}", p)) for name, p in own.items())):
                    parts.append(part(use, own_rows, flat, *more))
            return torch.cat(parts)[order.argsort()].unflatten(0, shape)

        if next(owner.parameters(recurse=False), None) is not None:
            setattr(owner, used, run)

    def _replace_scaled(self, path: str, owner: nn.Linear, rows: Rows) -> None:
        """As `_replace`, for an fp8 product with one scale for all parts of a data-parallel rank."""
        use, places = owner.forward, dict[Source, list[Source]]()
        repeated = owner.repeated if isinstance(owner, CopiedHeads) else lambda p: p
        for whose in rows:
            places.setdefault(whose[:2], []).append(whose)
        order = torch.cat([rows[whose] for together in places.values() for whose in together])
        whole = {name: nn.Parameter(p.detach(), requires_grad=False) for name, p in owner.named_parameters()}

        def run(x: torch.Tensor) -> torch.Tensor:
            flat, parts = x.flatten(0, 1), []
            for together in places.values():
                own_rows = flat[torch.cat([rows[whose] for whose in together])]
                with replaced(*((owner, name, copy) for name, copy in whole.items())):
                    y = use(own_rows)
                seen = fp8.rounded(own_rows.detach(), fp8.E4M3).split([len(rows[whose]) for whose in together])
                copies = [
                    {
                        name: self._copy(whose, f"{path}.{name}", p)
                        for name, p in owner.named_parameters()
                        if p.requires_grad
                    }
                    for whose in together
                ]
                if owner.weight.requires_grad:
                    made = torch.cat([x @ repeated(copy["weight"]).T for x, copy in zip(seen, copies, strict=True)])
                    y = y + _RoundedBack.apply(made - made.detach())  # nothing but a gradient
                if owner.bias is not None and owner.bias.requires_grad:
                    biases = [repeated(copy["bias"]).expand(len(x), -1) for x, copy in zip(seen, copies, strict=True)]
                    made = torch.cat(biases)
                    y = y + (made - made.detach())
                parts.append(y)
            return torch.cat(parts)[order.argsort()].unflatten(0, x.shape[:2])

        setattr(owner, "forward", run)  # noqa: B010  mypy takes it for a method

    def _copy(self, whose: Source, name: str, parameter: nn.Parameter) -> nn.Parameter:
        copies = self.copies.setdefault(whose, {})
        if name not in copies:
            copies[name] = nn.Parameter(parameter.detach())
            copies[name].grad_dtype = parameter.grad_dtype
        return copies[name]

    def take_gradients(self) -> dict[Source, dict[str, torch.Tensor]]:
        """Return the gradients of all copies and reset them."""
        out = {
            s: {name: p.grad for name, p in copies.items() if p.grad is not None} for s, copies in self.copies.items()
        }
        for copies in self.copies.values():
            for p in copies.values():
                p.grad = None
        return out


class CopiedHeads(ProductLinear):
    """A projection that computes each KV head once per rank that holds it. In fp8 each copy rounds its part of the gradient of the
    head; with one head the sum would be rounded."""

    repeated: Callable[[torch.Tensor], torch.Tensor]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.repeated(self.weight), None if self.bias is None else self.repeated(self.bias))


class CopiedNorm(ProjectionNorm):
    """The norm of the keys of such a projection."""

    repeated: Callable[[torch.Tensor], torch.Tensor]

    def weights(self) -> torch.Tensor:
        return self.repeated(self.weight)


def copy_heads(modules: Iterable[nn.Module], copies: int) -> None:
    """Make attention inside these modules compute each KV head `copies` times."""
    attentions = [part for module in modules for part in module.modules() if isinstance(part, SelfAttention)]
    for attention in attentions if copies > 1 else ():
        width = attention.width

        def repeated(p: torch.Tensor, width: int = width) -> torch.Tensor:
            return p.unflatten(0, (-1, width)).repeat_interleave(copies, 0).flatten(0, 1)

        for linear in (attention.k, attention.v):
            linear.__class__, linear.repeated = CopiedHeads, repeated  # type: ignore[assignment]
        if isinstance(attention.k_norm, ProjectionNorm):
            attention.k_norm.__class__, attention.k_norm.repeated = CopiedNorm, repeated  # type: ignore[assignment]


class _RoundedBack(torch.autograd.Function):
    """Backward rounds the gradient as an fp8 product would."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return fp8.rounded(gradient, fp8.E5M2).to(gradient.dtype)


def leading(x: torch.Tensor, tokens: int) -> tuple[int, ...]:
    """The token dimensions of a tensor: (sample, position), or one."""
    return tuple(x.shape[:1] if x.shape[0] == tokens else x.shape[:2])


def of_tokens(use: Callable, rows: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return use(x[rows])


def of_positions(use: Callable, rows: torch.Tensor, length: int) -> torch.Tensor:
    """The table is the same for every sample: each of its rows is used once per token."""
    return use(length)[rows % length]


def of_experts(use: Callable, rows: torch.Tensor, x_RI: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """Rows stay sorted by expert; some rows of each expert belong to this rank."""
    expert_R = torch.arange(len(counts), device=rows.device).repeat_interleave(torch.tensor(counts, device=rows.device))
    return use(x_RI[rows], expert_R[rows].bincount(minlength=len(counts)).tolist())
