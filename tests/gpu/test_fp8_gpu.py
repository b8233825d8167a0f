"""fp8 on a GPU: products with a scale per row, for any number of tokens, and training with them. Skipped without a GPU with fp8 units."""

import pytest
import torch

import ranks
from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.describe.workload import Workload
from meshwright.parallel.numerics import fp8, fp8_rows

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(torch.cuda.is_available() and not fp8.gpu_has_units(), reason="needs a GPU with fp8 units"),
]
MODEL = Model(hidden=256, layers=2, heads=4, kv_heads=2, ffn=512, vocab=512)
WORKLOAD = Workload(batch=8, seq=120, precision="fp8")  # 120 tokens of a micro-batch are no multiple of 16


@pytest.mark.parametrize("numerics", [fp8, fp8_rows], ids=["tensor", "row"])
@pytest.mark.parametrize("tokens", [256, 133])
def test_products_and_gradients_equal_the_emulation(numerics, tokens):
    """Forward, the gradient of the input and that of the weight, which sums over the tokens. The GPU keeps sums to about 14 bits of their
    largest term and rounds the result to bfloat16."""
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(*shape, generator=generator) for shape in ((1, tokens, 256), (384, 256), (1, tokens, 384))]
    results = []
    for device in ("cpu", "cuda"):
        x, w, gradient = (
            t.to(torch.bfloat16).to(device, torch.bfloat16 if device == "cuda" else torch.float32) for t in drawn
        )
        y = numerics.linear(x.requires_grad_(), w.requires_grad_())
        y.backward(gradient)
        results.append([t.detach().double().cpu().flatten(0, -2) for t in (y, x.grad, w.grad)])
    for expected, got in zip(*results, strict=True):
        largest = expected.abs().amax(-1, keepdim=True)
        assert ((got - expected).abs() <= 2**-7 * largest).all(), float(((got - expected).abs() / largest).max())


def losses(context, cases):
    """The losses of several trainings, one after the other in one process."""
    from meshwright.parallel.apply import apply
    from meshwright.training.data.samples import RandomSamples
    from meshwright.training.loop import Trainer

    out = []
    for workload, dtype, compiled in cases:
        plan = Plan(microbatch=1, param_dtype="fp32" if dtype == "float32" else "bf16", master=dtype != "float32")
        options = {"device": context.device, "dtype": getattr(torch, dtype), "compile": compiled}
        parallel = apply(MODEL, plan, workload, context.rank, **options)
        out.append([r.loss for r in Trainer(parallel, RandomSamples(MODEL, workload.seq, 0)).train(4)])
    return out


def test_training_with_a_scale_per_row():
    rows = WORKLOAD.but(scaling="row")
    cases = [(WORKLOAD.but(precision="fp32"), "float32", "off")]
    cases += [(rows, "bfloat16", compiled) for compiled in ("off", "blocks")]
    wide, *narrow = ranks.run(1, losses, cases, device="cuda", silence=120.0)[0]
    for (*_, compiled), found in zip(cases[1:], narrow, strict=True):
        assert found == pytest.approx(wide, rel=0.05), compiled
        assert found[-1] < found[0]
