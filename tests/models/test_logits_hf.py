"""A model read from a Hugging Face config computes the logits, and the gradient of the embedding, of the class of this config.

Transformers computes norms, angles, softmax and routers in float32 whatever the dtype of the weights. `in_float64` replaces float32 by
float64 in every call, so that both sides differ by rounding in float64 only: any difference in the mathematics is far above `BOUND`.
"""

import pytest
import torch

from hf_folders import in_float64
from meshwright.describe import hf
from meshwright.models import build
from meshwright.models.hf.weights import FolderWeights

transformers = pytest.importorskip("transformers")

SEQ = 24
# Each logit passes about ten sums of up to 48 terms: with 2⁻⁵³ each, 1e-13 of the largest; routers and softmax amplify it.
BOUND = 1e-11
SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 16, "rms_norm_eps": 1e-4,
}  # fmt: skip
GPT2 = {"vocab_size": 61, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 32}
ROUTED = SIZES | {"num_experts": 6, "num_local_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MIXTRAL = {key: value for key, value in ROUTED.items() if key not in ("num_experts", "moe_intermediate_size")}
LATENT = SIZES | {
    "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
    "v_head_dim": 10, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_shared_experts": 2,
    "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2,
}  # fmt: skip
GEMMA = SIZES | {"head_dim": 12}
NEOX = {key: value for key, value in SIZES.items() if key not in ("num_key_value_heads", "rms_norm_eps")}
FALCON = {key: value for key, value in NEOX.items() if key != "intermediate_size"}
LLAMA4 = SIZES | {
    "head_dim": 8, "intermediate_size_mlp": 24, "num_local_experts": 6, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2,
    "no_rope_layer_interval": 2, "attention_chunk_size": 7, "floor_scale": 3, "attn_scale": 0.6,
}  # fmt: skip
GLM4_MOE = SIZES | {
    "head_dim": 12, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_shared_experts": 2,
    "first_k_dense_replace": 1, "routed_scaling_factor": 1.5,
}  # fmt: skip
WINDOWS = ["sliding_attention", "full_attention", "sliding_attention"]
SCALED = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8},
    "exact yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "truncate": False,
                   "beta_fast": 4.0, "beta_slow": 0.5, "attention_factor": 1.3},
    "longrope": {"rope_type": "longrope", "original_max_position_embeddings": 8, "factor": 4.0,
                 "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 3.0, 4.0]},
    "short longrope": {"rope_type": "longrope", "original_max_position_embeddings": 64, "factor": 2.0,
                       "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 3.0, 4.0]},
}  # fmt: skip
DEEPSEEK_YARN = SCALED["yarn"] | {"mscale": 0.7, "mscale_all_dim": 1.3}
PATTERN = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
BIASED = {"attention_bias": True}
TIED = {"tie_word_embeddings": True}
CASES = [
    ("llama", SIZES),
    ("llama", SIZES | BIASED | TIED | {"mlp_bias": True, "head_dim": 12, "rope_theta": 500.0}),
    *(("llama", SIZES | {"rope_scaling": scaled, "rope_theta": 500.0}) for scaled in SCALED.values()),
    ("mistral", SIZES | {"sliding_window": 5, "head_dim": 10}),
    ("mistral", SIZES | {"sliding_window": None, "rope_scaling": SCALED["yarn"]}),
    ("qwen2", SIZES | PATTERN | TIED),
    ("qwen2", SIZES | {"rope_scaling": SCALED["yarn"]}),
    ("qwen3", SIZES | {"head_dim": 12}),
    ("qwen3", SIZES | PATTERN | BIASED | {"head_dim": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}
     | {"num_hidden_layers": 4}),
    ("glm", SIZES | {"head_dim": 12, "pad_token_id": None}),
    ("glm4", SIZES | TIED | {"head_dim": 8, "pad_token_id": None, "attention_bias": False}),
    ("stablelm", SIZES | {"use_qkv_bias": True, "layer_norm_eps": 1e-4}),
    ("mixtral", MIXTRAL | {"sliding_window": 7}),
    ("qwen3_moe", ROUTED | {"head_dim": 12, "norm_topk_prob": True, "decoder_sparse_step": 2, "num_hidden_layers": 4}),
    ("qwen3_moe", ROUTED | {"head_dim": 8, "norm_topk_prob": False, "use_sliding_window": True, "sliding_window": 5}),
    ("deepseek_v2", LATENT | {"topk_method": "group_limited_greedy", "routed_scaling_factor": 1.5, "norm_topk_prob": True}),
    ("deepseek_v2", LATENT | {"q_lora_rank": None, "rope_scaling": DEEPSEEK_YARN} | BIASED),
    ("deepseek_v3", LATENT),
    ("deepseek_v3", LATENT | {"rope_scaling": DEEPSEEK_YARN, "norm_topk_prob": False} | BIASED | TIED),
    ("deepseek_v3", LATENT | {"q_lora_rank": None, "rope_interleave": False, "rope_scaling": SCALED["linear"]}),
    ("gpt_oss", MIXTRAL | {"head_dim": 12, "sliding_window": 5, "swiglu_limit": 0.5}),
    ("gpt_oss", MIXTRAL | {"head_dim": 8, "attention_bias": False, "layer_types": ["full_attention"] * 3} | TIED),
    ("qwen2_moe", ROUTED | {"shared_expert_intermediate_size": 20, "qkv_bias": False}),
    ("gemma", GEMMA),
    ("gemma", GEMMA | BIASED | {"tie_word_embeddings": False, "hidden_act": "quick_gelu"}),
    ("gemma2", GEMMA | {"sliding_window": 5, "query_pre_attn_scalar": 3, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    ("gemma2", GEMMA | {"sliding_window": 5, "attn_logit_softcapping": None, "final_logit_softcapping": None}),
    ("gemma3_text", GEMMA | {"sliding_window": 5, "sliding_window_pattern": 2, "rope_theta": 300.0, "rope_local_base_freq": 20.0}),
    ("gemma3_text", GEMMA | {"sliding_window": 5, "layer_types": WINDOWS, "rope_scaling": SCALED["linear"], "final_logit_softcapping": 3.0}),
    ("gemma3_text", GEMMA | {"sliding_window": 8, "layer_types": WINDOWS, "use_bidirectional_attention": True}),
    ("gpt_neox", NEOX),
    ("gpt_neox", NEOX | {"use_parallel_residual": False, "rotary_pct": 1.0, "attention_bias": False, "hidden_act": "gelu_new"} | TIED),
    ("smollm3", SIZES | {"no_rope_layer_interval": 2}),
    ("smollm3", SIZES | BIASED | {"no_rope_layers": [0, 1, 1], "use_sliding_window": True, "sliding_window": 5, "mlp_bias": True}),
    ("llama4_text", LLAMA4),
    ("llama4_text", LLAMA4 | {"use_qk_norm": False, "attn_temperature_tuning": False, "num_experts_per_tok": 2} | BIASED),
    ("llama4_text", LLAMA4 | {"no_rope_layers": [1, 0, 1], "moe_layers": [1], "rope_scaling": SCALED["llama3"], "floor_scale": 8}),
    ("glm4_moe", GLM4_MOE),
    ("glm4_moe", GLM4_MOE | BIASED | {"use_qk_norm": True, "partial_rotary_factor": 1.0, "norm_topk_prob": False, "n_group": 4, "topk_group": 2}),
    ("granite", SIZES | {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2, "logits_scaling": 1.7}),
    ("olmo2", SIZES),
    ("olmo3", SIZES | {"sliding_window": 5, "layer_types": WINDOWS, "rope_theta": 300.0}),
    ("olmo3", SIZES | {"sliding_window": 5, "layer_types": WINDOWS, "rope_scaling": SCALED["yarn"]}),
    ("olmoe", {**MIXTRAL, "num_experts": 6, "norm_topk_prob": True}),
    ("starcoder2", NEOX | {"num_key_value_heads": 2, "sliding_window": 5, "norm_epsilon": 1e-3}),
    ("cohere", NEOX | {"num_key_value_heads": 2, "logit_scale": 0.3, "layer_norm_eps": 1e-3}),
    ("cohere2", NEOX | {"sliding_window": 5, "sliding_window_pattern": 2, "head_dim": 8}),
    ("cohere2", NEOX | BIASED | {"sliding_window": 5, "layer_types": WINDOWS, "head_dim": 8}),
    ("stablelm", NEOX | {"num_key_value_heads": 2, "use_parallel_residual": True, "use_qkv_bias": True, "layer_norm_eps": 1e-3}),
    ("stablelm", NEOX | {"num_key_value_heads": 4, "partial_rotary_factor": 0.5}),
    ("minimax_m2", MIXTRAL | {"head_dim": 12}),
    ("falcon", FALCON | {"num_kv_heads": 2, "new_decoder_architecture": True, "bias": True}),
    ("falcon", FALCON | {"new_decoder_architecture": False, "multi_query": True}),
    ("falcon", FALCON | {"new_decoder_architecture": False, "multi_query": False, "parallel_attn": False}),
    ("gpt_bigcode", GPT2),
    ("gpt_bigcode", GPT2 | {"multi_query": False, "n_inner": 40}),
    ("gpt2", GPT2),
    ("gpt2", GPT2 | {"scale_attn_by_inverse_layer_idx": True, "n_inner": 40, "tie_word_embeddings": False}),
    ("gpt2", GPT2 | {"scale_attn_weights": False, "activation_function": "quick_gelu"}),
    ("gpt2", GPT2 | {"activation_function": "gelu"}),
]  # fmt: skip


@pytest.fixture(autouse=True)
def wide():
    with in_float64():
        yield


def scattered(family, shape):
    """The model of Transformers, with weights so large that every part of it affects the logits."""
    config = transformers.AutoConfig.for_model(
        family, **{**shape, "pad_token_id": None}
    )  # a padding row has no gradient
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    reference = transformers.AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        tensors = {**dict(reference.named_parameters()), **correction_biases(reference)}
        for name, tensor in tensors.items():
            centre = 1.0 if name.endswith("norm.weight") or ".ln_" in name else 0.0
            tensor.copy_(centre + 0.3 * torch.randn(tensor.shape, generator=generator))
    return reference


def correction_biases(reference):
    return {name: buffer for name, buffer in reference.named_buffers() if name.endswith("e_score_correction_bias")}


def copied(reference, model, folder):
    """Our network with the weights of Transformers' model, through a folder."""
    reference.save_pretrained(folder)
    weights = FolderWeights(folder, model)
    network = build(model).to_empty(device="cpu").double().eval()
    if model.tied:
        network.head.project.weight = network.embedding.tokens.weight
    for name, parameter in network.named_parameters():
        parameter.data.copy_(weights.read(name, parameter.shape, [0] * parameter.ndim, parameter.shape))
    return network


def named(case):
    family, shape = case
    common = {**SIZES, **GPT2, **LATENT, **ROUTED, **LLAMA4}
    return f"{family} {' '.join(key for key, value in shape.items() if common.get(key) != value)}"


@pytest.mark.parametrize(("family", "shape"), CASES, ids=[named(case) for case in CASES])
def test_logits_equal_those_of_transformers(family, shape, tmp_path):
    reference = scattered(family, shape)
    model = hf.interpret(reference.config.to_dict())
    assert model.not_run == ()
    network = copied(reference, model, tmp_path)
    ids = torch.randint(0, 61, (2, SEQ), generator=torch.Generator().manual_seed(1))
    expected, got = reference(ids).logits, network(ids)
    weights = torch.randn(got.shape, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(got, expected, rtol=0, atol=BOUND * expected.abs().max().item())
    for logits in (expected, got):
        (logits * weights).sum().backward()
    theirs, ours = reference.get_input_embeddings().weight.grad, network.embedding.tokens.weight.grad
    torch.testing.assert_close(ours, theirs, rtol=0, atol=BOUND * theirs.abs().max().item())
