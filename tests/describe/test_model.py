"""Counts of a model, compared with formulas by hand, and properties of every count."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from meshwright.describe.catalog import load
from meshwright.describe.model import Model
from meshwright.errors import MeshwrightError

QUICK = settings(max_examples=20, deadline=None)
BIASES = {"qkv_bias": True, "out_bias": True, "ffn_bias": True}
GPT = BIASES | {"activation": "gelu", "norm": "layernorm", "positions": "learned", "tied": True, "dropout": True}


def gpt(hidden=64, layers=3, heads=4, vocab=100, seq=32, **more) -> Model:
    shape = {
        "hidden": hidden,
        "layers": layers,
        "heads": heads,
        "ffn": 4 * hidden,
        "vocab": vocab,
        "max_positions": seq,
    }
    return Model(**GPT | shape | more)


def saved_by_one_layer(model: Model, seq: int, **how) -> dict[str, float]:
    """Bytes saved by one more layer; embedding and head cancel."""
    less, more = model.activations(seq, **how), model.but(layers=model.layers + 1).activations(seq, **how)
    return {part: more[part] - less[part] for part in more if more[part] != less[part]}


# Saved activations

SHAPES = [(1024, 16, 512), (6144, 64, 2048), (12288, 96, 2048), (20480, 128, 2048), (25600, 160, 2048), (768, 12, 100)]


@pytest.mark.parametrize(("h", "a", "s"), SHAPES)
def test_a_gelu_layer_saves_34_sbh_and_5_ass(h, a, s):
    """sbh(34 + 5as/h), Korthikanti et al. 2022, equation 1, and its three parts."""
    layer = saved_by_one_layer(gpt(h, 2, a, 50257, s), s, flash=False)
    assert layer == {"attention": 11 * s * h + 5 * a * s * s, "ffn": 19 * s * h, "norm": 4 * s * h}
    assert sum(layer.values()) == pytest.approx(s * h * (34 + 5 * a * s / h), rel=1e-12)


@pytest.mark.parametrize(("h", "a", "s"), SHAPES)
def test_variants_of_the_34_formula(h, a, s):
    model = gpt(h, 2, a, 50257, s)
    without_masks = sum(saved_by_one_layer(model, s, flash=False, dropout=False).values())
    assert without_masks == s * h * 32 + 2 * a * s * s
    fused = sum(saved_by_one_layer(model, s, flash=True).values())
    assert fused == 34 * s * h + 4 * a * s  # one fp32 log-sum-exp per row replaces the softmax
    single = sum(saved_by_one_layer(model, s, dtype_bytes=4, flash=False, dropout=False).values())
    assert single == 2 * without_masks


def test_a_full_gpt_also_saves_embedding_and_head():
    h, layers, a, vocab, s = 64, 3, 4, 100, 32
    ends = s * h + 2 * s * h + 2 * s * h + 4 * s * vocab  # embedding mask, final norm, head's input, fp32 logits
    layer = s * h * 34 + 5 * a * s * s
    assert sum(gpt(h, layers, a, vocab, s).activations(s, flash=False).values()) == layers * layer + ends


def test_dropout_argument_overrides_the_model():
    assert gpt(dropout=False).activations(32, dropout=True) == gpt(dropout=True).activations(32)


def test_a_llama_layer_saves_the_inputs_of_its_products():
    h, n, k, d, f, s = 4096, 32, 8, 128, 14336, 8192
    layer = saved_by_one_layer(load("models", "llama3-8b"), s)
    assert layer["attention"] == s * (2 * h + 2 * n * d + 2 * 2 * k * d + 2 * n * d + 4 * n)  # in, q, k and v, o, lse
    assert layer["ffn"] == s * (2 * h + 2 * 2 * f + 2 * f)  # in, gate and up, their product
    assert layer["norm"] == s * 2 * 2 * h


def test_an_expert_layer_saves_the_dispatched_copies():
    h, f, experts, k, s = 4096, 14336, 8, 2, 1024
    layer = saved_by_one_layer(load("models", "mixtral-8x7b"), s)
    assert layer["experts"] == s * k * (
        2 * h + 2 * 2 * f + 2 * f + 2 * h
    )  # inputs, gate and up, their product, outputs
    assert layer["router"] == s * (2 * h + 4 * experts)


def test_shared_experts_reuse_the_saved_input_of_the_router():
    plain = load("models", "tiny-moe")
    width = 2 * plain.expert_width
    shared = plain.but(shared_experts=2)
    assert saved_by_one_layer(shared, 64)["shared"] == 64 * (2 * 2 * width + 2 * width)
    assert {k: v for k, v in saved_by_one_layer(shared, 64).items() if k != "shared"} == saved_by_one_layer(plain, 64)


# Parameters


@QUICK
@given(st.integers(1, 40), st.integers(1, 30), st.integers(1, 9), st.integers(1, 5000), st.integers(1, 400))
def test_gpt_parameters(width, layers, heads, vocab, positions):
    """V·h + S·h + L(12h² + 13h) + 2h: Narayanan et al. 2021, equation 2, and the final norm."""
    h = width * heads
    expected = vocab * h + positions * h + layers * (12 * h * h + 13 * h) + 2 * h
    assert gpt(h, layers, heads, vocab, positions).total == expected


@QUICK
@given(st.integers(1, 6), st.integers(1, 8), st.integers(1, 64), st.integers(1, 99), st.integers(1, 300), st.booleans())
def test_grouped_query_parameters(groups, per_group, dim, hidden, ffn, tied):
    """From multi-query (one group) to multi-head (one head per group)."""
    model = Model(
        hidden=hidden, layers=5, heads=groups * per_group, kv_heads=groups, head_dim=dim, ffn=ffn, vocab=77, tied=tied
    )
    attention = hidden * dim * groups * (2 * per_group + 2)
    layer = attention + 3 * hidden * ffn + 2 * hidden
    assert model.total == 5 * layer + hidden + (1 if tied else 2) * 77 * hidden
    assert model.parameters()["attention"] == 5 * attention


@QUICK
@given(*[st.integers(1, 50)] * 6, st.integers(0, 40), st.booleans())
def test_latent_attention_parameters(heads, hidden, latent, nope, rope, value, q_rank, biased):
    """DeepSeek's MLA: low-rank latents with a norm each, and one rotary key for all heads."""
    model = Model(
        attention="mla",
        hidden=hidden,
        layers=2,
        heads=heads,
        kv_rank=latent,
        nope_dim=nope,
        rope_dim=rope,
        value_dim=value,
        q_rank=q_rank,
        ffn=8,
        vocab=9,
        qkv_bias=biased,
    )
    query = hidden * q_rank + q_rank * heads * (nope + rope) if q_rank else hidden * heads * (nope + rope)
    keys = hidden * (latent + rope) + latent * heads * (nope + value)
    biases = (q_rank + latent + rope) if biased else 0
    assert model.parameters()["attention"] == 2 * (query + keys + heads * value * hidden + biases)
    assert model.parameters()["norm"] == 2 * (2 * hidden + q_rank + latent) + hidden


