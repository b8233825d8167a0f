"""Checks of a model's shape: which fields it needs, which exclude each other, and what must divide."""

from itertools import cycle, islice
from typing import Any, NamedTuple

from meshwright.describe.shape_parts import RopeOptions, RouterOptions
from meshwright.describe.variants import ATTENTIONS
from meshwright.errors import MeshwrightError, nearest_number

# --- The kinds of layers, and the pattern in which a model repeats them.
#
# A layer has a *mixer*, which moves information between positions, and a *channel* part, which works on each position alone. Most transformers have
# both in every layer; hybrid models (Nemotron-H) give each layer only one of them. A kind names the pair:
#
#     kind            mixer            channel          letters
#     dense           attention        FFN              *-
#     moe             attention        experts          *E
#     attention       attention                         *
#     linear          linear                            M
#     linear-dense    linear           FFN              M-
#     linear-moe      linear           experts          ME
#     query           reused keys                       Q
#     query-dense     reused keys      FFN              Q-
#     query-moe       reused keys      experts          QE
#     ffn                              FFN              -
#     experts                          experts          E
#
# A *linear* mixer has a state of fixed size instead of keys and values of all positions: Mamba, gated delta rule, lightning attention
# (`describe.mixer_options`). Models with compressed attention (`describe.mixer_options`, DeepSeek-V4) have three more mixers: `window` (W) sees the
# nearest positions, `selected` (S) also some of the compressed ones, `compressed` (C) also all of the strongly compressed ones.
#
# A *query* mixer (Q) is attention with queries alone: it reads the keys and values of an earlier layer (Gemma 3n).
#
# `pattern` writes the kinds with the letters that Megatron and Nemotron use. Without spaces every letter is a layer ("M-M*-"); with spaces every
# word is one ("ME ME ME *E"). A pattern shorter than the model is repeated.


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


MOST_LAYERS = 100_000  # layers are counted one by one
Shape = Any  # a `shape.ModelShape`, which imports this file


def check(m: Shape) -> None:
    """Raise if a shape cannot be a model."""
    if m.kind == "counts":
        if m.resnet.stages:
            m.resnet.check(m.layers)
            if m.given_parameters or m.given_flops or m.given_activations:
                raise MeshwrightError(
                    "MW-MODEL-010",
                    f"{m.name}: given_parameters, given_flops or given_activations besides [model.resnet]",
                    why="The stages of a residual network determine its parameters, FLOPs and activations",
                    fix="leave out the given numbers, or the resnet table",
                )
        elif m.given_parameters <= 0 or m.given_flops <= 0:
            raise MeshwrightError("MW-MODEL-001", f"{m.name}: 'counts' needs given_parameters and given_flops")
        return
    if m.resnet.stages:
        raise MeshwrightError("MW-MODEL-010", f"[model.resnet] with kind={m.kind}", fix="--set model.kind=counts")
    for field in ("hidden", "layers") if m.kind == "mlp" else ("hidden", "layers", "vocab"):
        if not getattr(m, field):
            raise MeshwrightError("MW-MODEL-001", f"{m.name}: a {m.kind} needs '{field}' above 0")
    if m.layers > MOST_LAYERS:
        raise MeshwrightError(
            "MW-MODEL-007",
            f"{m.name}: {m.layers} layers",
            valid=[f"1 to {MOST_LAYERS}"],
            fix=f"--set model.layers={MOST_LAYERS}",
        )
    if m.kind == "transformer":
        _check_attention(m)
        _check_rotation_and_activation(m)
        _check_effect(m)
        _check_experts(m)
        _check_pattern(m)
        _check_sparse_attention(m)


def _check_attention(m: Shape) -> None:
    """Raise if the fields of attention do not fit its kind, or KV heads do not divide the heads."""
    kind = ATTENTIONS[m.attention]
    kind.check_options(m.attention_options)
    if kind.check:
        kind.check(m)
    if m.heads % m.kv_groups:
        legal = [n for n in range(1, min(m.heads, 4096) + 1) if m.heads % n == 0]
        near = nearest_number(m.kv_groups, legal)
        what = f"{m.kv_groups} KV heads do not divide {m.heads} heads"
        raise MeshwrightError("MW-MODEL-003", what, valid=legal, fix=f"--set model.kv_heads={near}")


