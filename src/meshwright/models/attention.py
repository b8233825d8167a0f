"""Attention: grouped queries over keys and values, softmax(scale · q kᵀ) v.

What a layer may add: rotary positions (`rotary`), norms of queries and keys, a window, dropout of probabilities (`dropout`), document
masks (`documents`), and sinks. A sink is one learned score per head, without a value: it takes a share of each softmax, so a head that
finds no key of interest can return almost zero instead of an average of all values (gpt-oss):

    output = Σ_k exp(s_k) v_k / (exp(sink) + Σ_k exp(s_k))

Legend: B batch, S sequence, H hidden, N heads, K KV heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from meshwright.describe.model import Model
from meshwright.models.documents import current_documents, same_document
from meshwright.models.dropout import Dropped, Probabilities
from meshwright.models.parts import Linear
from meshwright.models.rotary import angles, rotate


class AttentionRule(NamedTuple):
    """How one layer attends: a query sees keys less than `window` positions away (0: all keys), scores are multiplied by `scale`
    (None: 1/√D), and some probabilities may be dropped."""

    window: int = 0
    scale: float | None = None
    dropped: Dropped | None = None


def rule_of(model: Model, layer: int) -> AttentionRule:
    width = model.nope_dim + model.rope_dim if model.attention == "mla" else model.head_width
    scale = model.score_scale(layer)
    return AttentionRule(0 if model.sees_all(layer) else model.window, None if scale == width**-0.5 else scale)


# q, k, v, the sink of each query if the model has sinks, [B, N, S], and the rule of the layer
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, AttentionRule], torch.Tensor]


class Geometry:
    """Positions and everything in attention that depends on them: the rotation, the mask and the attention function.
    Computed once per sequence length and shared by all layers. Under context parallelism a rank has a part of the
    sequence: `position_ids` holds the positions of its tokens, `length` is the length of the whole sequence, and `attend`
    exchanges keys and values with other ranks."""

    def __init__(self, model: Model) -> None:
        self.model, self.rotates, self.causal = model, model.positions == "rope", model.causal
        self.position_ids: torch.Tensor | None = None  # None: 0, 1, 2, …
        self.length = 0  # 0: that of the input
        self.attend: Attend = self.attend_whole
        self._cache: dict[tuple, torch.Tensor] = {}
        self.held_documents_BS: torch.Tensor | None = None

    def attend_whole(
        self,
        q_BNSD: torch.Tensor,
        k_BKSD: torch.Tensor,
        v_BKSD: torch.Tensor,
        sinks_BNS: torch.Tensor | None,
        rule: AttentionRule,
    ) -> torch.Tensor:
        """softmax(scale · q kᵀ) v over a whole sequence."""
        mask = self.mask(q_BNSD, rule.window)
        if rule.dropped is not None or sinks_BNS is not None:
            return self._attend_step_by_step(q_BNSD, k_BKSD, v_BKSD, sinks_BNS, mask, rule)
        return F.scaled_dot_product_attention(
            q_BNSD,
            k_BKSD,
            v_BKSD,
            attn_mask=mask,
            is_causal=self.causal and mask is None,
            scale=rule.scale,
            enable_gqa=q_BNSD.shape[1] != k_BKSD.shape[1],
        )

    def _attend_step_by_step(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks_BNS: torch.Tensor | None,
        mask: torch.Tensor | None,
        rule: AttentionRule,
    ) -> torch.Tensor:
        """Attention with sinks or dropped probabilities, computed as one matrix of all probabilities."""
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        scores = q @ k.transpose(-1, -2) * (rule.scale or q.shape[-1] ** -0.5)
        position_ids = torch.arange(q.shape[-2])
        visible = position_ids[:, None] >= position_ids if mask is None and self.causal else mask
        scores = scores if visible is None else scores.masked_fill(~visible.to(q.device), -torch.inf)
        if sinks_BNS is None:
            probabilities = scores.softmax(-1)
        else:
            probabilities = torch.cat((scores, sinks_BNS.unsqueeze(-1)), dim=-1).softmax(-1)[..., :-1]
        if rule.dropped is not None:
            probabilities = probabilities * rule.dropped.factor(position_ids, position_ids, q.dtype)
        return probabilities @ v

    def rotated(self, x_BNSD: torch.Tensor) -> torch.Tensor:
        """Queries or keys, rotated by their positions if the model uses rotary positions."""
        if not self.rotates:
            return x_BNSD
        cosine, sine = self.angles(x_BNSD.shape[-2], x_BNSD.dtype, x_BNSD.device)
        return rotate(x_BNSD, cosine, sine, self.model.rope.interleaved)

    def angles(self, length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Cosine and sine of the angles of this rank's tokens: [2, S, D]."""
        key = ("angles", length, dtype, device)
        if key not in self._cache:
            position_ids = torch.arange(length) if self.position_ids is None else self.position_ids
            self._cache[key] = torch.stack(angles(self.model, position_ids, self.length or length)).to(device, dtype)
        return self._cache[key]

    def prepare(self, length: int, dtype: torch.dtype, device: torch.device) -> None:
        """Compute what attention keeps for a length, outside of a compiled graph: the graph would compute it in every layer."""
        if self.rotates:
            self.angles(length, dtype, device)
        self._position_mask(length, self.model.window, device)

    def hold(self) -> None:
        """Keep the documents for a compiled graph, which cannot read them from their context variable (`parallel.compile`)."""
        self.held_documents_BS = current_documents()

    def documents(self) -> torch.Tensor | None:
        return self.held_documents_BS if torch.compiler.is_compiling() else current_documents()

    def mask(self, x: torch.Tensor, window: int) -> torch.Tensor | None:
        """True where a query may attend; None if `is_causal` or no mask is sufficient."""
        mask, documents_BS = self._position_mask(x.shape[-2], window, x.device), self.documents()
        if documents_BS is None:
            return mask
        position_ids = torch.arange(x.shape[-2], device=documents_BS.device)
        same = same_document(documents_BS, position_ids, position_ids)
        if mask is None and self.causal:
            same = same.tril_()
        return same.to(x.device) if mask is None else same.to(x.device) & mask

    def _position_mask(self, length: int, window: int, device: torch.device) -> torch.Tensor | None:
        if not window or window >= length:
            return None
        key = ("mask", length, window, device)
        if key not in self._cache:
            position = torch.arange(length, device=device)
            distance = position[:, None] - position[None, :]
            near = distance.abs() < window
            self._cache[key] = near & (distance >= 0) if self.causal else near
        return self._cache[key]


