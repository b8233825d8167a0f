"""The transformer: all presets are configurations of this class.

    x = tokens + positions                              (embedding, with a norm if the model has one)
    x = x + attention(norm(x));  x = x + ffn(norm(x))   (each layer; with four norms per layer, also a norm after each part)
    logits = project(norm(x))                           (head; with tied embeddings it uses the embedding's weight)

attention: grouped queries, or latent (`mla`); positions by rotation (RoPE), learned, or none. ffn: one network, or
experts (`moe`).

A dropout rate applies to the output of the embedding and to what attention and FFN add to x (`dropout`); attention
probabilities have a separate rate.

Legend: B batch, S sequence, H hidden, N heads, K KV heads, D head dim, F FFN width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from meshwright.describe import legality
from meshwright.describe.model import Model
from meshwright.describe.plan_fields import PlanFields
from meshwright.errors import MeshwrightError
from meshwright.models.documents import current_documents, same_document
from meshwright.models.dropout import Dropped, Probabilities, make_dropout
from meshwright.models.mla import LatentAttention
from meshwright.models.moe import MixtureOfExperts
from meshwright.models.parts import FeedForward, make_norm

IGNORED = -100  # a target that is padding
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool, Dropped | None], torch.Tensor]


def rotated_width(model: Model) -> int:
    return model.rope_dim if model.attention == "mla" else model.head_width


class Geometry:
    """Positions and everything in attention that depends on them: the rotation, the mask and the attention function.
    Computed once per sequence length and shared by all layers. Under context parallelism a rank has a part of the
    sequence: `position_ids` holds the positions of its tokens, and `attend` exchanges keys and values with other ranks."""

    def __init__(self, model: Model) -> None:
        self.rotate, self.width = model.positions == "rope", rotated_width(model)
        self.causal, self.window = model.causal, model.window
        self.rotary_base = model.rope_theta
        self.position_ids: torch.Tensor | None = None  # None: 0, 1, 2, …
        self.attend: Attend = self.attend_whole
        self._cache: dict[tuple, torch.Tensor] = {}

    def attend_whole(
        self, q_BNSD: torch.Tensor, k_BKSD: torch.Tensor, v_BKSD: torch.Tensor, full: bool, dropped: Dropped | None
    ) -> torch.Tensor:
        """softmax(q kᵀ / √D) v over a whole sequence."""
        mask = self.mask(q_BNSD, full)
        if dropped is not None:
            return self._attend_dropping(q_BNSD, k_BKSD, v_BKSD, mask, dropped)
        return F.scaled_dot_product_attention(
            q_BNSD,
            k_BKSD,
            v_BKSD,
            attn_mask=mask,
            is_causal=self.causal and mask is None,
            enable_gqa=q_BNSD.shape[1] != k_BKSD.shape[1],
        )

    def _attend_dropping(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, dropped: Dropped
    ) -> torch.Tensor:
        """Attention with dropped probabilities, computed as one matrix of all probabilities."""
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        position_ids = torch.arange(q.shape[-2])
        visible = position_ids[:, None] >= position_ids if mask is None and self.causal else mask
        scores = scores if visible is None else scores.masked_fill(~visible.to(q.device), -torch.inf)
        return scores.softmax(-1) * dropped.factor(position_ids, position_ids, q.dtype) @ v

    def rotated(self, x_BNSD: torch.Tensor) -> torch.Tensor:
        """Rotate each pair (x_i, x_{i+D/2}) at position p by the angle p · base^(−2i/D)."""
        if not self.rotate:
            return x_BNSD
        cosine_SD, sine_SD = self._angles(x_BNSD)
        first, second = x_BNSD.chunk(2, dim=-1)
        return x_BNSD * cosine_SD + torch.cat((-second, first), dim=-1) * sine_SD

    def _angles(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        key = ("angles", x.shape[-2], x.dtype, x.device)
        if key not in self._cache:
            frequency = self.rotary_base ** (-torch.arange(0, self.width, 2, dtype=torch.float64) / self.width)
            position_ids = torch.arange(x.shape[-2]) if self.position_ids is None else self.position_ids
            angle = torch.outer(position_ids.to("cpu", torch.float64), frequency).repeat(1, 2)
            self._cache[key] = torch.stack((angle.cos(), angle.sin())).to(x)
        cosine, sine = self._cache[key]
        return cosine, sine

    def mask(self, x: torch.Tensor, full: bool) -> torch.Tensor | None:
        """True where a query may attend; None if `is_causal` or no mask is sufficient."""
        mask, documents_BS = self._position_mask(x, full), current_documents()
        if documents_BS is None:
            return mask
        position_ids = torch.arange(x.shape[-2])
        same = same_document(documents_BS, position_ids, position_ids)
        if mask is None and self.causal:
            same = same.tril_()
        return same.to(x.device) if mask is None else same.to(x.device) & mask

    def _position_mask(self, x: torch.Tensor, full: bool) -> torch.Tensor | None:
        length = x.shape[-2]
        if full or not self.window or self.window >= length:
            return None
        key = ("mask", length, x.device)
        if key not in self._cache:
            position = torch.arange(length, device=x.device)
            distance = position[:, None] - position[None, :]
            near = distance.abs() < self.window
            self._cache[key] = near & (distance >= 0) if self.causal else near
        return self._cache[key]


class Attention(nn.Module):
    def __init__(self, model: Model, geometry: Geometry, full: bool, site: str) -> None:
        super().__init__()
        self.width, self.geometry, self.full = model.head_width, geometry, full
        self.probabilities = Probabilities(model.attention_dropout, site)
        queries, keys = model.heads * self.width, model.kv_groups * self.width
        self.q = nn.Linear(model.hidden, queries, bias=model.qkv_bias)
        self.k = nn.Linear(model.hidden, keys, bias=model.qkv_bias)
        self.v = nn.Linear(model.hidden, keys, bias=model.qkv_bias)
        self.q_norm = nn.RMSNorm(self.width, eps=model.norm_epsilon) if model.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(self.width, eps=model.norm_epsilon) if model.qk_norm else nn.Identity()
        self.o = nn.Linear(queries, model.hidden, bias=model.out_bias)

    def heads(self, x_BSX: torch.Tensor) -> torch.Tensor:
        return x_BSX.unflatten(-1, (-1, self.width))

    def forward(self, x_BSH: torch.Tensor) -> torch.Tensor:
        q_BNSD = self.geometry.rotated(self.q_norm(self.heads(self.q(x_BSH))).transpose(1, 2))
        k_BKSD = self.geometry.rotated(self.k_norm(self.heads(self.k(x_BSH))).transpose(1, 2))
        v_BKSD = self.heads(self.v(x_BSH)).transpose(1, 2)
        mixed_BNSD = self.geometry.attend(q_BNSD, k_BKSD, v_BKSD, self.full, self.probabilities(q_BNSD))
        return self.o(mixed_BNSD.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, model: Model, geometry: Geometry, index: int) -> None:
        super().__init__()
        full = bool(model.full_every) and (index + 1) % model.full_every == 0
        latent, expert = model.attention == "mla", model.layer_kinds[index] == "moe"
        self.attention_norm = make_norm(model)
        kind, site = LatentAttention if latent else Attention, f"layers.{index}.probabilities"
        self.attention = kind(model, geometry, full, site)
        self.ffn_norm = make_norm(model)
        if expert:
            self.moe = MixtureOfExperts(model)
        else:
            self.ffn = FeedForward(model)
        self.attention_post_norm = make_norm(model) if model.norms_per_layer == 4 else nn.Identity()
        self.ffn_post_norm = make_norm(model) if model.norms_per_layer == 4 else nn.Identity()
        self.attention_drop = make_dropout(model.dropout_rate, f"layers.{index}.attention", geometry)
        self.ffn_drop = make_dropout(model.dropout_rate, f"layers.{index}.ffn", geometry)
        self.expert = expert

    def forward(self, x_BSH: torch.Tensor) -> torch.Tensor:
        x_BSH = x_BSH + self.attention_drop(self.attention_post_norm(self.attention(self.attention_norm(x_BSH))))
        ffn = self.moe if self.expert else self.ffn
        return x_BSH + self.ffn_drop(self.ffn_post_norm(ffn(self.ffn_norm(x_BSH))))


class LearnedPositions(nn.Module):
    """The first S rows of a learned table, or the rows at the positions of this rank."""

    def __init__(self, model: Model, geometry: Geometry) -> None:
        super().__init__()
        self.geometry = geometry
        self.weight = nn.Parameter(torch.empty(model.max_positions, model.hidden))

    def forward(self, length: int) -> torch.Tensor:
        position_ids = self.geometry.position_ids
        length = length if position_ids is None else int(position_ids.max()) + 1
        if length > self.weight.shape[0]:
            raise MeshwrightError(
                "MW-BUILD-003",
                f"the sequence length {length} exceeds the {len(self.weight)} learned positions",
                fix=f"--set workload.seq={self.weight.shape[0]}",
            )
        return self.weight[:length] if position_ids is None else self.weight[position_ids.to(self.weight.device)]


class Embedding(nn.Module):
    def __init__(self, model: Model, geometry: Geometry) -> None:
        super().__init__()
        self.tokens = nn.Embedding(model.padded_vocab, model.hidden)
        self.positions = LearnedPositions(model, geometry) if model.positions == "learned" else None
        self.norm = make_norm(model) if model.embedding_norm else nn.Identity()
        self.drop = make_dropout(model.dropout_rate, "embedding", geometry)

    def forward(self, ids_BS: torch.Tensor) -> torch.Tensor:
        x_BSH = self.tokens(ids_BS)
        if self.positions is not None:
            x_BSH = x_BSH + self.positions(ids_BS.shape[1])
        return self.drop(self.norm(x_BSH))


class Head(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.norm = make_norm(model) if model.final_norm else nn.Identity()
        self.project = nn.Linear(model.hidden, model.padded_vocab, bias=False)

    def forward(self, x_BSH: torch.Tensor) -> torch.Tensor:
        return self.project(self.norm(x_BSH))


class Transformer(nn.Module):
    """The whole network, or the pipeline stage with `layers`. A tied head shares the embedding's weight if both are in
    the same stage."""

    def __init__(self, model: Model, layers: range) -> None:
        super().__init__()
        legality.check(PlanFields(), model, trainer=True)
        self.geometry = geometry = Geometry(model)
        self.embedding = Embedding(model, geometry) if layers.start == 0 else None
        self.layers = nn.ModuleDict({str(i): Layer(model, geometry, i) for i in layers})
        self.head = Head(model) if layers.stop == model.layers else None
        if model.tied and self.embedding is not None and self.head is not None:
            self.head.project.weight = self.embedding.tokens.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x) if self.embedding is not None else x
        for layer in self.layers.values():
            x = layer(x)
        return self.head(x) if self.head is not None else x


def cross_entropy(logits_BSV: torch.Tensor, target_BS: torch.Tensor) -> torch.Tensor:
    """The cross-entropy, summed over valid tokens, in float32 or wider."""
    wide = logits_BSV.flatten(0, 1).to(torch.promote_types(logits_BSV.dtype, torch.float32))
    return F.cross_entropy(wide, target_BS.flatten(), ignore_index=IGNORED, reduction="sum")
