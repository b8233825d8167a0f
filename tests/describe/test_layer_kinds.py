"""Layers of several kinds: patterns, linear mixers, sparse attention, multi-token prediction, latent experts; counts and refusals."""

import math

import pytest

from meshwright.describe import hf
from meshwright.describe.catalog import load
from meshwright.describe.hf.reader import different_fields
from meshwright.describe.legality import check
from meshwright.describe.mixer_options import LinearOptions
from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.describe.shape_checks import layer_kinds
from meshwright.describe.sharding import parameters
from meshwright.describe.workload import Workload
from meshwright.errors import MeshwrightError

MAMBA = LinearOptions(kind="mamba2", heads=8, head_dim=16, groups=4, state=32, conv=4, conv_bias=True)
PLAIN = Model(hidden=64, layers=6, heads=8, ffn=128, vocab=256)
HYBRID = PLAIN.but(pattern="M-M*-", linear=MAMBA)
NAMES = (
    "nemotron-h-8b",
    "nemotron-3-super",
    "qwen3-next-80b-a3b",
    "jamba-1.5-mini",
    "minimax-text-01",
    "deepseek-v3.2",
)


def test_a_pattern_is_letters_or_words_and_repeats():
    assert layer_kinds("M-M*-", 6) == ("linear", "ffn", "linear", "attention", "ffn", "linear")
    assert layer_kinds("ME ME *-", 4) == ("linear-moe", "linear-moe", "dense", "linear-moe")
    assert PLAIN.but(pattern="*- *-").layer_kinds == PLAIN.layer_kinds
    assert PLAIN.but(pattern="*- *-").total == PLAIN.total
    for bad in ("MX", "-M -M", "M* M*", "*EE *", "  "):
        with pytest.raises(MeshwrightError, match="MW-MODEL-010"):
            layer_kinds(bad, 4)


@pytest.mark.parametrize(
    "changes",
    [
        {"pattern": "M-"}, {"pattern": "*E *-"}, {"linear": MAMBA}, {"pattern": "*- *-", "linear": MAMBA},
        {"pattern": "*E *-", "experts": 4, "top_k": 1, "expert_ffn": 32, "moe_every": 2}, {"index_heads": 4}, {"expert_hidden": 16},
        {"pattern": "M-", "linear": MAMBA.but(groups=3)}, {"pattern": "M-", "linear": {"kind": "mamba2", "heads": 4}},
        {"index_heads": 4, "index_dim": 16, "index_top_k": 8, "window": 16}, {"pattern": "W-"}, {"attention": "compressed"},
        {"attention": "compressed", "q_rank": 8, "head_dim": 8, "window": 4, "compressed": {"out_groups": 2, "out_rank": 4}, "pattern": "S-"},
    ],
)  # fmt: skip
def test_fields_that_contradict_the_pattern_are_refused(changes):
    with pytest.raises(MeshwrightError, match="MW-MODEL-0"):
        PLAIN.but(**changes)


def test_mamba2_is_counted_matrix_by_matrix():
    inner, keys = 8 * 16, 4 * 32
    projection = 64 * (2 * inner + 2 * keys + 8)
    convolution = (inner + 2 * keys) * (4 + 1)
    one = projection + convolution + 3 * 8 + inner + inner * 64 + 64  # A, D and time step; the gated norm; output; norm
    assert sum(HYBRID.blocks["linear"].parameters().values()) == one
    attention, ffn, ends = 4 * 64 * 64 + 64, 3 * 64 * 128 + 64, 2 * 256 * 64 + 64
    assert HYBRID.total == 3 * one + attention + 2 * ffn + ends


@pytest.mark.parametrize("name", [*NAMES, "glm-4.5"])
@pytest.mark.parametrize("more", [{}, {"mtp_layers": 2}])
def test_the_sharding_table_has_all_parameters_once(name, more):
    model = load("models", name)
    model = model.but(layers=8, dense_layers=min(model.dense_layers, 1), **more)
    table = parameters(model, range(model.layers))
    assert sum(math.prod(p.shape) for p in table) == model.total
    assert len({p.name for p in table}) == len(table)


def test_multi_token_prediction_counts_one_layer_and_a_projection():
    """DeepSeek-V3's checkpoint: 684.49B values are 671.03B, this module, and copies of the embedding and the head."""
    model = load("models", "deepseek-v3")
    more = model.but(mtp_layers=1)
    assert more.total - model.total == pytest.approx(684.49e9 - model.total - 2 * 129280 * 7168, rel=0.001)
    assert more.flops(4096)["head"] == 2 * model.flops(4096)["head"]
    nano = load("models", "nemotron-3-super")
    assert (
        nano.but(mtp_layers=1).total - nano.total == 2_942_324_736 + 512
    )  # the checkpoint leaves out balancing biases


def test_linear_mixers_cost_the_same_at_any_length_and_sparse_attention_its_selection():
    hybrid = load("models", "nemotron-h-8b")
    short, long = hybrid.flops(4096), hybrid.flops(65536)
    assert short["linear-core"] == long["linear-core"]
    assert long["attention-core"] == pytest.approx(16 * short["attention-core"])
    dense, sparse = load("models", "deepseek-v3"), load("models", "deepseek-v3.2")
    assert sparse.attended(65536) == pytest.approx(2048, rel=0.02)
    assert sparse.flops(131072)["attention-core"] < 0.5 * dense.flops(131072)["attention-core"]
    assert sparse.attended(1024) == dense.attended(1024)