@QUICK
@given(st.integers(1, 12), st.data())
def test_expert_parameters(experts, data):
    top_k, shared, dense = (
        data.draw(st.integers(1, experts)),
        data.draw(st.integers(0, 3)),
        data.draw(st.integers(0, 4)),
    )
    h, f, layers, biased = 24, 10, 6, data.draw(st.booleans())
    model = Model(
        hidden=h,
        layers=layers,
        heads=2,
        ffn=32,
        vocab=50,
        experts=experts,
        top_k=top_k,
        expert_ffn=f,
        shared_experts=shared,
        dense_layers=dense,
        router_bias=biased,
        shared_gate=shared > 0,
    )
    moe = layers - dense
    expected = {
        "experts": moe * experts * 3 * h * f,
        "shared": moe * (shared * 3 * h * f + (h if shared else 0)),
        "ffn": dense * 3 * h * 32,
        "router": moe * (h + biased) * experts,
    }
    counts = model.parameters()
    assert {part: counts.get(part, 0) for part in expected} == expected
    assert model.active == model.total - moe * (experts - top_k) * 3 * h * f


def test_small_parts():
    base = {"hidden": 32, "layers": 3, "heads": 4, "ffn": 64, "vocab": 10}
    total = Model(**base).total
    assert Model(**base, qk_norm=True).total - total == 3 * 2 * 8
    assert Model(**base, sinks=True).total - total == 3 * 4
    assert Model(**base, norms_per_layer=4).total - total == 3 * 2 * 32
    assert Model(**base, final_norm=False).total - total == -32
    assert Model(**base, embedding_norm=True).total - total == 32
    assert Model(**base, norm="layernorm").total - total == 7 * 32
    assert Model(**base, positions="learned", max_positions=50).total - total == 50 * 32
    assert Model(**base, activation="gelu").total - total == -3 * 32 * 64
    moe = base | {"experts": 4, "top_k": 1, "expert_ffn": 8}
    assert Model(**moe, balance_bias=True).total - Model(**moe).total == 3 * 4
    assert Model(**moe | {"expert_ffn": 0}).parameters()["experts"] == 3 * 4 * 3 * 32 * 64  # as wide as the FFN


