"""Packed weights: codes and scales as their definition gives them, and the same numbers for every cut of a row."""

import pytest
import torch

from meshwright.models.quantised import LARGEST, NF4, QuantisedProduct, RowPacking, quantise

WIDTH, BLOCK = 200, 64  # the last block of a row is short


def rows(seed=0, experts=()):
    weight = torch.randn(*experts, 6, WIDTH, generator=torch.Generator().manual_seed(seed))
    weight[..., 2, :70] = 0  # a block of zeros
    return weight


def plain_nf4(row):
    """One row by the definition: the nearest level of each number, in units of the largest of its block."""
    out = []
    for block in row.split(BLOCK):
        s = block.abs().max()
        out += [
            min(NF4, key=lambda level, v=v: abs(v - level)) * float(s) if s else 0.0
            for v in (block / (s or 1)).tolist()
        ]
    return torch.tensor(out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nf4_is_the_nearest_level_of_its_block(dtype):
    weight, packing = rows().to(dtype), RowPacking("nf4", WIDTH)
    packed = packing.pack(weight)
    assert packed.shape == (6, 100 + 4 * 4)
    assert packed.dtype == torch.uint8
    expected = torch.stack([plain_nf4(row.float()) for row in weight])
    assert torch.equal(packing.unpack(packed, torch.float32), expected)
    first, second = (quantise(weight, "nf4")[0][0, :2]).tolist()
    assert int(packed[0, 0]) == 16 * first + second


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_a_row_has_one_scale(kind):
    weight, packing = rows(), RowPacking(kind, WIDTH)
    got, scale = packing.unpack(packing.pack(weight), torch.float32), weight.abs().amax(1, keepdim=True)
    if kind == "int8":
        assert torch.equal((got * 127 / scale.clamp(min=1e-9)).round(), (weight * 127 / scale.clamp(min=1e-9)).round())
    else:
        units = (weight * (LARGEST[kind] / scale.clamp(min=1e-9))).to(torch.float8_e4m3fn).float()
        torch.testing.assert_close(got, units * scale / LARGEST[kind], rtol=2e-7, atol=0)


def test_double_quantised_scales_keep_every_number_in_its_block():
    """A scale of one byte is at least the scale, and at most 1/255 of the row's largest above it."""
    weight = rows()
    single, double = (RowPacking("nf4", WIDTH, double=on) for on in (False, True))
    packed = double.pack(weight)
    assert packed.shape[-1] == 100 + 4 + 4
    scales = [p.scales(p.pack(weight)[..., p.code_bytes :]) for p in (single, double)]
    largest = scales[0].amax(1, keepdim=True)
    excess = scales[1] - scales[0]
    assert bool((excess >= -1e-6 * largest).all())
    assert bool((excess <= largest * (1 / 255 + 1e-6)).all())


@pytest.mark.parametrize("kind", ["nf4", "double", "int8", "fp8"])
@pytest.mark.parametrize(("first", "columns"), [(0, 8), (8, 24), (60, 70), (3, 7), (64, 136)])
def test_a_cut_has_the_numbers_of_the_whole_row(kind, first, columns):
    weight = rows(experts=(2,))
    name, options = ("nf4", {"double": True}) if kind == "double" else (kind, {})
    whole, part = RowPacking(name, WIDTH, 0, **options), RowPacking(name, columns, first, **options)
    packed = part.pack(weight)
    assert packed.shape == (2, 6, part.row_bytes)
    expected = whole.unpack(whole.pack(weight), torch.float32)[..., first : first + columns]
    assert torch.equal(part.unpack(packed, torch.float32), expected)


def test_a_product_unpacks_again_in_backward_and_saves_the_bytes_alone():
    weight, packing = rows(), RowPacking("nf4", WIDTH)
    packed, x = packing.pack(weight), torch.randn(3, WIDTH, dtype=torch.float64, requires_grad=True)
    plain = packing.unpack(packed, torch.float64)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = QuantisedProduct(packing, torch.nn.functional.linear, experts=False)(x, packed)
    assert torch.equal(y, x @ plain.T)
    assert [t.dtype for t in saved] == [torch.uint8]
    (gradient,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(gradient, plain.sum(0).expand(3, -1), rtol=1e-14, atol=1e-14)


def test_codes_are_those_of_bitsandbytes():
    functional = pytest.importorskip("bitsandbytes.functional")
    for dtype in (torch.float32, torch.bfloat16):
        weight = torch.randn(8, 256).to(dtype)
        codes, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
        packing = RowPacking("nf4", 256)
        packed = packing.pack(weight)
        assert torch.equal(packed[:, :128].flatten(), codes.flatten())
        assert torch.equal(packing.unpack(packed, dtype), functional.dequantize_4bit(codes, state))
    units, stats, _ = functional.int8_vectorwise_quant(weight.half())
    packed = RowPacking("int8", 256).pack(weight.half())
    assert torch.equal(packed[:, :256].view(torch.int8), units)
    assert torch.equal(packed[:, 256:].contiguous().view(torch.float32).flatten(), stats.float())