def _check_grouped(m: Shape) -> None:
    """Raise if heads do not divide the hidden width, or are narrower than what is rotated of them."""
    if not m.head_dim and m.hidden % m.heads:
        legal = [n for n in range(1, 257) if m.hidden % n == 0]
        grouped = [n for n in legal if not m.kv_heads or n % m.kv_heads == 0]
        raise MeshwrightError(
            "MW-MODEL-002",
            f"{m.heads} heads do not divide hidden {m.hidden}",
            valid=legal,
            fix=f"--set model.heads={nearest_number(m.heads, grouped)}" if grouped else "",
        )
    if m.rope_dim > m.head_width:
        what = f"rope_dim={m.rope_dim} exceeds the head width {m.head_width}"
        why = "It is the number of elements of each head that are rotated"
        raise MeshwrightError("MW-MODEL-009", what, why=why, fix="--set model.rope_dim=0")


def _check_latent(m: Shape) -> None:
    if not (m.kv_rank and m.nope_dim and m.value_dim):
        raise MeshwrightError("MW-MODEL-004", "MLA needs kv_rank, nope_dim and value_dim above 0")


def _check_compressed(m: Shape) -> None:
    o = m.compressed
    needed = m.q_rank and m.head_dim and m.window and o.out_groups and o.out_rank
    if not (needed and m.pattern and not m.has_part("attention")):
        what = "attention=compressed needs q_rank, head_dim, window, compressed.out_groups and out_rank, and a pattern of W, S and C layers"
        raise MeshwrightError("MW-MODEL-004", what)
    if (m.heads * m.head_dim) % o.out_groups:
        raise MeshwrightError("MW-MODEL-004", f"{o.out_groups} groups do not divide {m.heads} heads × {m.head_dim}")
    for mixer, present, fields in (
        ("selected", o.ratio and m.index_heads, "compressed.ratio and index_heads"),
        ("compressed", o.far_ratio, "compressed.far_ratio"),
    ):
        if m.has_part(mixer) and not present:
            raise MeshwrightError("MW-MODEL-010", f"pattern {m.pattern[:60]!r} needs model.{fields}")


ATTENTIONS.provide("gqa", check=_check_grouped)
ATTENTIONS.provide("mla", check=_check_latent)
ATTENTIONS.provide("compressed", check=_check_compressed)


def _check_rotation_and_activation(m: Shape) -> None:
    """Raise for options of rotary positions or of SwiGLU that do not fit the model or would have no effect."""
    if m.positions == "rope":
        m.rope.check(m.rotated_width, m.max_positions)
    elif m.rope != RopeOptions():
        raise MeshwrightError(
            "MW-MODEL-009", f"[model.rope] with positions={m.positions}", fix="--set model.positions=rope"
        )
    if m.activation != "swiglu" and (m.swiglu_limit, m.swiglu_alpha, m.swiglu_shift) != (0, 1, 0):
        what = f"swiglu_limit, swiglu_alpha or swiglu_shift with activation={m.activation}"
        raise MeshwrightError("MW-MODEL-009", what, fix="--set model.activation=swiglu")


def _check_effect(m: Shape) -> None:
    """Raise for fields that would have no effect together with the others, and for names of differences that the model does not have."""
    without_rope = bool(m.nope_every or m.nope_layers)
    windows_rotate = m.window and m.positions == "rope"
    per_head = m.qk_norm and m.qk_norm_width == "head"
    norms_before = m.norm_position == "pre" and m.norms_per_layer in (1, 2)
    for broken, what, *reset in (
        (without_rope and m.positions != "rope", f"layers without rotary positions and positions={m.positions}", "nope_every=0", "nope_layers=[]"),
        (m.window_kind == "chunk" and not m.window, "window_kind=chunk without a window", "window_kind=sliding"),
        (m.window_rope_theta and not windows_rotate, "window_rope_theta without a window and rotary positions", "window_rope_theta=0"),
        (m.temperature_scale and not without_rope, "temperature_scale without layers that have no rotary positions", "temperature_scale=0"),
        (not m.qk_norm_weights and not per_head, "qk_norm_weights=false without norms of each head", "qk_norm_weights=true"),
        (m.norm_offset and m.norm_parameters == "none", "norm_offset with norms that have no weight", "norm_offset=0"),
        (m.parallel_residual and not norms_before, "parallel_residual with norms after attention and FFN", "parallel_residual=false"),
    ):  # fmt: skip
        if broken:
            raise MeshwrightError("MW-MODEL-011", what, fix=" ".join(f"--set model.{field}" for field in reset))
    names = [entry.partition(":")[0] for entry in m.not_run]
    if unknown := sorted(set(m.allow_differences) - {"all", *names}):
        raise MeshwrightError(
            "MW-MODEL-011",
            f"allow_differences names {', '.join(unknown)}",
            why="A name is that of an entry of model.not_run, which this model "
            + (f"has for: {', '.join(names)}" if names else "has none of"),
            valid=["all", *names],
        )


