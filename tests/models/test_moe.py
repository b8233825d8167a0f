"""Mixtures of experts and latent attention on one device, compared with the formula, token by token."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.describe import catalog
from meshwright.describe.model import Model
from meshwright.describe.shape_parts import RouterOptions
from meshwright.errors import MeshwrightError
from meshwright.models import build, initial_value, loss_function
from meshwright.models.moe import LocalPlacement
from meshwright.models.router import Router, highest, load_metrics

SHAPE = {"hidden": 16, "layers": 2, "heads": 2, "ffn": 24, "vocab": 32, "experts": 5, "top_k": 2, "expert_ffn": 12}
LATENT = {"attention": "mla", "kv_rank": 10, "nope_dim": 6, "rope_dim": 4, "value_dim": 5}


def materialised(model, options=None, seed=0):
    network = build(model if options is None else model.but(router=options)).to_empty(device="cpu").double()
    if model.tied:
        network.head.project.weight = network.embedding.tokens.weight
    for name, parameter in network.named_parameters():
        parameter.data.copy_(initial_value(model, name, parameter.shape, seed, scatter=True))
    return network


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@settings(max_examples=20, deadline=None)
@given(
    layers=st.integers(1, 5),
    dense=st.integers(0, 2),
    every=st.integers(1, 3),
    experts=st.integers(2, 5),
    shared=st.integers(0, 2),
    width=st.sampled_from([0, 6]),
    shared_width=st.sampled_from([0, 10]),
    q_rank=st.sampled_from([0, 8]),
    latent=st.booleans(),
    activation=st.sampled_from(["gelu", "swiglu"]),
    norm=st.sampled_from(["rmsnorm", "layernorm"]),
    flags=st.lists(st.booleans(), min_size=7, max_size=7),
)
def test_parameters_equal_those_of_the_anatomy(
    layers, dense, every, experts, shared, width, shared_width, q_rank, latent, activation, norm, flags
):
    names = ("tied", "qkv_bias", "out_bias", "ffn_bias", "router_bias", "balance_bias", "shared_gate")
    kind = {**LATENT, "q_rank": q_rank} if latent else {}
    fields = {
        **SHAPE,
        **kind,
        **dict(zip(names, flags, strict=True)),
        "layers": layers,
        "experts": experts,
        "expert_ffn": width,
    }
    model = Model(
        **fields,
        dense_layers=min(dense, layers),
        moe_every=every,
        shared_experts=shared,
        shared_ffn=shared_width * (shared > 0),
        activation=activation,
        norm=norm,
    )
    if model.shared_gate and not shared:
        model = model.but(shared_gate=False)
    network = build(model)
    assert sum(p.numel() for p in network.parameters()) == model.total
    assert [hasattr(layer, "moe") for layer in network.layers.values()] == [k == "moe" for k in model.layer_kinds]


@pytest.mark.parametrize("name", ["mixtral-8x7b", "deepseek-v2-lite", "deepseek-v3", "qwen1.5-moe-a2.7b"])
def test_presets_are_built_in_full_on_meta(name):
    model = catalog.load("models", name)
    assert sum(p.numel() for p in build(model).parameters()) == model.total
    score = "sigmoid" if name == "deepseek-v3" else "softmax"
    assert {part.score for part in build(model).modules() if isinstance(part, Router)} == {score}


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"shared_experts": 2, "shared_gate": True, "router_bias": True, "ffn_bias": True},
        {"balance_bias": True, "activation": "gelu"},
        {"top_k": 1},
    ],
)
def test_a_mixture_equals_the_weighted_sum_of_experts(shape):
    model = Model(**{**SHAPE, **shape})
    moe = materialised(model).layers["0"].moe
    x = random(2, 3, 16)
    y = moe(x)
    router, experts = moe.router, moe.experts
    for token, got in zip(x.flatten(0, 1), y.flatten(0, 1), strict=True):
        logits = router.weight @ token + (router.bias if router.bias is not None else 0)
        score = logits.sigmoid() if model.balance_bias else logits.softmax(0)
        biased = score + (router.balance_bias if model.balance_bias else 0)
        chosen = biased.topk(model.top_k).indices
        weights = score[chosen] / (score[chosen].sum() if model.top_k > 1 else 1)
        expected = sum(w * one_expert(experts, int(e), token) for w, e in zip(weights, chosen, strict=True))
        if moe.shared is not None:
            expected = expected + moe.shared(token) * torch.sigmoid(moe.shared_scale.weight @ token)
        torch.testing.assert_close(got, expected)


def one_expert(experts, e, token):
    def linear(part, x):
        y = part.weight[e] @ x
        return y if part.bias is None else y + part.bias[e]

    inner = experts.activation(linear(experts.gate if experts.gated else experts.up, token))
    return linear(experts.down, inner * linear(experts.up, token) if experts.gated else inner)


def test_an_expert_without_tokens_has_a_zero_gradient():
    moe = materialised(Model(**SHAPE)).layers["0"].moe
    moe(random(1, 1, 16)).sum().backward()
    gradient = moe.experts.up.weight.grad
    assert (gradient.abs().sum((1, 2)) > 0).sum() == 2
    assert moe.experts.down.weight.grad is not None


def test_latent_attention_equals_its_formula():
    model = Model(**{**SHAPE, **LATENT, "q_rank": 8})
    network = materialised(model)
    attention, geometry = network.layers["0"].attention, network.geometry
    x = random(2, 5, 16)
    query = attention.q_a_norm(attention.q_a(x))
    latent, key = attention.kv_a(x).split((10, 4), -1)
    kv = attention.heads.kv_b(attention.kv_a_norm(latent)).unflatten(-1, (2, 11))
    q = attention.heads.q_b(query).unflatten(-1, (2, 10))
    mixed = []
    for n in range(2):
        positions = attention.heads.positions
        turned_q = geometry.rotated(q[:, None, :, n, 6:], positions)[:, 0]
        turned_k = geometry.rotated(key[:, None], positions)[:, 0]
        scores = q[:, :, n, :6] @ kv[:, :, n, :6].mT + turned_q @ turned_k.mT
        scores = scores / math.sqrt(10) + torch.full((5, 5), float("-inf")).triu(1)
        mixed.append(scores.softmax(-1) @ kv[:, :, n, 6:])
    torch.testing.assert_close(attention(x), attention.heads.o(torch.cat(mixed, -1)))


def routed(options, tokens=40, **shape):
    router = Router(Model(**{**SHAPE, **shape}, router=options)).double()
    torch.nn.init.normal_(router.weight, generator=torch.Generator().manual_seed(3))
    x = random(tokens, 16)
    return router, x, router(x, LocalPlacement())


def test_capacity_keeps_the_highest_scores_and_counts_dropped_copies():
    router, x, routing = routed(RouterOptions(capacity=0.75))
    most = math.ceil(0.75 * 40 * 2 / 5)
    scores = (x @ router.weight.t()).softmax(-1)
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, scores.topk(2).indices, True)
    assert routing.counts_E.tolist() == [min(most, int(n)) for n in chosen.sum(0)]
    start = 0
    for e, count in enumerate(routing.counts_E.tolist()):
        kept = set(routing.token_R[start : start + count].tolist())
        wanted = sorted(chosen[:, e].nonzero().flatten().tolist(), key=lambda t: -scores[t, e])
        assert kept == set(wanted[:most])
        start += count
    assert router.load[1].sum() == 80 - start > 0
    assert load_metrics(router.load)["dropped"] == pytest.approx(1 - start / 80)


def test_expert_choice_is_balanced_and_ties_go_to_the_earlier_token():
    _, _, routing = routed(RouterOptions(choice="expert"))
    assert routing.counts_E.tolist() == [16] * 5
    same = highest(torch.ones(6, 1), 2)
    assert same.flatten().tolist() == [True, True, False, False, False, False]


def test_the_balancing_losses_equal_their_formulas():
    options = RouterOptions(aux=0.3, z=0.2)
    router, x, routing = routed(options)
    (routing.weight_R * 0).sum().backward()  # all that remains is the loss that was added
    got = router.weight.grad.clone()
    weight = router.weight.detach().clone().requires_grad_()
    logits = x @ weight.t()
    scores = logits.softmax(-1)
    share = torch.zeros_like(scores).scatter_(1, scores.topk(2).indices, 1.0).sum(0) / 80
    loss = 0.3 * 5 * (share * scores.mean(0)).sum() + 0.2 * logits.logsumexp(-1).square().mean()
    loss.backward()
    torch.testing.assert_close(got, weight.grad)


def test_the_balancing_loss_per_sequence():
    """DeepSeek's `seq_aux`: shares and mean scores are those of one sequence, and the loss is the mean over sequences."""
    router = Router(Model(**SHAPE, router=RouterOptions(aux=0.3, aux_scope="sequence"))).double()
    torch.nn.init.normal_(router.weight, generator=torch.Generator().manual_seed(0))
    place, x_BSH = LocalPlacement(), random(40, 16).view(4, 10, 16)
    (router(place.local_tokens(x_BSH), place).weight_R * 0).sum().backward()
    weight = router.weight.detach().clone().requires_grad_()
    losses = []
    for x_SH in x_BSH:
        scores = (x_SH @ weight.t()).softmax(-1)
        share = torch.zeros_like(scores).scatter_(1, scores.topk(2).indices, 1.0).sum(0) / 20
        losses.append(0.3 * 5 * (share * scores.mean(0)).sum())
    torch.stack(losses).mean().backward()
    torch.testing.assert_close(router.weight.grad, weight.grad)


