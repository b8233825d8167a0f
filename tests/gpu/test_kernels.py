"""Kernels of one GPU against torch's operators: loss, optimizer, experts, offload, attention. Skipped without a GPU."""

import pytest
import torch
from torch import nn

import ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def drawn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_loss_kernel_equals_float64_logits_up_to_its_rounding(dtype):
    from meshwright.models import loss_kernel
    from meshwright.models.loss import IGNORED

    logits = (5 * drawn(33, 5003)).to(dtype)
    target = torch.randint(0, 5003, (33,), device="cuda")
    target[4] = IGNORED
    exact = logits.double().requires_grad_()
    each = nn.functional.cross_entropy(exact, target, ignore_index=IGNORED, reduction="none")
    (0.25 * each.sum()).backward()
    found, gradient = loss_kernel.loss_and_gradient(logits.clone(), target, torch.tensor(0.25, device="cuda"))
    assert torch.allclose(found.double(), each.detach(), rtol=1e-5, atol=1e-5)
    # The exponent z − log Σ is known to half a bit of its size, at most 64 here, and so is its exponential; then the result is rounded.
    bound = (64 * 2**-24 + torch.finfo(dtype).eps) * exact.grad.abs() + 2**-24
    assert ((gradient.double() - exact.grad).abs() <= bound).all()


def test_a_wide_product_is_added_in_place():
    from meshwright.models.wide_products import add_product

    a, b, total = (
        drawn(64, 512, dtype=torch.bfloat16),
        drawn(512, 48, seed=1, dtype=torch.bfloat16),
        drawn(64, 48, seed=2),
    )
    exact, address = total.double() + a.double() @ b.double(), total.data_ptr()
    found = add_product(total, a, b)
    assert found.data_ptr() == address
    assert torch.allclose(found.double(), exact, rtol=1e-5, atol=1e-3)


