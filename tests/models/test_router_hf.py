"""Routers that are read from Hugging Face configs choose and weight experts as the classes of these configs do."""

import pytest
import torch

from meshwright.describe import catalog, hf
from meshwright.models.moe import LocalPlacement
from meshwright.models.router import Router

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "vocab_size": 32,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 3,
}
LATENT = SIZES | {
    "n_routed_experts": 12,
    "moe_intermediate_size": 8,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 4,
    "first_k_dense_replace": 1,
}
QWEN = SIZES | {"num_experts": 12, "moe_intermediate_size": 8}
GROUPS = {"n_group": 4, "topk_group": 2}
ROUTERS = [
    ("mixtral", "MixtralTopKRouter", SIZES | {"num_local_experts": 12}),
    ("mixtral", "MixtralTopKRouter", SIZES | {"num_local_experts": 12, "num_experts_per_tok": 1}),
    ("qwen2_moe", "Qwen2MoeTopKRouter", QWEN),
    ("qwen3_moe", "Qwen3MoeTopKRouter", QWEN | {"norm_topk_prob": True}),
    ("deepseek_v2", "DeepseekV2TopkRouter", LATENT | {"topk_method": "greedy", "routed_scaling_factor": 1.5} | GROUPS),
    ("deepseek_v2", "DeepseekV2TopkRouter", LATENT | {"topk_method": "group_limited_greedy"} | GROUPS),
    ("deepseek_v3", "DeepseekV3TopkRouter", LATENT | {"routed_scaling_factor": 2.5} | GROUPS),
    ("deepseek_v3", "DeepseekV3TopkRouter", LATENT | {"norm_topk_prob": False, "n_group": 1, "topk_group": 1}),
]


@pytest.mark.parametrize(("family", "name", "shape"), ROUTERS, ids=[name for _, name, _ in ROUTERS])
def test_a_router_from_a_config_routes_as_its_class(family, name, shape):
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(family, **shape)
    code = __import__(f"transformers.models.{family}.modeling_{family}", fromlist=[name])
    theirs, ours = getattr(code, name)(config), Router(hf.interpret(config.to_dict()))
    generator = torch.Generator().manual_seed(0)
    weight, bias, x_TH = (torch.randn(s, generator=generator) for s in ((12, 16), (12,), (64, 16)))
    with torch.no_grad():
        for router in (theirs, ours):
            router.weight.copy_(weight)
        if ours.balance_bias is not None:
            theirs.e_score_correction_bias.copy_(0.2 * bias)
            ours.balance_bias.copy_(0.2 * bias)
        _, weights_TK, chosen_TK = theirs(x_TH)
        routing = ours(x_TH, LocalPlacement())
    expected_TE = torch.zeros(64, 12).scatter_(1, chosen_TK, weights_TK)
    expert_R = torch.arange(12).repeat_interleave(routing.counts_E)
    got_TE = torch.zeros(64, 12).index_put((routing.token_R, expert_R), routing.weight_R)
    torch.testing.assert_close(got_TE, expected_TE, rtol=1e-6, atol=1e-7)


def read(family, **fields):
    model = hf.interpret({"model_type": family, **fields})
    return model, model.notes


def test_balancing_losses_are_read_if_the_class_has_them():
    """Their loss is a mean over four layers, with shares that sum to three."""
    model, notes = read("mixtral", **SIZES, num_local_experts=12, router_aux_loss_coef=0.02, output_router_logits=True)
    assert model.router.aux == pytest.approx(0.02 * 3 / 4)
    model, notes = read("mixtral", **SIZES, num_local_experts=12, router_aux_loss_coef=0.02, router_jitter_noise=0.1)
    assert model.router.aux == 0
    assert [note.split(" ")[0] for note in notes] == ["router_aux_loss_coef"]
    assert "router_jitter_noise: noise on" in model.not_run[0]
    model, notes = read(
        "deepseek_v2", **LATENT, aux_loss_alpha=0.001, seq_aux=True, norm_topk_prob=True, routed_scaling_factor=3.0
    )
    assert (model.router.aux, model.router.normalise, model.router.scale) == (0.001, False, 3.0)
    assert any("norm_topk_prob is ignored" in note for note in notes)
    assert model.router.aux_scope == "sequence"
    model, notes = read("deepseek_v3", **LATENT, **GROUPS, scoring_func="softmax", topk_method="first")
    assert (model.router.score, model.balance_bias) == ("softmax", True)
    assert 'topk_method "first" is read as noaux_tc' in notes


def test_routing_keys_are_understood_or_reported():
    _, notes = read("llama", **{k: v for k, v in SIZES.items() if "experts" not in k}, norm_topk_prob=True)
    assert "norm_topk_prob" in notes[0]


RELEASED = {
    "deepseek-v2": {"n_group": 8, "topk_group": 3, "topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0,
                    "norm_topk_prob": False, "scoring_func": "softmax", "n_routed_experts": 160, "num_experts_per_tok": 6},
    "deepseek-v2-lite": {"n_group": 1, "topk_group": 1, "topk_method": "greedy", "routed_scaling_factor": 1.0,
                         "norm_topk_prob": False, "scoring_func": "softmax", "n_routed_experts": 64, "num_experts_per_tok": 6},
    "deepseek-v3": {"n_group": 8, "topk_group": 4, "topk_method": "noaux_tc", "routed_scaling_factor": 2.5,
                    "norm_topk_prob": True, "scoring_func": "sigmoid", "n_routed_experts": 256, "num_experts_per_tok": 8},
    "kimi-k2": {"n_group": 1, "topk_group": 1, "topk_method": "noaux_tc", "routed_scaling_factor": 2.827,
                "norm_topk_prob": True, "scoring_func": "sigmoid", "n_routed_experts": 384, "num_experts_per_tok": 8},
}  # fmt: skip


@pytest.mark.parametrize("name", RELEASED)
def test_the_catalog_routes_as_released(name):
    ours = catalog.load("models", name)
    read_as = read("deepseek_v3" if ours.balance_bias else "deepseek_v2", **{**LATENT, **RELEASED[name]})[0]
    for model in (ours, read_as):
        router = Router(model.but(hidden=16, heads=2))
        assert (router.experts, router.k, router.score) == (
            RELEASED[name]["n_routed_experts"],
            RELEASED[name]["num_experts_per_tok"],
            RELEASED[name]["scoring_func"],
        )
        assert (router.normalise, router.options.scale) == (
            RELEASED[name]["norm_topk_prob"],
            RELEASED[name]["routed_scaling_factor"],
        )
        groups = router.options.groups, router.options.groups_kept or 1
        assert groups == (RELEASED[name]["n_group"], RELEASED[name]["topk_group"])
