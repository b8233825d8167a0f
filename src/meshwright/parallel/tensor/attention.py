"""`nn.MultiheadAttention` split by heads.

torch keeps queries, keys and values in one weight, `in_proj_weight`, and calls one function that reads this weight, the number of heads and
`out_proj.weight` directly. Each of the three parts is cut separately, and `forward` is replaced:

    q, k, v = this rank's heads of x Wᵀ          x enters as in every column-split product (`Split.enter`)
    out_proj(softmax(q kᵀ / √d + mask) v)        "row" in the table: the sum over the ranks, then the bias

torch's fast path for evaluation reads the weights too, and is switched off.

Legend: B batch, S sequence, N heads of this rank, D head dimension, H hidden.
"""

import math
from contextlib import nullcontext
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshwright.errors import MeshwrightError
from meshwright.parallel import exchange
from meshwright.parallel.tensor.cutting import Split, cut_parts
from meshwright.parallel.tensor.regather import regather

PACKED = {"in_proj_weight": "1,1,1", "in_proj_bias": "1,1,1"}
SEPARATE = {"q_proj_weight": "1", "k_proj_weight": "1", "v_proj_weight": "1", "in_proj_bias": "1,1,1"}


def split_attention(done: Split, name: str, part: Any) -> None:
    """Keep this rank's heads. The table names `out_proj` too, as "row"."""
    ranks = done.group.size()
    if part.bias_k is not None or part.add_zero_attn:
        raise MeshwrightError(
            "MW-TP-004",
            f"'{name}' has add_bias_kv or add_zero_attn",
            why="They add a position to the keys of every head, which split attention does not do",
            fix="nn.MultiheadAttention(…, add_bias_kv=False, add_zero_attn=False)",
        )
    if part.num_heads % ranks:
        what = f"{part.num_heads} heads of '{name}' do not divide over tp={ranks}"
        raise MeshwrightError("MW-TP-002", what, why="A head is never cut")
    packed = part._qkv_same_embed_dim
    for field_name, parts in (PACKED if packed else SEPARATE).items():
        if getattr(part, field_name) is not None:
            cut_parts(done, part, name, field_name, 0, "column", parts)
    part.num_heads //= ranks
    part._qkv_same_embed_dim = False  # what the fast path asks for
    part.forward = _Forward(done, part, packed)


def switch_off_fast_paths(module: nn.Module) -> None:
    """`nn.TransformerEncoder` would hand nested tensors to its layers in evaluation."""
    for part in module.modules():
        if isinstance(part, nn.TransformerEncoder):
            part.use_nested_tensor = False


class _Forward:
    """`nn.MultiheadAttention.forward` on this rank's heads, with its arguments and results."""

    def __init__(self, done: Split, part: Any, packed: bool) -> None:
        self.done, self.part, self.packed = done, part, packed

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        done, part = self.done, self.part
        if query.ndim != 3:
            raise MeshwrightError("MW-TP-006", f"attention to an input of {query.ndim} dimensions", valid=["[B, S, H]"])
        given = {id(x): x for x in (query, key, value)}
        whole = {i: done.enter(x) for i, x in given.items()}
        one = len(given) == 1 and done.sequence
        around = regather(whole[id(query)], query, done.group, done.sequence_dim) if one else nullcontext()
        with around:
            q, k, v = self.projected(*(whole[id(x)] for x in (query, key, value)))
        mask = self.mask(key_padding_mask, attn_mask, q)
        drop = part.dropout if part.training else 0.0
        weights = None
        if need_weights:
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
            weights = F.dropout(torch.softmax(scores if mask is None else scores + mask, dim=-1), drop, part.training)
            out = weights @ v
            weights = self.all_weights(weights, average_attn_weights)
        else:
            out = F.scaled_dot_product_attention(q, k, v, mask, drop)
        out = out.transpose(1, 2).flatten(2)  # [B, S, N·D]
        return part.out_proj(out if part.batch_first else out.transpose(0, 1)), weights

    def projected(self, *inputs: Tensor) -> list[Tensor]:
        """Queries, keys and values of this rank's heads: [B, N, S, D]."""
        part = self.part
        separate = [getattr(part, f"{kind}_proj_weight") for kind in "qkv"]
        weights = part.in_proj_weight.chunk(3) if self.packed else separate
        biases = part.in_proj_bias.chunk(3) if part.in_proj_bias is not None else (None, None, None)
        out = []
        for x, weight, bias in zip(inputs, weights, biases, strict=True):
            y = F.linear(x if part.batch_first else x.transpose(0, 1), weight, bias)
            out.append(y.unflatten(-1, (part.num_heads, -1)).transpose(1, 2))
        return out

    def mask(self, padding: Tensor | None, given: Tensor | None, like: Tensor) -> Tensor | None:
        """Both masks as one to add to the scores; a mask for B·N heads is cut to the heads of this rank."""
        batch, heads = like.shape[:2]
        masks = []
        if given is not None:
            given = _additive(given, like)
            if given.ndim == 3:
                given = given.unflatten(0, (batch, -1)).narrow(1, self.done.group.rank() * heads, heads)
            masks.append(given)
        if padding is not None:
            masks.append(_additive(padding, like)[:, None, None, :])
        return reduce(add, masks) if masks else None

    def all_weights(self, weights: Tensor, average: bool) -> Tensor:
        """The probabilities of all heads, or their mean, on every rank."""
        group = self.done.group
        if average:
            return exchange.reduce_out(weights.sum(1) / (self.part.num_heads * group.size()), group)
        return exchange.join(weights, group, 1)


def _additive(mask: Tensor, like: Tensor) -> Tensor:
    """True becomes −∞; numbers stay."""
    if mask.dtype != torch.bool:
        return mask.to(like.dtype)
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, float("-inf"))
