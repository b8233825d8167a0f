"""Tests that need a GPU: kernels for blocks of attention, fp8 products, compressors, a training step. Skipped without one."""

import pytest
import torch

import ranks
from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.describe.workload import Workload
from one_process import perform

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
MODEL = Model(hidden=256, layers=4, heads=4, kv_heads=2, ffn=512, vocab=512)
DRAWN = ("random-k", "powersgd")  # each kind of device draws different numbers, the same on every rank
WORKLOAD = Workload(batch=8, seq=128, precision="fp32")


def exact(q, k, v):
    """Causal attention in float64, and its gradients for a grad_output of ones."""
    q, k, v = (x.double().requires_grad_() for x in (q, k, v))
    groups = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(groups, 1).transpose(-1, -2) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    output = scores.softmax(-1) @ v.repeat_interleave(groups, 1)
    output.sum().backward()
    return [output.detach(), q.grad, k.grad, v.grad]


def whole(q, k, v):
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    output = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    output.sum().backward()
    return [output.detach(), q.grad, k.grad, v.grad]


def in_blocks(q, k, v, parts):
    """Every rank of a ring, one after the other, on one device."""
    from meshwright.parallel.context.blocks import AttentionPattern, BlockAttention, BlockGradients, position_ids
    from meshwright.parallel.context.sequence import runs_of

    runs, pattern = runs_of(q.shape[2], parts, True), AttentionPattern(True)
    where = [position_ids(own).to(q.device) for own in runs]
    output, dq = torch.empty_like(q), torch.empty_like(q)
    dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (k, v))
    for own, mine in zip(runs, where, strict=True):
        attended = BlockAttention(q[:, :, mine], own, pattern)
        for theirs, there in zip(runs, where, strict=True):
            attended.attend_block(k[:, :, there], v[:, :, there], theirs)
        output[:, :, mine] = attended.output_BNSD.to(q.dtype)
        grad_output = torch.ones_like(output[:, :, mine])
        gradients = BlockGradients(grad_output, q[:, :, mine], output[:, :, mine], attended.lse_BNS, own, pattern)
        for theirs, there in zip(runs, where, strict=True):
            added = [torch.zeros_like(x[:, :, there], dtype=torch.float32) for x in (k, v)]
            gradients.attend_block(k[:, :, there], v[:, :, there], theirs, *added)
            dk[:, :, there] += added[0]
            dv[:, :, there] += added[1]
        dq[:, :, mine] = gradients.dq.to(q.dtype)
    return [output, dq, dk, dv]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_attention_in_blocks_is_as_exact_as_in_one_kernel(dtype):
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(2, n, 1024, 64, generator=generator, device="cuda").to(dtype) for n in (8, 2, 2))
    for truth, one, many in zip(exact(q, k, v), whole(q, k, v), in_blocks(q, k, v, 4), strict=True):
        kernel, ours = ((x.double() - truth).norm() / truth.norm() for x in (one, many))
        assert ours <= 1.25 * kernel + 4 * torch.finfo(torch.float32).eps, (float(kernel), float(ours))


@pytest.mark.parametrize("dtypes", [("e4m3fn", "e4m3fn"), ("e5m2", "e4m3fn")])
def test_fp8_products_of_the_device_equal_the_emulation(dtypes):
    from meshwright.parallel.numerics.fp8 import has_scaled_product, product, quantise, rounded

    a_dtype, b_dtype = (getattr(torch, f"float8_{name}") for name in dtypes)
    generator = torch.Generator("cuda").manual_seed(0)
    a, b = (torch.randn(size, 512, generator=generator, device="cuda", dtype=torch.bfloat16) for size in (256, 384))
    if not has_scaled_product(a, b):
        pytest.skip("no fp8 units")
    ours = product(quantise(a, a_dtype), quantise(b, b_dtype), a.dtype).double()
    parts = rounded(a, a_dtype).double(), rounded(b, b_dtype).double()
    emulated = parts[0] @ parts[1].T
    # The sum is kept to about 14 bits of its largest term, the result rounded to bfloat16.
    bound = 2**-8 * emulated.abs() + 2**-12 * (parts[0].abs() @ parts[1].abs().T)
    assert ((ours - emulated).abs() <= bound).all(), float(((ours - emulated).abs() / bound).max())