def test_fused_adamw_updates_as_torch_does_and_rounds_the_masters():
    from meshwright.training.optimizer.make import FusedAdamW

    start, options = drawn(1000, 33), {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    ours, theirs = (nn.Parameter(start.clone()) for _ in range(2))
    fused, plain = FusedAdamW([ours], **options), torch.optim.AdamW([theirs], **options, fused=True)
    rounded = torch.empty_like(start, dtype=torch.bfloat16)
    fused.rounded = {ours: rounded}
    for step in range(5):
        gradient = drawn(1000, 33, seed=step + 1, dtype=torch.bfloat16)
        ours.grad_dtype = torch.bfloat16
        ours.grad, theirs.grad = gradient, gradient.float() * 0.5
        fused.gradient_factor = torch.tensor(0.5, device="cuda")
        fused.step()
        plain.step()
        assert torch.allclose(ours, theirs, rtol=2e-6, atol=2e-7), step
    assert torch.equal(rounded, ours.detach().to(torch.bfloat16))
    assert fused.state[ours]["step"] == 5

    before = [t.clone() for t in (ours, rounded, fused.state[ours]["exp_avg"], fused.state[ours]["exp_avg_sq"])]
    fused.guarded = True
    for factor in (0.0, float("nan")):  # of a norm that is not finite
        ours.grad = torch.full_like(ours.grad, float("nan"))
        fused.gradient_factor = torch.tensor(factor, device="cuda", dtype=torch.float64)
        fused.step()
        fused.take_back()
        after = (ours, rounded, fused.state[ours]["exp_avg"], fused.state[ours]["exp_avg_sq"])
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert fused.state[ours]["step"] == 5


def test_experts_in_one_kernel_equal_experts_one_by_one():
    from meshwright.models.moe import grouped

    counts = [100, 0, 33, 517, 1]
    x, w = drawn(sum(counts), 64, dtype=torch.bfloat16), drawn(5, 48, 64, seed=1, dtype=torch.bfloat16)
    results = []
    for rows in (torch.tensor(counts, device="cuda"), counts):
        a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
        y = grouped(a, b, rows)
        y.backward(drawn(*y.shape, seed=2, dtype=torch.bfloat16))
        results.append([y.detach(), a.grad, b.grad])
    for one, many in zip(*results, strict=True):
        assert ((one - many).abs() <= 2**-7 * many.abs().max()).all()


def test_logits_of_bf16_operands_are_as_exact_as_float32():
    from meshwright.models.wide_products import wide_linear

    x, w = drawn(4096, 2048, dtype=torch.bfloat16), drawn(64, 2048, seed=1, dtype=torch.bfloat16)
    a, b, g = x.clone().requires_grad_(), w.clone().requires_grad_(), drawn(4096, 64, seed=2)
    y = wide_linear(a, b)
    y.backward(g)
    sums = [(y, x, w.t(), 2048), (a.grad, g, w, 3 * 64), (b.grad, g.t(), x, 3 * 4096)]
    for found, left, right, terms in sums:
        left, right = left.double(), right.double()
        exact, size = left @ right, left.abs() @ right.abs()
        rounding = 0.0 if found.dtype == torch.float32 else 2**-8
        # A tensor core truncates where it aligns the terms of a sum: one bit more than rounding.
        assert ((found.double() - exact).abs() <= terms * 2**-23 * size + rounding * exact.abs()).all()


@pytest.mark.parametrize("full", [False, True])
def test_offloaded_activations_return_before_backward_needs_them(full):
    """Prefetched copies, and streams that wait for each other: the same gradients as without."""
    from meshwright.parallel.data.offload import offload_activations
    from meshwright.parallel.recompute import recompute

    def layers():
        torch.manual_seed(0)
        made = [nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)) for _ in range(6)]
        return nn.Sequential(*made).cuda()

    plain, moved = layers(), layers()
    if full:
        recompute(moved)
    away = offload_activations(moved)
    for step in range(3):
        x = drawn(4096, 512, seed=step)
        for net in (plain, moved):
            net.zero_grad()
            net(x.requires_grad_()).square().mean().backward()
        for a, b in zip(plain.parameters(), moved.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad), step
    assert away.down_bytes == away.up_bytes > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "width", "values"),
    [(1, 32, 8, 128, 128), (5, 6, 2, 80, 80), (64, 8, 8, 64, 64), (2, 16, 1, 576, 512), (1, 40, 2, 128, 128)],
    ids=["grouped", "no power of two", "many sequences", "latents", "more heads than a program"],
)
def test_attention_of_a_token_equals_float64(batch, heads, kv_heads, width, values, dtype):
    """Positions at the ends of blocks and of runs; rows behind the position are NaN and not read."""
    from meshwright.models.decode import attend_token

    rows = 2048
    q = drawn(batch, heads, 1, width, dtype=dtype)
    keys, scale = drawn(batch, kv_heads, rows, width, seed=1, dtype=dtype), width**-0.5
    v = keys[..., :values] if values < width else drawn(batch, kv_heads, rows, values, seed=2, dtype=dtype)
    for at in (2047, 1000, 64, 63, 0):
        keys[:, :, at + 1 :], v[:, :, at + 1 :] = torch.nan, torch.nan
        k_double, v_double = (x[:, :, : at + 1].double().repeat_interleave(heads // kv_heads, 1) for x in (keys, v))
        probabilities = (q.double() @ k_double.transpose(-1, -2) * scale).softmax(-1)
        exact, size = probabilities @ v_double, probabilities @ v_double.abs()
        found = attend_token(q, keys, v, torch.tensor([at], device="cuda"), scale)
        # Tensor cores multiply float32 in 10 bits, and weights have the dtype of the values.
        assert ((found.double() - exact).abs() <= (2**-7 if dtype == torch.float32 else 2**-6) * size).all(), at


def test_tokens_replayed_from_a_graph_are_the_ordinary_ones():
    """Grouped queries with a window, and latents; every position replays the graph that was captured at the first one."""
    from meshwright.describe.model import Model
    from meshwright.models import build
    from meshwright.models.decode import generate
    from meshwright.parallel.pieces import materialise

    shape = {"hidden": 256, "layers": 3, "heads": 4, "ffn": 512, "vocab": 512, "max_positions": 128}
    latents = {"attention": "mla", "kv_rank": 64, "nope_dim": 32, "rope_dim": 16, "value_dim": 32, "kv_heads": 4}
    for fields in ({"kv_heads": 2, "window": 16}, latents):
        torch.manual_seed(0)
        network = build(Model(**shape, **fields))
        materialise(network, "cuda")
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.fill_(1.0) if parameter.dim() == 1 else parameter.normal_(0.0, 0.05)
        prompt = torch.randint(0, 512, (3, 40), device="cuda")
        assert torch.equal(generate(network, prompt, 30, capture=True), generate(network, prompt, 30)), fields


def test_a_kernel_for_attention_is_chosen():
    from meshwright.parallel.stages import KERNELS, prefer_fastest

    q, k = torch.Size((1, 8, 1024, 64)), torch.Size((1, 2, 1024, 64))
    assert prefer_fastest(q, k, k, True, torch.bfloat16, "cuda") in KERNELS


def losses(context, cases):
    """The losses of several trainings, one after the other in one process."""
    from meshwright.describe.model import Model
    from meshwright.describe.plan import Plan
    from meshwright.describe.workload import Workload
    from meshwright.parallel.apply import apply
    from meshwright.training.data.samples import RandomSamples
    from meshwright.training.loop import Trainer

    model, out = Model(hidden=256, layers=2, heads=4, kv_heads=2, ffn=512, vocab=512), []
    for precision, compiled in cases:
        workload, plan = Workload(batch=4, seq=128, precision=precision), Plan(microbatch=4)
        options = {"device": context.device, "dtype": torch.bfloat16, "compile": compiled}
        parallel = apply(model, plan, workload, context.rank, **options)
        out.append([r.loss for r in Trainer(parallel, RandomSamples(model, workload.seq, 0)).train(4)])
    return out


def test_compiled_layers_train_as_eager_ones():
    """A fused kernel rounds less often: losses differ by a few roundings of bf16."""
    cases = [(precision, mode) for precision in ("bf16", "fp8") for mode in ("off", "blocks")]
    found = ranks.run(1, losses, cases, device="cuda", silence=150.0)[0]
    for precision, eager, compiled in (("bf16", *found[:2]), ("fp8", *found[2:])):
        assert eager == pytest.approx(compiled, rel=2e-2), precision
        assert eager[0] == pytest.approx(compiled[0], rel=2e-3), precision
