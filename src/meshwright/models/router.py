"""The router: which experts a token visits, and the weight of each expert's output.

    scores      s = softmax(x W) over the experts, or sigmoid(x W) per expert (DeepSeek-V3)
    token       each token takes the k experts of highest s + b; the weights are the s chosen, scaled to sum to one
                if k > 1. The balancing bias b affects the choice, not the weights
    groups      tokens may choose among the experts of their best groups only, so that few nodes are visited (DeepSeek)
    expert      each expert takes the C = c·T·k/E tokens of highest s (Zhou et al. 2022): balanced by design, but the
                routing of a token depends on later tokens, so generation differs from training
    capacity    c > 0: an expert keeps at most C = ⌈c·T·k/E⌉ copies, those of highest s; the others are dropped
                and pass only through the residual. c = 0 is dropless
    balance     α·E·Σ_e f_e P_e, f_e the share of choices of expert e, P_e the mean score (Switch, GShard), over
                all tokens routed together, or per sequence and then averaged (DeepSeek's `seq_aux`);
                β·mean (log Σ exp(x W))² keeps logits small (z-loss, ST-MoE); or without a loss: after each step
                b_e ← b_e + γ·sign(mean load − load_e), outside the gradient (DeepSeek-V3)

T, f and P count *all* tokens that are routed together, on all ranks: the mean over ranks of f·P is not f·P of the mean.
The classic capacity rule, first come first served, drops late tokens and depends on the layout. The rule by score does
not; ties are resolved by the order of the batch. With gradient accumulation the tokens routed together are one
micro-batch of every rank, and the losses are averaged over micro-batches; b is updated by the load of the whole step.

Legend: T tokens, H hidden, E experts, K experts per token, R copies of tokens, one for each expert that a token visits.
"""

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from meshwright.describe.model import Model
from meshwright.describe.shape_parts import RouterOptions
from meshwright.models.wide_products import widened_linear


class Tokens(Protocol):
    """All tokens that are routed together, on all ranks. `rows` has one row per token of this rank."""

    share: float | Tensor  # weight of these tokens' loss in the loss of the step

    def sequences(self) -> tuple[Tensor, int]:
        """The index of the sequence of each token of this rank, among all sequences routed together, and the number of sequences."""
        ...

    def sum_over_ranks(self, values: Tensor) -> Tensor: ...
    def gather_tokens(self, rows: Tensor) -> Tensor: ...
    def local_rows(self, rows: Tensor) -> Tensor: ...


@dataclass
class Routing:
    """Copies of tokens, sorted by expert: the token of each copy, the weight of its expert's output, and the number of
    copies per expert. `place_TK` lists where the copies of each token are; None if tokens differ in their number of copies."""

    token_R: Tensor
    weight_R: Tensor
    counts_E: Tensor
    place_TK: Tensor | None = None


