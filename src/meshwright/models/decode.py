"""A plain forward with a KV cache: greedy tokens of our transformer, to compare times and memory with what `predict.decode` says.

    with decoding(network, capacity=4096) as decoder:
        decoder.prompt(ids_BS)                 logits of the last token, [B, V]
        decoder.capture()                      on a GPU, if wanted: later tokens replay one CUDA graph
        decoder.token(next_B)                  those of one more token of each sequence

All attention kinds call `Geometry.attend` with queries, keys and values. Each layer of a decoder has a geometry of its own, which keeps them in
buffers that are allocated once. A layer with a window keeps the last `window` positions in a ring: position p lies in row p mod window, where it
replaces the one that no later query sees. Latent attention keeps the latent and the rotated key (`models.mla`): one head of keys, whose first columns
are the values. Where the frequencies of rotary positions depend on the length of the sequence, the capacity is that length.

The position of a token is a tensor on the device, and the shapes of its step are the same at every position. So the step can be compiled, and a CUDA
graph that was captured at one position is right at all of them. What depends on the position are rows of tables, the row of the buffers that is
written, and how far they are read: by a kernel (`decode_kernel`) on a GPU, and by a mask elsewhere and for attention with sinks, soft caps or chunks.

It is no serving engine: sequences have the same length, and buffers are allocated once.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from meshwright.describe.model import Model
from meshwright.errors import MeshwrightError
from meshwright.models.attention import AttentionRule, Geometry, rule_of
from meshwright.models.mla import Heads, LatentAttention
from meshwright.models.parts import soft_cap
from meshwright.models.transformer import Transformer


@dataclass
class Place:
    """The position of the one token of each sequence that runs now, [1]; a prompt starts at 0."""

    at: Tensor
    prompt: bool = True
    tables: dict[tuple, Tensor] = field(default_factory=dict)  # of angles and temperatures, of all layers


class CachedGeometry(Geometry):
    """The geometry of one layer: positions of the tokens that run now, and the keys and values of those before them."""

    def __init__(self, model: Model, capacity: int, place: Place, rule: AttentionRule) -> None:
        super().__init__(model)
        self.capacity = self.length = capacity
        self.place, self._cache = place, place.tables
        self.rows = min(capacity, rule.window or capacity)
        self.attend = self.attend_cached
        # Keys and values, [B, K, rows, D], or the latents of all heads, [B, 1, rows, D]
        self.kept: tuple[Tensor, ...] = ()

    def allocate(self, shapes: list[tuple[int, int]], batch: int, dtype: torch.dtype) -> None:
        """Make the buffers of so many sequences, given the heads and the width of each."""
        device = self.place.at.device
        self.kept = tuple(
            torch.zeros(batch, heads, self.rows, width, dtype=dtype, device=device) for heads, width in shapes
        )

    def angles(self, length: int, dtype: torch.dtype, device: torch.device, base: float = 0.0) -> Tensor:
        table = super().angles(self.capacity, dtype, device, base)
        return table[:, :length] if self.place.prompt else table.index_select(1, self.place.at)

    def temperature(self, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        table = super().temperature(self.capacity, dtype, device)
        return table[:length] if self.place.prompt else table.index_select(0, self.place.at)

    def _positions(self, length: int) -> Tensor:
        return torch.arange(length)

    def keep(self, *new: Tensor) -> None:
        """Write the keys and values of these tokens into the buffers."""
        count = new[0].shape[-2]
        if self.place.prompt:
            last = min(count, self.rows)
            at, new = (
                torch.arange(count - last, count, device=new[0].device),
                tuple(x[..., count - last :, :] for x in new),
            )
        else:
            at = self.place.at
        for buffer, x in zip(self.kept, new, strict=True):
            buffer.index_copy_(2, at % self.rows, x)

    def attend_cached(self, q: Tensor, k: Tensor, v: Tensor, sinks_BNS: Tensor | None, rule: AttentionRule) -> Tensor:
        """Keep the keys and values of these tokens; attend to all that are kept."""
        if len(self.kept) > 1:  # latents are kept by those who compute them
            self.keep(k, v)
        if self.place.prompt:
            return self.attend_whole(q, k, v, sinks_BNS, rule)
        return self.attend_kept(q, self.kept[0], self.kept[1], sinks_BNS, rule)

    def keep_latents(self, latent_BSR: Tensor, key_B1SD: Tensor | None) -> bool:
        if len(self.kept) != 1:
            return False
        latent_B1SR = latent_BSR.unsqueeze(1)
        self.keep(latent_B1SR if key_B1SD is None else torch.cat((latent_B1SR, key_B1SD), dim=-1))
        return not self.place.prompt

    def attend_latents(self, q_BNSL: Tensor, values: int, rule: AttentionRule) -> Tensor:
        return self.attend_kept(q_BNSL, self.kept[0], self.kept[0][..., :values], None, rule)

    def attend_kept(
        self, q_BN1D: Tensor, k: Tensor, v: Tensor, sinks_BN1: Tensor | None, rule: AttentionRule
    ) -> Tensor:
        scale = rule.scale or q_BN1D.shape[-1] ** -0.5
        if q_BN1D.is_cuda and q_BN1D.dtype != torch.float64 and rule.fused and not rule.chunked and sinks_BN1 is None:
            return attend_token(q_BN1D.contiguous(), k, v, self.place.at, scale)
        q_BKGD = q_BN1D.squeeze(2).unflatten(1, (k.shape[1], -1))
        scores = q_BKGD @ k.transpose(-1, -2) * scale
        scores = soft_cap(scores, rule.softcap) if rule.softcap else scores
        scores = scores.masked_fill(~self.seen(rule), -torch.inf)
        if sinks_BN1 is not None:
            scores = torch.cat((scores, sinks_BN1.view(*scores.shape[:3], 1)), dim=-1)
        probabilities = scores.softmax(-1)[..., : self.rows]
        return (probabilities @ v).flatten(1, 2).unsqueeze(2)

    def seen(self, rule: AttentionRule) -> Tensor:
        """The rows that the token sees: those that were written, which a window's ring keeps no longer than it may, and of chunks its own."""
        row, at = torch.arange(self.rows, device=self.place.at.device), self.place.at
        if rule.chunked:
            return (row <= at) & (at - (at - row) % self.rows >= at // rule.window * rule.window)
        return row <= at

    @property
    def bytes(self) -> int:
        """Size of the buffers."""
        return sum(x.numel() * x.element_size() for x in self.kept)


@torch.library.custom_op("meshwright::attend_token", mutates_args=())
def attend_token(q: Tensor, keys: Tensor, values: Tensor, at: Tensor, scale: float) -> Tensor:
    """Attention of one query of each sequence and head, [B, N, 1, D], to the first `at` + 1 rows of buffers."""
    from meshwright.models import decode_kernel

    return decode_kernel.attend(q, keys, values, at, scale)


@attend_token.register_fake
def _(q: Tensor, keys: Tensor, values: Tensor, at: Tensor, scale: float) -> Tensor:
    return q.new_empty(*q.shape[:-1], values.shape[-1])


class Decoder:
    """A network whose tokens are computed one after the other."""

    def __init__(self, network: Transformer, geometries: list[CachedGeometry], outside: CachedGeometry) -> None:
        self.network, self.geometries, self.outside = network, geometries, outside
        self.place, self.capacity = outside.place, outside.capacity
        self.at = 0  # positions that were computed
        self.replay: Callable[[Tensor], Tensor] | None = None

    @torch.no_grad()
    def prompt(self, ids_BS: Tensor) -> Tensor:
        """The logits after the first tokens of new sequences, [B, V]."""
        self._check(ids_BS.shape[1])
        self.allocate(len(ids_BS))
        self.place.prompt, self.at = True, ids_BS.shape[1]
        return self._forward(ids_BS, torch.arange(self.at, device=ids_BS.device))

    def allocate(self, batch: int) -> None:
        """Make the buffers of so many sequences, unless they are there. A captured step writes into those of its own number of sequences."""
        kept = self.geometries[0].kept
        if kept and len(kept[0]) == batch:
            return
        self.replay = None
        dtype = next(self.network.layers.parameters()).dtype
        for geometry, layer in zip(self.geometries, self.network.layers.values(), strict=True):
            geometry.allocate(shapes_of(layer.attention), batch, dtype)

    @torch.no_grad()
    def token(self, ids_B: Tensor) -> Tensor:
        """The logits after one more token of each sequence, [B, V]. Those of a captured step are overwritten by the next one."""
        self._check(self.at + 1)
        self.place.at.fill_(self.at)
        self.at += 1
        return self._token(ids_B) if self.replay is None else self.replay(ids_B)

    @torch.no_grad()
    def capture(self) -> None:
        """Record the step of a token as a CUDA graph, which `token` replays. It computes at the next position, which that token overwrites."""
        self._check(self.at + 1)
        self.place.at.fill_(self.at)
        ids_B = torch.zeros(len(self.geometries[0].kept[0]), dtype=torch.long, device=self.place.at.device)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):  # compilers and libraries allocate in the first calls
                self._token(ids_B)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = self._token(ids_B)

        def replay(next_B: Tensor) -> Tensor:
            ids_B.copy_(next_B)
            graph.replay()
            return logits

        self.replay = replay

    def _token(self, ids_B: Tensor) -> Tensor:
        self.place.prompt = False
        return self._forward(ids_B[:, None], self.place.at)

    def _forward(self, ids_BS: Tensor, position_ids: Tensor) -> Tensor:
        network = self.network
        assert network.embedding is not None
        assert network.head is not None
        self.outside.position_ids = position_ids
        return network.head(network.body(network.embedding(ids_BS))[:, -1:])[:, 0]

    def _check(self, length: int) -> None:
        if length > self.capacity:
            raise MeshwrightError(
                "MW-BUILD-006",
                f"position {length} of a decoder for {self.capacity}",
                why="Its buffers are allocated once",
                fix=f"decoding(…, capacity={length})",
            )

    @property
    def bytes(self) -> int:
        """Size of all buffers."""
        return sum(geometry.bytes for geometry in self.geometries)