def test_fp8_products_of_experts_equal_the_emulation():
    """Numbers of rows that are not a multiple of 16, and zero rows; forward and both gradients."""
    from meshwright.parallel.numerics.fp8 import has_scaled_product
    from meshwright.parallel.numerics.fp8_grouped import Fp8Grouped

    counts, generator = [100, 0, 33], torch.Generator().manual_seed(0)
    x, w, g = (torch.randn(*s, generator=generator) for s in ((133, 256), (3, 384, 256), (133, 384)))
    g *= torch.logspace(-6, 0, 133)[:, None]  # each row has a separate scale
    if not has_scaled_product(x.cuda(), w[0].cuda()):
        pytest.skip("no fp8 units")
    results = []
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.float32), ("cuda", torch.bfloat16)):
        a, b, grad_output = (t.to(torch.bfloat16).to(device, dtype, copy=True) for t in (x, w, g))
        y = Fp8Grouped()(a.requires_grad_(), b.requires_grad_(), counts)
        y.backward(grad_output)
        results.append([t.detach().double().cpu() for t in (y, a.grad, b.grad)])
    # Sums are kept to about 14 bits of their largest term, a result rounded to bfloat16.
    for expected, single, narrow in zip(*results, strict=True):
        largest = expected.abs().amax(-1, keepdim=True)
        for got, bound in ((single, 2**-9), (narrow, 2**-7)):
            assert ((got - expected).abs() <= bound * largest).all(), float(((got - expected).abs() / largest).max())


@pytest.mark.parametrize("name", ["fp16", "bf16", "int8", "int4", "fp8", "top-k", "random-k", "threshold", "powersgd"])
def test_compressors_give_the_same_result_on_gpu_and_cpu(name):
    from meshwright.parallel.numerics.compress.compressors import make_compressor

    layout = [(0, torch.Size([64, 48])), (64 * 48, torch.Size([32]))]
    message = torch.randn(64 * 48 + 32, generator=torch.Generator().manual_seed(0))
    results = {}
    for device in ("cpu", "cuda"):
        compressor, sent = make_compressor(name), torch.zeros_like(message)
        for _ in range(2):  # the second has errors fed back
            out = message.to(device, copy=True)
            for asked in compressor.reduce(0, out, layout, 0, 1):
                perform([asked])
            sent += out.cpu()
        left = compressor.feedback.errors.get(0, torch.zeros(1)).cpu().flatten()
        results[device] = sent
        if compressor.feedback.on:  # nothing is lost, only late
            torch.testing.assert_close(sent + left[: len(sent)], 2 * message, rtol=1e-5, atol=1e-5)
    if name not in DRAWN:
        torch.testing.assert_close(results["cuda"], results["cpu"], rtol=1e-5, atol=1e-5)


def hooked(context, names):
    """Gradients of the fourth step with torch's DDP, by name of the hook."""
    from torch.nn.parallel import DistributedDataParallel

    from meshwright.parallel.numerics.compress.ddp_hook import CompressionState, hook

    out = {}
    for name in names:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(128, 256), torch.nn.Tanh(), torch.nn.Linear(256, 64)).cuda()
        model = DistributedDataParallel(model, bucket_cap_mb=0.05)
        model.register_comm_hook(CompressionState(name), hook)
        x = torch.randn(32, 128, device="cuda")
        for _ in range(4):
            model.zero_grad()
            model(x).square().mean().backward()
        out[name] = torch.cat([p.grad.flatten() for p in model.parameters()]).cpu().numpy()
    return out


def test_the_hook_waits_for_its_messages_on_the_gpu():
    found = ranks.run(1, hooked, ("none", "bf16", "int8"), device="cuda")[0]
    largest = abs(found["none"]).max()
    for name, bound in (
        ("bf16", 2**-8),
        ("int8", 1.01 / 127),
    ):  # four equal gradients: each sends what the previous one left out
        error = abs(found[name] - found["none"]).max() / largest
        assert 0 < error < bound, (name, error)


def losses(context, cases):
    """The losses of several trainings, one after the other in one process: each process takes seconds to start."""
    from meshwright.parallel.apply import apply
    from meshwright.training.data.samples import RandomSamples
    from meshwright.training.loop import Trainer

    torch.set_float32_matmul_precision("highest")
    out = []
    for plan, workload, dtype, model in cases:
        parallel = apply(model, plan, workload, context.rank, device=context.device, dtype=getattr(torch, dtype))
        out.append([r.loss for r in Trainer(parallel, RandomSamples(model, workload.seq, 0)).train(5)])
    return out


WIDE = {"microbatch": 4, "param_dtype": "fp32", "master": False}
FIELDS = [{}, {"recompute": "full"}, {"recompute": "selective"}, {"offload": "activations"}, {"offload": "states"}]