def test_a_balancing_bias_prevents_collapse():
    """Tokens that all prefer one expert spread out, and no gradient reaches the bias."""
    options = RouterOptions(balance_rate=0.05)
    router = Router(Model(**SHAPE, balance_bias=True, router=options)).double()
    torch.nn.init.normal_(router.weight, std=0.3, generator=torch.Generator().manual_seed(0))
    torch.nn.init.zeros_(router.balance_bias)
    with torch.no_grad():
        router.weight[0] += 0.5
    x = random(200, 16).abs()
    peaks = []
    for _ in range(40):
        router.load = None
        router(x, LocalPlacement())
        peaks.append(load_metrics(router.load)["peak"])
        with torch.no_grad():
            router.balance_bias.add_(router.balance(router.load[0]))
    assert peaks[0] > 2
    assert peaks[-1] < 1.3
    assert not router.balance_bias.requires_grad


def test_metrics_of_an_even_and_of_a_collapsed_load():
    even = load_metrics(torch.tensor([[4.0, 4, 4, 4], [0, 0, 0, 0]]))
    collapsed = load_metrics(torch.tensor([[16.0, 0, 0, 0], [4, 0, 0, 0]]))
    assert even == {"entropy": pytest.approx(1), "peak": 1, "idle": 0, "dropped": 0}
    assert collapsed == {"entropy": pytest.approx(0, abs=1e-12), "peak": 4, "idle": 0.75, "dropped": 0.25}


