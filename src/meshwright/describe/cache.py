"""The KV cache: what a layer keeps of one sequence of s tokens so that the next token needs no other, and what of it that token reads.

    attention                2·K·D per position; with MLA the latent and the rotated key, which every tensor-parallel rank holds whole
    with a window w          min(s, w) positions
    with an indexer          its keys too: all of them are read, and then only the positions that it selects
    query mixer (Q)          nothing: it reads the keys and values of an earlier layer
    linear mixer (M)         its state H·N·P and the last inputs of its convolution, whatever s is: read and written
    compressed attention     one vector of D per near position and per pooled one (r positions, and the indexer's); what waits to be pooled: keys and
                             weights of s mod r positions, and where pools overlap (S) those of the last r

Legend: K KV heads, D head dim, H linear heads, N state, P their width.
"""

from typing import NamedTuple

from meshwright.describe.model import Model
from meshwright.describe.shape_checks import KINDS
from meshwright.describe.variants import ATTENTIONS


class LayerCache(NamedTuple):
    """Elements of one sequence in one layer: those cut with the heads over tensor-parallel ranks, and those whole on each of them."""

    by_head: float = 0.0
    whole: float = 0.0
    read_by_head: float = 0.0
    read_whole: float = 0.0
    positions: float = 0.0  # that the next token attends to
    candidates: float = 0.0  # from which an indexer selects them

    @property
    def elements(self) -> float:
        return self.by_head + self.whole


def layer_cache(m: Model, kind: str, sees_all: bool, seq: int) -> LayerCache:
    """What a layer of this kind keeps of a sequence of `seq` tokens."""
    mixer = KINDS[kind].mixer
    if not mixer:
        return LayerCache()
    if mixer == "linear":
        o = m.linear
        state = o.heads * o.head_dim * o.state + o.convolved * o.conv
        return LayerCache(by_head=state, read_by_head=2 * state)
    attention = ATTENTIONS[m.attention]
    width, near = ATTENTIONS.part(m.attention, "cached")(m), seq if sees_all else min(seq, m.window)
    if mixer in ("window", "selected", "compressed"):
        return _compressed(m, mixer, width, near, seq)
    index = m.index_dim * seq if m.index_heads else 0
    seen = min(near, m.index_top_k or near)
    kept = 0 if mixer == "query" else width * near
    if attention.cached_whole:
        return LayerCache(0, kept + index, 0, width * seen + index, seen, seq)
    return LayerCache(kept, index, width * seen, index, seen, seq)


def _compressed(m: Model, mixer: str, width: int, near: int, seq: int) -> LayerCache:
    ratio = {"selected": m.compressed.ratio, "compressed": m.compressed.far_ratio}.get(mixer, 0)
    if not ratio:
        return LayerCache(0, width * near, 0, width * near, near)
    pooled, waiting = divmod(seq, ratio)
    index = m.index_dim if mixer == "selected" else 0
    overlapping = ratio if mixer == "selected" and pooled else 0
    # Vectors of each position that are pooled: its own pool's and the next one's
    projected = 2 if mixer == "selected" else 1
    held = 2 * (width + index) * (waiting * projected + overlapping)  # keys, and the weights with which they are pooled
    far = min(pooled, m.index_top_k) if mixer == "selected" else pooled
    kept = width * near + (width + index) * pooled + held
    return LayerCache(0, kept, 0, width * (near + far) + index * pooled, near + far, pooled if index else 0)


def cache_by_mixer(m: Model, seq: int) -> dict[str, tuple[int, LayerCache]]:
    """The layers that keep or read something, by mixer ("attention, window 4,096" apart from "attention"): their number, and one layer's cache."""
    out: dict[str, tuple[int, LayerCache]] = {}
    for layer, kind in enumerate(m.layer_kinds):
        mixer, sees_all = KINDS[kind].mixer, m.sees_all(layer)
        if mixer:
            near = mixer in ("attention", "query") and not sees_all
            name = f"{mixer}, window {m.window:,}" if near else mixer
            number, cache = out.get(name) or (0, layer_cache(m, kind, sees_all, seq))
            out[name] = number + 1, cache
    return out
