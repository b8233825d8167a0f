"""The attention kinds: their names, the fields of `[model]` that each one reads, and its parts.

`ATTENTIONS` is the only table of attention kinds. All parts but the last two are functions of a model:

    part         room                      what it returns or does
    block        describe.attention_blocks   the `Block` of a mixer: matrices, vectors, saved tensors and the core (arguments: model, mixer).
                                             Parameters, FLOPs, saved activations and the sharding table are counted from it
    check        describe.shape_checks       raises for fields that do not fit
    key_width    here                        the width of a query and a key: scores are divided by its square root
    rotated      here                        elements of each head that rotary positions rotate
    summary      here                        a few words for one line about the model
    small        here                        narrow widths of a model that `verify` runs in place of this one; widths not named stay
    lower        lower.layer_kinds           adds the operations of one layer to a `LayerLowering`
    module       models.transformer          the torch module (arguments: model, geometry, layer); none for a kind that is `planning_only`
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from meshwright.describe.variants import NameIn, Registry
from meshwright.errors import MeshwrightError, nearest

SMALL_HEAD = 8  # width of a head in the models that `verify` runs


@dataclass(frozen=True)
class Attention:
    """One attention kind, and its parts."""

    name: str
    about: str
    fields: tuple[str, ...] = ()  # fields of [model] that it reads besides hidden and heads
    mixers: tuple[str, ...] = ("attention",)  # the mixers of a pattern that it has (`describe.layers`)
    options: Mapping[str, float] = field(default_factory=dict)  # keys of [model.attention_options], and their defaults
    heads_in: str = "attention"  # the module of a layer whose matrices are cut by heads: tensor parallelism begins here
    not_trained: tuple[str, ...] = ()  # flags of [model] that its module does not compute
    frameworks: tuple[str, ...] = ()  # other frameworks that have it; "*": all whose models have it
    planning_only: bool = False  # has no module: `train` and `verify` refuse it
    block: Callable[..., Any] | None = None
    check: Callable[..., None] | None = None  # none: it accepts all values
    key_width: Callable[..., int] | None = None
    rotated: Callable[..., int] | None = None
    summary: Callable[..., str] | None = None  # none: its name
    small: Callable[..., dict[str, Any]] | None = None
    lower: Callable[..., None] | None = None
    module: Callable[..., Any] | None = None

    def reads(self, name: str) -> bool:
        """Whether it reads a field of `[model]`."""
        return name in self.fields

    def check_options(self, options: Mapping[str, float]) -> None:
        """Raise for a key of `[model.attention_options]` that this kind does not have."""
        for key in options:
            if key not in self.options:
                near = nearest(key, list(self.options))
                raise MeshwrightError(
                    "MW-CONF-001",
                    f"model.attention_options.{key} does not exist for attention={self.name}",
                    valid=list(self.options),
                    fix=f"--set model.attention_options.{near}={options[key]:g}" if near else "",
                )


def _small_latents(model: Any) -> dict[str, int]:
    widths = {"q_rank": 6, "kv_rank": 10, "nope_dim": 6, "rope_dim": 4, "value_dim": 5}
    return {name: min(size, getattr(model, name)) for name, size in widths.items()}


ATTENTIONS: Registry[Attention] = Registry(
    "attention kind",
    Attention(
        "gqa",
        "groups of queries share a key and a value; multi-head and multi-query attention are its ends",
        ("kv_heads", "head_dim"),
        ("attention", "query"),
        frameworks=("*",),
        key_width=lambda m: m.head_width,
        rotated=lambda m: m.rope_dim or m.head_width,
        summary=lambda m: f" ({m.kv_groups} KV)" if m.kv_groups != m.heads else "",
        small=lambda m: {"rope_dim": SMALL_HEAD // 2 if m.rope_dim else 0},
    ),
    Attention(
        "mla",
        "multi-head latent attention (DeepSeek-V2): keys and values of all heads from one small vector of each token",
        ("q_rank", "kv_rank", "nope_dim", "rope_dim", "value_dim", "latent_norm_epsilon"),
        heads_in="attention.heads",
        frameworks=("*",),
        not_trained=("qk_norm", "sinks"),
        key_width=lambda m: m.nope_dim + m.rope_dim,
        rotated=lambda m: m.rope_dim,
        summary=lambda m: f" (MLA, latent {m.kv_rank})",
        small=_small_latents,
    ),
    Attention(
        "compressed",
        "compressed attention (DeepSeek-V4): one KV head, and distant positions pooled into one (`describe.compressed`)",
        ("q_rank", "head_dim", "window", "compressed"),
        ("window", "selected", "compressed"),
        frameworks=("*",),
        planning_only=True,
        key_width=lambda m: m.head_width,
        rotated=lambda m: m.rope_dim or m.head_width,
        summary=lambda m: f" ({m.kv_groups} KV)" if m.kv_groups != m.heads else "",
    ),
)
AttentionName = Annotated[str, NameIn(ATTENTIONS)]
