"""The shape of a model: its fields, their checks, and what follows from them.

Three kinds. `transformer`: decoders (and encoders, with `causal = false`) with layers of the kinds of `shape_checks`: attention (grouped-query or
multi-head latent) or a linear mixer, with an FFN or a mixture of experts. `mlp`: L square layers, the lecture's. `counts`: only totals are
known, or a residual network (`resnet`) that is costed by its totals. `anatomy` lists the tensors of a shape; `model` counts them.
"""

from __future__ import annotations

from functools import cached_property
from typing import Literal

from pydantic import Field, model_validator
from pydantic.json_schema import SkipJsonSchema

from meshwright.describe import shape_checks
from meshwright.describe.adapter import Adapter
from meshwright.describe.base import Bytes, Count, Described, Norms, Size, Whole
from meshwright.describe.mixer_options import CompressedOptions, LinearOptions
from meshwright.describe.shape_parts import ResNetOptions, RopeOptions, RouterOptions
from meshwright.describe.variants import ACTIVATIONS, ATTENTIONS, ActivationName, AttentionName


class Published(Described):
    """Parameter counts that the makers published; a test compares ours with them."""

    parameters: Count = 0.0
    active: Count = 0.0
    active_counts: Literal["all", "no-input-embedding", "no-embeddings"] = "all"
    """what the published active count leaves out"""
    source: str = ""
    note: str = ""


class ExtraTensor(Described):
    """A weight that no other field describes. Each tensor-parallel rank has all of it; it is planned and costed, not trained."""

    name: str
    where: Literal["layer", "embedding", "head"] = "layer"
    rows: Whole = 0
    """input width of a matrix; 0: a vector"""
    columns: Size
    """output width of a matrix, or length of a vector"""
    lookup: bool = False
    """rows are looked up, not multiplied: an embedding"""