@pytest.mark.parametrize(("dense", "every"), [(0, 1), (0, 2), (3, 1), (1, 3), (7, 1), (2, 9)])
def test_which_layers_have_experts(dense, every):
    model = Model(hidden=8, layers=7, heads=1, ffn=8, vocab=8, experts=2, top_k=1, dense_layers=dense, moe_every=every)
    expected = ["moe" if i >= dense and (i - dense + 1) % every == 0 else "dense" for i in range(7)]
    assert list(model.layer_kinds) == expected


# FLOPs


@QUICK
@given(st.integers(1, 20), st.integers(1, 20), st.integers(1, 8), st.integers(1, 5000), st.integers(2, 4096))
def test_gpt_flops(width, layers, heads, vocab, s):
    """72·L·h²(1 + s/6h + V/12Lh) per token without recompute (96 with it, Narayanan et al. 2021, equation 3)."""
    h = width * heads
    expected = 72 * layers * h * h * (1 + s / (6 * h) + vocab / (12 * layers * h))
    assert gpt(h, layers, heads, vocab, s).model_flops(s, halve_causal=False) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", ["llama3-70b", "mixtral-8x7b", "deepseek-v3", "gpt-oss-120b", "qwen3-32b", "phi4-14b"])
def test_six_flops_per_parameter_and_token(name):
    """Without the quadratic part of attention, 6 per active parameter of a matrix product (not of vectors or the embedding)."""
    m = load("models", name)
    linears = [(times, linear) for times, block in m._over_blocks() for linear in block.linears]
    products = sum(times * linear.uses * linear.d_in * linear.d_out for times, linear in linears)
    assert m.model_flops(0) == 6 * products
    assert m.model_flops(0) == pytest.approx(6 * (m.active - m.padded_vocab * m.hidden), rel=0.002)


def test_tied_heads_still_multiply():
    untied = gpt(tied=False)
    assert gpt().flops(32) == untied.flops(32)
    assert untied.total - gpt().total == 100 * 64


def test_latent_attention_core_is_wider_in_queries_than_in_values():
    m = load("models", "deepseek-v3")
    assert m.flops(4096)["attention-core"] == 61 * 2 * 128 * (192 + 128) * 2048


def mean_attended(s: int, window: int, causal: bool) -> float:
    seen = [min(t, window or s) if causal else (window or s) for t in range(1, s + 1)]
    return sum(seen) / s


@QUICK
@given(st.integers(16, 600), st.integers(0, 700), st.booleans())
def test_attended_positions_against_counting(s, window, causal):
    model = gpt(causal=causal, window=window, full_every=0)
    expected = mean_attended(s, window if window < s else 0, causal)
    assert model.attended(s) == pytest.approx(expected, abs=0.51)  # the half position a token's own score counts
    assert model.attended(s) <= model.attended(s, halve_causal=False)


@pytest.mark.parametrize(
    ("layers", "every", "full"), [(6, 2, 3), (26, 6, 4), (7, 3, 2), (5, 0, 0), (5, 1, 5), (3, 4, 0)]
)
def test_share_of_layers_with_full_attention(layers, every, full):
    model = gpt(layers=layers, window=64, full_every=every, causal=False)
    assert model.attended(1024) == pytest.approx((full * 1024 + (layers - full) * 64) / layers)


# Properties of every shape


@st.composite
def models(draw) -> Model:
    heads = draw(st.sampled_from([1, 2, 4, 8]))
    fields = {
        "hidden": 8 * draw(st.integers(1, 40)), "layers": draw(st.integers(1, 12)), "heads": heads,
        "kv_heads": draw(st.sampled_from([k for k in (1, 2, 4, 8) if heads % k == 0])),
        "ffn": draw(st.integers(1, 900)),
        "vocab": draw(st.integers(1, 60_000)), "vocab_multiple": draw(st.sampled_from([1, 64, 128, 1000])),
        "activation": draw(st.sampled_from(["gelu", "relu", "swiglu", "geglu"])), "tied": draw(st.booleans()),
        "qkv_bias": draw(st.booleans()), "dropout": draw(st.booleans()), "window": draw(st.integers(0, 300)),
        "full_every": draw(st.integers(0, 4)), "causal": draw(st.booleans()), "qk_norm": draw(st.booleans()),
    }  # fmt: skip
    if draw(st.booleans()):
        experts = draw(st.integers(1, 16))
        fields |= {
            "experts": experts,
            "top_k": draw(st.integers(1, experts)),
            "expert_ffn": draw(st.integers(0, 200)),
            "shared_experts": draw(st.integers(0, 2)),
            "dense_layers": draw(st.integers(0, fields["layers"])),
            "moe_every": draw(st.integers(1, 3)),
        }
    return Model(**fields)


