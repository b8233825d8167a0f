"""What depends on positions: rotary angles, attention masks and dropout masks, from the formulas alone.

    rotation    the pair (a, b) of a head at position p is the complex number a + ib, multiplied by exp(i·p·f)
    mask        query q sees key k if k ≤ q, if k is in its window or chunk, and if both are in the same document
    dropout     keep an element if hash(seed, step, site, sample, position, feature) ≥ r · 2¹⁶

`models` computes the same with tables of cosines, tiles of masks and a hash on tensors of any shape. This file shares no code with it.

Legend: B batch, N heads, S sequence, D width of a head, I = D/2 pairs.
"""

import hashlib
from collections.abc import Sequence
from math import ceil, floor, log, pi, sqrt

import numpy as np
import torch

from meshwright.describe.model import Model


def rotated(x_BNSD: torch.Tensor, model: Model, layer: int) -> torch.Tensor:
    """Queries or keys of a layer with rotary positions: the first elements of each head are pairs that turn with the position."""
    length = x_BNSD.shape[-2]
    plain = has_window(model, layer) and model.window_rope_theta > 0
    frequency_I = plain_frequencies(model, model.window_rope_theta) if plain else frequencies(model, length)
    width = 2 * len(frequency_I)
    turned, rest = x_BNSD[..., :width], x_BNSD[..., width:]
    dims = (-1, 2) if model.rope.interleaved else (2, -1)
    first, second = turned.unflatten(-1, dims).unbind(-1 if model.rope.interleaved else -2)
    angle_SI = torch.outer(torch.arange(length, dtype=torch.float64), torch.tensor(frequency_I, dtype=torch.float64))
    size = torch.full_like(angle_SI, 1.0 if plain else rotation_size(model))
    product = torch.complex(first, second) * torch.polar(size, angle_SI)
    return torch.cat((product.real, product.imag, rest), dim=-1)


def plain_frequencies(model: Model, theta: float) -> list[float]:
    """f_i = θ^(−2i/D)."""
    width = model.rope_dim or (model.head_dim or model.hidden // model.heads)
    return [theta ** (-2 * i / width) for i in range(width // 2)]


def frequencies(model: Model, length: int) -> list[float]:
    """The frequency of each pair, scaled for sequences that are longer than the original ones (`describe.shape_parts`)."""
    rope, theta = model.rope, model.rope_theta
    original = rope.original_positions or model.max_positions
    plain = plain_frequencies(model, theta)
    width = 2 * len(plain)
    match rope.kind:
        case "default":
            return plain
        case "linear":
            return [f / rope.factor for f in plain]
        case "dynamic":
            growth = rope.factor * max(length, original) / original - (rope.factor - 1)
            return plain_frequencies(model, theta * growth ** (width / (width - 2)))
        case "longrope":
            divisors = rope.long_factor if length > original else rope.short_factor
            return [f / divisor for f, divisor in zip(plain, divisors, strict=True)]
        case "llama3":
            low, high = rope.low_freq_factor, rope.high_freq_factor
            share = [(original * f / (2 * pi) - low) / (high - low) for f in plain]
        case _:  # yarn
            first, last = (
                width * log(original / (2 * pi * n)) / (2 * log(theta)) for n in (rope.beta_fast, rope.beta_slow)
            )
            first, last = (floor(first), ceil(last)) if rope.truncate else (first, last)
            first, last = max(first, 0), min(last, width - 1)
            share = [(last - i) / (last - first) if last != first else float(i <= first) for i in range(len(plain))]
    clamped = [min(1.0, max(0.0, s)) for s in share]
    return [f * s + f / rope.factor * (1 - s) for f, s in zip(plain, clamped, strict=True)]


def rotation_size(model: Model) -> float:
    """The factor of cosine and sine: above 1 under yarn and longrope, so that scores grow with the length."""
    rope = model.rope
    if rope.kind not in ("yarn", "longrope"):
        return 1.0
    if rope.attention_factor or rope.factor <= 1:
        return rope.attention_factor or 1.0
    if rope.kind == "longrope":
        return sqrt(1 + log(rope.factor) / log(rope.original_positions or model.max_positions))
    both = rope.mscale and rope.mscale_all_dim
    return magnitude(model, rope.mscale) / magnitude(model, rope.mscale_all_dim) if both else magnitude(model, 1.0)


def magnitude(model: Model, scale: float) -> float:
    return 1.0 + 0.1 * scale * log(max(model.rope.factor, 1.0))


def has_window(model: Model, layer: int) -> bool:
    """Whether a layer, counted from 0, sees a part of the positions only."""
    sees_all = layer in model.full_layers or (model.full_every > 0 and (layer + 1) % model.full_every == 0)
    return model.window > 0 and not sees_all


def visible(model: Model, layer: int, length: int, documents_BS: torch.Tensor | None) -> torch.Tensor:
    """[B or 1, 1, S, S]: whether a query, row by row, sees a key."""
    query, key = torch.arange(length)[:, None], torch.arange(length)[None, :]
    seen = key <= query if model.causal else torch.ones(length, length, dtype=torch.bool)
    if has_window(model, layer):
        chunk = query // model.window == key // model.window
        seen = seen & (chunk if model.window_kind == "chunk" else (query - key).abs() < model.window)
    if documents_BS is None:
        return seen[None, None]
    return (seen & (documents_BS[:, :, None] == documents_BS[:, None, :]))[:, None]


GOLDEN, FIRST, SECOND = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def splitmix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's mixing of 64 bits (Steele, Lea & Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * FIRST
    x = (x ^ (x >> np.uint64(27))) * SECOND
    return x ^ (x >> np.uint64(31))


def dropout_factor(seed: int, step: int, site: str, samples: Sequence[int], rate: float, *sizes: int) -> torch.Tensor:
    """[B, *sizes]: 0 for elements that are dropped, 1 / (1 − rate) for others. Each index is mixed into the hash in turn; the last one in groups
    of four, which share the 64 bits of a number."""
    *outer, width = sizes
    digests = [hashlib.blake2b(text.encode(), digest_size=8).digest() for text in (f"{seed}:{step}", site)]
    moment, place = (np.frombuffer(digest, "<u8").astype(np.uint64) for digest in digests)
    number = splitmix(splitmix(np.array(samples, np.uint64) * GOLDEN + moment) + place)
    for size in (*outer, -(-width // 4)):
        number = splitmix(number[..., None] + np.arange(size, dtype=np.uint64) * GOLDEN)
    bits = np.stack([(number >> np.uint64(16 * i)) & np.uint64(0xFFFF) for i in range(4)], axis=-1)
    parts = bits.reshape(*bits.shape[:-2], -1)[..., :width] ^ np.uint64(0x8000)
    limit = min(round(rate * 2**16), 2**16 - 1)
    return torch.from_numpy((parts >= limit) / (1 - limit / 2**16))