def shapes_of(attention: Any) -> list[tuple[int, int]]:
    """Heads and width of what a layer keeps: keys and values, or of latent attention without an adapter of its up-projection the latents."""
    if isinstance(attention, LatentAttention):
        heads: Heads = attention.heads
        count = heads.kv_b.out_features // (heads.nope + heads.value)
        return (
            [(1, sum(attention.ranks))] if heads.absorbs else [(count, heads.nope + heads.rope), (count, heads.value)]
        )
    return [(attention.k.out_features // attention.width, attention.width)] * 2


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
    own, training = network.geometry, network.training
    check(own.model)
    weight = next(network.layers.parameters())
    place = Place(torch.zeros(1, dtype=torch.long, device=weight.device))

    def geometry(layer: int) -> CachedGeometry:
        return CachedGeometry(own.model, capacity, place, rule_of(own.model, layer))

    of_layers = {int(name): geometry(int(name)) for name in network.layers}
    of_layers[next(iter(of_layers))].prepare(capacity, weight.dtype, weight.device)
    outside = geometry(0)
    parts: list[tuple[Any, CachedGeometry]] = [(m, outside) for m in network.modules()]
    parts += [(m, of_layers[int(name)]) for name, layer in network.layers.items() for m in layer.modules()]
    parts = [(m, new) for m, new in parts if isinstance(getattr(m, "geometry", None), Geometry)]
    network.eval()
    for part, new in parts:
        part.geometry = new
    try:
        yield Decoder(network, [*of_layers.values()], outside)
    finally:
        for part, _ in parts:
            part.geometry = own
        network.train(training)


def generate(network: Transformer, prompt_BS: Tensor, count: int, capture: bool = False) -> Tensor:
    """The `count` most likely tokens after a prompt, one after the other: [B, count]. `capture`: as one CUDA graph that is replayed."""
    tokens: list[Tensor] = []
    with decoding(network, prompt_BS.shape[1] + count) as decoder:
        logits_BV = decoder.prompt(prompt_BS)
        if capture and count > 1:
            logits_BV = logits_BV.clone()
            decoder.capture()
        while True:
            tokens.append(logits_BV.argmax(-1))
            if len(tokens) == count:
                return torch.stack(tokens, dim=1)
            logits_BV = decoder.token(tokens[-1])
