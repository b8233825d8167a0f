"""The networks have the parameters that the anatomy counts."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.describe import catalog
from meshwright.describe.model import Model
from meshwright.errors import MeshwrightError
from meshwright.models import build, initial_value, loss_function
from meshwright.models.attention import AttentionRule, Geometry

NAMES = {"ffn-gate": "ffn.gate", "ffn-up": "ffn.up", "ffn-down": "ffn.down", "linear": "linear"}


def materialised(model, seed=0, scatter=True):
    network = build(model).to_empty(device="cpu").double()
    if model.tied:
        network.head.project.weight = network.embedding.tokens.weight
    for name, parameter in network.named_parameters():
        parameter.data.copy_(initial_value(model, name, parameter.shape, seed, scatter))
    return network


def count(network):
    return sum(p.numel() for p in network.parameters())


@settings(max_examples=20, deadline=None)
@given(
    heads=st.sampled_from([1, 2, 4, 6]),
    per_kv=st.sampled_from([1, 2]),
    width=st.sampled_from([0, 2, 8]),
    layers=st.integers(1, 3),
    ffn=st.integers(1, 40),
    vocab=st.integers(1, 70),
    multiple=st.sampled_from([1, 16]),
    activation=st.sampled_from(["gelu", "relu", "swiglu", "geglu"]),
    norm=st.sampled_from(["rmsnorm", "layernorm"]),
    positions=st.sampled_from(["rope", "learned", "none"]),
    norms=st.sampled_from([2, 4]),
    flags=st.lists(st.booleans(), min_size=7, max_size=7),
)
def test_parameters_equal_those_of_the_anatomy(
    heads, per_kv, width, layers, ffn, vocab, multiple, activation, norm, positions, norms, flags
):
    names = ("tied", "final_norm", "embedding_norm", "qk_norm", "qkv_bias", "out_bias", "ffn_bias")
    model = Model(
        hidden=heads * 4,
        heads=heads,
        kv_heads=heads // per_kv if heads % per_kv == 0 else heads,
        head_dim=width,
        layers=layers,
        ffn=ffn,
        vocab=vocab,
        vocab_multiple=multiple,
        activation=activation,
        norm=norm,
        positions=positions,
        max_positions=12,
        norms_per_layer=norms,
        **dict(zip(names, flags, strict=True)),
    )
    network = build(model)
    assert count(network) == model.total
    layer = network.layers["0"]
    for linear in model.blocks["dense"].linears:
        module = layer.get_submodule(NAMES.get(linear.name, f"attention.{linear.name}"))
        assert tuple(module.weight.shape) == (linear.d_out, linear.d_in)
        assert (module.bias is not None) == linear.bias


@pytest.mark.parametrize("name", ["llama3-8b", "gpt3-175b", "gemma2-9b", "bert-large"])
def test_presets_are_built_in_full_on_meta(name):
    model = catalog.load("models", name)
    assert count(build(model)) == model.total


def test_stages_partition_the_parameters():
    model = Model(hidden=16, layers=5, heads=2, ffn=24, vocab=32, tied=True)
    whole = dict(build(model).named_parameters())
    stages = [dict(build(model, r).named_parameters()) for r in (range(2), range(2, 4), range(4, 5))]
    names = [n for stage in stages for n in stage]
    assert set(names) - {"head.project.weight"} == set(whole)
    assert len(names) == len(set(names))
    assert "head.project.weight" in stages[-1]  # a tied head on another stage than its embedding has a separate copy


def test_an_mlp_is_its_square_layers():
    model = Model(kind="mlp", hidden=8, layers=4, ffn_bias=True, activation="relu")
    network = materialised(model)
    assert count(network) == model.total == 4 * (64 + 8)
    x = torch.randn(6, 8, dtype=torch.float64)
    y = x
    for i, layer in enumerate(network.layers.values()):
        y = y @ layer.linear.weight.T + layer.linear.bias
        y = y.relu() if i < 3 else y
    torch.testing.assert_close(network(x), y)
    target = y.detach() + 2.0
    target[1] = math.nan  # a padded row
    assert loss_function(model)(y, target).item() == pytest.approx(5 * 4.0)


@pytest.mark.parametrize("causal", [True, False])
def test_a_window_limits_the_visible_positions(causal):
    model = Model(hidden=16, layers=3, heads=2, ffn=16, vocab=8, window=3, full_every=3, causal=causal)
    network = materialised(model)
    assert [layer.attention.rule.window for layer in network.layers.values()] == [3, 3, 0]
    listed = materialised(model.but(full_every=0, full_layers=(0, 2, 7)))
    assert [layer.attention.rule.window for layer in listed.layers.values()] == [0, 3, 0]
    mask = Geometry(model).mask(torch.empty(1, 2, 6, 8), AttentionRule(window=3))
    for query in range(6):
        seen = {k for k in range(6) if abs(query - k) < 3 and (k <= query or not causal)}
        assert set(mask[query].nonzero().flatten().tolist()) == seen
    assert Geometry(model).mask(torch.empty(1, 2, 6, 8), AttentionRule()) is None


def test_initial_values_depend_only_on_seed_and_name():
    model = Model(hidden=16, layers=2, heads=2, ffn=16, vocab=8)
    shape = torch.Size((16, 16))
    first = initial_value(model, "layers.0.attention.q.weight", shape, 1)
    assert torch.equal(first, initial_value(model, "layers.0.attention.q.weight", shape, 1))
    assert not torch.equal(first, initial_value(model, "layers.0.attention.q.weight", shape, 2))
    assert not torch.equal(first, initial_value(model, "layers.1.attention.q.weight", shape, 1))
    assert torch.equal(initial_value(model, "head.norm.weight", torch.Size((16,)), 1), torch.ones(16))
    assert initial_value(model, "head.norm.weight", torch.Size((16,)), 1, scatter=True).std() > 0
    big = torch.Size((400, 500))
    expected = math.sqrt(2 / (5 * 16))
    assert initial_value(model, "layers.0.ffn.up.weight", big, 0).std().item() == pytest.approx(expected, rel=0.02)
    assert initial_value(model, "layers.0.ffn.down.weight", big, 0).std().item() == pytest.approx(
        expected / 2, rel=0.02
    )


@pytest.mark.parametrize(
    "shape",
    [
        {"attention": "mla", "kv_rank": 4, "nope_dim": 4, "value_dim": 4, "qk_norm": True},
        {"attention": "mla", "kv_rank": 4, "nope_dim": 4, "value_dim": 4, "rope_dim": 3},
        {"positions": "alibi"},
        {"norms_per_layer": 1},
        {"head_dim": 5},
    ],
)
def test_models_that_cannot_be_built_are_refused(shape):
    with pytest.raises(MeshwrightError, match="MW-BUILD-002"):
        build(Model(**{"hidden": 16, "layers": 2, "heads": 2, "ffn": 16, "vocab": 8, **shape}))
    with pytest.raises(MeshwrightError, match="MW-BUILD-001"):
        build(Model(kind="counts", given_parameters=1, given_flops=1))


def test_a_sequence_beyond_the_learned_positions_is_refused():
    model = Model(hidden=16, layers=1, heads=2, ffn=16, vocab=8, positions="learned", max_positions=4)
    with pytest.raises(MeshwrightError, match="MW-BUILD-003"):
        materialised(model)(torch.zeros(1, 5, dtype=torch.long))