@pytest.mark.parametrize("bad", [{"score": "tanh"}, {"capacity": -1}, {"aux": float("nan")}, {"choice": "both"}])
def test_impossible_options_are_refused(bad):
    with pytest.raises(MeshwrightError, match=f"MW-CONF-003: model.router.{next(iter(bad))}"):
        Model(**SHAPE, router=bad)


@pytest.mark.parametrize(
    "router",
    [
        {"groups": 2},
        {"groups": 5, "groups_kept": 6},
        {"groups": 5, "groups_kept": 1},
        {"groups": 5, "choice": "expert"},
    ],
)
def test_groups_with_too_few_experts_are_refused(router):
    with pytest.raises(MeshwrightError, match="MW-MODEL-008"):
        Model(**SHAPE, router=router)


@pytest.mark.parametrize("name", ["tiny-moe", "tiny-mla"])
def test_presets_learn_on_one_device(name):
    model = catalog.load("models", name).but(layers=2, hidden=32, heads=4, kv_heads=0, vocab=32, ffn=48, expert_ffn=16)
    network = materialised(model, RouterOptions(aux=0.01)).float()
    optimizer = torch.optim.AdamW([p for p in network.parameters() if p.requires_grad], lr=1e-2)
    ids = torch.randint(0, 32, (4, 17), generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(15):
        loss = loss_function(model)(network(ids[:, :-1]), ids[:, 1:]) / 64
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