def test_training_on_a_gpu_equals_a_cpu():
    """float32. Muon's iteration enlarges rounding errors in small singular values by up to 485, and the update is a thousandth of a weight."""
    cases = [(Plan(**WIDE, **fields), WORKLOAD, "float32", MODEL) for fields in FIELDS]
    cases.append((Plan(**WIDE), WORKLOAD.but(optimizer="muon"), "float32", MODEL))
    cpu, gpu = (ranks.run(1, losses, cases, device=device, silence=100.0)[0] for device in ("cpu", "cuda"))
    for (plan, workload, *_), expected, found in zip(cases, cpu, gpu, strict=True):
        bound = 1e-4 if workload.optimizer == "muon" else 2e-5
        assert found == pytest.approx(expected, rel=bound), (plan, workload.optimizer)


def test_training_on_a_gpu_in_16_bits():
    experts = MODEL.but(experts=4, top_k=2, expert_ffn=256, shared_experts=1)
    exact_cases = [(Plan(**WIDE), WORKLOAD, "float32", model) for model in (MODEL, experts)]
    kinds = [("bf16", MODEL), ("fp16", MODEL), ("fp8", MODEL), ("bf16", experts), ("fp8", experts)]
    cases = []
    for precision, model in kinds:
        plan = Plan(microbatch=4, param_dtype="fp16" if precision == "fp16" else "bf16")
        dtype = "float16" if precision == "fp16" else "bfloat16"
        cases.append((plan, WORKLOAD.but(precision=precision), dtype, model))
    dense, sparse, *narrow = ranks.run(1, losses, exact_cases + cases, device="cuda", silence=100.0)[0]
    for (precision, model), found in zip(kinds, narrow, strict=True):
        exact_losses = sparse if model.experts else dense
        assert found == pytest.approx(exact_losses, rel=0.05 if precision == "fp8" else 0.01), (precision, model)
        assert found[-1] < found[0]


@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 256), (torch.bfloat16, 1030), (torch.float64, 33)])
def test_dropout_is_the_same_on_any_device(dtype, width):
    from meshwright.models.dropout import Dropout, sample_hashes
    from meshwright.models.step_context import within

    layer, x = Dropout(0.3, "layers.0.ffn"), torch.randn(4, 128, width).to(dtype)
    results = []
    for device in ("cpu", "cuda"):
        y = x.to(device, copy=True).requires_grad_()
        with within(samples_B=sample_hashes(1, 2, range(4, 8), torch.device(device))):
            out = layer(y)
        out.backward(torch.ones_like(out))
        results.append((out.detach().cpu(), y.grad.cpu()))
    assert all(torch.equal(here, there) for here, there in zip(*results, strict=True))


def test_compiled_dropout_drops_the_same_elements():
    """The second half of a sequence, so that positions start behind 0; forward and backward."""
    from meshwright.models.dropout import Dropout, sample_hashes
    from meshwright.models.step_context import within

    device, results = torch.device("cuda"), []
    layer = Dropout(0.3, "layers.0.ffn")
    layer.share = (1, 2)
    layer.prepare(device)
    for module in (layer, torch.compile(layer, fullgraph=True, dynamic=False)):
        x = torch.ones(4, 128, 1030, device=device, requires_grad=True)
        with within(samples_B=sample_hashes(1, 2, range(4, 8), device)):
            out = module(x)
        out.sum().backward()
        results.append((out.detach(), x.grad))
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(eager == 0, compiled == 0)
        torch.testing.assert_close(eager, compiled)


def test_attention_dropout_is_the_same_on_any_device():
    """In tiles, also on a GPU: a fused kernel would draw different random numbers."""
    from meshwright.models.dropout import Dropped
    from meshwright.parallel.context.attend import tiled_attention
    from meshwright.parallel.context.blocks import AttentionPattern

    generator, results = torch.Generator().manual_seed(0), []
    parts = [torch.randn(2, n, 96, 32, generator=generator) for n in (4, 2, 2)]
    for device, dtype in (("cpu", torch.float64), ("cuda", torch.float64), ("cuda", torch.bfloat16)):
        dropped = Dropped(torch.tensor([5, 6], device=device), range(4), 0.2)
        q, k, v = (x.to(device, dtype, copy=True).requires_grad_() for x in parts)
        output = tiled_attention(q, k, v, AttentionPattern(True), dropped)
        output.backward(torch.ones_like(output))
        results.append([x.detach().double().cpu() for x in (output, q.grad, k.grad, v.grad)])
    for expected, double, narrow in zip(*results, strict=True):
        torch.testing.assert_close(double, expected, rtol=1e-12, atol=1e-12)
        assert (narrow - expected).norm() < 0.02 * expected.norm()