class Sinks(nn.Module):
    """The sink of each head, for every query: [B, S, N]."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads))

    def forward(self, x_BSX: torch.Tensor) -> torch.Tensor:
        return self.weight.expand(*x_BSX.shape[:-1], -1)


class Attention(nn.Module):
    def __init__(self, model: Model, geometry: Geometry, layer: int) -> None:
        super().__init__()
        self.width, self.geometry, self.rule = model.head_width, geometry, rule_of(model, layer)
        self.probabilities = Probabilities(model.attention_dropout, f"layers.{layer}.probabilities")
        queries, keys = model.heads * self.width, model.kv_groups * self.width
        self.q = Linear(model.hidden, queries, bias=model.qkv_bias)
        self.k = Linear(model.hidden, keys, bias=model.qkv_bias)
        self.v = Linear(model.hidden, keys, bias=model.qkv_bias)
        self.q_norm = nn.RMSNorm(self.width, eps=model.norm_epsilon) if model.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(self.width, eps=model.norm_epsilon) if model.qk_norm else nn.Identity()
        self.sinks = Sinks(model.heads) if model.sinks else None
        self.o = Linear(queries, model.hidden, bias=model.out_bias)

    def heads(self, x_BSX: torch.Tensor) -> torch.Tensor:
        return x_BSX.unflatten(-1, (-1, self.width))

    def forward(self, x_BSH: torch.Tensor) -> torch.Tensor:
        q_BNSD = self.geometry.rotated(self.q_norm(self.heads(self.q(x_BSH))).transpose(1, 2))
        k_BKSD = self.geometry.rotated(self.k_norm(self.heads(self.k(x_BSH))).transpose(1, 2))
        v_BKSD = self.heads(self.v(x_BSH)).transpose(1, 2)
        sinks_BNS = None if self.sinks is None else self.sinks(x_BSH).transpose(1, 2)
        rule = self.rule._replace(dropped=self.probabilities(q_BNSD))
        mixed_BNSD = self.geometry.attend(q_BNSD, k_BKSD, v_BKSD, sinks_BNS, rule)
        return self.o(mixed_BNSD.transpose(1, 2).flatten(2))
