"""Attention: grouped queries over keys and values, softmax(scale · q kᵀ) v.

What a layer may add: rotary positions, norms of queries and keys, a window (the nearest keys, or those of the same chunk), soft
caps of scores, dropout of probabilities (`dropout`), document masks, and sinks. A layer without rotary positions may
multiply its queries by a factor that grows with the position (Llama 4), so that attention to many keys stays sharp:

    q_p ← q_p · (1 + a·ln(1 + ⌊(p + 1) / floor⌋))                         positions p from 0

A sink is one learned score per head, without a value: it takes a share of each softmax, so a head that
finds no key of interest can return almost zero instead of an average of all values (gpt-oss):

    output = Σ_k exp(s_k) v_k / (exp(sink) + Σ_k exp(s_k))

Legend: B batch, S sequence, H hidden, N heads, K KV heads, D head dim.

Rotary position embedding: pairs of elements of queries and keys are rotated by angles that grow with the position.

A rotation by p_q·f of a query and by p_k·f of a key changes their product by the distance p_q − p_k only. `describe.shape_parts` has the
formulas by which the frequencies f are scaled for longer sequences; here they are computed, in float64.

Two layouts of pairs: element i with i + D/2, or 2i with 2i + 1 (`interleaved`). The second one returns its pairs in the order of the first:
queries and keys are permuted in the same way, so their products do not change.

Legend: B batch, S sequence, N heads, D rotated width of a head, I = D/2 pairs.

Document masks: in a sequence packed from several documents, a token attends only to tokens of its own document.

Without the mask, attention also reads the documents before it in the sequence. With it, a document trains as if
it stood alone, apart from its positions: rotary attention depends only on distances, so they make no difference there.

Every token has a document number, [B, S] for the whole sequences of the micro-batch. A context-parallel rank has these numbers
for all tokens, not only for its own, so the mask of any block of queries and keys needs no communication:

    visible(q, k) = (document[q] == document[k])   and what causality and the window allow

The numbers reach attention through the `step_context`.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshwright.describe.model import Model
from meshwright.describe.shape_parts import RopeOptions
from meshwright.models.dropout import Dropped, Probabilities
from meshwright.models.parts import ProductLinear, ProjectionNorm, at_least_single, rms_norm, soft_cap
from meshwright.models.step_context import current


def same_document(documents_BS: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """[B, 1, R, C]: whether the tokens at two lists of positions belong to the same document, for all heads."""
    return (documents_BS[:, rows, None] == documents_BS[:, None, columns]).unsqueeze(1)


def frequencies(model: Model, length: int, base: float = 0.0) -> Tensor:
    """f_i of each pair in float64, for sequences of `length` positions; with a `base`, its plain frequencies, not scaled."""
    rope, width, theta = (RopeOptions() if base else model.rope), model.rotated_width, base or model.rope_theta
    original = rope.original_positions or model.max_positions
    if rope.kind == "dynamic" and length > original:
        theta *= (rope.factor * length / original - (rope.factor - 1)) ** (width / (width - 2))
    plain_I = theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    match rope.kind:
        case "linear":
            return plain_I / rope.factor
        case "llama3":
            return mixed(plain_I, rope.factor, kept_by_wavelength(plain_I, rope, original))
        case "yarn":
            return mixed(plain_I, rope.factor, kept_by_rotations(rope, width, theta, original))
        case "longrope":
            factors = rope.long_factor if length > original else rope.short_factor
            return plain_I / torch.tensor(factors, dtype=torch.float64)
    return plain_I


def mixed(plain_I: Tensor, factor: float, kept_I: Tensor) -> Tensor:
    """Frequencies of which a share is kept as it is and the remaining share is divided by `factor`."""
    return kept_I * plain_I + (1 - kept_I) * plain_I / factor


def kept_by_wavelength(plain_I: Tensor, rope: RopeOptions, original: int) -> Tensor:
    """Llama 3: 0 for wavelengths above L / low, 1 for those below L / high, linear in L / wavelength between."""
    in_original_I = original * plain_I / (2 * math.pi)
    return ((in_original_I - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)


def kept_by_rotations(rope: RopeOptions, width: int, theta: float, original: int) -> Tensor:
    """YaRN: 1 up to the pair that completes beta_fast rotations in L positions, 0 from the pair that completes beta_slow on."""
    first, last = (
        width * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))
        for rotations in (rope.beta_fast, rope.beta_slow)
    )
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    last += 0.001 if first == last else 0.0  # a ramp of no width would divide by zero
    pairs_I = torch.arange(width // 2, dtype=torch.float64)
    return 1 - ((pairs_I - first) / (last - first)).clamp(0, 1)


def angles(model: Model, position_ids: Tensor, length: int, base: float = 0.0) -> tuple[Tensor, Tensor]:
    """Cosine and sine [S, D] of the angles at some positions of a sequence of `length`, in float64. `base`: see `frequencies`."""
    angle_SI = torch.outer(position_ids.to("cpu", torch.float64), frequencies(model, length, base))
    factor = 1.0 if base else model.rope.rotation_factor(model.max_positions)
    angle_SD = angle_SI.repeat(1, 2)
    return angle_SD.cos() * factor, angle_SD.sin() * factor


def rotate(x_BNSD: Tensor, cosine_SD: Tensor, sine_SD: Tensor, interleaved: bool) -> Tensor:
    """The elements of x, as many as the angles are wide, rotated pair by pair; further elements stay as they are."""
    width = cosine_SD.shape[-1]
    if width < x_BNSD.shape[-1]:
        turned, kept = x_BNSD.split((width, x_BNSD.shape[-1] - width), dim=-1)
        return torch.cat((rotate(turned, cosine_SD, sine_SD, interleaved), kept), dim=-1)
    if interleaved:
        x_BNSD = x_BNSD.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    first, second = x_BNSD.chunk(2, dim=-1)
    return x_BNSD * cosine_SD + torch.cat((-second, first), dim=-1) * sine_SD


class AttentionRule(NamedTuple):
    """The attention pattern of one layer: a query sees keys less than `window` positions away (0: all keys), or with `chunked` those of its chunk of
    `window` positions; scores are multiplied by `scale` (None: 1/√D) and soft-capped (0: not); some probabilities may be dropped."""

    window: int = 0
    scale: float | None = None
    chunked: bool = False
    softcap: float = 0.0
    dropped: Dropped | None = None

    @property
    def fused(self) -> bool:
        """Whether torch's attention function computes this rule."""
        return self.dropped is None and not self.softcap