def _check_experts(m: Shape) -> None:
    """Raise for experts that no token can choose, and for fields of experts without experts."""
    if m.experts:
        if not 1 <= m.top_k <= m.experts:
            what = f"top_k={m.top_k} of {m.experts} experts is impossible"
            raise MeshwrightError("MW-MODEL-005", what, valid=[f"1 to {m.experts}"], fix="--set model.top_k=1")
        m.router.check(m.experts, m.top_k)
    elif m.top_k or m.shared_experts:
        raise MeshwrightError("MW-MODEL-005", "top_k or shared experts without experts", fix=_some_experts(m))
    elif m.router != RouterOptions():
        raise MeshwrightError("MW-MODEL-005", "a router without experts", fix=_some_experts(m))
    elif m.expert_hidden:
        raise MeshwrightError("MW-MODEL-005", "expert_hidden without experts", fix="--set model.expert_hidden=0")
    if m.dense_layers > m.layers:
        raise MeshwrightError("MW-MODEL-006", f"{m.dense_layers} dense layers of {m.layers} layers")


def _some_experts(m: Shape) -> str:
    """Settings that give a model experts, where its router accepts them."""
    experts, top_k = max(8, m.top_k), m.top_k or 2
    try:
        m.router.check(experts, top_k)
    except MeshwrightError:
        return ""
    return f"--set model.experts={experts}" + ("" if m.top_k else f" --set model.top_k={top_k}")


def _check_pattern(m: Shape) -> None:
    """Raise for a pattern of layers that contradicts other fields, and for fields of parts that no layer has."""
    if m.pattern and (m.dense_layers or m.moe_every > 1):
        what = "pattern with dense_layers or moe_every"
        why = "The pattern already says which layers have experts"
        raise MeshwrightError("MW-MODEL-010", what, why=why, fix="--set model.dense_layers=0 --set model.moe_every=1")
    for mixer in ATTENTION:
        if m.has_part(mixer) and mixer not in ATTENTIONS[m.attention].mixers:
            kinds = [f"attention={name}" for name, kind in ATTENTIONS.items() if mixer in kind.mixers]
            raise MeshwrightError("MW-MODEL-010", f"pattern {m.pattern[:60]!r} needs model.{' or '.join(kinds)}")
    for part, present, field in (("experts", m.experts, "experts"), ("linear", m.linear.kind, "linear.kind")):
        if m.has_part(part) and not present:
            raise MeshwrightError("MW-MODEL-010", f"pattern {m.pattern[:60]!r} needs model.{field}")
        if present and not m.has_part(part) and ((m.pattern and part == "experts") or part == "linear"):
            raise MeshwrightError("MW-MODEL-010", f"model.{field} is set, but no layer of the pattern has it")
    if m.linear.kind:
        m.linear.check()
    if not m.ffn and (m.has_part("ffn") or (m.experts and not m.expert_ffn)):
        raise MeshwrightError("MW-MODEL-001", f"{m.name}: a transformer needs 'ffn' above 0")


def _check_sparse_attention(m: Shape) -> None:
    """Raise for an indexer without a size, or together with a window."""
    sizes = (m.index_heads, m.index_dim, m.index_top_k)
    if any(sizes) and not all(sizes):
        raise MeshwrightError("MW-MODEL-010", "sparse attention needs index_heads, index_dim and index_top_k above 0")
    if m.index_heads and m.window and not ATTENTIONS[m.attention].reads("window"):
        raise MeshwrightError("MW-MODEL-010", "sparse attention with a window", fix="--set model.window=0")
