"""A plain forward with a KV cache: greedy tokens of our transformer, to compare times and memory with what `predict.decode` says.

    with decoding(network, capacity=4096) as decoder:
        decoder.prompt(ids_BS)                 logits of the last token, [B, V]
        decoder.token(next_B)                  those of one more token of each sequence

All attention kinds call `Geometry.attend` with queries, keys and values; the geometry of a decoder keeps the keys and values of every layer there, so
that one code serves all of them. A layer with a window keeps the last `window` positions in a ring: position p lies in row p mod window, where it
replaces the one that no later query sees. Latent attention keeps what its heads read, not the latent.
Where the frequencies of rotary positions depend on the length of the sequence, the capacity is that length.

It is no serving engine: sequences have the same length, and buffers are allocated once.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from meshwright.describe.model import Model
from meshwright.errors import MeshwrightError
from meshwright.models.attention import AttentionRule, Geometry
from meshwright.models.transformer import Transformer


class CachedGeometry(Geometry):
    """Positions of the tokens that run now, and the keys and values of those before them."""

    def __init__(self, model: Model, capacity: int) -> None:
        super().__init__(model)
        self.capacity = self.length = capacity
        self.caches: list[tuple[Tensor, Tensor]] = []  # keys and values of each layer
        self.first = self.layer = 0  # position of the first token that runs now; the layer whose attention is next
        # Compiled layers call it between two graphs: it counts layers and keeps tensors.
        self.attend = torch.compiler.disable(self.attend_cached)

    def move(self, first: int, count: int, device: torch.device) -> None:
        """Go to the positions of the next tokens."""
        if first + count > self.capacity:
            raise MeshwrightError(
                "MW-BUILD-006",
                f"position {first + count} of a decoder for {self.capacity}",
                why="Its buffers are allocated once",
                fix=f"decoding(…, capacity={first + count})",
            )
        self.first, self.layer = first, 0
        self.position_ids = torch.arange(first, first + count, device=device)

    def angles(self, length: int, dtype: torch.dtype, device: torch.device, base: float = 0.0) -> Tensor:
        return super().angles(self.capacity, dtype, device, base)[:, self.first : self.first + length]

    def temperature(self, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return super().temperature(self.capacity, dtype, device)[self.first : self.first + length]

    def _positions(self, length: int) -> Tensor:
        return torch.arange(length)

    def attend_cached(self, q: Tensor, k: Tensor, v: Tensor, sinks_BNS: Tensor | None, rule: AttentionRule) -> Tensor:
        """Keep the keys and values of these tokens; attend to all that are kept."""
        count, rows = q.shape[-2], min(self.capacity, rule.window or self.capacity)
        if len(self.caches) == self.layer:
            self.caches.append(tuple(x.new_empty(*x.shape[:2], rows, x.shape[-1]) for x in (k, v)))  # type: ignore[arg-type]
        kept = self.caches[self.layer]
        self.layer += 1
        last = min(count, rows)
        at = torch.arange(self.first + count - last, self.first + count, device=q.device) % rows
        for buffer, new in zip(kept, (k, v), strict=True):
            buffer.index_copy_(2, at, new[..., count - last :, :])
        if not self.first:
            return self.attend_whole(q, k, v, sinks_BNS, rule)
        filled = min(self.first + 1, rows)
        k, v = (buffer[:, :, :filled] for buffer in kept)
        seen = None
        if rule.chunked:  # the other windows hold exactly what the query sees
            row = torch.arange(filled, device=q.device)
            seen = (self.first - (self.first - row) % rows >= self.first // rule.window * rule.window)[None]
        if not rule.fused or sinks_BNS is not None:
            seen = torch.ones(1, filled, dtype=torch.bool, device=q.device) if seen is None else seen
            return self._attend_step_by_step(q, k, v, sinks_BNS, seen, rule)
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(q, k, v, seen, scale=rule.scale, enable_gqa=q.shape[1] != k.shape[1])

    @property
    def bytes(self) -> int:
        """Size of all buffers."""
        return sum(x.numel() * x.element_size() for layer in self.caches for x in layer)


class Decoder:
    """A network whose tokens are computed one after the other."""

    def __init__(self, network: Transformer, geometry: CachedGeometry) -> None:
        self.network, self.geometry, self.at = network, geometry, 0

    @torch.no_grad()
    def prompt(self, ids_BS: Tensor) -> Tensor:
        """The logits after the first tokens of new sequences, [B, V]."""
        self.at = 0
        return self._run(ids_BS)

    @torch.no_grad()
    def token(self, ids_B: Tensor) -> Tensor:
        """The logits after one more token of each sequence, [B, V]."""
        return self._run(ids_B[:, None])

    def _run(self, ids_BS: Tensor) -> Tensor:
        network, geometry = self.network, self.geometry
        assert network.embedding is not None
        assert network.head is not None
        geometry.move(self.at, ids_BS.shape[1], ids_BS.device)
        self.at += ids_BS.shape[1]
        return network.head(network.body(network.embedding(ids_BS))[:, -1:])[:, 0]


def check(model: Model) -> None:
    """Raise if a token's output depends on later tokens or on other sequences."""
    if not model.causal or (model.experts and model.router.compares):
        raise MeshwrightError(
            "MW-DEC-001",
            f"{model.name} generates no text",
            why="The output of its tokens depends on later ones, or its experts choose among all tokens of a batch",
            fix="a causal model whose tokens choose their experts, without a capacity",
        )


@contextmanager
def decoding(network: Transformer, capacity: int) -> Iterator[Decoder]:
    """A decoder for sequences of at most `capacity` tokens; the network is as before afterwards."""
    check(network.geometry.model)
    own, geometry, training = network.geometry, CachedGeometry(network.geometry.model, capacity), network.training
    parts: list[Any] = [module for module in network.modules() if getattr(module, "geometry", None) is own]
    network.eval()
    for part in parts:
        part.geometry = geometry
    try:
        yield Decoder(network, geometry)
    finally:
        for part in parts:
            part.geometry = own
        network.train(training)


def generate(network: Transformer, prompt_BS: Tensor, count: int) -> Tensor:
    """The `count` most likely tokens after a prompt, one after the other: [B, count]."""
    tokens: list[Tensor] = []
    with decoding(network, prompt_BS.shape[1] + count) as decoder:
        logits_BV = decoder.prompt(prompt_BS)
        while True:
            tokens.append(logits_BV.argmax(-1))
            if len(tokens) == count:
                return torch.stack(tokens, dim=1)
            logits_BV = decoder.token(tokens[-1])
