"""Shares of peak of Blackwell GPUs, compared with tables that NVIDIA publishes of its kernels."""

import pytest

from meshwright.cost.compute import attention_time, gemm_time, op_time
from meshwright.cost.step import step_cost
from meshwright.describe import catalog
from meshwright.describe.plan import Plan
from meshwright.describe.stack import Stack
from meshwright.describe.workload import Workload
from meshwright.lower.program import Op
from meshwright.lower.step import step_program

TOKENS = 15872
WEIGHTS = ((4096, 12288), (4096, 4096), (4096, 16384), (16384, 4096))
# Milliseconds of forward, input gradient and weight gradient of one layer on a B300, operands quantised before: Transformer Engine,
# docs/examples/gemm_profiling/gemm_profiling.rst.
LAYER = {
    "bf16": (4.250, 4.434, 4.418),
    "fp8": (2.158, 2.329, 2.325),
    "mxfp8": (2.365, 2.397, 2.400),
    "fp4": (1.254, 1.305, 1.205),
}
# Milliseconds of causal attention in bf16, forward and backward, by tokens: NVIDIA/cudnn-frontend at release 1.23,
# benchmark/sdpa_benchmark_training/results/*_919_only_cudnn, 64 heads of 128 with 8 of keys: TFLOP/s.
ATTENTION = {
    "gb200": {4096: (1335, 1132), 8192: (1598, 1311)},
    "gb300": {4096: (1672, 1195), 8192: (1887, 1385)},
}
SUSTAINED = (
    0.88  # rate of kernels that run for seconds over the rate of such a benchmark, on one H200 with the same cuDNN
)


# Rates of 42 kernels of RMSNorm (cuDNN, eager, compiled; forward, backward) over those on an H200, geometric mean: the same repository at the same
# release, benchmark/norms/results, shapes of 33e6 elements and more.
NORMS = {"gb200": 1.449, "gb300": 1.477}
# Milliseconds that quantising with current scaling adds to a layer on a B300, in the first table: an operand of each of three products is read for
# its maximum, read again and written in a byte.
QUANTISED_MS, QUANTISED_BYTES = 9.147 - 6.812, 5.0


# Rate of training a Mamba-2 of 48 layers of width 2048 on a GB200 over that on an H200, bf16, 4 sequences of 4096: state-spaces/mamba#904.
SCAN_GAIN = 360.4 / 239.2


def product(m: int, n: int, k: int) -> Op:
    return Op("product", "ffn", "gemm", 1.0, 2.0 * m * n * k, 2.0 * (m * k + k * n + m * n), (1, m, n, k))


def of(cluster: str):
    return catalog.load("clusters", cluster).accelerator


@pytest.mark.parametrize("dtype", LAYER)
def test_products_of_a_layer_take_the_published_time_on_a_b300(dtype):
    shapes = [shape for k, n in WEIGHTS for shape in ((TOKENS, n, k), (TOKENS, k, n), (n, k, TOKENS))]
    seconds = sum(float(gemm_time(of("dgx-b300"), dtype, product(*shape))) for shape in shapes)
    assert 1e3 * seconds == pytest.approx(sum(LAYER[dtype]), rel=0.02)


@pytest.mark.parametrize(("card", "tokens"), [(card, tokens) for card, rates in ATTENTION.items() for tokens in rates])
def test_attention_takes_the_published_time(card, tokens):
    forward, backward = ATTENTION[card][tokens]
    flops = 4.0 * 64 * 128 * tokens * tokens / 2
    published = flops / (forward * 1e12) + 2.5 * flops / (backward * 1e12)
    ops = (Op("core", "attention", "attention", 1.0, f * flops, 0.0, (64, tokens, tokens, 128)) for f in (1.0, 2.5))
    device = of(f"{card}-nvl72")
    seconds = sum(float(attention_time(device, "bf16", op, "fused")) for op in ops)
    assert seconds == pytest.approx(published / SUSTAINED, rel=0.06)


def test_more_power_makes_products_faster_not_copies():
    b300, gb300 = of("dgx-b300").efficiency, of("gb300-nvl72").efficiency
    for dtype in LAYER:
        rates = [
            eff.products(dtype) * of(name).peak_for(dtype) for eff, name in ((b300, "dgx-b300"), (gb300, "gb300-nvl72"))
        ]
        assert rates[1] / rates[0] == pytest.approx((1400 / 1100) ** 0.7, rel=0.02)
    assert b300.memory == gb300.memory


@pytest.mark.parametrize("card", NORMS)
def test_kernels_that_move_memory_gain_as_much_over_hopper_as_published(card):
    rate, hopper = (
        device.efficiency.memory * device.memory_bandwidth for device in (of(f"{card}-nvl72"), of("dgx-h200"))
    )
    assert rate / hopper == pytest.approx(NORMS[card], rel=0.02)


def test_quantising_a_layer_takes_the_published_time():
    inputs, outputs, weights = (
        sum(sizes) for sizes in zip(*((TOKENS * k, TOKENS * n, k * n) for k, n in WEIGHTS), strict=True)
    )
    operands = inputs + weights + outputs + weights + inputs + outputs
    op = Op("quantise", "ffn", "memory", bytes=QUANTISED_BYTES * operands, launches=1.0, elementwise="quantise")
    assert 1e3 * op_time(of("dgx-b300"), "fp8", Stack(elementwise=1.6), op) == pytest.approx(QUANTISED_MS, rel=0.02)


def test_a_mamba_gains_as_much_over_hopper_as_published():
    base = catalog.load("models", "nemotron-h-8b")
    mixer = base.linear.but(heads=64, groups=1, chunk=256)
    model = base.but(hidden=2048, layers=48, pattern="M" * 48, ffn=0, vocab=50288, heads=32, kv_heads=32, linear=mixer)
    stack = catalog.load("stacks", "torch-eager").but(launch=1e-7, collective_launch=1e-7)

    def seconds(cluster):
        program = step_program(model, [Plan(microbatch=4)], Workload(batch=4, seq=4096), stack)
        return float(step_cost(program, catalog.load("clusters", cluster).with_gpus(1)).time[0])

    assert seconds("dgx-h200") / seconds("gb200-nvl72") == pytest.approx(SCAN_GAIN, rel=0.02)