def test_compressed_attention_sees_its_window_and_what_it_compresses():
    model, seq = load("models", "deepseek-v4-flash"), 65536
    seen = {
        kind: model.positions_of(model.blocks[f"{kind}-moe"].attention, seq)
        for kind in ("window", "selected", "compressed")
    }
    near = 128 - 128**2 / (2 * seq)
    selected = (2048 - 2048**2 / (2 * seq)) / 4
    assert seen["window"] == pytest.approx((near, 0.0))
    assert seen["selected"] == pytest.approx((near + selected, seq / 2 / 4))
    assert seen["compressed"] == pytest.approx((near + seq / 2 / 128, seq / 2 / 128))


def test_latent_experts_are_always_active_outside_the_latent():
    model = load("models", "nemotron-3-super")
    assert model.active == pytest.approx(12_770_216_960, rel=1e-4)  # of the published weights, without inactive experts


@pytest.mark.parametrize("name", NAMES)
def test_train_and_verify_refuse_what_our_transformer_lacks(name):
    model = load("models", name)
    with pytest.raises(MeshwrightError, match=r"MW-BUILD-002.*planned and costed, not trained"):
        check(Plan(), model, Workload(batch=1, seq=1024), trainer=True)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"tp": 16}, "MW-PLAN-004"), ({"tp": 8}, ""), ({"cp": 16, "tp": 8}, ""), ({"cp": 32, "tp": 8}, "MW-PLAN-008"), ({"pp": 4}, ""),
    ],
)  # fmt: skip
def test_linear_heads_and_groups_limit_tensor_and_context_parallelism(changes, code):
    model, work = load("models", "nemotron-h-8b"), Workload(batch=64, seq=8192)
    if not code:
        Plan(**changes).check(model, work)
        return
    with pytest.raises(MeshwrightError, match=code):
        Plan(**changes).check(model, work)


# Hugging Face configs of these families, with the values of the published files

SHARED = {"num_key_value_heads": 8, "vocab_size": 131072, "max_position_embeddings": 8192, "tie_word_embeddings": False}
CONFIGS = {
    "nemotron-h-8b": SHARED | {
        "model_type": "nemotron_h", "hidden_size": 4096, "num_hidden_layers": 52, "num_attention_heads": 32, "attention_head_dim": 128,
        "intermediate_size": 21504,
        "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-", "mlp_hidden_act": "relu2", "ssm_state_size": 128,
        "mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "conv_kernel": 4, "chunk_size": 128,
    },
    "qwen3-next-80b-a3b": {
        "model_type": "qwen3_next", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2,
        "head_dim": 256,
        "intermediate_size": 5120, "vocab_size": 151936, "max_position_embeddings": 262144, "rope_theta": 10000000, "partial_rotary_factor": 0.25,
        "linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_num_value_heads": 32, "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4, "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512, "decoder_sparse_step": 1, "norm_topk_prob": True, "rms_norm_eps": 1e-6,
    },
    "jamba-1.5-mini": SHARED | {
        "model_type": "jamba", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 14336,
        "vocab_size": 65536,
        "max_position_embeddings": 262144, "attn_layer_period": 8, "attn_layer_offset": 4, "expert_layer_period": 2, "expert_layer_offset": 1,
        "num_experts": 16, "num_experts_per_tok": 2,
        "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": 256, "mamba_conv_bias": True, "rms_norm_eps": 1e-6,
    },
    "minimax-text-01": SHARED | {
        "model_type": "minimax_text_01", "hidden_size": 6144, "num_hidden_layers": 80, "num_attention_heads": 64, "head_dim": 128,
        "intermediate_size": 9216, "vocab_size": 200064, "attn_type_list": ([0] * 7 + [1]) * 10, "num_local_experts": 32, "num_experts_per_tok": 2,
        "rope_theta": 10000000, "rotary_dim": 64, "layernorm_mlp_alpha": 3.5,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_configs_of_hybrid_families_are_read(name):
    model, known = hf.interpret(CONFIGS[name]), load("models", name)
    assert (model.total, model.active, model.layer_kinds) == (known.total, known.active, known.layer_kinds)
    assert not [note for note in model.notes if "unknown key" in note]
    assert model.linear == known.linear
    assert not different_fields(model, known)


def test_words_for_layers_and_experts_of_nemotron_3_are_read():
    words = {"M": "mamba", "E": "moe", "*": "attention"}
    known = load("models", "nemotron-3-super")
    config = {
        "model_type": "nemotron_h", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128,
        "layers_block_type": [words[letter] for letter in known.pattern], "vocab_size": 131072, "max_position_embeddings": 262144,
        "n_routed_experts": 512, "num_experts_per_tok": 22, "moe_intermediate_size": 2688, "moe_latent_size": 1024, "n_shared_experts": 1,
        "moe_shared_expert_intermediate_size": 5376, "routed_scaling_factor": 5.0, "mlp_hidden_act": "relu2", "ssm_state_size": 128,
        "mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "conv_kernel": 4, "chunk_size": 128, "num_nextn_predict_layers": 1,
    }  # fmt: skip
    model = hf.interpret(config)
    assert (model.total, model.layer_kinds, model.router) == (
        known.total,
        known.layer_kinds,
        known.router.but(normalise=None),
    )
    assert any("mtp_layers=1" in note for note in model.notes)
    with pytest.raises(MeshwrightError, match="MW-HF-007"):
        hf.interpret(config | {"layers_block_type": ["mamba", "retention"]})


def test_published_sizes_of_mamba2_alone_and_of_sparse_deepseek():
    mamba = {
        "model_type": "mamba2", "hidden_size": 2560, "num_hidden_layers": 64, "vocab_size": 50288, "num_heads": 80, "head_dim": 64,
        "state_size": 128, "n_groups": 1, "conv_kernel": 4, "chunk_size": 256, "tie_word_embeddings": True,
    }  # fmt: skip
    assert hf.interpret(mamba).total == 2_702_599_680
    assert "deepseek_v32" in hf.FAMILIES
