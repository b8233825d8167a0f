"""fp8 products with a scale per row: error bounds, outlier tokens, and training compared with one device that rounds the same way."""

import pytest
import torch

import ranks
from meshwright.describe.adapter import Adapter
from meshwright.describe.config import Config
from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.describe.stack import Stack
from meshwright.describe.workload import Workload
from meshwright.lower.step import step_program
from meshwright.models.quantised import RowPacking
from meshwright.parallel.numerics import fp8, fp8_rows
from meshwright.proof.prove import prove

MODEL = Model(hidden=16, layers=2, heads=2, ffn=24, vocab=32, ffn_bias=True)
E4 = 2.0**-4


def random(*shape, seed=0, scale=1.0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale


def bound(a, b):
    """(2u + u²) Σ|a||b|, plus underflow: an element of a row moves by at most 2⁻¹⁰ steps of 1/448 of the row's largest magnitude."""
    half_step = 2.0**-10 / 448
    below = half_step * (
        a.abs().amax(1, keepdim=True) * b.abs().sum(1) + a.abs().sum(1, keepdim=True) * b.abs().amax(1)
    )
    return ((2 * E4 + E4**2) * (a.abs() @ b.abs().T) + 1.1 * below) * (1 + 2.0**-20)


def test_products_are_within_their_bounds_forward_and_backward():
    x, w, b = random(3, 5, 32).requires_grad_(), random(24, 32, seed=1).requires_grad_(), random(24, seed=2)
    x.data[1, 2] *= 1e4  # each row has its scale
    w.data[:, 3] *= 1e-4
    gradient = random(3, 5, 24, seed=3, scale=1e-6)
    y = fp8_rows.linear(x, w, b)
    y.backward(gradient)
    flat_x, g = x.detach().flatten(0, 1), gradient.flatten(0, 1)
    assert ((y - (x @ w.T + b)).detach().flatten(0, 1).abs() <= bound(flat_x, w.detach())).all()
    assert ((x.grad.flatten(0, 1) - g @ w.detach()).abs() <= bound(g, w.detach().T)).all()
    assert ((w.grad - g.T @ flat_x).abs() <= bound(g.T, flat_x.T)).all()
    assert (w.grad - g.T @ flat_x).norm() > 1e-3 * w.grad.norm()  # and it was fp8


def device_product(a, b, scale_a, scale_b, out_dtype, use_fast_accum):
    """`torch._scaled_mm` of a GPU: it refuses other layouts and sizes."""
    assert a.is_contiguous()
    assert b.T.is_contiguous()
    assert not any(size % 16 for size in (*a.shape, *b.shape))
    rows, columns = ((len(a), 1), (1, b.shape[1])) if scale_a.ndim else ((), ())
    assert (scale_a.shape, scale_b.shape) == (rows, columns)
    assert scale_a.is_contiguous()
    assert scale_b.is_contiguous()
    return ((a.double() * scale_a) @ (b.double() * scale_b)).to(out_dtype)


@pytest.mark.parametrize("numerics", [fp8, fp8_rows], ids=["tensor", "row"])
@pytest.mark.parametrize("tokens", [32, 21])
def test_any_number_of_tokens_meets_the_alignment_of_the_device(numerics, tokens, monkeypatch):
    """The gradient of a weight sums over tokens: 21 are padded to 32. A product of a GPU differs from the emulation by its bf16 result."""

    def run():
        x, w = random(1, tokens, 48).requires_grad_(), random(32, 48, seed=1).requires_grad_()
        y = numerics.linear(x, w)
        y.backward(random(1, tokens, 32, seed=2))
        return [part.detach() for part in (y, x.grad, w.grad)]

    emulated = run()
    calls = []
    monkeypatch.setattr(numerics, "has_scaled_product", lambda a, b, *_: calls.append(len(b) % 16 == 0) or calls[-1])
    monkeypatch.setattr(torch, "_scaled_mm", device_product)
    for got, expected in zip(run(), emulated, strict=True):
        assert ((got - expected).abs() <= 2.0**-7 * expected.abs() + 1e-12).all()
    assert calls == [True] * 3


def test_an_outlier_token_does_not_change_the_other_tokens():
    x, w = random(8, 32), random(24, 32, seed=1)
    calm = {linear: linear(x, w)[1:] for linear in (fp8_rows.linear, fp8.linear)}
    x[0] *= 1e6
    exact = x[1:] @ w.T
    assert torch.equal(fp8_rows.linear(x, w)[1:], calm[fp8_rows.linear])
    error = {linear: (linear(x, w)[1:] - exact).norm() / exact.norm() for linear in calm}
    assert error[fp8.linear] > 0.5  # with one scale for all tokens, most of their values underflow
    assert error[fp8_rows.linear] < 2 * E4


@pytest.mark.parametrize("plan", [{"shard": 2, "zero": 3, "recompute": "full"}, *ranks.soak([{"pp": 2}])], ids=str)
def test_it_trains_what_one_device_trains(plan):
    work = {"batch": 4, "seq": 8, "precision": "fp8", "scaling": "row"}
    config = Config.from_parts(MODEL, "laptop", plan={"param_dtype": "fp32", **plan}, workload=work)
    proof = prove(config, ranks=2, steps=2)
    assert proof.small.workload.scaling == "row"
    assert proof.passed, proof.agreements[0].breaks[:2]
    assert proof.agreements[0].errors["gradient"] < 1e-9


def test_inputs_are_kept_in_16_bits_and_both_operands_are_quantised():
    stack = Stack(fp8_passes=5.0)

    def lowered(scaling):
        work = Workload(batch=4, seq=64, precision="fp8", scaling=scaling)
        return step_program(MODEL, [Plan()], work, stack)

    by_tensor, by_row = lowered("tensor"), lowered("row")
    saved = [float(sum(sum(parts.values()) for parts in p.saved.values())[0]) for p in (by_tensor, by_row)]
    assert saved[1] > saved[0]
    moved = [
        sum(
            float((op.bytes * op.count).sum())
            for _, op in p.ops("dense")
            if "quantise" in op.name or "transpose" in op.name
        )
        for p in (by_tensor, by_row)
    ]
    assert moved[1] > moved[0]


def test_a_packed_fp8_base_is_multiplied_as_it_is():
    """Against products with the dequantised matrix: only the input and the gradient are rounded, and the base a single time."""
    x, w, b = random(3, 5, 32).requires_grad_(), random(24, 32, seed=1), random(24, seed=2)
    w[:, 3] *= 1e-4
    w[7] *= 10  # each row has its scale, which backward must not round with the others
    packing = RowPacking("fp8", 32)
    packed = packing.pack(w)
    gradient = random(3, 5, 24, seed=3, scale=1e-6)
    y = fp8_rows.FrozenRowProduct(packing)(x, packed, b)
    y.backward(gradient)
    base, scales = packing.unpack(packed, torch.float64), packing.scales(packed[:, packing.code_bytes :]).double()
    flat_x, g = x.detach().flatten(0, 1), gradient.flatten(0, 1)
    units, scaled = base / scales, g * scales.T
    exact = (2.0**-4, 2.0**-11)  # rounding of a code, and of the smallest codes, whose step is 2⁻⁹ of 448
    for got, rows, matrix in (
        ((y - b).detach().flatten(0, 1), flat_x, base.T),
        (x.grad.flatten(0, 1), scaled, units),
    ):
        error = (got - rows @ matrix).abs()
        one_rounding = exact[0] * (rows.abs() @ matrix.abs())
        below = exact[1] / 448 * rows.abs().amax(1, keepdim=True) * matrix.abs().sum(0)
        assert (error <= (one_rounding + 1.1 * below) * (1 + 1e-5)).all()
        assert error.norm() > 1e-3 * (rows @ matrix).norm()  # and it was fp8


@pytest.mark.parametrize(
    "plan", [{"shard": 2, "zero": 3}, *ranks.soak([{"replicate": 2, "recompute": "full"}])], ids=str
)
def test_adapters_train_beside_a_base_in_fp8(plan):
    adapter = Adapter(rank=4, base="fp8", targets=("all-linear",))
    work = {"batch": 4, "seq": 8, "precision": "fp8", "scaling": "row"}
    config = Config.from_parts(
        MODEL.but(adapter=adapter), "laptop", plan={"param_dtype": "fp32", **plan}, workload=work
    )
    proof = prove(config, ranks=2, steps=2)
    assert proof.small.model.adapter.base == "fp8"
    assert proof.passed, proof.agreements[0].breaks[:2]


def test_a_packed_base_is_copied_and_not_quantised():
    def moved(adapter, name):
        work = Workload(batch=4, seq=64, precision="fp8", scaling="row")
        program = step_program(MODEL.but(adapter=adapter), [Plan()], work, Stack(fp8_passes=5.0))
        return sum(float(op.bytes[0] * op.count) for op in program.blocks["dense", "F"] if op.name.endswith(name))

    plain, packed = Adapter(rank=4), Adapter(rank=4, base="fp8")
    weights = 4 * 16 * 16 + 3 * 16 * 24  # of a layer
    assert moved(plain, "-quantise") - moved(packed, "-quantise") == 5 * weights
    assert moved(packed, "-dequantise") == 2 * weights
