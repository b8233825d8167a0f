"""The sharding table has the parameters that the network registers: names, shapes, order and requires_grad, for full models and stages."""

import pytest

from meshwright.describe import catalog
from meshwright.describe.model import Model
from meshwright.describe.sharding import parameters
from meshwright.errors import MeshwrightError
from meshwright.models import build

SMALL = {"hidden": 16, "layers": 3, "heads": 4, "ffn": 24, "vocab": 33}
BIASED = {"qkv_bias": True, "out_bias": True, "ffn_bias": True}
EXPERTS = {**SMALL, "experts": 4, "top_k": 2, "expert_ffn": 12}
LATENT = {"attention": "mla", "kv_rank": 10, "nope_dim": 6, "rope_dim": 4, "value_dim": 5}
MODELS = {
    "llama": Model(**SMALL, kv_heads=2),
    "gpt": Model(**SMALL, tied=True, norm="layernorm", positions="learned", max_positions=8, activation="gelu",
                 embedding_norm=True, **BIASED),
    "gemma": Model(**SMALL, tied=True, norms_per_layer=4, qk_norm=True, head_dim=6, activation="geglu"),
    "mlp": Model(kind="mlp", hidden=16, layers=3, ffn_bias=True),
    "experts": Model(**EXPERTS, shared_experts=1, shared_gate=True, router_bias=True, tied=True, **BIASED),
    "latent": Model(**EXPERTS, **LATENT, q_rank=8, shared_experts=2, dense_layers=1, balance_bias=True, norm="layernorm"),
    "queries": Model(**SMALL, **LATENT, qkv_bias=True, final_norm=False),
}  # fmt: skip


def buildable(model):
    try:
        build(model, range(1, 2))
    except MeshwrightError:
        return False
    return True


KNOWN = {name: catalog.load("models", name) for name in catalog.names("models")}
SHORT = {name: m.but(layers=3, dense_layers=min(m.dense_layers, 1)) for name, m in KNOWN.items() if m.kind != "counts"}
MODELS |= {name: model for name, model in SHORT.items() if buildable(model)}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("layers", [range(3), range(1), range(1, 2), range(1, 3)], ids=str)
def test_the_sharding_table_matches_the_built_network(name, layers):
    made = [(path, tuple(p.shape), p.requires_grad) for path, p in build(MODELS[name], layers).named_parameters()]
    assert [(p.name, p.shape, p.learns) for p in parameters(MODELS[name], layers)] == made


def test_most_of_the_catalog_is_checked():
    assert len(MODELS) > 50
