"""Two models are the same function of the same weights, or the comparison names the fields that make them differ."""

import pytest

from meshwright.describe import hf
from meshwright.describe.model import Model

DENSE = Model(hidden=32, layers=4, heads=4, kv_heads=2, ffn=48, vocab=40, window=8, max_positions=64)
EXPERTS = Model(hidden=32, layers=4, heads=4, vocab=40, experts=8, top_k=2, expert_ffn=12, balance_bias=True)
LATENT = Model(
    hidden=32, layers=2, heads=4, ffn=48, vocab=40, attention="mla", kv_rank=8, nope_dim=6, rope_dim=4, value_dim=8
)
YARN = DENSE.but(rope={"kind": "yarn", "factor": 4.0, "original_positions": 16})

DIFFERENT = [
    (DENSE, {"window": 9}), (DENSE, {"full_every": 2}), (DENSE, {"full_layers": (3,)}), (DENSE, {"window": 0}),
    (DENSE, {"kv_heads": 4}), (DENSE, {"head_dim": 16}), (DENSE, {"rope_theta": 5000.0}), (DENSE, {"rope_dim": 4}),
    (DENSE, {"rope": {"interleaved": True}}), (DENSE, {"norm_epsilon": 1e-6}), (DENSE, {"attention_scale": 0.5}),
    (DENSE, {"activation": "geglu"}), (DENSE, {"tied": True}), (DENSE, {"qkv_bias": True}),
    (EXPERTS, {"router": {"score": "softmax"}}), (EXPERTS, {"router": {"scale": 2.5}}), (EXPERTS, {"router": {"normalise": False}}),
    (EXPERTS, {"router": {"groups": 4, "groups_kept": 2}}), (EXPERTS, {"top_k": 3}), (EXPERTS, {"dense_layers": 1, "ffn": 48}),
    (LATENT, {"latent_norm_epsilon": 1e-6}), (YARN, {"rope": {"kind": "yarn", "factor": 8.0, "original_positions": 16}}),
    (YARN, {"rope": {"kind": "yarn", "factor": 4.0}}),
]  # fmt: skip
SAME = [
    (DENSE, {"head_dim": 8}), (DENSE, {"rope_dim": 8}), (DENSE, {"attention_scale": 8**-0.5}), (DENSE, {"max_positions": 128}),
    (DENSE, {"dropout_rate": 0.1, "dropout": True, "attention_dropout": 0.1, "vocab_multiple": 16, "name": "other"}),
    (DENSE.but(full_every=2), {"full_every": 0, "full_layers": (1, 3)}), (DENSE.but(window=0), {"window": 8, "full_every": 1}),
    (EXPERTS, {"router": {"aux": 0.1, "z": 0.01, "capacity": 2.0, "balance_rate": 0.1, "aux_scope": "sequence"}}),
    (EXPERTS, {"router": {"score": "sigmoid", "normalise": True}}), (EXPERTS, {"ffn": 99}),
    (LATENT, {"latent_norm_epsilon": 1e-5}), (YARN, {"max_positions": 128}),
]  # fmt: skip


@pytest.mark.parametrize(("model", "change"), DIFFERENT, ids=str)
def test_a_change_of_the_function_is_seen(model, change):
    assert hf.different_fields(model, model.but(**change))


@pytest.mark.parametrize(("model", "change"), SAME, ids=str)
def test_another_way_to_write_the_same_function_is_not(model, change):
    assert hf.different_fields(model, model.but(**change)) == {}


def test_learned_positions_are_counted():
    learned = DENSE.but(positions="learned")
    assert list(hf.different_fields(learned, learned.but(max_positions=128))) == ["max_positions"]