class Router(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        options: RouterOptions = model.router
        self.experts, self.k, self.options = model.experts, model.top_k, options
        self.score = options.score or ("sigmoid" if model.balance_bias else "softmax")
        normalise = model.top_k > 1 if options.normalise is None else options.normalise
        self.normalise = options.choice == "token" and normalise
        self.weight = nn.Parameter(torch.empty(model.experts, model.hidden))
        self.product = widened_linear
        self.bias = nn.Parameter(torch.empty(model.experts)) if model.router_bias else None
        # A parameter without a gradient: saved and sharded like the others, and updated by `balance`.
        self.balance_bias = (
            nn.Parameter(torch.empty(model.experts), requires_grad=False) if model.balance_bias else None
        )
        self.load: Tensor | None = None  # [2, E], of this step so far: copies chosen, copies dropped

    def forward(self, x_TH: Tensor, tokens: Tokens) -> Routing:
        route = self.route_all if self.dropless else self.route_some
        return Routing(*route(self.logits(x_TH), tokens, x_TH.dtype))

    def route_all(self, logits_TE: Tensor, tokens: Tokens, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """The fields of a `Routing` in which every token visits k experts. The number of copies is known, so the host does not wait for it, and
        this can be one compiled graph; they are sorted by expert as short integers, of which a GPU sorts 8 bits in a pass."""
        scores_TE = self.scores(logits_TE)
        with torch.no_grad():
            expert_TK = self.best(scores_TE.detach()).sort(1).values
            expert_R, order_R = expert_TK.flatten().to(torch.int16).sort(stable=True)
            experts_E = torch.arange(self.experts, dtype=expert_R.dtype, device=expert_R.device)
            counts_E = torch.searchsorted(expert_R, experts_E, right=True).diff(prepend=order_R.new_zeros(1))
            place_TK = torch.empty_like(order_R).scatter_(0, order_R, torch.arange(len(order_R), device=order_R.device))
            self._count(counts_E, torch.zeros_like(counts_E))
        weights_TK = self._weights(scores_TE.gather(1, expert_TK))
        if self.options.aux or self.options.z:
            chosen_TE = torch.zeros_like(scores_TE, dtype=torch.bool).scatter_(1, expert_TK, True)
            weights_TK = add_loss(weights_TK, self.losses(logits_TE, scores_TE, chosen_TE, tokens), tokens.share)
        # `gather` and not an index: its backward need not sort the places.
        weight_R = weights_TK.flatten().gather(0, order_R).to(dtype)
        return order_R // self.k, weight_R, counts_E, place_TK.view_as(expert_TK)

    def route_some(self, logits_TE: Tensor, tokens: Tokens, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """The fields of a `Routing` in which tokens differ in the number of experts they visit."""
        scores_TE = self.scores(logits_TE)
        with torch.no_grad():
            chosen_TE, kept_TE = self.choose(scores_TE.detach(), tokens)
            self._count(chosen_TE.sum(0), (chosen_TE & ~kept_TE).sum(0))
        weights_TE = self._weights(scores_TE * chosen_TE)
        if self.options.aux or self.options.z:
            weights_TE = add_loss(weights_TE, self.losses(logits_TE, scores_TE, chosen_TE, tokens), tokens.share)
        expert_R, token_R = kept_TE.t().nonzero(as_tuple=True)
        return token_R, weights_TE[token_R, expert_R].to(dtype), kept_TE.sum(0)

    def scores(self, logits_TE: Tensor) -> Tensor:
        return logits_TE.softmax(-1) if self.score == "softmax" else logits_TE.sigmoid()

    def _weights(self, chosen_scores: Tensor) -> Tensor:
        """The weights of each token's experts, for the scores of those it chose."""
        if self.normalise:
            chosen_scores = chosen_scores / (chosen_scores.sum(-1, keepdim=True) + 1e-20)
        return chosen_scores * self.options.scale

    @property
    def dropless(self) -> bool:
        """Whether every token visits k experts."""
        return self.options.choice == "token" and not self.options.capacity

    def logits(self, x_TH: Tensor) -> Tensor:
        """The logits in float32 or wider, whatever the precision of the layer."""
        logits_TE = self.product(x_TH, self.weight)
        return logits_TE if self.bias is None else logits_TE + self.bias.to(logits_TE.dtype)

    def choose(self, scores_TE: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """Masks [T, E] of the chosen copies and of those that the capacity limit keeps, where there is one."""
        if self.options.choice == "expert":
            all_scores = tokens.gather_tokens(scores_TE)
            most = min(len(all_scores), max(1, self.capacity(len(all_scores), self.options.capacity or 1.0)))
            chosen = tokens.local_rows(highest(all_scores, most))
            return chosen, chosen
        chosen = torch.zeros_like(scores_TE, dtype=torch.bool).scatter_(1, self.best(scores_TE), True)
        # Scores are at least 0, so −1 ranks below all of them: an expert keeps only tokens that chose it.
        candidates = tokens.gather_tokens(scores_TE.masked_fill(~chosen, -1.0))
        most = min(len(candidates), max(1, self.capacity(len(candidates), self.options.capacity)))
        return chosen, chosen & tokens.local_rows(highest(candidates, most))

    def best(self, scores_TE: Tensor) -> Tensor:
        """The k experts of each token, in any order."""
        biased = scores_TE if self.balance_bias is None else scores_TE + self.balance_bias.to(scores_TE.dtype)
        if self.options.groups > 1:
            biased = self.within_groups(biased)
        return biased.topk(self.k, dim=1, sorted=False).indices

    def within_groups(self, scores_TE: Tensor) -> Tensor:
        """The scores, set to −∞ for experts outside the best groups of each token."""
        groups, kept = self.options.groups, self.options.groups_kept or self.options.groups
        scores_TGN = scores_TE.unflatten(1, (groups, -1))
        most = min(2, scores_TGN.shape[2]) if self.balance_bias is not None else 1
        group_TG = scores_TGN.topk(most, dim=2).values.sum(2)
        best_TG = torch.zeros_like(group_TG, dtype=torch.bool).scatter_(1, group_TG.topk(kept, dim=1).indices, True)
        return scores_TGN.masked_fill(~best_TG[:, :, None], -torch.inf).flatten(1)

    def capacity(self, tokens: int, factor: float) -> int:
        return math.ceil(factor * tokens * self.k / self.experts)

    def losses(self, logits: Tensor, scores: Tensor, chosen: Tensor, tokens: Tokens) -> Tensor:
        """The part of the two losses from the tokens of this rank; the sum over all ranks is the loss."""
        part_T, parts = self._balance_sets(chosen, tokens)
        counted_TE = torch.cat((chosen, torch.ones_like(chosen[:, :1])), dim=1).to(scores.dtype)
        load_PE, count_P = tokens.sum_over_ranks(_by_part(counted_TE, part_T, parts)).split((self.experts, 1), dim=1)
        share_TE = scores if self.score == "softmax" else scores / scores.sum(-1, keepdim=True)
        mean_PE = _by_part(share_TE, part_T, parts) / count_P
        aux = self.experts * (load_PE / load_PE.sum(1, keepdim=True) * mean_PE).sum() / parts
        z = logits.logsumexp(-1).square().sum() / count_P.sum()
        return self.options.aux * aux + self.options.z * z

    def _balance_sets(self, chosen: Tensor, tokens: Tokens) -> tuple[Tensor, int]:
        """The set of tokens over which the balancing loss of each token is computed, as an index, and the number of sets: one set,
        or one per sequence."""
        if self.options.aux_scope == "sequence":
            return tokens.sequences()
        return torch.zeros(len(chosen), dtype=torch.long, device=chosen.device), 1

    def _count(self, chosen_E: Tensor, dropped_E: Tensor) -> None:
        if not self.training:  # evaluation between steps does not count
            return
        load = torch.stack((chosen_E, dropped_E)).to(torch.float64)
        self.load = load if self.load is None else self.load + load

    def balance(self, load_E: Tensor) -> Tensor:
        """The update of the balancing bias for the load of a step."""
        return self.options.balance_rate * torch.sign(load_E.mean() - load_E)


def _by_part(rows_TX: Tensor, part_T: Tensor, parts: int) -> Tensor:
    """The sums of the rows of each part."""
    return rows_TX.new_zeros((parts, rows_TX.shape[1])).index_add(0, part_T, rows_TX)


def highest(scores_TE: Tensor, most: int) -> Tensor:
    """A mask of the `most` highest-scored tokens of each expert; ties go to the earlier token."""
    order_TE = scores_TE.sort(dim=0, descending=True, stable=True).indices[:most]
    return torch.zeros_like(scores_TE, dtype=torch.bool).scatter_(0, order_TE, True)


class _AddLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, share: float | Tensor) -> Tensor:
        ctx.share, ctx.like = share, loss
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradient, torch.ones_like(ctx.like) * ctx.share, None


def add_loss(x: Tensor, loss: Tensor, share: float | Tensor) -> Tensor:
    """Return `x`, and add `share`·`loss` to the minimised loss in its backward. A loss inside a pipeline stage has no
    output through which it could be returned."""
    return _AddLoss.apply(x, loss, share)


def load_metrics(load_2E: Tensor) -> dict[str, float]:
    """The balance of one layer: `entropy` is 1 if even and 0 for a single expert (collapse), `peak` is the busiest
    expert over the mean, `idle` the share of experts without a token, `dropped` the share of dropped copies."""
    chosen, dropped = load_2E.to(torch.float64)
    total = max(float(chosen.sum()), 1.0)
    share = chosen / total
    entropy = float(-(share * share.clamp(min=1e-300).log()).sum()) / math.log(max(len(chosen), 2))
    return {
        "entropy": entropy,
        "peak": float(chosen.max()) / total * len(chosen),
        "idle": float((chosen == 0).double().mean()),
        "dropped": float(dropped.sum()) / total,
    }
