"""Reading Hugging Face configs: counts equal transformers' models and our catalog, and bad input never gives a traceback."""

import contextlib
import json
import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshwright.describe import hf
from meshwright.describe.catalog import load
from meshwright.describe.hf.reader import different_fields
from meshwright.describe.model import Model
from meshwright.errors import MeshwrightError

COMMON = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
GROUPED = COMMON | {"num_key_value_heads": 2}
LATENT = COMMON | {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
ROUTED = GROUPED | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
GPT2 = {"vocab_size": 300, "n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 64}
BLOOM = {"vocab_size": 300, "hidden_size": 48, "n_layer": 3, "n_head": 4}
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
MAMBA2 = GROUPED | {
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 24,
    "n_groups": 2,
    "conv_kernel": 4,
    "head_dim": 16,
}
MAMBA2_ALONE = {
    "hidden_size": 64, "num_hidden_layers": 3, "vocab_size": 512, "num_heads": 8, "head_dim": 16, "state_size": 24, "n_groups": 2, "expand": 2,
}  # fmt: skip
DELTA = {
    "num_hidden_layers": 4, "head_dim": 32, "linear_num_key_heads": 2, "linear_key_head_dim": 12, "linear_num_value_heads": 4,
    "linear_value_head_dim": 20,
}  # fmt: skip
OPT = {k: v for k, v in COMMON.items() if k != "intermediate_size"} | {"ffn_dim": 96, "max_position_embeddings": 32}
FALCON = {k: v for k, v in COMMON.items() if k != "intermediate_size"}
PADDED = GROUPED | {"pad_token_id": 0}
SMALL_3N = PADDED | {
    "head_dim": 24,
    "num_kv_shared_layers": 1,
    "laurel_rank": 8,
    "altup_num_inputs": 2,
    "vocab_size_per_layer_input": 80,
}
JAMBA = {
    "num_hidden_layers": 8,
    "attn_layer_period": 4,
    "attn_layer_offset": 2,
    "mamba_dt_rank": 6,
    "mamba_d_state": 10,
    "use_mamba_kernels": False,
}

ORACLE = {
    "llama": [GROUPED, COMMON | TIED | {"head_dim": 24}, GROUPED | {"attention_bias": True, "mlp_bias": True}],
    "mistral": [GROUPED | {"sliding_window": 32}, GROUPED | TIED | {"head_dim": 20, "sliding_window": None}],
    "phi3": [GROUPED | {"pad_token_id": 0}, COMMON | TIED | {"pad_token_id": 0, "resid_pdrop": 0.1}],
    "qwen2": [GROUPED | UNTIED, GROUPED | TIED | {"vocab_size": 700, "num_hidden_layers": 5}],
    "qwen3": [GROUPED | {"head_dim": 32}, GROUPED | TIED | {"head_dim": 16, "attention_bias": True}],
    "qwen2_moe": [
        ROUTED | {"shared_expert_intermediate_size": 96},
        ROUTED | {"shared_expert_intermediate_size": 40, "decoder_sparse_step": 2, "num_hidden_layers": 6} | TIED,
        ROUTED | {"shared_expert_intermediate_size": 40, "mlp_only_layers": [0, 1], "qkv_bias": False},
    ],
    "qwen3_moe": [
        ROUTED | {"head_dim": 32},
        ROUTED | {"mlp_only_layers": [0], "head_dim": 16, "attention_bias": True, "num_hidden_layers": 4} | TIED,
    ],
    "mixtral": [
        GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2},
        COMMON | {"num_key_value_heads": 1, "num_local_experts": 6, "num_experts_per_tok": 3} | TIED,
    ],
    "deepseek_v2": [
        LATENT,
        LATENT | {"q_lora_rank": None, "first_k_dense_replace": 0} | TIED,
        LATENT | {"attention_bias": True},
    ],
    "deepseek_v3": [
        LATENT,
        LATENT | {"q_lora_rank": None, "n_shared_experts": 1, "first_k_dense_replace": 2},
        LATENT | {"attention_bias": True} | TIED,
    ],
    "gpt2": [GPT2, GPT2 | UNTIED | {"n_inner": 100}, GPT2 | {"activation_function": "relu", "resid_pdrop": 0.0}],
    "gpt_neox": [COMMON, COMMON | TIED | {"attention_bias": False, "hidden_dropout": 0.1}],
    "gemma": [GROUPED | {"head_dim": 20}, GROUPED | UNTIED | {"head_dim": 16, "attention_bias": True}],
    "gemma2": [GROUPED | {"head_dim": 20}, GROUPED | UNTIED | {"head_dim": 16, "num_hidden_layers": 4}],
    "gemma3_text": [
        GROUPED | {"head_dim": 20},
        GROUPED | {"head_dim": 16, "num_hidden_layers": 7, "sliding_window": 8} | UNTIED,
    ],
    "gpt_oss": [
        GROUPED | {"head_dim": 24, "num_local_experts": 4, "num_experts_per_tok": 2},
        GROUPED | {"head_dim": 16, "num_local_experts": 6, "attention_bias": False} | TIED,
    ],
    "granite": [GROUPED, GROUPED | TIED | {"attention_bias": True, "mlp_bias": True}],
    "olmo2": [GROUPED, COMMON | TIED | {"attention_bias": True}],
    "olmo3": [GROUPED | {"num_hidden_layers": 4}, COMMON | {"sliding_window": 8}],
    "olmoe": [
        GROUPED | {"num_experts": 8, "num_experts_per_tok": 2},
        COMMON | {"num_experts": 4, "num_experts_per_tok": 1, "norm_topk_prob": True} | TIED,
    ],
    "llama4_text": [
        GROUPED | {"head_dim": 16, "num_local_experts": 4, "intermediate_size_mlp": 96},
        GROUPED | {"head_dim": 24, "num_local_experts": 4, "interleave_moe_layer_step": 2, "num_hidden_layers": 6} | TIED,
    ],
    "glm4_moe": [
        GROUPED | {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "use_qk_norm": True},
        GROUPED | {"n_routed_experts": 4, "num_experts_per_tok": 2, "attention_bias": True, "head_dim": 24} | TIED,
    ],
    "starcoder2": [GROUPED, COMMON | UNTIED | {"use_bias": False, "num_key_value_heads": 1}],
    "smollm3": [GROUPED | {"pad_token_id": 0}, COMMON | UNTIED | {"pad_token_id": 0, "mlp_bias": True}],
    "deepseek_v32": [LATENT | {"index_n_heads": 4, "index_head_dim": 16, "index_topk": 8}],
    "nemotron_h": [
        MAMBA2 | {"hybrid_override_pattern": "M-M*-"},
        MAMBA2 | {"hybrid_override_pattern": "ME*E", "moe_intermediate_size": 48, "n_routed_experts": 8, "num_experts_per_tok": 2,
                  "n_shared_experts": 1, "moe_shared_expert_intermediate_size": 56, "n_group": 1, "topk_group": 1},
    ],
    "qwen3_next": [
        ROUTED | DELTA | {"shared_expert_intermediate_size": 40},
        ROUTED | DELTA | {"full_attention_interval": 2, "mlp_only_layers": [1], "shared_expert_intermediate_size": 24} | TIED,
    ],
    "jamba": [
        GROUPED | JAMBA | {"num_experts": 4, "num_experts_per_tok": 2},
        GROUPED | JAMBA | {"num_experts": 1, "mamba_conv_bias": False, "mamba_dt_rank": "auto", "mamba_d_state": 8} | TIED,
    ],
    "minimax": [
        GROUPED | {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": [*["linear_attention"] * 2, "full_attention"]},
    ],
    "bamba": [
        GROUPED | {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 24},
    ],
    "deepseek_v4": [
        {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 32, "q_lora_rank": 24,
         "qk_rope_head_dim": 8, "o_groups": 2, "o_lora_rank": 20, "index_n_heads": 4, "index_head_dim": 16, "index_topk": 8, "hc_mult": 3,
         "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
         "mlp_layer_types": ["moe"] * 3, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    ],
    "mamba2": [MAMBA2_ALONE, MAMBA2_ALONE | TIED | {"use_conv_bias": False, "n_groups": 4}],
    "opt": [
        OPT, OPT | {"word_embed_proj_dim": 32, "do_layer_norm_before": False}, OPT | {"word_embed_proj_dim": 32} | UNTIED,
        OPT | {"_remove_final_layer_norm": True}, OPT | {"enable_bias": False, "layer_norm_elementwise_affine": False},
    ],
    "bloom": [BLOOM, BLOOM | UNTIED, BLOOM | {"hidden_size": 1024, "n_layer": 24, "n_head": 16}],
    "mpt": [{"d_model": 64, "n_layers": 3, "n_heads": 4, "vocab_size": 90, "expansion_ratio": 2}],
    "falcon": [
        FALCON, FALCON | {"multi_query": False, "alibi": True, "bias": True, "parallel_attn": False},
        FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
        FALCON | {"new_decoder_architecture": True, "ffn_hidden_size": 100} | UNTIED,
        {"vocab_size": 65024, "hidden_size": 8192, "num_hidden_layers": 60, "num_attention_heads": 128, "num_kv_heads": 8,
         "new_decoder_architecture": True},
    ],
    "gpt_bigcode": [GPT2, GPT2 | UNTIED | {"n_inner": 100, "multi_query": False}],
    "gptj": [GPT2 | {"rotary_dim": 8}, GPT2 | {"n_inner": 100, "rotary_dim": 8}],
    "codegen": [GPT2 | {"rotary_dim": 8}],
    "phi": [PADDED, PADDED | {"qk_layernorm": True}],
    "cohere": [PADDED, PADDED | UNTIED | {"use_qk_norm": True, "attention_bias": True}],
    "cohere2": [PADDED, PADDED | UNTIED | {"attention_bias": True, "sliding_window": 16}],
    "stablelm": [PADDED, PADDED | TIED | {"use_qkv_bias": True, "qk_layernorm": True, "use_parallel_residual": True}],
    "glm": [PADDED | {"head_dim": 24}, PADDED | TIED | {"attention_bias": False, "head_dim": 16}],
    "glm4": [PADDED | {"head_dim": 24}, PADDED | TIED | {"attention_bias": False, "head_dim": 16}],
    "minimax_m2": [PADDED | {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 24}],
    "qwen3_5_text": [PADDED | DELTA | {"attention_bias": True, "num_hidden_layers": 6}],
    "qwen3_5_moe_text": [{k: v for k, v in ROUTED.items() if k != "intermediate_size"} | DELTA | {"shared_expert_intermediate_size": 40}],
    "gemma3n_text": [SMALL_3N, SMALL_3N | UNTIED | {"attention_bias": True, "num_kv_shared_layers": 0, "intermediate_size": [96] * 3}],
}  # fmt: skip


def test_oracle_covers_every_family():
    assert set(ORACLE) == set(hf.FAMILIES)


@pytest.mark.parametrize("family", ORACLE)
def test_counts_equal_transformers(family, tmp_path):
    """Every parameter of the model that transformers builds on the meta device, from the config file that it saves."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    for shape in ORACLE[family]:
        config = transformers.AutoConfig.for_model(family, **shape)
        with torch.device("meta"):
            reference = transformers.AutoModelForCausalLM.from_config(config)
        expected = sum(p.numel() for p in reference.parameters())
        expected += sum(b.numel() for n, b in reference.named_buffers() if n.endswith("e_score_correction_bias"))
        path = tmp_path / "config.json"
        path.write_text(config.to_json_string())
        model = hf.read(path)
        assert model.total == expected, shape
        assert not [n for n in model.notes if n.startswith("unknown key")], model.notes
        # The same shape in the bare words of older files.
        assert hf.interpret({"model_type": family, **shape}).total == expected


REAL = {
    "llama3.1-405b": {
        "model_type": "llama", "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126,
        "num_attention_heads": 128, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
        "hidden_act": "silu", "tie_word_embeddings": False, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
        "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3",
                         "original_max_position_embeddings": 8192},
    },
    "mixtral-8x7b": {
        "architectures": ["MixtralForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000,
        "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None, "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5, "rope_theta": 1e6,
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61,
        "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "moe_intermediate_size": 2048,
        "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
        "moe_layer_freq": 1, "vocab_size": 129280, "max_position_embeddings": 163840, "topk_method": "noaux_tc",
        "num_nextn_predict_layers": 1, "tie_word_embeddings": False, "rms_norm_eps": 1e-6, "rope_theta": 10000,
        "n_group": 8, "topk_group": 4, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
        "rope_scaling": {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
                         "original_max_position_embeddings": 4096},
    },
    "gemma2-9b": {
        "model_type": "gemma2", "hidden_size": 3584, "intermediate_size": 14336, "num_hidden_layers": 42,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256, "vocab_size": 256000,
        "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 4096,
        "max_position_embeddings": 8192,
    },
    "gpt2-xl": {
        "model_type": "gpt2", "n_embd": 1600, "n_layer": 48, "n_head": 25, "n_positions": 1024, "n_ctx": 1024,
        "vocab_size": 50257, "activation_function": "gelu_new", "attn_pdrop": 0.1, "resid_pdrop": 0.1,
    },
    "gpt-oss-120b": {
        "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 128,
        "num_experts_per_tok": 4, "vocab_size": 201088, "sliding_window": 128, "attention_bias": True,
        "layer_types": ["sliding_attention", "full_attention"] * 18, "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5, "rope_theta": 150000, "swiglu_limit": 7.0,
        "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                         "original_max_position_embeddings": 4096},
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
        "num_experts_per_tok": 8, "moe_intermediate_size": 768, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "max_window_layers": 48, "use_sliding_window": False, "vocab_size": 151936, "max_position_embeddings": 40960,
        "tie_word_embeddings": False, "norm_topk_prob": True, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
    },
    "mistral-7b": {
        "model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "sliding_window": 4096,
        "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", REAL)
def test_released_configs_agree_with_the_catalog(name, tmp_path):
    """Released configs describe the same model as the catalog: equal counts, FLOPs and saved bytes."""
    (tmp_path / "config.json").write_text(json.dumps(REAL[name]))
    model, ours = hf.read(str(tmp_path), name), load("models", name)
    assert model.name == name
    assert model.parameters() == ours.parameters()
    assert model.active == ours.active
    assert model.flops(8192) == ours.flops(8192)
    assert model.activations(8192) == ours.activations(8192)
    assert model.max_positions == ours.max_positions
    if not model.not_run:
        assert different_fields(model, ours) == {}


def notes_of(**config) -> list[str]:
    return list(hf.interpret(config).notes)


def test_notes_name_what_is_assumed_or_not_understood():
    assert notes_of(model_type="llama", **COMMON) == []
    [note] = notes_of(model_type="llama", **COMMON, moe_intermediate_size=12, rope_theta=1e4, bos_token_id=1)
    assert "moe_intermediate_size = 12" in note
    assert "multi-token-prediction" in notes_of(model_type="deepseek_v3", **LATENT, num_nextn_predict_layers=1)[0]
    assert (
        "8, the default of mistral"
        in notes_of(model_type="mistral", **COMMON | {"num_attention_heads": 16, "sliding_window": None})[0]
    )
    irregular = ["full_attention", "sliding_attention", "sliding_attention"]
    assert "ignored" in notes_of(model_type="mistral", **GROUPED, sliding_window=8, layer_types=irregular)[0]
    assert len(notes_of(model_type="llama", **COMMON, **{f"odd_{i}": 1 for i in range(500)})) == hf.MOST_NOTES + 1


def test_language_model_inside_a_multi_modal_config():
    """Nested configs are saved as differences from their class: missing keys have the default of the class, and are reported."""
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    }
    model = hf.interpret({"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 1152}})
    assert (model.heads, model.kv_heads, model.head_dim, model.vocab, model.tied) == (8, 4, 256, 262208, True)
    assert (model.window, model.full_every) == (1024, 6)
    assert "language model" in model.notes[0]
    assert sum("default of gemma3_text" in n for n in model.notes) == 4


def test_flat_and_nested_multi_modal_configs_are_read():
    """Qwen2.5-VL stored the keys of its language model at the top level, and later in a nested table."""
    flat = hf.interpret(
        {"model_type": "qwen2_5_vl", **GROUPED, **UNTIED, "vision_config": {"depth": 32}, "vision_start_token_id": 5}
    )
    nested = hf.interpret(
        {"model_type": "qwen2_5_vl", "text_config": {"model_type": "qwen2_5_vl_text", **GROUPED}, **UNTIED}
    )
    assert (
        flat.parameters()
        == nested.parameters()
        == hf.interpret({"model_type": "qwen2", **GROUPED, **UNTIED}).parameters()
    )
    assert "language model" in flat.notes[0]
    scout = {
        "num_local_experts": 16,
        "intermediate_size_mlp": 96,
        "head_dim": 16,
        "model_type": "llama4_text",
        **GROUPED,
        "num_hidden_layers": 8,
    }
    model = hf.interpret({"model_type": "llama4", "text_config": scout, "vision_config": {}})
    assert (model.experts, model.shared_experts, model.window, model.full_every) == (16, 1, 8192, 4)


def test_norms_of_full_projections_are_counted():
    from meshwright.describe.sharding import parameters

    model = hf.interpret({"model_type": "olmo2", **GROUPED})
    assert sum(math.prod(p.shape) for p in parameters(model, range(model.layers))) == model.total


def test_differences_in_the_mathematics_are_listed():
    assert hf.interpret({"model_type": "llama", **GROUPED, "rope_theta": 5e5, "rms_norm_eps": 1e-6}).not_run == ()
    capped = hf.interpret({"model_type": "gemma2", **GROUPED, "head_dim": 16})  # soft-capping is its class's default
    assert (capped.not_run, capped.attention_softcap) == ((), 50.0)
    foreign = hf.interpret(
        {"model_type": "llama", **GROUPED, "attn_logit_softcapping": 30.0, "residual_multiplier": 1.0}
    )
    assert foreign.not_run == ("attn_logit_softcapping: soft-capping of attention scores (30.0)",)
    scaled = {"type": "mrope", "mrope_section": [1, 1, 2]}
    assert "mrope" in hf.interpret({"model_type": "qwen2_vl", **GROUPED, "rope_scaling": scaled}).not_run[0]
    assert hf.interpret({"model_type": "gpt_neox", **COMMON}).parallel_residual


@pytest.mark.parametrize("family", ORACLE)
def test_missing_keys_have_the_values_of_the_class(family):
    """A config of a few keys describes the same model as the file with all keys that transformers writes for it."""
    transformers = pytest.importorskip("transformers")
    shape = ORACLE[family][0]
    written = json.loads(transformers.AutoConfig.for_model(family, **shape).to_json_string())
    bare, whole = (hf.interpret(config) for config in ({"model_type": family, **shape}, written))
    same = {"notes": (), "max_positions": whole.max_positions, "head_dim": whole.head_width}
    assert bare.head_width == whole.head_width
    assert bare.but(**same) == whole.but(**same)


YARN = {
    "rope_type": "yarn",
    "factor": 40.0,
    "original_max_position_embeddings": 4096,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}


@pytest.mark.parametrize(
    ("family", "shape", "keys", "expected"),
    [
        ("llama", GROUPED, {"rope_scaling": {"type": "linear", "factor": 2.0}}, {"kind": "linear", "factor": 2.0}),
        ("llama", GROUPED, {"rope_scaling": {"rope_type": "default", "rope_theta": 7.0}}, {}),
        ("llama", GROUPED, {"rope_scaling": {"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 9}},
         {"kind": "dynamic", "factor": 2.0}),
        ("llama", GROUPED, {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 2.0,
         "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}},
         {"kind": "llama3", "factor": 8.0, "low_freq_factor": 2.0, "original_positions": 8192}),
        ("deepseek_v3", LATENT, {"rope_scaling": YARN},
         {"kind": "yarn", "factor": 40.0, "original_positions": 4096, "mscale": 1.0, "mscale_all_dim": 0.7, "interleaved": True}),
        ("deepseek_v3", LATENT, {"rope_interleave": False}, {}),
        ("deepseek_v2", LATENT, {"rope_interleave": True}, {"interleaved": True}),
        ("gpt_oss", ORACLE["gpt_oss"][0], {}, {"kind": "yarn", "factor": 32.0, "original_positions": 4096, "truncate": False}),
        ("phi3", GROUPED, {"rope_scaling": {"type": "su", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
         "max_position_embeddings": 64, "original_max_position_embeddings": 32},
         {"kind": "longrope", "factor": 2.0, "original_positions": 32, "short_factor": (1.0,) * 8, "long_factor": (2.0,) * 8}),
    ],
)  # fmt: skip
def test_rotary_positions_are_read(family, shape, keys, expected):
    model = hf.interpret({"model_type": family, "max_position_embeddings": 65536, **shape, **keys})
    assert model.rope.as_dict() == expected
    assert not [line for line in model.not_run if "rotary" in line]
    assert Model(**model.as_dict()) == model


def test_priorities_of_rotary_settings():
    both = {"rope_theta": 1e5, "rope_parameters": {"rope_theta": 2e5, "rope_type": "default"}}
    assert hf.interpret({"model_type": "llama", **GROUPED, **both}).rope_theta == 2e5
    assert hf.interpret({"model_type": "llama", **GROUPED, "rope_theta": 1e5}).rope_theta == 1e5
    assert hf.interpret({"model_type": "mixtral", **ORACLE["mixtral"][0]}).rope_theta == 1e6
    assert hf.interpret({"model_type": "gpt_neox", **COMMON}).rope_dim == 4
    assert hf.interpret({"model_type": "gpt_neox", **COMMON, "rotary_pct": 1.0}).rope_dim == 0


@pytest.mark.parametrize(
    "table",
    [
        {"rope_type": "linear", "factor": "8"},
        {"rope_type": "linear", "factor": 0},
        {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]},
        {"rope_type": "longrope", "short_factor": 3, "long_factor": [1.0]},
        {"rope_type": "longrope"},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "truncate": 1},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1},
    ],
)
def test_rotary_settings_that_are_refused(table):
    with pytest.raises(MeshwrightError, match=r"MW-(HF-006|MODEL-009|CONF-003)"):
        hf.interpret({"model_type": "llama", **GROUPED, "max_position_embeddings": 64, "rope_scaling": table})


def test_layers_without_a_window_are_a_stride_or_a_list():
    first = hf.interpret(
        {"model_type": "qwen2", **GROUPED, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}
    )
    assert (first.window, first.full_every, first.full_layers) == (8, 0, (0, 1))
    assert first.attended(64) == pytest.approx((2 * 32 + (8 - 0.5)) / 3)
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    regular = hf.interpret({"model_type": "gpt_oss", **ORACLE["gpt_oss"][0], "layer_types": types})
    assert (regular.full_every, regular.full_layers) == (2, ())


def test_values_that_training_uses():
    model = hf.interpret({"model_type": "llama", **GROUPED, "rope_theta": 5e5, "rms_norm_eps": 1e-6})
    assert (model.rope_theta, model.norm_epsilon) == (5e5, 1e-6)
    gpt2 = hf.interpret({"model_type": "gpt2", **GPT2, "resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.1})
    assert (gpt2.dropout, gpt2.dropout_rate, gpt2.attention_dropout, gpt2.embedding_dropout) == (True, 0.2, 0.1, None)
    other = hf.interpret({"model_type": "gpt2", **GPT2, "resid_pdrop": 0.0, "embd_pdrop": 0.2, "attn_pdrop": 0.0})
    assert (other.dropout_rate, other.embedding_rate, other.attention_dropout) == (0.0, 0.2, 0.0)


def test_activations():
    assert hf.interpret({"model_type": "gemma3_text", **GROUPED, "head_dim": 16}).activation == "geglu-tanh"
    assert hf.interpret({"model_type": "gpt2", **GPT2}).activation == "gelu-tanh"
    assert hf.interpret({"model_type": "gpt2", **GPT2, "activation_function": "gelu"}).activation == "gelu"
    with pytest.raises(MeshwrightError, match=r'MW-HF-006: activation "foo".*Valid: silu'):
        hf.interpret({"model_type": "llama", **COMMON, "hidden_act": "foo"})
    with pytest.raises(MeshwrightError, match="MW-HF-006"):
        hf.interpret({"model_type": "gpt2", **GPT2, "activation_function": "tanh"})


def test_a_window_without_a_pattern_limits_every_layer():
    model = Model(hidden=64, layers=4, heads=4, ffn=64, vocab=100)
    assert model.but(window=128).attended(4096) < model.attended(4096) / 10


@pytest.mark.parametrize("kind", ["bert", "t5", "mamba", "zamba2", "falcon_h1"])
def test_other_architectures_are_refused_with_a_fix(kind):
    with pytest.raises(MeshwrightError, match=r"MW-HF-008.*Fix: a \[model\] table"):
        hf.interpret({"model_type": kind, **COMMON})


def test_a_model_folder_is_accepted_where_a_model_is_named(tmp_path):
    from meshwright.describe.config import load as load_config

    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps({"model_type": "olmo2", **GROUPED}))
    (tmp_path / "plan.toml").write_text('model = "tiny"\ncluster = "dgx-h100"\n')
    assert load_config(str(tmp_path / "plan.toml")).model.norm_position == "post"


@pytest.mark.parametrize(
    ("config", "code"),
    [
        ({"model_type": "lama", **COMMON}, "MW-HF-004"),
        ({"model_type": 7, **COMMON}, "MW-HF-004"),
        ({**COMMON}, "MW-HF-004"),
        ({"model_type": "llama", "hidden_size": 64}, "MW-HF-005"),
        ({"model_type": "llama", **COMMON, "hidden_size": -64}, "MW-HF-006"),
        ({"model_type": "llama", **COMMON, "hidden_size": 10**30}, "MW-HF-006"),
        ({"model_type": "llama", **COMMON, "hidden_size": 64.5}, "MW-HF-006"),
        ({"model_type": "llama", **COMMON, "hidden_size": "64"}, "MW-HF-006"),
        ({"model_type": "llama", **COMMON, "hidden_size": True}, "MW-HF-006"),
        ({"model_type": "llama", **COMMON, "tie_word_embeddings": 1}, "MW-HF-006"),
        ({"model_type": "llama", **COMMON, "hidden_act": 3}, "MW-HF-006"),
        ({"model_type": "llama", **COMMON, "num_hidden_layers": 10**9}, "MW-HF-006"),
        ({"model_type": "llama", **COMMON, "num_attention_heads": 5}, "MW-MODEL-002"),
        ({"model_type": "gpt2", **GPT2, "add_cross_attention": True}, "MW-HF-007"),
        ({"model_type": "qwen3_moe", **ROUTED, "mlp_only_layers": [1], "num_hidden_layers": 6}, "MW-HF-007"),
        ({"model_type": "qwen3_moe", **ROUTED, "mlp_only_layers": "all"}, "MW-HF-006"),
        ({"model_type": "mixtral", **GROUPED, "num_local_experts": 4, "num_experts_per_tok": 9}, "MW-MODEL-005"),
    ],
)
def test_refusals(config, code):
    with pytest.raises(MeshwrightError) as caught:
        hf.interpret(config)
    assert caught.value.code == code


def test_another_spelling_of_a_family_is_mended():
    with pytest.raises(MeshwrightError) as caught:
        hf.interpret({"model_type": "deepseek-v3"})
    assert caught.value.fix == '"model_type": "deepseek_v3"'


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"{", "MW-HF-003"),
        (b"[1, 2]", "MW-HF-003"),
        (b'{"model_type": "llama", "hidden_size": NaN}', "MW-HF-003"),
        (b'{"hidden_size": -Infinity}', "MW-HF-003"),
        (b"\xff\xfe\x00", "MW-CONF-006"),
        (b"[" * 100_000, "MW-HF-003"),
        (b'{"a": ' + b"9" * 6000 + b"}", "MW-HF-003"),
        (b"", "MW-HF-003"),
        (b'{"model_type": "llama", "num_attention_heads": 1e400}', "MW-HF-006"),
    ],
)
def test_hostile_files(content, code, tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(MeshwrightError) as caught:
        hf.read(path)
    assert caught.value.code == code
    assert caught.value.exit_code == 2


def test_a_huge_file_is_refused_unread(tmp_path):
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(100 * 2**20)
    with pytest.raises(MeshwrightError) as caught:
        hf.read(path)
    assert caught.value.code == "MW-CONF-005"


@pytest.mark.parametrize("path", ["no/such/config.json", "", "\0", ".", "/dev/null", "x" * 5000])
def test_paths_that_hold_no_config(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MeshwrightError) as caught:
        hf.read(path)
    assert caught.value.code == "MW-CONF-004"


def test_names(tmp_path):
    assert hf.interpret({"model_type": "llama", **COMMON}).name == "llama"
    assert hf.interpret({"model_type": "llama", **COMMON, "_name_or_path": "org/Some-7B"}).name == "Some-7B"
    assert hf.interpret({"model_type": "llama", **COMMON, "_name_or_path": "../.."}).name == "llama"
    assert hf.interpret({"model_type": "llama", **COMMON}, "mine").name == "mine"


KEYS = sorted({k for shapes in ORACLE.values() for shape in shapes for k in shape} | {"layer_types", "text_config"})
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 300)
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.sampled_from(["silu", "gelu", "full_attention"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(sorted(hf.FAMILIES)), st.data())
def test_any_values_in_the_right_keys(family, data):
    """Either a model with counts, or our error. Mutated real configs reach more code than random keys."""
    shape = dict(data.draw(st.sampled_from(ORACLE[family])))
    shape.update(data.draw(st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=3)))
    try:
        model = hf.interpret({"model_type": family, **shape})
    except MeshwrightError:
        return
    assert 0 < model.active <= model.total
    assert len(model.notes) <= hf.MOST_NOTES + 1


@settings(max_examples=75, deadline=None)
@given(st.binary(max_size=60) | st.text(max_size=60).map(str.encode) | VALUES.map(lambda v: json.dumps(v).encode()))
def test_any_bytes(raw):
    with contextlib.suppress(MeshwrightError):
        hf.interpret(hf.parse(raw))


def test_a_proof_and_an_estimate_list_ignored_features(tmp_path):
    """A run without a part of the model needs its name, and a proof must report it."""
    from meshwright.describe.config import load as load_config
    from meshwright.models import build
    from meshwright.predict.prediction import predict
    from meshwright.proof.small import small_copy

    config = {"model_type": "mixtral", **ORACLE["mixtral"][0], "router_jitter_noise": 0.1, "odd_key": 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "plan.toml").write_text(
        'model = "config.json"\n[cluster]\nextends = "dgx-h100"\ngpus = 2\n[plan]\nreplicate = 2\n[workload]\nbatch = 4\nseq = 64\n'
    )
    refused = load_config(str(tmp_path / "plan.toml"))
    for check in (refused.check_trainable, lambda: small_copy(refused, 2), lambda: build(refused.model)):
        with pytest.raises(MeshwrightError, match=r"MW-BUILD-005.*--allow-differences router_jitter_noise"):
            check()
    with pytest.raises(MeshwrightError, match=r"MW-MODEL-011.*jitter.*Valid: all, router_jitter_noise"):
        load_config(str(tmp_path / "plan.toml"), ['model.allow_differences=["jitter"]'])
    config = load_config(str(tmp_path / "plan.toml"), ['model.allow_differences=["router_jitter_noise"]'])
    assert any("not exercised: router_jitter_noise: noise" in line for line in small_copy(config, 2).changes)
    assumed = predict(config).assumed
    assert any("odd_key" in line for line in assumed)
