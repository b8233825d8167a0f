"""A linear mixer (`describe.mixer_options`) under tensor, sequence and context parallelism, for one micro-batch.

Tensor parallelism cuts heads and groups, as in attention: one exchange of T·h before the input projection and one after the output
projection. Context parallelism exchanges sequence for heads with two all-to-alls, as Ulysses does for attention, whatever the plan's kind of
context parallelism for attention is: a state needs all earlier positions.

The scan runs in chunks of C positions, in a kernel each for: states of the chunks, passing them on, scores inside the chunks, outputs. Backward
repeats all but the outputs, and has a kernel for the gradient of each operand. Counted from the kernels of Mamba-2, they read or write

    values (T·H·P)                    3 times forward, 15 times backward
    states (T/C · H·N·P, fp32)        4 times forward, 11 times backward

which bounds the scan on recent devices: its products are small (C × C and C × N). Backward has three times the products of forward. mamba1 has
a decay for each channel and state, hence no products: one kernel whose T·H·N exponentials and multiply-adds run on the vector units.
"""

from meshwright.describe.tensors import LinearCore
from meshwright.lower.layer import LayerLowering
from meshwright.lower.program import Array, Op

STATE_BYTES = 4.0
PRODUCTS = {"F": 1.0, "I": 3.0}  # over those of forward
VALUE_PASSES = {"F": 3.0, "I": 15.0}
STATE_PASSES = {"F": 4.0, "I": 11.0}
SCAN_LAUNCHES = {"F": 5.0, "I": 13.0}


def linear_mixer(low: LayerLowering) -> None:
    """Add the operations of a linear mixer."""
    b, m, t, e = low.b, low.m, low.b.tokens, low.element
    o, core = m.linear, low.block.linear
    assert core is not None
    low.norm("norm-1")
    low.enter_columns("linear", m.hidden, "linear-project")
    low.gemm("linear-project", "linear", t, o.projected / b.tp, m.hidden)
    _exchange(low, "linear-heads", t * (o.projected / b.tp) * e)
    if o.conv:
        low.memory("F", "conv", "linear", t * o.convolved / b.tp * e, 2, 1)
        low.memory("I", "conv-grad", "linear", t * o.convolved / b.tp * e, 4, 2)
    if core.products:
        _scan(low, core)
    else:
        _selective_scan(low)
    low.gate("scan-norm", "linear", t * o.inner / b.tp * e)
    _exchange(low, "linear-sequence", t * (o.inner / b.tp) * e)
    low.gemm("linear-result", "linear", t, m.hidden, o.inner / b.tp)
    low.leave_rows("linear", m.hidden, o.inner, "linear-result")
    if m.norms_per_layer == 4:
        low.norm("norm-3")
    low.residual("linear-residual")


def _exchange(low: LayerLowering, name: str, size: Array) -> None:
    """Exchange sequence for heads, or back, over the context-parallel ranks."""
    on = (low.b.cp > 1) * 1.0
    for phase in ("F", "I"):
        low.collective(phase, name, "linear", "all_to_all", "cp", size, on)


def _scan(low: LayerLowering, core: LinearCore) -> None:
    """Chunks by matrix products, states between them."""
    b, t, e, o = low.b, low.b.tokens, low.element, low.m.linear
    heads = core.heads / b.tp
    chunks = t / core.chunk
    values = t * (o.inner + o.keys) / b.tp * e
    states = chunks * heads * core.state * core.value * STATE_BYTES
    shape = (chunks * heads, float(core.chunk), float(core.value), float(core.chunk + core.state))
    flops = t * core.flops / b.tp
    for phase, name in (("F", "scan"), ("I", "scan-grad")):
        moved = VALUE_PASSES[phase] * values + STATE_PASSES[phase] * states
        work, launches = PRODUCTS[phase] * flops, SCAN_LAUNCHES[phase]
        low.phases[phase].append(Op(name, "linear", "scan", 1.0, work, moved, shape, low.wide, launches=launches))


def _selective_scan(low: LayerLowering) -> None:
    """mamba1: the projections of its steps, and the scan of each channel and state."""
    b, t, e, o = low.b, low.b.tokens, low.element, low.m.linear
    width = o.rank + 2 * o.state
    low.gemm("linear-steps", "linear", t, width, o.inner / b.tp)
    for phase in ("F", "I"):
        low.collective(phase, "linear-steps", "linear", "all_reduce", "tp", low.message(width), low.with_tp)
    low.gemm("linear-rate", "linear", t, o.inner / b.tp, o.rank)
    local = t * o.inner / b.tp
    low.memory("F", "scan", "linear", local * e, 4, 1, exponentials=local * o.state)
    low.memory("I", "scan-grad", "linear", local * e, 9, 1, exponentials=local * o.state)
    low.phases["F"][-1].flops = local * o.state * 6.0
    low.phases["I"][-1].flops = local * o.state * 15.0
