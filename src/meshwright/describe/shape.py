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
    activation: Literal["gelu", "relu", "swiglu", "geglu"] = "swiglu"
    vocab: Whole = 0
    vocab_multiple: Size = Field(default=1, description="the vocabulary is padded up to a multiple of this")
    tied: bool = False
    max_positions: Whole = 0
    rope_theta: float = Field(default=10_000.0, gt=1, lt=1e15, description="base of the rotary position embedding")
    positions: Literal["rope", "learned", "alibi", "none"] = "rope"
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_epsilon: float = Field(default=1e-5, gt=0, lt=1, description="added to the variance in norms")
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
    attention_dropout: float = Field(
        default=0.0, ge=0, lt=1, description="share of attention's probabilities dropped when training"
    )
    window: Whole = Field(default=0, description="sliding-window attention: positions seen; 0: all")
    full_every: Whole = Field(default=0, description="with a window: every n-th layer sees all positions; 0: none does")
    sinks: bool = False
    attention: Literal["gqa", "mla"] = "gqa"
    q_rank: Whole = 0
    kv_rank: Whole = 0
    rope_dim: Whole = 0
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
        return self.activation in ("swiglu", "geglu")

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

    def layer_count(self, kind: str) -> int:
        return self.layer_kinds.count(kind)

    @property
    def has_dense_layers(self) -> bool:
        return "dense" in self.layer_kinds