class ModelShape(Described):
    """A model's shape. Zero means "derived": kv_heads = heads, head_dim = hidden / heads, expert_ffn = ffn."""

    name: str = "custom"
    kind: Literal["transformer", "mlp", "counts"] = "transformer"
    hidden: Whole = 0
    layers: Whole = 0
    heads: Size = 1
    kv_heads: Whole = 0
    head_dim: Whole = 0
    ffn: Whole = 0
    activation: ActivationName = "swiglu"
    """of the FFN; -tanh: the tanh approximation of GELU (GPT-2), quick: x·sigmoid(1.702·x), relu2: relu(x)²"""
    swiglu_limit: float = Field(default=0.0, ge=0)
    """swiglu: the gate is clamped to at most this, the other half to ±this; 0: neither"""
    swiglu_alpha: float = Field(default=1.0, gt=0)
    """swiglu: the gate g becomes g·sigmoid(alpha·g)"""
    swiglu_shift: float = 0.0
    """swiglu: added to the other half before the product (gpt-oss: 1)"""
    vocab: Whole = 0
    vocab_multiple: Size = 1
    """the vocabulary is padded up to a multiple of this"""
    tied: bool = False
    max_positions: Whole = 0
    rope_theta: float = Field(default=10_000.0, gt=1, lt=1e15)
    """base of the rotary position embedding"""
    rope: RopeOptions = RopeOptions()
    positions: Literal["rope", "learned", "alibi", "none"] = "rope"
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_epsilon: float = Field(default=1e-5, gt=0, lt=1)
    """added to the variance in norms"""
    latent_norm_epsilon: float = Field(default=0.0, ge=0, lt=1)
    """the same in the norms of latent attention; 0: norm_epsilon"""
    norm_offset: float = Field(default=0.0, ge=0, le=1)
    """added to the weight of every norm before it multiplies (Gemma: 1)"""
    norm_parameters: Literal["all", "weight", "none"] = "all"
    """what norms learn: weight, and a bias in layernorm; the weight alone; or nothing (OLMo)"""
    norms_per_layer: Norms = 2
    """1: attention and FFN in parallel share one; 4: one more after each of them"""
    norm_position: Literal["pre", "post"] = "pre"
    """norms before or after attention and FFN"""
    parallel_residual: bool = False
    """attention and FFN read the same input: x + attention(norm(x)) + ffn(norm(x)) (GPT-NeoX); norms_per_layer=1: one norm for both"""
    residual_scale: float = Field(default=1.0, gt=0)
    """factor of what attention and FFN add to the residual (Granite)"""
    embedding_scale: float = Field(default=1.0, gt=0)
    """factor of the token embeddings (Gemma: √hidden)"""
    logit_scale: float = Field(default=1.0, gt=0)
    """factor of the logits (Granite, Cohere)"""
    logit_softcap: float = Field(default=0.0, ge=0)
    """soft cap c of the logits: z becomes c·tanh(z/c) (Gemma 2); 0: none"""
    final_norm: bool = True
    embedding_norm: bool = False
    embedding_dim: Whole = 0
    """width of token embeddings, projected to hidden and back (OPT-350m); 0: hidden"""
    qk_norm: bool = False
    qk_norm_width: Literal["head", "projection"] = "head"
    """queries and keys are normalised per head, or over the whole projection (OLMo 2)"""
    qk_norm_weights: bool = True
    """false: queries and keys are normalised without weights, after the rotation, in layers with rotary positions (Llama 4)"""
    qkv_bias: bool = False
    out_bias: bool = False
    ffn_bias: bool = False
    causal: bool = True
    dropout: bool = False
    """dropout masks are kept for backward, a byte an element"""
    dropout_rate: float = Field(default=0.0, ge=0, lt=1)
    """share of elements dropped when training"""
    embedding_dropout: float | None = Field(default=None, ge=0, lt=1)
    """the same at the output of the embedding; default: dropout_rate"""
    attention_dropout: float = Field(default=0.0, ge=0, lt=1)
    """share of attention's probabilities dropped when training"""
    window: Whole = 0
    """sliding-window attention: positions seen; 0: all"""
    full_every: Whole = 0
    """with a window: every n-th layer sees all positions; 0: none does"""
    full_layers: tuple[Whole, ...] = ()
    """with a window: more layers, counted from 0, that see all positions"""
    window_kind: Literal["sliding", "chunk"] = "sliding"
    """a query sees the nearest keys, or (chunk) those of its chunk of `window` positions (Llama 4)"""
    window_rope_theta: float = Field(default=0.0, ge=0, lt=1e15)
    """rotary base of layers with a window, whose frequencies are not scaled (Gemma 3); 0: as in the others"""
    nope_every: Whole = 0
    """every n-th layer has no rotary positions (SmolLM3); 0: none"""
    nope_layers: tuple[Whole, ...] = ()
    """more layers, counted from 0, without rotary positions"""
    temperature_scale: float = Field(default=0.0, ge=0)
    """layers without rotary positions: the query at p, counted from 1, is multiplied by 1 + a·ln(1 + ⌊p/floor⌋) (Llama 4); 0: not"""
    temperature_floor: Size = 8192
    """floor of that formula, in positions"""
    attention_softcap: float = Field(default=0.0, ge=0)
    """soft cap c of attention scores: s becomes c·tanh(s/c) (Gemma 2); 0: none"""
    sinks: bool = False
    """a learned score per head that takes a share of each softmax (gpt-oss)"""
    attention_scale: float = Field(default=0.0, ge=0)
    """factor of attention scores; 0: 1/√(width of a query)"""
    attention_scale_by_layer: bool = False
    """scores of layer i, counted from 0, are also divided by i + 1 (GPT-2)"""
    attention: AttentionName = "gqa"
    """the kind of attention (`describe.variants`)"""
    attention_options: dict[str, float] = Field(default_factory=dict)
    """options of an attention kind that was added as a plug-in"""
    q_rank: Whole = 0
    kv_rank: Whole = 0
    rope_dim: Whole = 0
    """rotated elements of each head; 0: all of them, with latent attention none"""
    nope_dim: Whole = 0
    value_dim: Whole = 0
    output_gate: bool = False
    """a learned sigmoid scales the output of attention, element by element (Qwen3-Next)"""
    index_heads: Whole = 0
    """sparse attention: heads of the indexer that selects positions (DeepSeek-V3.2); 0: none"""
    index_dim: Whole = 0
    """sparse attention: width of an indexer head"""
    index_top_k: Whole = 0
    """sparse attention: positions that each query attends to"""
    pattern: str = ""
    """kinds of the layers, repeated: * attention, Q attention to an earlier layer's keys, M linear mixer, W, S, C compressed attention, - FFN, E
    experts; every letter is a layer ("M-M*-"), with spaces every word ("ME ME *E"); default: attention with FFN or experts in every layer"""
    linear: LinearOptions = LinearOptions()
    compressed: CompressedOptions = CompressedOptions()
    streams: Size = 1
    """residual streams that layers read and write with learned weights (hyper-connections)"""
    mtp_layers: Whole = 0
    """multi-token prediction: modules of one layer and a second loss after the last layer"""
    experts: Whole = 0
    top_k: Whole = 0
    expert_ffn: Whole = 0
    expert_hidden: Whole = 0
    """latent experts: tokens are projected to this width before dispatch; 0: hidden"""
    shared_experts: Whole = 0
    shared_ffn: Whole = 0
    """width of all shared experts; 0: shared_experts × expert_ffn"""
    shared_gate: bool = False
    """Qwen2-MoE: a learned sigmoid scales the shared experts"""
    dense_layers: Whole = 0
    """first layers that keep a dense FFN"""
    moe_every: Size = 1
    """of the layers after those, every n-th has experts"""
    router_bias: bool = False
    balance_bias: bool = False
    """DeepSeek-V3's per-expert routing bias"""
    router: RouterOptions = RouterOptions()
    extra: tuple[ExtraTensor, ...] = ()
    """weights beside these parts, for planning: name, where, rows, columns, lookup"""
    resnet: ResNetOptions = ResNetOptions()
    given_parameters: Count = 0.0
    """kind 'counts': parameters"""
    given_flops: Count = 0.0
    """kind 'counts': forward FLOPs per sample"""
    given_activations: Bytes = 0.0
    """kind 'counts': saved bytes per sample"""
    published: Published = Published()
    notes: tuple[str, ...] = ()
    """what was assumed when the model was read from another format"""
    not_run: tuple[str, ...] = ()
    """parts of the original model that `train` and `verify` compute in another way"""
    allow_differences: tuple[str, ...] = ()
    """names of such parts that a run may compute in another way; all: every one"""
    adapter: SkipJsonSchema[Adapter] = Adapter()

    @model_validator(mode="after")
    def _legal(self) -> ModelShape:
        shape_checks.check(self)
        return self

    # Derived shape

    @property
    def unit(self) -> str:
        """Unit of a batch: tokens of sequences, or samples."""
        return "tokens" if self.kind == "transformer" else "samples"

    @property
    def kv_groups(self) -> int:
        return self.kv_heads or self.heads

    @property
    def head_width(self) -> int:
        return self.head_dim or self.hidden // self.heads

    @property
    def token_width(self) -> int:
        """Width of a token's embedding."""
        return self.embedding_dim or self.hidden

    @property
    def norm_affine(self) -> tuple[str, ...]:
        """The parameters of a norm."""
        names = ("weight", "bias") if self.norm == "layernorm" else ("weight",)
        return {"all": names, "weight": names[:1], "none": ()}[self.norm_parameters]

    @property
    def gated(self) -> bool:
        return ACTIVATIONS[self.activation].gated

    @property
    def norms_outputs(self) -> bool:
        """Whether a norm follows attention and FFN."""
        return self.norms_per_layer == 4 or self.norm_position == "post"

    @property
    def differences(self) -> tuple[str, ...]:
        """Entries of `not_run` that `allow_differences` does not name. The name of an entry is the text before its colon."""
        allowed = self.allow_differences
        return tuple(e for e in self.not_run if "all" not in allowed and e.partition(":")[0] not in allowed)

    @property
    def embedding_rate(self) -> float:
        """Share of elements of the embedding's output dropped when training."""
        return self.dropout_rate if self.embedding_dropout is None else self.embedding_dropout

    @property
    def drops_probabilities(self) -> bool:
        """Whether attention's probabilities are dropped: with the rest where no rate is stated."""
        return self.attention_dropout > 0 or (self.dropout and not self.dropout_rate)

    @property
    def rotated_width(self) -> int:
        """Elements of each head that rotary positions rotate."""
        return int(ATTENTIONS.part(self.attention, "rotated")(self))

    @property
    def key_width(self) -> int:
        """Elements of a query or key of one head."""
        return int(ATTENTIONS.part(self.attention, "key_width")(self))

    def attention_option(self, name: str) -> float:
        """A value of `[model.attention_options]`, or its default."""
        return self.attention_options.get(name, ATTENTIONS[self.attention].options[name])

    def score_scale(self, layer: int) -> float:
        """The factor of attention scores in a layer."""
        scale = self.attention_scale or self.key_width**-0.5
        if self.kv_rank and self.positions == "rope":
            scale *= self.rope.latent_score_factor
        return scale / (layer + 1) if self.attention_scale_by_layer else scale

    @property
    def padded_vocab(self) -> int:
        return -(-self.vocab // self.vocab_multiple) * self.vocab_multiple

    @property
    def expert_width(self) -> int:
        return self.expert_ffn or self.ffn

    @property
    def shared_width(self) -> int:
        return self.shared_ffn or self.shared_experts * self.expert_width

    @property
    def routed_width(self) -> int:
        """Width of the tokens that are dispatched to experts."""
        return self.expert_hidden or self.hidden

    @cached_property
    def layer_kinds(self) -> tuple[str, ...]:
        """The kind of each layer, a key of `layers.KINDS`."""
        if self.pattern:
            return shape_checks.layer_kinds(self.pattern, self.layers)
        every = self.moe_every
        after = (
            "moe" if self.experts and i % every == every - 1 else "dense"
            for i in range(self.layers - self.dense_layers)
        )
        return ("dense",) * self.dense_layers + tuple(after)

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of layers that the model has, each once."""
        return tuple(kind for kind in shape_checks.KINDS if kind in self.layer_kinds) if self.layers else ("dense",)

    @cached_property
    def expert_kinds(self) -> tuple[str, ...]:
        """The kinds of blocks that have routed experts."""
        return tuple(kind for kind in (*self.kinds, *self.mtp_kinds) if self.parts_of(kind).channel == "experts")

    @cached_property
    def mtp_kinds(self) -> tuple[str, ...]:
        """The block of multi-token prediction, if the model has it."""
        return ("mtp",) if self.mtp_layers else ()

    def parts_of(self, kind: str) -> shape_checks.LayerKind:
        """Mixer and channel part of a kind of layer; a module of multi-token prediction has attention, and experts if the model has them."""
        return shape_checks.KINDS[("moe" if self.experts else "dense") if kind == "mtp" else kind]

    def has_part(self, part: str) -> bool:
        """Whether some layer has this mixer or channel part."""
        return part in self._parts

    @cached_property
    def _parts(self) -> frozenset[str]:
        return frozenset(part for kind in self.kinds for part in self.parts_of(kind))

    def sees_all(self, layer: int) -> bool:
        """Whether the queries of a layer, counted from 0, see all positions."""
        periodic = bool(self.full_every) and (layer + 1) % self.full_every == 0
        return not self.window or periodic or layer in self._listed_full

    def rotates(self, layer: int) -> bool:
        """Whether a layer, counted from 0, has rotary positions."""
        periodic = bool(self.nope_every) and (layer + 1) % self.nope_every == 0
        return self.positions == "rope" and not periodic and layer not in self.nope_layers

    @cached_property
    def _listed_full(self) -> frozenset[int]:
        return frozenset(self.full_layers)

    @cached_property
    def full_count(self) -> int:
        """The number of layers with attention that sees all positions."""
        return sum(self.has_attention(i) and self.sees_all(i) for i in range(self.layers))

    @cached_property
    def attention_count(self) -> int:
        """The number of layers with attention."""
        return sum(map(self.has_attention, range(self.layers)))

    def has_attention(self, layer: int) -> bool:
        return shape_checks.KINDS[self.layer_kinds[layer]].mixer in shape_checks.ATTENTION

    @cached_property
    def has_attention_layers(self) -> bool:
        return any(self.parts_of(kind).mixer in shape_checks.ATTENTION for kind in self.kinds)

    @property
    def residual_width(self) -> int:
        """Width of all residual streams: what passes between layers and stages."""
        return self.streams * self.hidden

    def layer_count(self, kind: str) -> int:
        return self.layer_kinds.count(kind)
