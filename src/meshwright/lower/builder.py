"""The builders that all layers use: a product with its backward, a pass over memory, a collective, and the edges of tensor parallelism.

Tensor parallelism (Megatron's form): a column-split product needs no communication forward and an all-reduce of its input's
gradient backward; a row-split product is the reverse. So a layer has four all-reduces of T·h a micro-batch: after attention
and after the FFN, forward and backward. Sequence parallelism cuts each in two: an all-gather before the column-split
product and a reduce-scatter after the row-split one, same bytes, and the norms between them see T/tp tokens. Its saved
inputs are sharded too, so backward gathers them again for the gradient of the weights: two more all-gathers; where backward is split, I
gathers them as well as W (phase G). With more ranks than KV heads each head has tp/K copies, which sum their gradients once per step (`sync`).

The all-gather form splits every product by columns and gathers each output: more bytes, one kind of collective.

fp8 products do not narrow what is sent, unless the plan has `gather_dtype=fp8`. Then sequence parallelism's all-gathers of their operands
(the inputs forward and again for the gradient of the weights, the gradients of the outputs) have a byte per element and scales, in stacks
that do so (`fp8_activation_gathers`). What is summed (reduce-scatters, all-reduces) stays in 16 bits: a sum of tp numbers in fp8 would lose
what cancels. Pipeline sends, context parallelism and the exchanges of experts are not narrowed either: their readers are not only fp8
products.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from meshwright.describe.accelerator import DTYPE_BYTES
from meshwright.describe.sharding import local_shape
from meshwright.describe.sharding.parameters import adapter_styles
from meshwright.describe.tensors import Linear, ParameterBlock
from meshwright.lower.batch import Batch
from meshwright.lower.footprint import degrees
from meshwright.lower.program import NARROW, Array, Op, present

QUANTISED_IN = ("F", "I")  # phases in which the input and the gradient of the output of a product are quantised
# Bytes read to quantise an element to blocks, and those of a copy. fp4 also has a scale for the tensor, whose maximum is read first.
BLOCK_BYTES = {"mxfp8": (2.0, 1.0), "fp4": (4.0, 0.5)}
# The same of fp8 with the scale of the tensor itself (`Stack.fp8_scaling`), which reads its maximum first too
CURRENT_BYTES = (4.0, 1.0)
# Time of torch's sum of a 16-bit into a 32-bit tensor over that of a copy: 2.50 of 4.27 TB/s on one H200, layers and embeddings alike
MIXED_DTYPES = 1.7
# The matrices of products that are named otherwise, or join several; `q-latents`: what reads the gathered latents.
JOINED = {
    "qkv": ("q", "k", "v", "gate"),
    "q-latents": ("q_b", "q", "kv_b"),
    **{f"{part}-up": (f"{part}-gate", f"{part}-up") for part in ("ffn", "shared", "experts")},
    "linear-project": ("linear-in",),
    "linear-result": ("linear-out",),
    "logits": ("head",),
}


class BlockBuilder:
    """Collects the operations of one block, phase by phase."""

    def __init__(self, batch: Batch, block: ParameterBlock, element: float, messages: dict[Any, Array]) -> None:
        self.b, self.block, self.element = batch, block, element
        self.messages = messages  # of `message`; all blocks of a program share them
        self.m = batch.model
        self.linears = {linear.name: linear for linear in block.linears}
        self.fused = set(batch.stack.fused)
        self.degrees = degrees(batch)
        self.wide = "bf16" if batch.workload.precision in NARROW else ""  # dtype of products that are never narrower
        self.phases: dict[str, list[Op]] = {"F": [], "I": [], "W": [], "R": []}
        self.row_tokens = batch.tokens / batch.seq_split  # tokens the regions between the products see
        self.with_tp = (batch.tp > 1).astype(float)
        self.with_sp = self.with_tp * batch.sp
        self.gather_form = self.with_tp * batch.gather_form
        self.reduce_form = self.with_tp * ~batch.sp * ~batch.gather_form  # all-reduces, Megatron without sp

    def memory(
        self,
        phase: str,
        name: str,
        part: str,
        size: Array,
        passes: Array,
        launches: Array,
        count: Array = 1.0,
        exponentials: Array = 0.0,
        elementwise: str = "",
    ) -> None:
        """Add a memory-bound operation: `passes` reads or writes of `size` bytes."""
        self.phases[phase].append(
            Op(
                name,
                part,
                "memory",
                count,
                bytes=size * passes,
                launches=launches,
                exponentials=exponentials,
                elementwise=elementwise,
            )
        )

    def collective(
        self,
        phase: str,
        name: str,
        part: str,
        kind: str,
        axis: str,
        n: Array,
        count: Array,
        copies: float = 1.0,
        product: str = "",
        own_shard: bool = False,
        copied: Array = 0.0,
    ) -> None:
        op = Op(
            name,
            part,
            "p2p" if kind == "send" else "collective",
            count,
            collective=kind,
            axis=axis,
            message_bytes=n,
            stream=f"comm:{axis}",
            copies=copies,
            product=product,
            own_shard=own_shard,
            bytes=copied,
        )
        self.phases.setdefault(phase, []).append(op)

    def gemm(
        self,
        name: str,
        part: str,
        m: Array,
        n: Array,
        k: Array,
        products: Array = 1.0,
        launches: Array = 1.0,
        dtype: str = "",
        quantised: Sequence[str] = QUANTISED_IN,
        separate: int = 1,
    ) -> None:
        """Add a product and its two backward products: input gradient (m,k,n) and weight gradient (k,n,m). A frozen weight has no gradient; a
        quantised one is brought to the dtype of the product first; an adapter adds its own two products. `quantised`: the phases in which a
        kernel of its own quantises the input (F) and the gradient of the output (I) to blocks. `separate`: the products of which it consists."""
        linears = self.matrices(name)
        self.product(name, part, m, n, k, products, launches, dtype, self.trained_share(linears), quantised, separate)
        if not self.m.adapter.on:
            return
        if packed := [linear for linear in linears if linear.packed]:
            share = sum(linear.d_out for linear in packed) / sum(linear.d_out for linear in linears)
            size = products * n * k * share
            for phase, suffix in (("F", ""), ("I", "-grad")):
                # Rows of codes in fp8 end with a scale: the product takes a copy without it.
                moved = 2.0 if self.fp8_base else self.m.adapter.row_bytes(k) / k + self.element
                self.memory(phase, f"{name}-dequantise{suffix}", part, size, moved, len(packed))
        ranked = [linear for linear in linears if linear.rank]
        joined = self.b.stack.joined_adapters and len(ranked) == len(linears) and len({x.rank for x in ranked}) == 1
        for pair in [ranked] if joined else [[linear] for linear in ranked]:
            self.adapter(pair, name if joined else pair[0].name, m, products)

    @property
    def fp8_base(self) -> bool:
        """Whether products in fp8 take the codes of a frozen base as they are."""
        return self.m.adapter.base == "fp8" and self.b.workload.precision == "fp8"

    @property
    def wide_share(self) -> float:
        """The share of the layers whose products stay in 16 bits beside a narrower precision, counted in every layer."""
        return min(self.b.stack.wide_layers / self.m.layers, 1.0) if self.m.layers else 0.0

    def matrices(self, product: str) -> list[Linear]:
        """The matrices of a product, which the stack may have joined."""
        names = JOINED.get(product, (product,))
        return [self.linears[name] for name in names if name in self.linears]

    def trained_share(self, linears: list[Linear]) -> float:
        """Share of a product's weights that have a gradient; one without a matrix of its own is frozen with the rest."""
        if not self.m.adapter.on:
            return 1.0
        whole = sum(linear.d_out for linear in linears)
        trained = sum(linear.d_out for linear in linears if linear.learns)
        return trained / whole if whole else float(self.m.adapter.learns(""))

    def adapter(self, linears: list[Linear], name: str, tokens: Array, products: Array) -> None:
        """Add y += scale · B·(A·x), x with dropout: two thin products with their backward, and two sums: with the output of the base, and with the
        gradient of its input. One pair of matrices adapts all of `linears`, which read the same input."""
        linear, d_out = linears[0], 0.0
        copies = (linear.copies,) if linear.style.startswith("experts") else ()
        inner, d_in = local_shape(adapter_styles(linear.style)[0], (*copies, linear.rank, linear.d_in), self.degrees)[
            -2:
        ]
        for each in linears:
            style = adapter_styles(each.style)[1]
            d_out = d_out + local_shape(style, (*copies, each.d_out, each.rank), self.degrees)[-2]
        part, fused = linear.part, "bias-dropout" in self.fused and not self.b.stack.joined_adapters
        size_in, size_out = (products * tokens * width * self.element for width in (d_in, d_out))
        if self.m.adapter.dropout:
            for phase, suffix in (("F", ""), ("I", "-grad")):
                self.memory(phase, f"{name}-lora-drop{suffix}", part, size_in, 2.5, 1)
        self.product(f"{name}-lora-a", part, tokens, inner, d_in, products, 1.0, self.wide)
        self.product(f"{name}-lora-b", part, tokens, d_out, inner, products, 1.0, self.wide)
        self.memory("F", f"{name}-lora-add", part, size_out, 3 if fused else 5, 1 if fused else 2)
        if not fused:
            self.memory("I", f"{name}-lora-scale-grad", part, size_out, 2, 1)
        self.memory("I", f"{name}-lora-add-grad", part, size_in, 3, 1)

    def accumulate(self, name: str, part: str, weights: Array, launches: Array) -> None:
        """Add the gradient of `weights` numbers to the sum over micro-batches, or copy it to the buffer in which this micro-batch reduces it. torch's
        kernel that adds two dtypes reads number by number. A loss that is computed in chunks sums the gradient of its weight in 32 bits, and
        scales it at the end."""
        b = self.b
        e: Array = self.element
        if name == "logits" and np.any(b.fuses_loss):
            self.memory("W", f"{name}-scale", part, weights, 8.0 * b.fuses_loss, 1)
            e = np.where(b.fuses_loss, 4.0, e)
        added, copied = b.gradient_passes("expert" if part == "experts" else "dense")
        passes = added * (e + 2 * b.grad_bytes) * np.where(b.grad_bytes != e, MIXED_DTYPES, 1.0)
        passes = passes + copied * (e + b.comm_bytes)
        self.memory("W", f"{name}-accumulate", part, weights, passes, launches * (added | copied & b.sums_whole))

    def product(
        self,
        name: str,
        part: str,
        m: Array,
        n: Array,
        k: Array,
        products: Array,
        launches: Array,
        dtype: str,
        trained: float = 1.0,
        quantised: Sequence[str] = QUANTISED_IN,
        separate: int = 1,
    ) -> None:
        """Add a product with its backward; the share `trained` of its outputs belongs to weights that have a gradient. Each of `separate`
        products computes a part of the outputs: it reads the whole input, forward and for the gradient of its weight, and writes a gradient of the
        whole input, which are added up."""
        flops = 2.0 * products * m * n * k
        e = self.element
        launches = launches * separate
        size = products * (m * k + k * n + m * n) * e
        operand = e if dtype else min(e, DTYPE_BYTES[self.b.workload.precision])
        read, written = ((separate - 1) * products * m * k * x for x in (operand, e))
        weights = products * k * n * trained
        wide = self.wide_share if self.wide and not dtype else 0.0
        direct = "accumulate" in self.fused  # the product adds into the accumulated gradient
        grown = products * (m * k + m * n * trained) * e + read + weights * (2 * self.b.grad_bytes if direct else e)
        for phase, suffix, work, moved, sides in (
            ("F", "", flops, size + read, (m, n, k)),
            ("I", "-dgrad", flops, size + written, (m, k, n)),
            ("W", "-wgrad", flops * trained, grown, (k, n * trained, m)),
        ):
            if phase == "W" and not trained:
                continue
            op = Op(name + suffix, part, "gemm", 1.0 - wide, work, moved, (products, *sides), dtype, launches=launches)
            self.phases[phase].append(op)
            if wide:
                self.phases[phase].append(replace(op, name=f"{op.name}-wide", count=wide, dtype=self.wide))
        if separate > 1:
            self.memory("I", f"{name}-dgrad-sum", part, products * m * k * e, separate + 1, separate - 1)
        if not direct and trained:
            self.accumulate(name, part, weights, launches)
        precision = self.b.workload.precision
        current = self.b.stack.keeps_quantised and self.b.stack.fp8_scaling == "current"
        if not dtype and (precision in BLOCK_BYTES or (precision == "fp8" and current)):
            read, copy = BLOCK_BYTES.get(precision, CURRENT_BYTES)
            size = read + copy * (2 if trained else 1)
            for phase, elements in (("F", products * m * k), ("I", products * m * n)):
                if phase in quantised:
                    self.quantise_blocks(phase, name, part, size, elements * (1.0 - wide))
        elif precision == "fp8" and self.b.stack.fp8_passes and not dtype:
            weights = weights if self.fp8_base else products * k * n
            self.quantise(name, part, products * m * k, products * m * n, weights, trained > 0)

    def quantise_blocks(self, phase: str, name: str, part: str, size: float, elements: Array) -> None:
        """Add the passes that bring the input or the gradient of the output of a product to fp8 or fp4 in a kernel of their own. The blocks of a
        product and of the gradient of its weight lie along other dimensions, so one kernel reads 16 bits and writes both copies; beside a frozen
        weight only the first (Transformer Engine's module/linear.py: columnwise=backward_needs_input). Weights are quantised once a step."""
        self.memory(phase, f"{name}-quantise", part, elements, size, 2, elementwise="quantise")

    def quantise(
        self, name: str, part: str, inputs: Array, outputs: Array, weights: Array, trained: bool = True
    ) -> None:
        """Add the passes that bring operands of an fp8 product to fp8, and those that transpose them for the gradient of the weight. With a
        scale per row each of the three products quantises both of its operands, the weight too."""
        if self.b.workload.scaling == "row":
            for phase, size in (("F", inputs + weights), ("I", outputs + weights), ("W", (inputs + outputs) * trained)):
                self.memory(phase, f"{name}-quantise", part, size, self.b.stack.fp8_passes, 4)
            return
        cast_in, cast_out = inputs, outputs
        if (
            self.b.gathers_fp8 and self.b.stack.fp8_activation_gathers
        ):  # sequence parallelism gathers what is cast already
            styles = {linear.style for linear in self.matrices(name)}
            shard = np.where(self.b.gather_fp8 & self.b.sp, 1 / self.b.tp, 1.0)
            cast_in, cast_out = (
                (inputs * shard if "column" in styles else inputs),
                (outputs * shard if "row" in styles else outputs),
            )
        self.memory("F", f"{name}-quantise", part, cast_in, self.b.stack.fp8_passes, 2)
        self.memory("I", f"{name}-quantise-grad", part, cast_out, self.b.stack.fp8_passes, 2)
        if trained:
            self.memory("W", f"{name}-transpose", part, inputs + outputs, 2, 2)

    # Tensor and sequence parallel edges

    def message(self, width: int) -> Array:
        """Bytes of this rank's tokens at a width. Equal widths return the same array, so that it is timed once."""
        if width not in self.messages:
            self.messages[width] = self.b.tokens * width * self.element
        return self.messages[width]

    def gathered(self, width: int, wide: int = 0) -> Array:
        """Bytes of an all-gather over tp of an operand of products: those of `message`; in fp8 a byte for all but `wide` of its width, and
        scales. The head multiplies in 16 bits."""
        n = self.message(width)
        narrows = self.b.gathers_fp8 and self.b.stack.fp8_activation_gathers
        if not narrows or self.block.kind == "head":
            return n
        if (width, wide) not in self.messages:
            narrow = self.b.fp8_gather_bytes(self.b.tokens * (width - wide), "tp")
            self.messages[width, wide] = np.where(self.b.gather_fp8, narrow + self.b.tokens * wide * self.element, n)
        return self.messages[width, wide]

    @property
    def summed(self) -> Array:
        """Passes over the parts of a sum that arrive in pieces: each is read, their sum is written."""
        return 1.0 + 1.0 / self.b.tp

    def ordered(self, n: Array, in_pieces: Array = 0.0) -> Array:
        """Bytes that copies of a message of sequence parallelism move (`Stack.orders_messages`); `in_pieces`: passes where it overlaps."""
        if not self.b.stack.orders_messages:
            return 0.0
        pieces = self.b.overlap["tp"] > 0
        return n * np.where(pieces, in_pieces, 2.0 * (self.b.microbatch > 1))

    def enter_columns(self, part: str, width: int, product: str, wide: int = 0) -> None:
        """Add the communication before a column-split `product` with an input of `width`, of which `wide` is read in 16 bits."""
        n, gathered = self.message(width), self.gathered(width, wide)
        dgrad, wgrad = f"{product}-dgrad", f"{product}-wgrad"
        readers = self.matrices("q-latents" if product == "kv_b" else product)
        again = self.with_sp * any(linear.learns or linear.rank for linear in readers)
        if self.b.stack.keeps_gathered:  # only a layer that runs again gathers again
            again = again * self.b.reruns_layers * (part != "head")
        ordered, order_sum = (
            self.ordered(gathered),
            self.ordered(n, 2.0 if not self.b.stack.overlap_sums else self.summed),
        )
        self.collective(
            "F", f"{part}-in", part, "all_gather", "tp", gathered, self.with_sp, 1.0, product, True, ordered
        )
        self.collective(
            "I", f"{part}-in-grad", part, "reduce_scatter", "tp", n, self.with_sp, product=dgrad, copied=order_sum
        )
        if present(again):
            self.collective(
                "W", f"{part}-in-again", part, "all_gather", "tp", gathered, again, product=wgrad, copied=ordered
            )
        if self.b.splits_twice:
            self.collective("G", f"{part}-in-again", part, "all_gather", "tp", gathered, again * self.b.splits)
        reduced = self.reduce_form + self.gather_form
        self.collective("I", f"{part}-in-grad", part, "all_reduce", "tp", n, reduced, product=dgrad)

    def leave_rows(self, part: str, width: int, inner: int, product: str) -> None:
        """Add the communication after a row-split `product` with an output of `width` and an input of `inner`. The all-gather form gathers
        both."""
        n, n_inner = self.message(width), self.message(inner)
        self.collective("F", f"{part}-out", part, "all_reduce", "tp", n, self.reduce_form)
        gathered, summed = self.gathered(width), self.ordered(n, self.summed)
        for phase, name, kind, size, behind, copied in (
            ("F", "out", "reduce_scatter", n, product, summed),
            ("I", "out-grad", "all_gather", gathered, f"{product}-dgrad", self.ordered(gathered)),
        ):
            self.collective(phase, f"{part}-{name}", part, kind, "tp", size, self.with_sp, 1.0, behind, True, copied)
        self.collective("F", f"{part}-inner", part, "all_gather", "tp", n_inner, self.gather_form)
        self.collective("F", f"{part}-out", part, "all_gather", "tp", n, self.gather_form)
        self.collective("I", f"{part}-inner-grad", part, "reduce_scatter", "tp", n_inner, self.gather_form)
