"""The kinds of layers, and the pattern in which a model repeats them.

A layer has a *mixer*, which moves information between positions, and a *channel* part, which works on each position alone. Most transformers have
both in every layer; hybrid models (Nemotron-H) give each layer only one of them. A kind names the pair:

    kind            mixer            channel          letters
    dense           attention        FFN              *-
    moe             attention        experts          *E
    attention       attention                         *
    linear          linear                            M
    linear-dense    linear           FFN              M-
    linear-moe      linear           experts          ME
    query           reused keys                       Q
    query-dense     reused keys      FFN              Q-
    query-moe       reused keys      experts          QE
    ffn                              FFN              -
    experts                          experts          E

A *linear* mixer has a state of fixed size instead of keys and values of all positions: Mamba, gated delta rule, lightning attention
(`describe.linear`). Models with compressed attention (`describe.compressed`, DeepSeek-V4) have three more mixers: `window` (W) sees the
nearest positions, `selected` (S) also some of the compressed ones, `compressed` (C) also all of the strongly compressed ones.

A *query* mixer (Q) is attention with queries alone: it reads the keys and values of an earlier layer (Gemma 3n).

`pattern` writes the kinds with the letters that Megatron and Nemotron use. Without spaces every letter is a layer ("M-M*-"); with spaces every
word is one ("ME ME ME *E"). A pattern shorter than the model is repeated.
"""

from __future__ import annotations

from itertools import cycle, islice
from typing import NamedTuple

from meshwright.errors import MeshwrightError


class LayerKind(NamedTuple):
    """The two parts of a layer: "attention", "linear" or "" and "ffn", "experts" or ""."""

    mixer: str
    channel: str


MIXERS = {"*": "attention", "Q": "query", "M": "linear", "W": "window", "S": "selected", "C": "compressed"}
CHANNELS = {"-": "ffn", "E": "experts"}
ATTENTION = ("attention", "query", "window", "selected", "compressed")  # mixers with softmax attention
SUFFIXES = {"ffn": "-dense", "experts": "-moe", "": ""}
KINDS = {
    "dense": LayerKind("attention", "ffn"),
    "moe": LayerKind("attention", "experts"),
    "attention": LayerKind("attention", ""),
    **{
        f"{mixer}{suffix}": LayerKind(mixer, channel)
        for mixer in MIXERS.values()
        if mixer != "attention"
        for channel, suffix in SUFFIXES.items()
    },
    "ffn": LayerKind("", "ffn"),
    "experts": LayerKind("", "experts"),
}
NAMES = {parts: name for name, parts in KINDS.items()}


def layer_kinds(pattern: str, layers: int) -> tuple[str, ...]:
    """The kinds of `layers` layers in a repeated pattern."""
    words = pattern.split() if " " in pattern.strip() else list(pattern.strip())
    if not words:
        raise MeshwrightError("MW-MODEL-010", "pattern has no layer", valid=[*MIXERS, *CHANNELS])
    return tuple(islice(cycle([_kind(word, pattern) for word in words]), layers))


def _kind(word: str, pattern: str) -> str:
    mixer, channel = word[:1] in MIXERS, word[-1:] in CHANNELS
    if len(word) != mixer + channel:
        raise MeshwrightError(
            "MW-MODEL-010",
            f"{word!r} in pattern {pattern[:60]!r} is not a layer",
            why="A layer is a mixer, a channel part (- FFN, E experts), or a mixer followed by a channel part",
            valid=[*MIXERS, *CHANNELS, *(mixer + channel for mixer in MIXERS for channel in CHANNELS)],
        )
    return NAMES[LayerKind(MIXERS.get(word[0], ""), CHANNELS.get(word[-1], ""))]
