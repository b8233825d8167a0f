"""The shape of a model: its fields, their checks, and what follows from them.

Three kinds. `transformer`: decoders (and encoders, with `causal = false`), dense or mixture of experts, with
grouped-query or multi-head latent attention. `mlp`: L square layers, the lecture's. `counts`: only totals are known
(ResNet-50). `anatomy` lists the tensors of a shape; `model` counts them.
"""

from __future__ import annotations

from functools import cached_property
from typing import Literal

from pydantic import Field, model_validator

from meshwright.describe.base import Bytes, Count, Described, Norms, Size, Whole
from meshwright.describe.rope import RopeOptions
from meshwright.describe.router import RouterOptions
from meshwright.errors import MeshwrightError, nearest_number

MOST_LAYERS = 100_000  # layers are counted one by one


class Published(Described):
    """What the makers published, to hold our counts to."""

    parameters: Count = 0.0
    active: Count = 0.0
    active_counts: Literal["all", "no-input-embedding", "no-embeddings"] = Field(
        default="all", description="what the published active count leaves out"
    )
    source: str = ""
    note: str = ""


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
    activation: Literal["gelu", "gelu-tanh", "quick-gelu", "relu", "swiglu", "geglu", "geglu-tanh"] = Field(
        default="swiglu",
        description="of the FFN; -tanh: the tanh approximation of GELU (GPT-2), quick: x·sigmoid(1.702·x)",
    )
    swiglu_limit: float = Field(
        default=0.0,
        ge=0,
        description="swiglu: the gate is clamped to at most this, the other half to ±this; 0: neither",
    )
    swiglu_alpha: float = Field(default=1.0, gt=0, description="swiglu: the gate g becomes g·sigmoid(alpha·g)")
    swiglu_shift: float = Field(
        default=0.0, description="swiglu: added to the other half before the product (gpt-oss: 1)"
    )
    vocab: Whole = 0
    vocab_multiple: Size = Field(default=1, description="the vocabulary is padded up to a multiple of this")
    tied: bool = False
    max_positions: Whole = 0
    rope_theta: float = Field(default=10_000.0, gt=1, lt=1e15, description="base of the rotary position embedding")
    rope: RopeOptions = RopeOptions()
    positions: Literal["rope", "learned", "alibi", "none"] = "rope"
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_epsilon: float = Field(default=1e-5, gt=0, lt=1, description="added to the variance in norms")
    latent_norm_epsilon: float = Field(
        default=0.0, ge=0, lt=1, description="the same in the norms of latent attention; 0: norm_epsilon"
    )
    norms_per_layer: Norms = 2
    norm_position: Literal["pre", "post"] = Field(default="pre", description="norms before or after attention and FFN")
    final_norm: bool = True
    embedding_norm: bool = False
    qk_norm: bool = False
    qk_norm_width: Literal["head", "projection"] = Field(
        default="head", description="queries and keys are normalised per head, or over the whole projection (OLMo 2)"
    )
    qkv_bias: bool = False
    out_bias: bool = False
    ffn_bias: bool = False
    causal: bool = True
    dropout: bool = Field(default=False, description="dropout masks are kept for backward, a byte an element")
    dropout_rate: float = Field(default=0.0, ge=0, lt=1, description="share of elements dropped when training")
    embedding_dropout: float | None = Field(
        default=None, ge=0, lt=1, description="the same at the output of the embedding; default: dropout_rate"
    )
    attention_dropout: float = Field(
        default=0.0, ge=0, lt=1, description="share of attention's probabilities dropped when training"
    )
    window: Whole = Field(default=0, description="sliding-window attention: positions seen; 0: all")
    full_every: Whole = Field(default=0, description="with a window: every n-th layer sees all positions; 0: none does")
    full_layers: tuple[Whole, ...] = Field(
        default=(), description="with a window: more layers, counted from 0, that see all positions"
    )
    sinks: bool = Field(
        default=False, description="a learned score per head that takes a share of each softmax (gpt-oss)"
    )
    attention_scale: float = Field(
        default=0.0, ge=0, description="factor of attention scores; 0: 1/√(width of a query)"
    )
    attention_scale_by_layer: bool = Field(
        default=False, description="scores of layer i, counted from 0, are also divided by i + 1 (GPT-2)"
    )
    attention: Literal["gqa", "mla"] = "gqa"
    q_rank: Whole = 0
    kv_rank: Whole = 0
    rope_dim: Whole = Field(
        default=0, description="rotated elements of each head; 0: all of them, with latent attention none"
    )
    nope_dim: Whole = 0
    value_dim: Whole = 0
    experts: Whole = 0
    top_k: Whole = 0
    expert_ffn: Whole = 0
    shared_experts: Whole = 0
    shared_ffn: Whole = Field(default=0, description="width of all shared experts; 0: shared_experts × expert_ffn")
    shared_gate: bool = Field(default=False, description="Qwen2-MoE: a learned sigmoid scales the shared experts")
    dense_layers: Whole = Field(default=0, description="first layers that keep a dense FFN")
    moe_every: Size = Field(default=1, description="of the layers after those, every n-th has experts")
    router_bias: bool = False
    balance_bias: bool = Field(default=False, description="DeepSeek-V3's per-expert routing bias")
    router: RouterOptions = RouterOptions()
    given_parameters: Count = Field(default=0.0, description="kind 'counts': parameters")
    given_flops: Count = Field(default=0.0, description="kind 'counts': forward FLOPs per sample")
    given_activations: Bytes = Field(default=0.0, description="kind 'counts': saved bytes per sample")
    published: Published = Published()
    notes: tuple[str, ...] = Field(
        default=(), description="what was assumed when the model was read from another format"
    )
    not_run: tuple[str, ...] = Field(
        default=(), description="parts of the original model that `train` and `verify` compute in another way"
    )

    @model_validator(mode="after")
    def _legal(self) -> ModelShape:
        if self.kind == "counts":
            if self.given_parameters <= 0 or self.given_flops <= 0:
                raise MeshwrightError("MW-MODEL-001", f"{self.name}: 'counts' needs given_parameters and given_flops")
            return self
        need = ("hidden", "layers") if self.kind == "mlp" else ("hidden", "layers", "vocab")
        for field in need:
            if not getattr(self, field):
                raise MeshwrightError("MW-MODEL-001", f"{self.name}: a {self.kind} needs '{field}' above 0")
        if self.layers > MOST_LAYERS:
            raise MeshwrightError(
                "MW-MODEL-007",
                f"{self.name}: {self.layers} layers",
                valid=[f"1 to {MOST_LAYERS}"],
                fix=f"--set model.layers={MOST_LAYERS}",
            )
        return self if self.kind == "mlp" else self._legal_transformer()

    def _legal_transformer(self) -> ModelShape:
        if self.attention == "gqa" and not self.head_dim and self.hidden % self.heads:
            legal = [n for n in range(1, 257) if self.hidden % n == 0]
            grouped = [n for n in legal if not self.kv_heads or n % self.kv_heads == 0]
            raise MeshwrightError(
                "MW-MODEL-002",
                f"{self.heads} heads do not divide hidden {self.hidden}",
                valid=legal,
                fix=f"--set model.heads={nearest_number(self.heads, grouped)}" if grouped else "",
            )
        if self.heads % self.kv_groups:
            legal = [n for n in range(1, min(self.heads, 4096) + 1) if self.heads % n == 0]
            near = nearest_number(self.kv_groups, legal)
            raise MeshwrightError(
                "MW-MODEL-003",
                f"{self.kv_groups} KV heads do not divide {self.heads} heads",
                valid=legal,
                fix=f"--set model.kv_heads={near}",
            )
        self._check_rotation_and_activation()
        if self.attention == "mla" and not (self.kv_rank and self.nope_dim and self.value_dim):
            raise MeshwrightError("MW-MODEL-004", "MLA needs kv_rank, nope_dim and value_dim above 0")
        if self.experts and not 1 <= self.top_k <= self.experts:
            raise MeshwrightError(
                "MW-MODEL-005",
                f"top_k={self.top_k} of {self.experts} experts is impossible",
                valid=[f"1 to {self.experts}"],
                fix="--set model.top_k=1",
            )
        if not self.experts and (self.top_k or self.shared_experts):
            raise MeshwrightError("MW-MODEL-005", "top_k or shared experts without experts", fix=self._some_experts())
        if not self.experts and self.router != RouterOptions():
            raise MeshwrightError("MW-MODEL-005", "a router without experts", fix=self._some_experts())
        if self.experts:
            self.router.check(self.experts, self.top_k)
        if self.dense_layers > self.layers:
            raise MeshwrightError("MW-MODEL-006", f"{self.dense_layers} dense layers of {self.layers} layers")
        if not self.ffn and (self.layer_count("dense") or not self.expert_ffn):
            raise MeshwrightError("MW-MODEL-001", f"{self.name}: a transformer needs 'ffn' above 0")
        return self

    def _check_rotation_and_activation(self) -> None:
        """Raise for options of rotary positions or of SwiGLU that do not fit the model or would have no effect."""
        if self.attention == "gqa" and self.rope_dim > self.head_width:
            raise MeshwrightError(
                "MW-MODEL-009",
                f"rope_dim={self.rope_dim} exceeds the head width {self.head_width}",
                why="It is the number of elements of each head that are rotated",
                fix="--set model.rope_dim=0",
            )
        if self.positions == "rope":
            self.rope.check(self.rotated_width, self.max_positions)
        elif self.rope != RopeOptions():
            raise MeshwrightError(
                "MW-MODEL-009", f"[model.rope] with positions={self.positions}", fix="--set model.positions=rope"
            )
        if self.activation != "swiglu" and (self.swiglu_limit, self.swiglu_alpha, self.swiglu_shift) != (0, 1, 0):
            raise MeshwrightError(
                "MW-MODEL-009",
                f"swiglu_limit, swiglu_alpha or swiglu_shift with activation={self.activation}",
                fix="--set model.activation=swiglu",
            )

    def _some_experts(self) -> str:
        """Settings that give a model experts, where its router accepts them."""
        experts, top_k = max(8, self.top_k), self.top_k or 2
        try:
            self.router.check(experts, top_k)
        except MeshwrightError:
            return ""
        return f"--set model.experts={experts}" + ("" if self.top_k else f" --set model.top_k={top_k}")

    # Derived shape

    @property
    def kv_groups(self) -> int:
        return self.kv_heads or self.heads

    @property
    def head_width(self) -> int:
        return self.head_dim or self.hidden // self.heads

    @property
    def gated(self) -> bool:
        return self.activation in ("swiglu", "geglu", "geglu-tanh")

    @property
    def embedding_rate(self) -> float:
        """Share of elements of the embedding's output dropped when training."""
        return self.dropout_rate if self.embedding_dropout is None else self.embedding_dropout

    @property
    def rotated_width(self) -> int:
        """Elements of each head that rotary positions rotate."""
        return self.rope_dim if self.attention == "mla" else self.rope_dim or self.head_width

    def score_scale(self, layer: int) -> float:
        """The factor of attention scores in a layer."""
        latent = self.attention == "mla"
        width = self.nope_dim + self.rope_dim if latent else self.head_width
        scale = self.attention_scale or width**-0.5
        if latent and self.positions == "rope":
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

    @cached_property
    def layer_kinds(self) -> tuple[str, ...]:
        """The kind of each layer: "dense" or "moe"."""
        every = self.moe_every
        after = (
            "moe" if self.experts and i % every == every - 1 else "dense"
            for i in range(self.layers - self.dense_layers)
        )
        return ("dense",) * self.dense_layers + tuple(after)

    def sees_all(self, layer: int) -> bool:
        """Whether the queries of a layer, counted from 0, see all positions."""
        periodic = bool(self.full_every) and (layer + 1) % self.full_every == 0
        return not self.window or periodic or layer in self._listed_full

    @cached_property
    def _listed_full(self) -> frozenset[int]:
        return frozenset(self.full_layers)

    @cached_property
    def full_count(self) -> int:
        """The number of layers that see all positions."""
        return sum(map(self.sees_all, range(self.layers)))

    def layer_count(self, kind: str) -> int:
        return self.layer_kinds.count(kind)

    @property
    def has_dense_layers(self) -> bool:
        return "dense" in self.layer_kinds
