"""Multi-head latent attention (DeepSeek-V2): keys and values of all heads are computed from one small vector per token.

    c = norm(x W_kv_a)[:kv_rank]                  the latent: decoding keeps only it and the rotated key below
    r = rotate(x W_kv_a)[kv_rank:]                one rotated key of rope_dim, the same for every head
    k_n = [c W_k,n ; r],   v_n = c W_v,n          nope_dim + rope_dim, and value_dim
    q_n = norm(x W_q_a) W_q_b,n                   its last rope_dim rotated; x W_q without a query rank

The rotated key is separate because rotation does not commute with the up-projection: W_k could not be folded into W_q at
inference. The down-projections are small and not split; all later matrices are split by heads. So the latent and the rotated
key enter `Heads` as one tensor: under tensor parallelism this tensor is gathered, or its gradient is summed, with
q_rank + kv_rank + rope_dim numbers per token instead of h.

Legend: B batch, S sequence, H hidden, N heads, L latent widths together.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshwright.describe.model import Model
from meshwright.models.attention import Geometry, positions_of, rule_of
from meshwright.models.dropout import Probabilities
from meshwright.models.parts import ProductLinear, make_norm


class Heads(nn.Module):
    """Computes the attention of these heads from the latents of every token."""

    def __init__(self, model: Model, geometry: Geometry, layer: int) -> None:
        super().__init__()
        self.geometry, self.rule, self.positions = geometry, rule_of(model, layer), positions_of(model, layer)
        self.probabilities = Probabilities(model.attention_dropout, f"layers.{layer}.probabilities")
        self.nope, self.rope, self.value = model.nope_dim, model.rope_dim, model.value_dim
        self.widths = (model.q_rank or model.hidden, model.kv_rank, model.rope_dim)
        queries = model.heads * (self.nope + self.rope)
        if model.q_rank:
            self.q_b = ProductLinear(model.q_rank, queries, bias=False)
        else:
            self.q = ProductLinear(model.hidden, queries, bias=False)
        self.kv_b = ProductLinear(model.kv_rank, model.heads * (self.nope + self.value), bias=False)
        self.o = ProductLinear(model.heads * self.value, model.hidden, bias=model.out_bias)
        self.has_rank = bool(model.q_rank)

    def forward(self, latents_BSL: Tensor) -> Tensor:
        query, latent, key = latents_BSL.split(self.widths, dim=-1)
        q = self.q_b(query) if self.has_rank else self.q(query)
        q_BNSD = q.unflatten(-1, (-1, self.nope + self.rope)).transpose(1, 2)
        rotated_key = None
        if self.rope:
            q_plain, q_rotated = q_BNSD.split((self.nope, self.rope), dim=-1)
            q_BNSD = torch.cat((q_plain, self.geometry.rotated(q_rotated, self.positions)), dim=-1)
            rotated_key = self.geometry.rotated(key.unsqueeze(1), self.positions)
        q_BNSD = self.geometry.tempered(q_BNSD, self.positions)
        if self.geometry.keep_latents(latent, rotated_key):
            mixed_BNSD = self.attend_latents(q_BNSD)
        else:
            kv_BNSD = self.kv_b(latent).unflatten(-1, (-1, self.nope + self.value)).transpose(1, 2)
            k_BNSD, v_BNSD = kv_BNSD.split((self.nope, self.value), dim=-1)
            if rotated_key is not None:
                k_BNSD = torch.cat((k_BNSD, rotated_key.expand(-1, q_BNSD.shape[1], -1, -1)), dim=-1)
            rule = self.rule._replace(dropped=self.probabilities(q_BNSD))
            mixed_BNSD = self.geometry.attend(q_BNSD, k_BNSD, v_BNSD, None, rule)
        return self.o(mixed_BNSD.transpose(1, 2).flatten(2))

    @property
    def absorbs(self) -> bool:
        """Whether queries can attend to latents: the up-projection is its matrix, without an adapter and not quantised."""
        return self.kv_b.product is F.linear

    def attend_latents(self, q_BNSD: Tensor) -> Tensor:
        """Attention to latents that are kept: W_k is multiplied with the queries, and W_v with the mixed latents, of which each head has one.

        q · (W_k c) = (W_kᵀ q) · c              Σ p W_v c = W_v (Σ p c)"""
        weight_NXR = self.kv_b.weight.unflatten(0, (-1, self.nope + self.value))
        key_NDR, value_NVR = weight_NXR.split((self.nope, self.value), dim=1)
        plain, rotated = q_BNSD.split((self.nope, self.rope), dim=-1)
        wide_BNSL = torch.cat((torch.einsum("bnsd,ndr->bnsr", plain, key_NDR), rotated), dim=-1)
        rule = self.rule._replace(scale=self.rule.scale or (self.nope + self.rope) ** -0.5)
        mixed_BNSR = self.geometry.attend_latents(wide_BNSL, key_NDR.shape[-1], rule)
        return torch.einsum("bnsr,nvr->bnsv", mixed_BNSR, value_NVR)


class LatentAttention(nn.Module):
    def __init__(self, model: Model, geometry: Geometry, layer: int) -> None:
        super().__init__()
        epsilon = model.latent_norm_epsilon
        self.ranks = (model.kv_rank, model.rope_dim)
        if model.q_rank:
            self.q_a = ProductLinear(model.hidden, model.q_rank, bias=model.qkv_bias)
            self.q_a_norm = make_norm(model, model.q_rank, epsilon)
        self.kv_a = ProductLinear(model.hidden, model.kv_rank + model.rope_dim, bias=model.qkv_bias)
        self.kv_a_norm = make_norm(model, model.kv_rank, epsilon)
        self.heads = Heads(model, geometry, layer)

    @property
    def geometry(self) -> Geometry:
        return self.heads.geometry

    @geometry.setter
    def geometry(self, geometry: Geometry) -> None:
        self.heads.geometry = geometry

    def forward(self, x_BSH: Tensor) -> Tensor:
        query = self.q_a_norm(self.q_a(x_BSH)) if self.heads.has_rank else x_BSH
        latent, key = self.kv_a(x_BSH).split(self.ranks, dim=-1)
        return self.heads(torch.cat((query, self.kv_a_norm(latent), key), dim=-1))
