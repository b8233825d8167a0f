"""Tiny Transformers models with random weights, saved as folders: the oracle of reading and writing."""

import json
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from meshwright.describe import hf
from meshwright.models import build
from meshwright.models.hf.folder import Folder
from meshwright.models.hf.safetensors_file import StoredTensor, write_safetensors
from meshwright.models.hf.weights import FolderWeights
from meshwright.parallel.pieces import materialise

SIZES = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
         "max_position_embeddings": 32}  # fmt: skip
GROUPED = SIZES | {"num_key_value_heads": 2}
ROUTED = GROUPED | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = SIZES | {
    "q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 10,
    "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
GPT2 = {"vocab_size": 40, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "n_inner": 48}
WINDOWS = {
    "use_sliding_window": True,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}


def rope(kind, original=0, **options):
    """Scaled rotary positions; `original`: positions before scaling."""
    positions = {"original_max_position_embeddings": original} if original else {}
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **positions, **options}}


GEMMA3 = {"head_dim": 12, "sliding_window": 5, "sliding_window_pattern": 2, "rope_local_base_freq": 20.0}
LLAMA4 = {
    "head_dim": 8, "intermediate_size_mlp": 24, "num_local_experts": 4, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2,
    "no_rope_layer_interval": 2, "attention_chunk_size": 7, "floor_scale": 3, "attn_scale": 0.6,
}  # fmt: skip
CASES = {
    "llama": ("Llama", GROUPED | {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("Llama", GROUPED | {"tie_word_embeddings": True, "head_dim": 12}),
    "mistral": ("Mistral", GROUPED | {"sliding_window": 5}),
    "qwen2": ("Qwen2", GROUPED | {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", GROUPED | {"head_dim": 8}),
    "phi3": ("Phi3", GROUPED | {"pad_token_id": 0}),
    "glm4": ("Glm4", GROUPED | {"head_dim": 8, "pad_token_id": None}),
    "stablelm": ("StableLm", GROUPED | {"use_qkv_bias": True}),
    "mixtral": ("Mixtral", GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2_moe": ("Qwen2Moe", ROUTED | {"shared_expert_intermediate_size": 20}),
    "qwen3_moe": ("Qwen3Moe", ROUTED | {"head_dim": 8, "mlp_only_layers": [0]}),
    "deepseek_v2": ("DeepseekV2", LATENT | {"q_lora_rank": None, "topk_method": "greedy"}),
    "deepseek_v3": ("DeepseekV3", LATENT | {"n_group": 2, "topk_group": 1}),
    "gpt_oss": ("GptOss", GROUPED | {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5}),
    "gpt2": ("GPT2", GPT2),
    "llama-linear": ("Llama", GROUPED | rope("linear", factor=4.0)),
    "llama-dynamic": ("Llama", GROUPED | rope("dynamic", factor=2.0) | {"max_position_embeddings": 8}),
    "llama-llama3": ("Llama", GROUPED | rope("llama3", 8, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0)),
    "qwen2-yarn": ("Qwen2", GROUPED | rope("yarn", 8, factor=4.0) | WINDOWS),
    "mistral-longrope": ("Mistral", GROUPED | rope("longrope", 8, factor=4.0, short_factor=[1.0] * 4, long_factor=[1.0, 2.0, 3.0, 4.0])),
    "deepseek_v3-yarn": ("DeepseekV3", LATENT | rope("yarn", 8, factor=4.0, mscale=1.0, mscale_all_dim=0.5)),
}  # fmt: skip
FURTHER = {  # families whose logits `test_logits_hf` compares
    "gemma": ("Gemma", GROUPED | {"head_dim": 12}),
    "gemma2": ("Gemma2", GROUPED | {"head_dim": 12, "sliding_window": 5, "query_pre_attn_scalar": 10}),
    "gemma3": ("Gemma3", GROUPED | GEMMA3),
    "gemma3-linear": ("Gemma3", GROUPED | GEMMA3 | {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "granite": ("Granite", GROUPED | {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2, "logits_scaling": 3.0}),
    "smollm3": ("SmolLM3", GROUPED | {"no_rope_layer_interval": 2, "pad_token_id": 0}),
    "olmo2": ("Olmo2", GROUPED),
    "olmo3": ("Olmo3", GROUPED | {"sliding_window": 5, "layer_types": WINDOWS["layer_types"]}),
    "olmoe": ("Olmoe", GROUPED | {"num_experts": 4, "num_experts_per_tok": 2}),
    "starcoder2": ("Starcoder2", GROUPED | {"sliding_window": 5}),
    "gpt_neox": ("GPTNeoX", SIZES | {"rotary_pct": 0.5}),
    "glm4_moe": ("Glm4Moe", GROUPED | {"head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}),
    "llama4": ("Llama4", GROUPED | LLAMA4),
}  # fmt: skip
CASES |= FURTHER
SPECIAL = {  # for single tests
    "gpt_oss-packed": ("GptOss", CASES["gpt_oss"][1] | {"intermediate_size": 64}),
    "bytes": ("Llama", GROUPED | {"vocab_size": 300}),
}
IDS = torch.arange(24).view(2, 12) * 7 % 40


@cache
def original(case: str):
    """A Transformers model with no bias at zero and no norm at one, in evaluation mode."""
    import transformers

    name, keys = (CASES | SPECIAL)[case]
    kind = getattr(transformers, "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM")
    torch.manual_seed(0)
    model = kind(kind.config_class(**keys))
    for tensor in (*model.parameters(), *(b for n, b in model.named_buffers() if "correction_bias" in n)):
        nn.init.normal_(tensor, std=0.2)
    model.tie_weights()
    return model.eval()


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def saved(case: str, folder: Path, **options) -> Path:
    original(case).save_pretrained(folder, **options)
    return folder


def loaded(folder: Path):
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


def our_network(weights, dtype: torch.dtype = torch.float32):
    """Our network on one device with the weights of a folder."""
    module = build(weights.model).to(dtype)
    materialise(module, "cpu")
    for name, parameter in module.named_parameters():
        parameter.data.copy_(weights.read(name, parameter.shape, [0] * parameter.ndim, parameter.shape))
    return module.eval()


def opened(folder):
    return FolderWeights(folder, hf.read(folder))


def tensors_of(folder):
    tensors = Folder(folder).tensors
    return {name: tensors.read(name, tuple(slice(0, n) for n in tensors.shape(name))) for name in tensors.names()}


def rewritten(folder, tensors, **keys):
    """Replace all tensors of a folder, and some keys of its config."""
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    described = [StoredTensor(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()]
    write_safetensors(folder / "model.safetensors", described, tensors.__getitem__, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | keys
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class InFloat64(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        wide = [torch.float64 if value is torch.float32 else value for value in args]
        options = {key: torch.float64 if value is torch.float32 else value for key, value in (kwargs or {}).items()}
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        return function(*wide, **options)


@contextmanager
def in_float64():
    """Every call that names float32, as Transformers' norms, angles, softmax and routers do, gets float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    with InFloat64():
        yield
    torch.set_default_dtype(before)
