"""The model: a shape, and what it counts to.

Three kinds. `transformer`: decoders (and encoders, with `causal = false`), dense or mixture of experts, with
grouped-query or multi-head latent attention. `mlp`: L square layers, the lecture's. `counts`: only totals are known
(ResNet-50).

    parameters()        by part; `active` counts each token's own experts only
    flops(seq)          forward FLOPs per token by part: 2 per weight used, and 4·N·D per attended position
    activations(seq)    bytes kept for backward, per sequence, by part

A causal token attends to (s+1)/2 ≈ s/2 positions on average; `attended` halves s for causal models, as kernels do.
Published MFU figures often do not halve: `model_flops` takes the convention as an argument.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, Literal

from pydantic import Field, model_validator

from meshwright.describe import anatomy
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


class Model(Described):
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
    def _legal(self) -> Model:
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

    def _legal_transformer(self) -> Model:
        if self.attention == "gqa" and not self.head_dim and self.hidden % self.heads:
            legal = [n for n in range(1, 257) if self.hidden % n == 0]
            raise MeshwrightError(
                "MW-MODEL-002",
                f"{self.heads} heads do not divide hidden {self.hidden}",
                valid=legal,
                fix=f"--set model.heads={nearest_number(self.heads, legal)}",
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
            raise MeshwrightError(
                "MW-MODEL-005", "top_k or shared experts, yet no experts", fix="--set model.experts=8"
            )
        if not self.experts and self.router != RouterOptions():
            raise MeshwrightError("MW-MODEL-005", "a router is described, yet no experts", fix="--set model.experts=8")
        if self.experts:
            self.router.check(self.experts, self.top_k)
        if self.dense_layers > self.layers:
            raise MeshwrightError("MW-MODEL-006", f"{self.dense_layers} dense layers of {self.layers} layers")
        if not self.ffn and (self.layer_count("dense") or not self.expert_ffn):
            raise MeshwrightError("MW-MODEL-001", f"{self.name}: a transformer needs 'ffn' above 0")
        return self

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

    @cached_property
    def blocks(self) -> dict[str, anatomy.Block]:
        return anatomy.blocks(self)

    def attended(self, seq: float, halve_causal: bool = True) -> float:
        """Mean positions a token attends to, over all layers."""
        full = seq / 2 if self.causal and halve_causal else seq
        if not self.window or self.window >= seq:
            return full
        # Token t sees min(t, w): the average over s is w − w²/2s.
        near = self.window - self.window**2 / (2 * seq) if self.causal and halve_causal else float(self.window)
        seeing_all = self.layers // self.full_every / self.layers if self.full_every else 0.0
        return full * seeing_all + near * (1 - seeing_all)

    # Counts

    def _over_blocks(self) -> list[tuple[int, anatomy.Block]]:
        times = {"embedding": 1, "head": 1, "dense": self.layer_count("dense"), "moe": self.layer_count("moe")}
        return [(times[kind], block) for kind, block in self.blocks.items() if times[kind]]

    def parameters(self) -> dict[str, float]:
        """Parameters by part."""
        if self.kind == "counts":
            return {"all": self.given_parameters}
        out: dict[str, float] = {}
        for times, block in self._over_blocks():
            for part, count in block.parameters().items():
                out[part] = out.get(part, 0) + times * count
        return {part: n for part, n in out.items() if n}

    @cached_property
    def total(self) -> float:
        return sum(self.parameters().values())

    @cached_property
    def active(self) -> float:
        """Parameters one token meets: of the experts only its own k."""
        idle = self.parameters().get("experts", 0) * (self.experts - self.top_k) / self.experts if self.experts else 0
        return self.total - idle

    def flops(self, seq: float, halve_causal: bool = True) -> dict[str, float]:
        """Forward FLOPs per token (per sample for 'counts') by part. Backward is twice this."""
        if self.kind == "counts":
            return {"all": self.given_flops}
        out: dict[str, float] = {}
        positions = self.attended(seq, halve_causal)
        for times, block in self._over_blocks():
            for linear in block.linears:
                out[linear.part] = out.get(linear.part, 0.0) + times * linear.flops
            if block.attention:
                out["attention-core"] = out.get("attention-core", 0.0) + times * block.attention.flops(positions)
        return out

    def model_flops(self, seq: float, halve_causal: bool = True) -> float:
        """FLOPs to train one token: forward and twice that for backward, nothing recomputed. MFU's numerator."""
        return 3.0 * sum(self.flops(seq, halve_causal).values())

    def activations(
        self, seq: int, dtype_bytes: float = 2, flash: bool = True, dropout: bool | None = None
    ) -> dict[str, float]:
        """Bytes one sequence keeps for backward on one device, by part."""
        if self.kind == "counts":
            return {"all": self.given_activations}
        if dropout is not None and dropout != self.dropout:
            return self.but(dropout=dropout).activations(seq, dtype_bytes, flash)
        conditions = {"", "flash" if flash else "stored-softmax", "dropout" if self.dropout else ""}
        out: dict[str, float] = {}
        for times, block in self._over_blocks():
            for linear in block.linears:
                if linear.saves_input:
                    out[linear.part] = out.get(linear.part, 0.0) + times * seq * linear.uses * linear.d_in * dtype_bytes
            for s in block.saved:
                if s.condition in conditions:
                    size = seq * (s.width + s.per_position * seq) * (s.bytes_ or dtype_bytes)
                    out[s.part] = out.get(s.part, 0.0) + times * size
        return {part: n for part, n in out.items() if n}

    @classmethod
    def from_hf(cls, path: str, name: str = "") -> Model:
        """Read a Hugging Face `config.json`."""
        from meshwright.describe.hf import read

        return read(path, name)

    def describe_shape(self) -> str:
        """One line a person can check at a glance."""
        if self.kind == "counts":
            return f"counts only: {self.given_parameters:,.0f} parameters"
        if self.kind == "mlp":
            return f"{self.layers} square layers of {self.hidden}"
        text = f"{self.layers} layers, hidden {self.hidden}, {self.heads} heads"
        if self.attention == "mla":
            text += f" (MLA, latent {self.kv_rank})"
        elif self.kv_groups != self.heads:
            text += f" ({self.kv_groups} KV)"
        text += f", FFN {self.ffn} {self.activation}" if self.ffn else f", {self.activation}"
        if self.experts:
            text += f", {self.experts} experts of {self.expert_width}, top {self.top_k}"
            text += f", {self.shared_experts} shared" if self.shared_experts else ""
        return text + f", vocabulary {self.vocab}"

    def as_dict(self) -> dict[str, Any]:
        return {"name": self.name, **super().as_dict()}