@QUICK
@given(models(), st.integers(1, 2048))
def test_counts_are_positive_and_add_up(m, s):
    assert 0 < m.active <= m.total == sum(m.parameters().values())
    for counts in (m.parameters(), m.flops(s), m.activations(s), m.activations(s, flash=False)):
        assert all(v >= 0 for v in counts.values())
        assert sum(counts.values()) > 0
    assert Model(**m.as_dict()) == m


@QUICK
@given(models())
def test_vocabulary_is_padded_up_and_never_more_than_needed(m):
    assert m.padded_vocab % m.vocab_multiple == 0
    assert 0 <= m.padded_vocab - m.vocab < m.vocab_multiple


@QUICK
@given(models(), st.sampled_from(["hidden", "layers", "ffn", "vocab", "heads", "experts"]), st.integers(16, 512))
def test_larger_is_never_cheaper(m, field, s):
    assume(getattr(m, field))
    larger = m.but(**{field: 2 * getattr(m, field)} | ({"head_dim": m.head_width} if field == "heads" else {}))
    assert larger.total >= m.total
    assert larger.active >= m.active
    assert larger.model_flops(s) >= m.model_flops(s)
    assert sum(larger.activations(s).values()) >= sum(m.activations(s).values())


@QUICK
@given(models(), st.integers(1, 1000), st.integers(1, 1000))
def test_longer_sequences_cost_more(m, s, more):
    assert sum(m.activations(s + more).values()) > sum(m.activations(s).values())
    assert m.model_flops(s + more) >= m.model_flops(s)


@QUICK
@given(models())
def test_using_all_experts_gives_a_dense_count(m):
    assume(m.layer_count("moe"))
    assert m.but(top_k=m.experts).active == m.total
    assert (m.active == m.total) == (m.top_k == m.experts)


# Other kinds, and what is not a model


def test_a_deep_mlp():
    m = Model(kind="mlp", hidden=1024, layers=4)
    assert m.total == 4 * 1024**2
    assert sum(m.flops(1).values()) == 2 * m.total
    assert sum(m.activations(10).values()) == 4 * 10 * 1024 * 2 * 2  # input and pre-activation of each layer


def test_counts_only():
    m = Model(kind="counts", given_parameters="25.6M", given_flops="8.2G", given_activations="42MB")
    assert m.total == m.active == pytest.approx(25.6e6)
    assert (m.flops(7)["all"], m.activations(7)["all"]) == pytest.approx((8.2e9, 42e6))


@pytest.mark.parametrize(
    ("change", "code", "fix"),
    [
        ({"hidden": 0}, "MW-MODEL-001", ""),
        ({"vocab": 0}, "MW-MODEL-001", ""),
        ({"ffn": 0}, "MW-MODEL-001", ""),
        ({"ffn": 0, "experts": 4, "top_k": 1, "expert_ffn": 8, "dense_layers": 1}, "MW-MODEL-001", ""),
        ({"kind": "counts"}, "MW-MODEL-001", ""),
        ({"heads": 7}, "MW-MODEL-002", "--set model.heads=8"),
        ({"heads": 8, "kv_heads": 5}, "MW-MODEL-003", "--set model.kv_heads=4"),
        ({"heads": 2**40, "head_dim": 1, "kv_heads": 5}, "MW-MODEL-003", "--set model.kv_heads=4"),
        ({"attention": "mla", "kv_rank": 8}, "MW-MODEL-004", ""),
        ({"experts": 4}, "MW-MODEL-005", "--set model.top_k=1"),
        ({"experts": 4, "top_k": 5}, "MW-MODEL-005", "--set model.top_k=1"),
        ({"top_k": 2}, "MW-MODEL-005", "--set model.experts=8"),
        ({"dense_layers": 4}, "MW-MODEL-006", ""),
        ({"layers": 100_001}, "MW-MODEL-007", "--set model.layers=100000"),
        ({"hiden": 8}, "MW-CONF-001", "hidden"),
        ({"hidden": -1}, "MW-CONF-003", ""),
        ({"hidden": 10**30}, "MW-CONF-003", ""),
        ({"hidden": float("nan")}, "MW-CONF-003", ""),
        ({"activation": "swigloo"}, "MW-CONF-003", "--set model.activation=swiglu"),
    ],
)
def test_illegal_models_are_refused_with_a_fix(change, code, fix):
    with pytest.raises(MeshwrightError) as caught:
        Model(**{"hidden": 64, "layers": 3, "heads": 4, "ffn": 128, "vocab": 100} | change)
    assert caught.value.code == code
    assert caught.value.fix == fix


def test_a_layer_has_four_norms_at_most() -> None:
    with pytest.raises(MeshwrightError, match=r"model\.norms_per_layer = 5 is not valid"):
        Model(hidden=8, layers=1, heads=1, ffn=8, vocab=8, norms_per_layer=5)
