"""The model: a shape, and what it counts to.

    parameters()        by part; `active` counts only the experts that one token visits
    flops(seq)          forward FLOPs per token by part: 2 per weight used, and 4·N·D per attended position
    activations(seq)    bytes kept for backward, per sequence, by part

A causal token attends to (s+1)/2 ≈ s/2 positions on average; `attended` halves s for causal models, as kernels do.
Published MFU figures often do not halve: `model_flops` takes the convention as an argument.
"""

import math
from functools import cached_property
from typing import Any, Self

import numpy as np
from pydantic import model_validator

from meshwright.describe import adapted, anatomy
from meshwright.describe.adapter import Adapter
from meshwright.describe.shape import ModelShape, Published
from meshwright.describe.shape_checks import MOST_LAYERS
from meshwright.describe.tensors import AttentionCore
from meshwright.describe.variants import ATTENTIONS
from meshwright.describe.workload import Workload
from meshwright.units import format_count

__all__ = ["MOST_LAYERS", "Model", "Published"]


class Model(ModelShape):
    """A model's shape with its counts."""

    @model_validator(mode="after")
    def _adapter_fits(self) -> Self:
        if self.adapter != Adapter():
            adapted.check(self, self.blocks)
        return self

    @cached_property
    def blocks(self) -> dict[str, anatomy.ParameterBlock]:
        return anatomy.blocks(self)

    def attended(self, seq: float, halve_causal: bool = True) -> float:
        """Mean positions a token attends to, over all layers with attention: those in its window, or that an indexer selects."""
        full = self.candidates(seq, halve_causal)
        width = self.index_top_k or self.window
        if not width or width >= seq:
            return full
        halves = self.causal and halve_causal
        chunked = self.window_kind == "chunk" and not self.index_top_k
        near = _seen_in_chunks(width, seq, halves) if chunked else _seen(width, seq, halves)
        seeing_all = 0.0 if self.index_top_k else self.full_count / max(self.attention_count, 1)
        return full * seeing_all + near * (1 - seeing_all)

    def positions_of(self, core: AttentionCore, seq: float, halve_causal: bool = True) -> tuple[float, float]:
        """Return the mean positions a token attends to in a layer with this core, and how many an indexer selects them from."""
        candidates = self.candidates(seq, halve_causal)
        if not core.window:
            return self.attended(seq, halve_causal), candidates
        halves = self.causal and halve_causal
        seen = _seen(core.window, seq, halves)
        if not core.ratio:
            return seen, 0.0
        far = _seen(core.selected * core.ratio, seq, halves) if core.selected else candidates
        return seen + far / core.ratio, candidates / core.ratio

    def candidates(self, seq: float, halve_causal: bool = True) -> float:
        """Mean positions that a token may attend to: those before it in a causal model."""
        return seq / 2 if self.causal and halve_causal else seq

    def layers_before(self, kind: str) -> np.ndarray:
        """For each layer, and for the end, the number of layers of a kind before it."""
        if kind not in self._layers_before:
            self._layers_before[kind] = np.cumsum([0, *(one == kind for one in self.layer_kinds)])
        return self._layers_before[kind]

    @cached_property
    def _layers_before(self) -> dict[str, np.ndarray]:
        return {}

    # Counts

    def _over_blocks(self) -> list[tuple[int, anatomy.ParameterBlock]]:
        times = {"embedding": 1, "head": 1, "mtp": self.mtp_layers}
        return [(times.get(kind) or self.layer_count(kind), block) for kind, block in self.blocks.items()]

    def parameters(self) -> dict[str, float]:
        """Parameters by part."""
        if self.kind == "counts":
            tensors = self.resnet.tensors.values() if self.resnet.stages else ()
            return {"all": float(sum(map(math.prod, tensors))) or self.given_parameters}
        out: dict[str, float] = {}
        for times, block in self._over_blocks():
            for part, count in block.parameters().items():
                out[part] = out.get(part, 0) + times * count
        return {part: n for part, n in out.items() if n}

    @cached_property
    def total(self) -> float:
        return sum(self.parameters().values())

    @cached_property
    def trained(self) -> float:
        """Parameters that have a gradient: all of them, but for frozen ones."""
        if not self.adapter.on:
            return self.total
        return sum(times * block.trained for times, block in self._over_blocks())

    @cached_property
    def active(self) -> float:
        """Parameters that one token uses: only k of the experts."""
        idle = self.parameters().get("experts", 0) * (self.experts - self.top_k) / self.experts if self.experts else 0
        return self.total - idle

    def flops(self, seq: float, halve_causal: bool = True) -> dict[str, float]:
        """Forward FLOPs per token (per sample for 'counts') by part. Backward is twice this."""
        if self.kind == "counts":
            o = self.resnet
            return {"all": float(o.stem.flops + o.block_flops + o.head_flops) if o.stages else self.given_flops}
        out: dict[str, float] = {}
        for times, block in self._over_blocks():
            for linear in block.linears:
                out[linear.part] = out.get(linear.part, 0.0) + times * linear.flops
            if block.attention:
                core = block.attention.flops(*self.positions_of(block.attention, seq, halve_causal))
                out["attention-core"] = out.get("attention-core", 0.0) + times * core
            if block.linear:
                out["linear-core"] = out.get("linear-core", 0.0) + times * block.linear.flops
        return out

    def model_flops(self, seq: float, halve_causal: bool = True) -> float:
        """FLOPs to train one token: forward, and twice that for backward, without recompute and without the gradients of frozen weights. The
        numerator of MFU."""
        whole = 3.0 * sum(self.flops(seq, halve_causal).values())
        if not self.adapter.on:
            return whole
        return whole - sum(
            times * linear.frozen_flops for times, block in self._over_blocks() for linear in block.linears
        )

    def activations(
        self, seq: int, dtype_bytes: float = 2, flash: bool = True, dropout: bool | None = None
    ) -> dict[str, float]:
        """Bytes one sequence keeps for backward on one device, by part."""
        if self.kind == "counts":
            o = self.resnet
            saved = o.saved_by_ends + sum(map(o.saved, o.blocks)) if o.stages else self.given_activations
            return {"all": float(saved)}
        if dropout is not None and dropout != self.dropout:
            return self.but(dropout=dropout).activations(seq, dtype_bytes, flash)
        conditions = {
            "",
            "fused-norm",
            "weighted-outputs",
            "flash" if flash else "stored-softmax",
            "dropout" if self.dropout else "",
        }
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

    def describe_batch(self, workload: Workload, style: str = ",") -> str:
        """The batch of a workload: sequences of tokens, or samples of a model that has no sequence."""
        size = f" × {workload.seq:{style}} tokens" if self.unit == "tokens" else " samples"
        return f"batch {workload.batch:{style}}{size}"

    def describe_trained(self) -> str:
        """The parameters that train, where not all do, after a comma."""
        return f", {format_count(self.trained)} trained ({self.adapter.describe()})" if self.adapter.on else ""

    def describe_shape(self) -> str:
        """One line a person can check at a glance."""
        if self.kind == "counts":
            o = self.resnet
            if o.stages:
                blocks = "-".join(map(str, o.stages))
                return f"residual network of {blocks} blocks, width {o.width}, images {o.image} × {o.image}, {o.classes} classes"
            return f"counts only: {self.given_parameters:,.0f} parameters"
        if self.kind == "mlp":
            return f"{self.layers} square layers of {self.hidden}"
        text = f"{self.layers} layers{self._describe_kinds()}, hidden {self.hidden}"
        if self.has_attention_layers:
            text += f", {self.heads} heads"
            kind = ATTENTIONS[self.attention]
            text += kind.summary(self) if kind.summary else f" ({kind.name})"
        if self.index_heads:
            text += f", {self.index_top_k} positions selected"
        if self.linear.kind:
            text += f", {self.linear.kind} {self.linear.heads} × {self.linear.head_dim}, state {self.linear.state}"
        text += f", FFN {self.ffn} {self.activation}" if self.ffn else f", {self.activation}"
        if self.experts:
            latent = f" (latent {self.expert_hidden})" if self.expert_hidden else ""
            text += f", {self.experts} experts of {self.expert_width}{latent}, top {self.top_k}"
            text += f", {self.shared_experts} shared" if self.shared_experts else ""
        text += f", {self.mtp_layers} more predicted" if self.mtp_layers else ""
        return text + f", vocabulary {self.vocab}"

    def _describe_kinds(self) -> str:
        """The number of layers of each kind, for a model with a pattern."""
        if not self.pattern:
            return ""
        return " (" + ", ".join(f"{self.layer_count(kind)} {kind}" for kind in self.kinds) + ")"

    def as_dict(self) -> dict[str, Any]:
        return {"name": self.name, **super().as_dict()}


def _seen(width: float, seq: float, causal: bool) -> float:
    """Mean positions in a window of `width`. Token t of a causal sequence sees min(t, w): the average over s is w − w²/2s."""
    width = min(width, seq)
    return width - width**2 / (2 * seq) if causal else float(width)


def _seen_in_chunks(width: float, seq: float, causal: bool) -> float:
    """Mean positions in a chunk of `width`: all of them, or half of them in a causal sequence. The last chunk may be shorter."""
    last = seq % width
    return ((seq - last) * width + last**2) / seq * (0.5 if causal else 1.0)
