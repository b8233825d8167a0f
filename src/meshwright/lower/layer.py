"""The parts of a layer under tensor, sequence, context and expert parallelism, for one micro-batch.

`lower.builder` explains the communication of tensor and sequence parallelism and has the builders of single operations.

Context parallelism gives each rank T = b·s/cp tokens. `ring` passes K and V around (2·T·kv, cp−1 times; backward passes
them again, and their gradients behind them: twice as much), `all-gather` gathers K and V at once, `ulysses` exchanges
sequence for heads with all-to-alls of Q, K, V and the output.

Arithmetic narrower than 16 bits (fp8) is used for the products with the weights of a layer and of its experts. The core of attention,
the router and the head multiply in 16 bits (`wide`).
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from meshwright.describe.sharding import local_shape
from meshwright.describe.tensors import Linear
from meshwright.describe.variants import ACTIVATIONS
from meshwright.lower import attention_dropout, attention_tiles, sparse_attention
from meshwright.lower.builder import BlockBuilder
from meshwright.lower.program import Array, Op, present

MODULES = {  # operations of forward of which a module of `Stack.reruns` consists, by the start of their names or by their parts
    "core_attn": (("core", "scores", "softmax", "values", "tile"), ()),
    "layernorm": (("norm-1", "norm-2"), ()),
    "mla_up_proj": (("q_b", "kv_b", "rope"), ()),
    "mlp": ((), ("ffn",)),
    "moe": ((), ("router", "latent", "experts", "shared")),
    "moe_act": (("experts-activation",), ()),
}
ULYSSES_LAUNCHES = 23.0  # of the copies that bring heads of whole sequences together for two all-to-alls, and back


class LayerLowering(BlockBuilder):
    """The parts of a layer: attention, FFN, norms and residuals, and what backward recomputes of them."""

    def norm(self, name: str, width: int | None = None) -> None:
        size = self.row_tokens * (width or self.m.hidden) * self.element
        fused = "norm" in self.fused
        self.memory("F", name, "norm", size, 2 if fused else 6, 1 if fused else 5, elementwise="norm")
        self.memory("I", f"{name}-grad", "norm", size, 4 if fused else 10, 2 if fused else 8, elementwise="norm")

    def residual(self, name: str) -> None:
        """Bias, dropout and the residual addition; with several residual streams also their mixing."""
        if self.m.streams > 1:
            self.streams(name)
            return
        size = self.row_tokens * self.m.hidden * self.element
        fused = "bias-dropout" in self.fused
        extra = 0 if fused else int(self.m.dropout) * 2 + int(self.m.out_bias or self.m.ffn_bias)
        more = (0.5 if self.m.dropout else 0) + 2 * extra
        self.memory("F", name, "norm", size, 3 + more, 1 + extra, elementwise="residual")
        self.memory("I", f"{name}-grad", "norm", size, 2 + more, 1 + extra, elementwise="residual")
        self.drop(name, "norm", size, "I")

    def streams(self, name: str) -> None:
        """Hyper-connections around a part: all n streams are read for the weights and again for the part's input; its output is written to all
        of them, which are mixed. Backward reads and writes both twice."""
        m, size = self.m, self.row_tokens * self.m.residual_width * self.element
        self.gemm(f"{name}-weights", "norm", self.row_tokens, (2 + m.streams) * m.streams, m.residual_width)
        self.memory("F", name, "norm", size, 4 + 2 / m.streams, 4)
        self.memory("I", f"{name}-grad", "norm", size, 8 + 4 / m.streams, 8)

    def drop(self, name: str, part: str, size: Array, backward: str) -> None:
        """Add the pass of a dropout whose mask is computed."""
        if attention_dropout.computes_masks(self.b):
            for phase in ("F", backward):
                self.memory(phase, f"{name}-drop{'' if phase == 'F' else '-grad'}", part, size, 2, 1)

    def extra_products(self) -> None:
        """Products with the weights of `model.extra`, and with the projections of narrow token embeddings: whole on every rank."""
        for linear in self.block.linears:
            if linear.part == "extra" or linear.name in ("embedding-in", "embedding-out"):
                self.gemm(linear.name, linear.part, self.row_tokens, linear.d_out, linear.d_in)

    def columns(self, linear: Linear) -> Array:
        """Output width of this rank's part of a product."""
        return local_shape(linear.style, (linear.d_out, linear.d_in), self.degrees)[0]

    def project_grouped(self) -> None:
        """Queries, keys and values from the hidden state, in one product where the stack fuses them."""
        linears = [linear for name, linear in self.linears.items() if name in ("q", "k", "v", "gate")]
        self.enter_columns("attention", self.m.hidden, "qkv")
        separate = len(linears) if self.b.stack.separate_projections else 1
        width = sum(map(self.columns, linears))
        self.gemm("qkv", "attention", self.b.tokens, width, self.m.hidden, separate=separate)

    def project_latents(self) -> None:
        """Latents, then queries, keys and values from them. The down-projections are whole on every rank; under sp they run on its own tokens,
        before the gather."""
        m, linears = self.m, self.linears
        ranks = m.q_rank + m.kv_rank
        for name in ("q_a", "kv_a"):
            if name in linears:
                self.gemm(name, "attention", self.row_tokens, linears[name].d_out, linears[name].d_in)
        self.memory("F", "latent-norm", "norm", self.row_tokens * ranks * self.element, 2, 2)
        self.memory("I", "latent-norm-grad", "norm", self.row_tokens * ranks * self.element, 4, 4)
        width = (ranks if m.q_rank else m.hidden + m.kv_rank) + m.rope_dim
        self.enter_columns("attention", width, "kv_b", wide=m.rope_dim)
        for name in ("q_b", "q", "kv_b"):
            if name in linears:
                self.gemm(name, "attention", self.b.tokens, self.columns(linears[name]), linears[name].d_in)

    def attention(self, project: Callable[[], None]) -> None:
        """Softmax attention around its core; `project` adds the products that compute queries, keys and values."""
        b, m, t = self.b, self.m, self.b.tokens
        core = self.block.attention
        assert core is not None
        heads = core.heads / b.tp
        kv_heads = np.maximum(core.kv_heads / b.tp, 1.0)
        self.norm("norm-1")
        project()
        self.rotate(t * (heads * core.qk + kv_heads * core.qk) * self.element)
        before = len(self.phases["I"])
        self._context(heads, kv_heads)
        if core.index:
            sparse_attention.select_positions(self, core)
        self.core(heads)
        if (
            m.sinks and b.splits_twice
        ):  # the half of the weights runs the backward of attention again, for its own parameters
            again = (op for op in self.phases["I"][before:] if not op.name.startswith("ulysses"))
            self.phases.setdefault("S", []).extend([replace(op, count=op.count * b.splits) for op in again])
        inner = self.linears["o"].d_in
        if m.output_gate:
            self.gate("output-gate", "attention", t * inner / b.tp * self.element)
        self.gemm("o", "attention", t, m.hidden, inner / b.tp)
        self.leave_rows("attention", m.hidden, inner, "o")
        if m.norms_per_layer == 4:
            self.norm("norm-3")
        self.residual("attention-residual")

    def gate(self, name: str, part: str, size: Array) -> None:
        """A sigmoid or SiLU of one tensor times another."""
        fused = "activation" in self.fused
        self.memory("F", name, part, size, 3 if fused else 5, 1 if fused else 2, exponentials=size / self.element)
        self.memory("I", f"{name}-grad", part, size, 5 if fused else 8, 1 if fused else 3)

    def rotate(self, size: Array) -> None:
        if self.m.positions == "rope":
            scaled = self.m.rope.rotation_factor(self.m.max_positions) != 1
            fused = "rope" in self.fused and not (scaled and "scaled-rope" in self.b.stack.unfused)
            tensors = 2 if self.b.stack.separate_projections else 1
            for phase in ("F", "I"):
                passes, launches = (2, tensors) if fused else (6, 6 * tensors)
                self.memory(phase, "rope", "attention", size, passes, launches, elementwise="rotation")
        if self.m.qk_norm:
            self.memory("F", "qk-norm", "norm", size, 2, 2)
            self.memory("I", "qk-norm-grad", "norm", size, 4, 4)
            if (
                self.m.qk_norm_width == "projection"
            ):  # ranks with parts of the heads average the squares of queries and of keys
                wide = self.b.tokens * max(4.0, self.element)
                for phase in ("F", "I"):
                    self.collective(phase, "qk-norm-mean", "norm", "all_reduce", "tp", wide, 2 * self.with_tp)

    def core(self, heads: Array) -> None:
        """softmax(QKᵀ)V. Flash attention runs five products backward for forward's two; stored softmax four."""
        b, m = self.b, self.m
        core = self.block.attention
        assert core is not None
        seq = b.by_length(lambda length: length)
        positions = b.by_length(lambda length: m.positions_of(core, length, b.stack.attention != "stored")[0])
        if attention_dropout.is_tiled(b):
            for phase, ops in attention_dropout.core_ops(b, core, heads, positions).items():
                self.phases[phase] += ops
            return
        flops = 2.0 * b.tokens * heads * (core.qk + core.v) * positions * b.slowest
        shape = (b.microbatch * heads, seq / b.cp, seq, float(core.qk))
        size = b.tokens * heads * (2 * core.qk + 2 * core.v) * self.element
        if b.stack.attention != "stored":
            fused: Array = 1.0
            if present(in_tiles := attention_tiles.in_tiles(b)):
                fused = ~in_tiles * 1.0
                for phase, ops in attention_tiles.core_ops(b, core, heads, in_tiles).items():
                    self.phases[phase] += ops
            self.phases["F"].append(Op("core", "attention", "attention", fused, flops, size, shape, self.wide))
            self.phases["I"].append(
                Op("core-grad", "attention", "attention", fused, 2.5 * flops, 2 * size, shape, self.wide, launches=3)
            )
            return
        scores = b.tokens * heads * positions * self.element
        product = (b.microbatch * heads, seq / b.cp, seq, float(core.qk))
        fused = "softmax" in self.fused
        drops = m.drops_probabilities
        passes = (2 if fused else 8) + (2.5 if drops else 0)
        wide = self.wide
        self.phases["F"].append(Op("scores", "attention", "gemm", 1.0, flops / 2, size / 2 + scores, product, wide))
        exponentials = scores / self.element
        launches = (1 if fused else 4) + int(drops)
        self.memory("F", "softmax", "attention", scores, passes, launches, exponentials=exponentials)
        self.phases["F"].append(Op("values", "attention", "gemm", 1.0, flops / 2, size / 2 + scores, product, wide))
        for name in ("scores", "values"):
            self.phases["I"].append(
                Op(f"{name}-grad", "attention", "gemm", 2.0, flops / 2, size / 2 + scores, product, wide)
            )
        self.memory("I", "softmax-grad", "attention", scores, passes + 1, (1 if fused else 4) + int(drops))

    def _context(self, heads: Array, kv_heads: Array) -> None:
        core = self.block.attention
        assert core is not None
        b = self.b
        on = b.cp > 1
        kv = b.tokens * kv_heads * (core.qk + core.v) * self.element  # this rank's K and V
        ring, ulysses, gather = (on & (b.cp_kind == i) for i in range(3))
        for phase, name in (("F", "ring-kv"), ("I", "ring-kv-again"), ("I", "ring-kv-grad")):
            self.collective(phase, name, "attention", "send", "cp", kv, ring * (b.cp - 1))
        if b.stack.context_in_blocks:
            self._context_blocks(heads, gather * 1.0)
        else:
            self.collective("F", "gather-kv", "attention", "all_gather", "cp", kv * b.cp, gather * 1.0)
            self.collective("I", "gather-kv-again", "attention", "all_gather", "cp", kv * b.cp, gather * 1.0)
            self.collective("I", "scatter-kv-grad", "attention", "reduce_scatter", "cp", kv * b.cp, gather * 1.0)
        # Ulysses needs at least one KV head a rank: fewer are repeated.
        kv_u = np.maximum(kv_heads, b.cp) * (core.qk + core.v)
        q_in, out = heads * core.qk, heads * core.v
        for phase in ("F", "I"):
            if present(ulysses):
                moved = b.tokens * (q_in + kv_u + out) * self.element
                self.memory(phase, "ulysses-order", "attention", moved, 4, ULYSSES_LAUNCHES, ulysses * 1.0)
            for name, width in (("ulysses-qkv", q_in + kv_u), ("ulysses-out", out)):
                n = b.tokens * width * self.element
                self.collective(phase, name, "attention", "all_to_all", "cp", n, ulysses * 1.0)

    def _context_blocks(self, heads: Array, gather: Array) -> None:
        """torch's `context_parallel`: K and V, repeated to the heads of Q, are gathered behind the rank's own block; the gradients of each block go
        round the ranks in fp32, and at last home. The outputs of blocks are merged, and their gradients summed, in fp32: in bytes of an element of Q,

            merge     read the sum (4) and a block (2), write the sum (4)
            backward  the same for the gradients of Q, K and V; those of K and V are also copied to a message (4 + 4 each)
        """
        core, b = self.block.attention, self.b
        assert core is not None
        kv, q = b.tokens * heads * (core.qk + core.v), b.tokens * heads * core.qk
        blocks = gather * (b.cp - 1)
        for phase, name in (("F", "gather-kv"), ("I", "gather-kv-again")):
            self.collective(phase, name, "attention", "all_gather", "cp", kv * self.element * b.cp, gather)
        self.collective("I", "ring-kv-grad", "attention", "send", "cp", kv * 4.0, gather * b.cp)
        self.memory("F", "merge-blocks", "attention", q * core.v / core.qk, 10, 1, blocks)
        self.memory("I", "sum-blocks", "attention", 10 * q + 18 * kv, 1, 3, blocks)

    def feed_forward(self, part: str, width: int, edges: bool = True) -> None:
        """Add the products and the activation of an FFN split over tp; `edges` adds its tensor-parallel communication."""
        b, m = self.b, self.m
        local = width / b.tp
        if edges:
            self.enter_columns(part, m.hidden, f"{part}-up")
        columns = 2 if m.gated else 1
        separate = columns if b.stack.separate_projections else 1
        self.gemm(f"{part}-up", part, b.tokens, local * columns, m.hidden, separate=separate)
        self.activation(part, b.tokens * local * self.element)
        self.gemm(f"{part}-down", part, b.tokens, m.hidden, local)
        if edges:
            self.leave_rows(part, m.hidden, width, f"{part}-down")

    def activation(self, part: str, size: Array, weighted: bool = False) -> None:
        """GELU reads and writes one tensor; a gated one reads two.

        A gated one that is `weighted` by the routing of each row has two kernels in backward (Megatron's fusions/fused_bias_swiglu.py, compiled by
        torch). One computes the two gradients as the halves of one tensor: 3 + 2 reads and 2 writes. The other sums the gradient of the weights
        over a row: 3 reads. On an H200 both take 28 bytes of an element at the rate of a copy (1.4 times these 20), forward 10.

        Clamps that are not fused: forward each half is read and written, then both are joined: 4 reads and 4 writes. Backward reads the gradient and
        the input of each half, writes its gradient, and joins both: 6 reads and 4 writes."""
        inputs = 2 if self.m.gated else 1
        exponentials = size / self.element if ACTIVATIONS[self.m.activation].exponential else 0.0
        counts = {"": (inputs + 1, 1), "-grad": (2 * inputs + 1, 1)}
        if "activation" not in self.fused:
            counts = {"": (2 * inputs + 2, inputs + 1), "-grad": (4 * inputs + 2, 2 * inputs + 1)}
        elif weighted and self.m.gated:
            counts["-grad"] = (10, 2)
            if self.m.swiglu_limit and self.m.swiglu_alpha != 1 and "clamped-gelu" in self.b.stack.unfused:
                self.memory("F", f"{part}-clamp", part, size, 8, 3)
                self.memory("I", f"{part}-clamp-grad", part, size, 10, 3)
        for phase, (suffix, (passes, launches)) in zip("FI", counts.items(), strict=True):
            name = f"{part}-activation{suffix}"
            self.memory(phase, name, part, size, passes, launches, exponentials=exponentials, elementwise="activation")

    def shared_scales(self) -> None:
        """Add fp8's scales, where ranks that hold parts of a tensor agree on one scale for it: the maxima of a product's two operands
        forward, of its gradient backward. Weights that ZeRO-3 gathers in fp8 have a scale already. Experts scale each token separately; ranks that
        split an expert agree on the scales of its weights, and of the rows that `down` reads."""
        if not self.b.scales:
            return
        products = sum(linear.part not in ("router", "experts") for linear in self.block.linears)
        for axis in ("tp", "cp"):
            on = (self.b.size(axis) > 1) * float(products)
            operands = np.where(self.b.gathers_fp8_weights("dense"), 4.0, 8.0) if self.b.gathers_fp8 else 8.0
            self.collective("F", "fp8-operands", "norm", "all_reduce", axis, operands, on)
            self.collective("I", "fp8-gradients", "norm", "all_reduce", axis, 4.0, on)
            if self.b.splits_twice:
                self.collective("S", "fp8-gradients", "norm", "all_reduce", axis, 4.0, on * self.b.splits)
        if self.block.kind in self.m.expert_kinds:
            experts, split = self.b.experts_scaled_forward, (self.b.etp > 1) * 1.0
            rows = self.b.tokens / self.b.tp * self.m.top_k * self.m.router.travelling * self.b.etp
            weights = split * (experts > 0) * (2.0 if self.m.gated else 1.0)
            for name, n, on in (("weights", experts, weights), ("rows", experts + rows, split)):
                self.collective("F", f"fp8-expert-{name}", "experts", "all_reduce", "expert_tp", 4.0 * n, on)

    # Whole layers

    def square(self) -> dict[str, list[Op]]:
        """The square layer of the deep MLP: x ← gelu(x·W), column-split with its output gathered."""
        b, h = self.b, self.m.hidden
        tokens = b.tokens
        n = tokens * h * self.element
        self.gemm("linear", "ffn", tokens, h / b.tp, h)
        local = tokens * h / b.tp
        self.memory("F", "gelu", "ffn", local * self.element, 2, 1, exponentials=local)
        self.memory("I", "gelu-grad", "ffn", local * self.element, 3, 1, exponentials=local)
        self.collective("F", "gather", "ffn", "all_gather", "tp", n, self.with_tp)
        self.collective("I", "reduce", "ffn", "reduce_scatter", "tp", n, self.with_tp)
        self.shared_scales()
        self.recomputed("gather")
        return self.phases

    def recomputed(self, last: str) -> None:
        """Add what backward recomputes: all of forward under `full`, the attention core under `selective` (or, by the stack, everything but
        the core and every second product).

        Where the stack stops early, forward is rerun only until backward has what it needs: not the `last` exchange nor the product before it
        (unless a norm or a dropout after them needs their result). And the input that is gathered for the rerun is the one that the
        gradients of the weights would have gathered. Modules of `Stack.reruns` are repeated in backward itself.
        """
        full, selective = (self.b.recompute == 2) * 1.0, (self.b.recompute == 1) * 1.0
        spared = {op.name.removesuffix("-again") for op in self.phases["W"] if op.name.endswith("-in-again")}
        stack = self.b.stack
        ends_early = stack.early_stop and not stack.reruns_graphs and (not self.m.norms_outputs or self.m.kind == "mlp")
        if ends_early:
            spared.add(last)
        needless = self._after_the_last_input() if ends_early and not self.m.dropout else set()
        by_operator, products = stack.selective == "operators", 0
        for op in self.phases["F"]:
            core = op.name in ("core", "scores", "softmax", "values", "tiles", "tile-softmax")
            products += op.kind == "gemm" and not core and not op.name.endswith("-wide")
            if stack.early_stop and op.axis == "tp" and op.name in spared:
                continue
            is_saved = core or op.collective == "reduce_scatter" or (op.kind == "gemm" and products % 2 == 1)
            whole = 0.0 if op.name in needless else full
            reruns = whole + (selective if (not is_saved if by_operator else core) else 0.0)
            if present(reruns):
                self.phases["R"].append(self._rerun(op, reruns))
            reran = (MODULES[module] for module in stack.reruns)
            if any(op.name.startswith(names) or op.part in parts for names, parts in reran):
                self.phases["I"].append(self._rerun(op, 1.0 - np.maximum(full, reruns)))

    def _after_the_last_input(self) -> set[str]:
        """The names of the operations of forward after the input of the last product, where nothing but a residual reads its result: backward
        needs the inputs of products. Routed experts are weighted after their last product."""
        forward = self.phases["F"]
        products = [i for i, op in enumerate(forward) if op.kind == "gemm" and not op.name.endswith("-wide")]
        if not products or forward[products[-1]].part not in ("ffn", "attention", "linear"):
            return set()
        product, *tail = forward[products[-1] :]
        residual = {op.name for op in tail if op.name.endswith("-residual")}
        others = {op.name for op in tail if op.kind != "collective" and not op.name.startswith(product.name)}
        return {product.name, f"{product.name}-wide", *residual} if others == residual else set()

    @staticmethod
    def _rerun(op: Op, reruns: Array) -> Op:
        """An operation of forward as recompute repeats it."""
        product = f"{op.product}-again" if op.product else ""
        return replace(op, name=f"{op.name}-again", count=op.count * reruns, product=product)
