"""Compressed attention (DeepSeek-V4): `[model.compressed]`. All queries share one KV head, whose keys and values are the same vector. There are three
kinds of layers, which see

    window       the `window` nearest positions
    selected     these, and of the positions compressed `ratio` to one (overlapping) those that an indexer selects
    compressed   these, and all positions compressed `far_ratio` to one

A compressor pools `ratio` positions with learned weights (two projections and a bias for each place in the group). Queries come from a latent
(`q_rank`). The output projection is a product for each of `out_groups` groups of heads into a latent of `out_rank`, and one from all latents.

Legend: h hidden, N heads, D head dim, q q_rank, g groups, r out_rank. Parameters of a window layer: h·q + q·N·D + h·D + N·D·r + g·r·h.
"""

from __future__ import annotations

from pydantic import Field

from meshwright.describe.base import Described, Whole
from meshwright.describe.tensors import AttentionCore, Block, Linear, Saved, Vector


class CompressedOptions(Described):
    """Ratios of compression, and the grouped output projection."""

    ratio: Whole = Field(
        default=0, description="positions that the layers S compress into one; an indexer selects some"
    )
    far_ratio: Whole = Field(default=0, description="positions that the layers C compress into one; all are seen")
    out_groups: Whole = Field(default=0, description="groups of heads with a separate output projection")
    out_rank: Whole = Field(default=0, description="width of the output of each group")


def compressed_part(
    o: CompressedOptions,
    mixer: str,
    hidden: int,
    heads: int,
    width: int,
    q_rank: int,
    window: int,
    index: tuple[int, int, int],
) -> Block:
    """The attention of one kind of layer; `index`: heads and width of the indexer, and the positions that it selects."""
    inner = heads * width
    linears = [
        Linear("q_a", "attention", hidden, q_rank, "between"),
        Linear("q_b", "attention", q_rank, inner, "column"),
        Linear("kv", "attention", hidden, width, "between", saves_input=False),
        Linear("o_a", "attention", inner // o.out_groups, o.out_groups * o.out_rank, "column", saves_input=False),
        Linear("o", "attention", o.out_groups * o.out_rank, hidden, "row"),
    ]
    vectors = [
        Vector("q-norm", "norm", q_rank),
        Vector("kv-norm", "norm", width),
        Vector("sinks", "attention", heads, "per-head"),
    ]
    saved = [
        Saved("q", "attention", inner, "tensor"),
        Saved("kv", "attention", width, "sequence"),
        Saved("logsumexp", "attention", heads, "tensor", 4, condition="flash"),
        Saved("attention-out", "attention", inner, "tensor"),
        Saved("latent-norms", "attention", q_rank + width, "sequence"),
    ]
    ratio = {"selected": o.ratio, "compressed": o.far_ratio}.get(mixer, 0)
    indexes = index if mixer == "selected" else (0, 0, 0)
    if ratio:
        linears += _compressor("compress", hidden, width, mixer == "selected")
        vectors += _compressor_vectors("compress", width, ratio, mixer == "selected")
        saved.append(Saved("compressor", "attention", 2 * width, "sequence"))
    if mixer == "selected":
        index_heads, index_width, _ = index
        linears += [
            Linear("index_q", "attention", q_rank, index_heads * index_width, "between", saves_input=False),
            Linear("index_weights", "attention", hidden, index_heads, "between", saves_input=False),
            *_compressor("index", hidden, index_width, True),
        ]
        vectors += _compressor_vectors("index", index_width, ratio, True)
        saved.append(Saved("index", "attention", index_heads * (index_width + 1) + 4 * index_width, "sequence"))
        saved.append(Saved("selected", "attention", index[2], "sequence", 4))
    core = AttentionCore(heads, 1, width, width, indexes[0] * indexes[1], window, ratio, indexes[2])
    return Block("", tuple(linears), tuple(vectors), tuple(saved), core)


def _compressor(name: str, hidden: int, width: int, overlaps: bool) -> list[Linear]:
    """The projections that pool keys and values, and the weights of pooling; groups that overlap have both twice."""
    columns = (2 if overlaps else 1) * width
    return [
        Linear(f"{name}_kv", "attention", hidden, columns, "between", saves_input=False),
        Linear(f"{name}_gate", "attention", hidden, columns, "between", saves_input=False),
    ]


def _compressor_vectors(name: str, width: int, ratio: int, overlaps: bool) -> list[Vector]:
    return [
        Vector(f"{name}-bias", "attention", ratio * (2 if overlaps else 1) * width),
        Vector(f"{name}-norm", "norm", width),
    ]