def rule_of(model: Model, layer: int) -> AttentionRule:
    scale = model.score_scale(layer)
    window = 0 if model.sees_all(layer) else model.window
    chunked = model.window_kind == "chunk" and bool(window)
    return AttentionRule(window, None if scale == model.key_width**-0.5 else scale, chunked, model.attention_softcap)


class Positions(NamedTuple):
    """Position encoding of the queries and keys of one layer: rotated or not, with the base of layers with a window (0: that of
    the model, scaled); queries multiplied by the attention temperature or not."""

    rotated: bool
    base: float
    tempered: bool


def positions_of(model: Model, layer: int) -> Positions:
    rotated = model.rotates(layer)
    base = 0.0 if model.sees_all(layer) else model.window_rope_theta
    return Positions(rotated, base, bool(model.temperature_scale) and not rotated)


# q, k, v, the sink of each query if the model has sinks, [B, N, S], and the rule of the layer
Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None, AttentionRule], Tensor]


class Geometry:
    """Positions and everything in attention that depends on them: the rotation, the mask and the attention function.
    Computed once per sequence length and shared by all layers. Under context parallelism a rank has a part of the
    sequence: `position_ids` holds the positions of its tokens, `length` is the length of the whole sequence, and `attend`
    exchanges keys and values with other ranks."""

    def __init__(self, model: Model) -> None:
        self.model, self.causal = model, model.causal
        self.position_ids: Tensor | None = None  # None: 0, 1, 2, …
        self.length = 0  # 0: that of the input
        self.attend: Attend = self.attend_whole
        self._cache: dict[tuple, Tensor] = {}

    def attend_whole(
        self, q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, sinks_BNS: Tensor | None, rule: AttentionRule
    ) -> Tensor:
        """softmax(scale · q kᵀ) v over a whole sequence."""
        mask = self.mask(q_BNSD, rule)
        if not rule.fused or sinks_BNS is not None:
            return self._attend_step_by_step(q_BNSD, k_BKSD, v_BKSD, sinks_BNS, mask, rule)
        causal, gqa = self.causal and mask is None, q_BNSD.shape[1] != k_BKSD.shape[1]
        attend = F.scaled_dot_product_attention
        return attend(q_BNSD, k_BKSD, v_BKSD, mask, is_causal=causal, scale=rule.scale, enable_gqa=gqa)

    def keep_latents(self, latent_BSR: Tensor, key_B1SD: Tensor | None) -> bool:
        """Keep the latents and rotated keys of these tokens if this is a decoder's geometry (`models.decode`). Returns whether their queries attend
        to what is kept (`attend_latents`), so that keys and values of heads are not needed."""
        return False

    def attend_latents(self, q_BNSL: Tensor, values: int, rule: AttentionRule) -> Tensor:
        """Attention of queries to the kept latents with their rotated keys; the first `values` columns of these are the values."""
        raise NotImplementedError

    def _attend_step_by_step(
        self, q: Tensor, k: Tensor, v: Tensor, sinks_BNS: Tensor | None, mask: Tensor | None, rule: AttentionRule
    ) -> Tensor:
        """Attention with sinks, soft-capped scores or dropped probabilities, computed as one matrix of all probabilities."""
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        scores = q @ k.transpose(-1, -2) * (rule.scale or q.shape[-1] ** -0.5)
        scores = soft_cap(scores, rule.softcap) if rule.softcap else scores
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

    def rotated(self, x_BNSD: Tensor, positions: Positions) -> Tensor:
        """Queries or keys, rotated by their positions if the layer has rotary positions."""
        if not positions.rotated:
            return x_BNSD
        cosine, sine = self.angles(x_BNSD.shape[-2], x_BNSD.dtype, x_BNSD.device, positions.base)
        return rotate(x_BNSD, cosine, sine, self.model.rope.interleaved)

    def tempered(self, q_BNSD: Tensor, positions: Positions) -> Tensor:
        """Queries, multiplied by the attention temperature of their positions if the layer has one."""
        if not positions.tempered:
            return q_BNSD
        return (q_BNSD * self.temperature(q_BNSD.shape[-2], q_BNSD.dtype, q_BNSD.device)).to(q_BNSD.dtype)

    def angles(self, length: int, dtype: torch.dtype, device: torch.device, base: float = 0.0) -> Tensor:
        """Cosine and sine of the angles of this rank's tokens: [2, S, D]."""
        key = ("angles", base, length, dtype, device)
        if key not in self._cache:
            found = angles(self.model, self._positions(length), self.length or length, base)
            self._cache[key] = torch.stack(found).to(device, dtype)
        return self._cache[key]

    def temperature(self, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The factor of the query at each position of this rank, [S, 1], in float32 or wider."""
        key = ("temperature", length, dtype, device)
        if key not in self._cache:
            steps_S = (self._positions(length).double() + 1).div(self.model.temperature_floor).floor()
            factor_S = 1 + self.model.temperature_scale * steps_S.log1p()
            self._cache[key] = factor_S[:, None].to(device, at_least_single(dtype))
        return self._cache[key]

    def _positions(self, length: int) -> Tensor:
        return torch.arange(length) if self.position_ids is None else self.position_ids.cpu()

    def prepare(self, length: int, dtype: torch.dtype, device: torch.device) -> None:
        """Compute what attention keeps for a length, outside of a compiled graph: the graph would compute it in every layer, and that of
        a recomputed layer, which finds it, would be another one."""
        device = torch.empty(0, device=device).device  # "cuda" is the present GPU, as the inputs of attention say
        for layer in range(self.model.layers):
            positions, rule = positions_of(self.model, layer), rule_of(self.model, layer)
            if positions.rotated:
                self.angles(length, dtype, device, positions.base)
            if positions.tempered:
                self.temperature(length, dtype, device)
            self._position_mask(length, rule, device)

    def mask(self, x: Tensor, rule: AttentionRule) -> Tensor | None:
        """True where a query may attend; None if `is_causal` or no mask is sufficient."""
        mask, documents_BS = self._position_mask(x.shape[-2], rule, x.device), current().documents_BS
        if documents_BS is None:
            return mask
        position_ids = torch.arange(x.shape[-2], device=documents_BS.device)
        same = same_document(documents_BS, position_ids, position_ids)
        if mask is None and self.causal:
            same = same.tril_()
        return same.to(x.device) if mask is None else same.to(x.device) & mask

    def _position_mask(self, length: int, rule: AttentionRule, device: torch.device) -> Tensor | None:
        window = rule.window
        if not window or window >= length:
            return None
        key = ("mask", length, window, rule.chunked, device)
        if key not in self._cache:
            position = torch.arange(length, device=device)
            distance = position[:, None] - position[None, :]
            chunk = position // window
            near = chunk[:, None] == chunk[None, :] if rule.chunked else distance.abs() < window
            self._cache[key] = near & (distance >= 0) if self.causal else near
        return self._cache[key]


class Sinks(nn.Module):
    """The sink of each head, for every query: [B, S, N]."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads))

    def forward(self, x_BSX: Tensor) -> Tensor:
        return self.weight.expand(*x_BSX.shape[:-1], -1)


class SelfAttention(nn.Module):
    def __init__(self, model: Model, geometry: Geometry, layer: int) -> None:
        super().__init__()
        self.width, self.geometry, self.rule = model.head_width, geometry, rule_of(model, layer)
        self.positions = positions_of(model, layer)
        self.probabilities = Probabilities(model.attention_dropout, f"layers.{layer}.probabilities")
        queries, keys = model.heads * self.width, model.kv_groups * self.width
        self.q = ProductLinear(model.hidden, queries, bias=model.qkv_bias)
        self.k = ProductLinear(model.hidden, keys, bias=model.qkv_bias)
        self.v = ProductLinear(model.hidden, keys, bias=model.qkv_bias)
        weighted = model.qk_norm and model.qk_norm_weights
        self.whole = weighted and model.qk_norm_width == "projection"  # norms over all heads
        self.q_norm = self.make_norm(model, queries) if weighted else nn.Identity()
        self.k_norm = self.make_norm(model, keys) if weighted else nn.Identity()
        # Without weights a norm follows the rotation.
        plain = model.qk_norm and not weighted and self.positions.rotated
        self.rotated_norm = (
            nn.RMSNorm(self.width, eps=model.norm_epsilon, elementwise_affine=False) if plain else nn.Identity()
        )
        self.sinks = Sinks(model.heads) if model.sinks else None
        self.o = ProductLinear(queries, model.hidden, bias=model.out_bias)

    def make_norm(self, model: Model, projection: int) -> nn.Module:
        """The norm of queries or keys: over the whole projection, or of each head."""
        if self.whole:
            return ProjectionNorm(projection, model.norm_epsilon, model.norm_offset)
        return rms_norm(self.width, model.norm_epsilon, model.norm_offset)

    def heads(self, x_BSX: Tensor) -> Tensor:
        return x_BSX.unflatten(-1, (-1, self.width))

    def rotated(self, x_BSX: Tensor, norm: nn.Module) -> Tensor:
        """Queries or keys, [B, heads, S, D], normalised and rotated."""
        x_BSND = self.heads(norm(x_BSX)) if self.whole else norm(self.heads(x_BSX))
        return self.rotated_norm(self.geometry.rotated(x_BSND.transpose(1, 2), self.positions))

    def forward(self, x_BSH: Tensor) -> Tensor:
        q_BNSD = self.geometry.tempered(self.rotated(self.q(x_BSH), self.q_norm), self.positions)
        k_BKSD = self.rotated(self.k(x_BSH), self.k_norm)
        v_BKSD = self.heads(self.v(x_BSH)).transpose(1, 2)
        sinks_BNS = None if self.sinks is None else self.sinks(x_BSH).transpose(1, 2)
        rule = self.rule._replace(dropped=self.probabilities(q_BNSD))
        mixed_BNSD = self.geometry.attend(q_BNSD, k_BKSD, v_BKSD, sinks_BNS, rule)
        return self.o(mixed_BNSD.transpose(1, 2).flatten(2))
