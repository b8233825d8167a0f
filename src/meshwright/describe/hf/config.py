"""Parse a JSON config and check each value: bounded, typed, with a record of the keys that were read.

`load` accepts a regular file of at most 2 MB, `parse` refuses NaN, infinities and anything but an object, and `HfConfig`
returns numbers, flags and words within bounds or raises an error that names the key. `unread` lists the keys that no
function read and that are not known to be harmless.
"""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeGuard

from meshwright.describe.base import MOST
from meshwright.describe.files import read_text
from meshwright.errors import MeshwrightError, kind_of
from meshwright.units import Json

MOST_BYTES = 2_000_000
# Values a config may omit because they are the defaults of its class (nested configs are saved as differences).
DEFAULTS: dict[str, dict[str, int]] = {
    "glm4_moe": {"moe_intermediate_size": 1408, "num_key_value_heads": 8},
    "llama4_text": {"num_key_value_heads": 8, "head_dim": 128, "intermediate_size_mlp": 16384},
    "olmo3": {"sliding_window": 4096},
    "smollm3": {"num_key_value_heads": 4},
    "starcoder2": {"num_key_value_heads": 2},
    "deepseek_v2": {"q_lora_rank": 1536, "n_shared_experts": 2, "n_routed_experts": 64, "moe_intermediate_size": 1407},
    "deepseek_v3": {"q_lora_rank": 1536, "n_shared_experts": 1, "first_k_dense_replace": 3, "n_routed_experts": 256,
                    "moe_intermediate_size": 2048},
    "gemma": {"num_key_value_heads": 16, "head_dim": 256},
    "gemma2": {"num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096},
    "gemma3_text": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208,
                    "sliding_window": 4096},
    "gpt_oss": {"head_dim": 64, "sliding_window": 128, "num_key_value_heads": 8},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "mixtral": {"num_key_value_heads": 8},
    "qwen2": {"num_key_value_heads": 32},
    "qwen3": {"head_dim": 128, "num_key_value_heads": 32},
    "qwen2_moe": {"num_key_value_heads": 16, "num_experts": 60, "shared_expert_intermediate_size": 5632},
    "qwen3_moe": {"num_key_value_heads": 4, "num_local_experts": 128},
    "qwen3_next": {"num_key_value_heads": 2, "head_dim": 256},
    "qwen3_5_text": {"num_key_value_heads": 4, "head_dim": 256},
    "qwen3_5_moe_text": {"num_key_value_heads": 2, "head_dim": 256},
    "minimax": {"num_key_value_heads": 8},
    "minimax_m2": {"num_key_value_heads": 8, "head_dim": 128},
    "glm": {"num_key_value_heads": 2, "head_dim": 128},
    "glm4": {"num_key_value_heads": 2, "head_dim": 128},
    "gemma3n_text": {"num_key_value_heads": 2, "head_dim": 256, "sliding_window": 512},
    "cohere2": {"sliding_window": 4096},
    "opt": {"max_position_embeddings": 2048},
    "gpt_bigcode": {"max_position_embeddings": 1024},
}  # fmt: skip
DEFAULTS["deepseek_v32"] = DEFAULTS["deepseek_v3"]
# Keys of a family, and the names under which most families have them.
GPT = {"n_embd": "hidden_size", "n_embed": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
       "n_inner": "intermediate_size", "n_positions": "max_position_embeddings", "activation_function": "hidden_act"}  # fmt: skip
RENAMED: dict[str, dict[str, str]] = {
    **dict.fromkeys(("bloom", "gpt_bigcode", "gptj", "codegen"), GPT),
    "falcon": {"activation": "hidden_act", "ffn_hidden_size": "intermediate_size", "n_embed": "hidden_size"},
    "mpt": {"d_model": "hidden_size", "n_heads": "num_attention_heads", "n_layers": "num_hidden_layers", "max_seq_len": "max_position_embeddings"},
    "opt": {"ffn_dim": "intermediate_size", "activation_function": "hidden_act"},
}  # fmt: skip
# Spellings of dropout rates.
DROPOUT = {
    "attention": ("attention_dropout", "attn_pdrop"),
    "residual": ("resid_pdrop", "residual_dropout", "hidden_dropout", "dropout"),
    "embedding": ("embd_pdrop", "embedding_dropout"),
}
# The class's defaults, where they are not 0.
RATES = {"opt": {"residual": 0.1}, **{family: dict.fromkeys(DROPOUT, 0.1) for family in ("gpt2", "gpt_bigcode")}}
# Keys that a family's class does not use, or that repeat other keys.
UNUSED: dict[str, tuple[str, ...]] = {
    "bloom": ("slow_but_exact", "seq_length", "masked_softmax_fusion", "bias_dropout_fusion", "offset_alibi", "unk_token_id"),
    "mpt": ("expansion_ratio", "learned_pos_emb", "no_bias", "norm_type", "attn_config", "embedding_fraction", "verbose"),
    "gpt_bigcode": ("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "inference_runner", "max_batch_size", "max_sequence_length"),
    "cohere2": ("cache_implementation", "order_of_interleaved_layers", "position_embedding_type", "rotary_pct", "use_gated_activation"),
    "minimax_m2": (
        "router_aux_loss_coef", "shared_intermediate_size", "use_routing_bias", "use_qk_norm", "qk_norm_type", "attn_type_list", "use_mtp",
        "num_mtp_modules", "mtp_transformer_layers", "layernorm_full_attention_beta", "max_model_len",
    ),
    "gemma3n_text": (
        "altup_active_idx", "altup_coef_clip", "altup_correct_scale", "altup_lr_multiplier", "activation_sparsity_pattern", "max_window_layers",
        "query_pre_attn_scalar", "layer_types",
    ),
    "nemotron_h": (
        "num_hidden_layers", "intermediate_size", "expand", "layers_block_type", "num_logits_to_keep", "use_mamba_kernels", "mamba_hidden_act",
        "mtp_hybrid_override_pattern", "mtp_layers_block_type", "moe_intermediate_size", "moe_shared_expert_intermediate_size", "n_group",
        "topk_group", "n_routed_experts", "n_shared_experts", "num_experts_per_tok", "norm_topk_prob", "routed_scaling_factor",
        "moe_latent_size", "moe_shared_expert_overlap", "time_step_limit", "time_step_min", "time_step_max", "time_step_floor", "time_step_rank",
        "rescale_prenorm_residual",
    ),
    "jamba": ("use_mamba_kernels", "num_logits_to_keep", "use_associative_scan"),
    "minimax": ("postnorm", "shared_intermediate_size", "shared_moe_mode", "block_size", "layer_types"),
    "bamba": (
        "mamba_expand", "num_logits_to_keep", "time_step_limit", "time_step_min", "time_step_max", "time_step_floor", "time_step_rank",
        "rescale_prenorm_residual",
    ),
    "mamba2": (
        "residual_in_fp32", "rms_norm", "hidden_act", "conv_kernel", "n_groups", "state_size", "use_conv_bias", "chunk_size",
        "time_step_limit", "time_step_min", "time_step_max", "time_step_floor", "time_step_rank",
        "rescale_prenorm_residual",
    ),
    "deepseek_v4": (
        "mlp_layer_types", "num_hash_layers", "hc_sinkhorn_iters", "hc_eps", "scoring_func", "partial_rotary_factor", "topk_method",
        "router_aux_loss_coef", "expert_dtype", "attention_bias", "num_key_value_heads", "norm_topk_prob",
    ),
    "llama4_text": ("router_aux_loss_coef", "router_jitter_noise", "attention_chunk_size"),
}  # fmt: skip
# Keys that change no count: token ids, rates, precisions, rotary details, housekeeping.
HARMLESS = re.compile(
    r"^_|^rope|^rotary|^partial_rotary|theta$|^architectures$|^model_type$|token_id$|token_index$|eps$|epsilon$|"
    r"dropout|pdrop|^init|dtype$|^use_cache$|^transformers|^tokenizer|^auto_map$|label|^pretraining_tp$|^pad|^bos|^eos|"
    r"^ep_size$|scaling|softcapping$|"
    r"^query_pre_attn_scalar$|^quantization_config$|^cache_impl|^summary_|^task_specific|^output_|^return_dict$|"
    r"^use_parallel_residual$|^gradient_checkpointing$|^scale_attn|^reorder_and|^n_ctx$|^original_max_position|"
    r"^swiglu_|^experts_per_token$|^initial_context_length$|^is_|^chunk_size|^problem_type$|^full_attn_mod$|"
    r"^interpolate_factor$|^layer_types$|^qk_head_dim$|^max_window_layers$|sliding_window|^torchscript$|^tie_|^mm_tokens|^rms_norm"
)


class HfConfig:
    """The keys of one config: typed reading, with a record of what was read and what was assumed."""

    def __init__(self, family: str, data: Json, notes: list[str]) -> None:
        renamed = RENAMED.get(family, {})
        self.data = {
            renamed.get(key, key): value for key, value in data.items() if value is not None or key not in renamed
        }
        self.family, self.notes = family, notes
        self.read_keys = set(UNUSED.get(family, ()))
        self.differences: list[str] = []  # parts of the model that `train` computes in another way

    def get(self, key: str) -> Any:
        self.read_keys.add(key)
        return self.data.get(key)

    def covered(self, *keys: str) -> None:
        """Mark keys that the family's class does not use, or that repeat other keys."""
        self.read_keys.update(keys)

    def differs(self, *parts: str) -> None:
        """Add parts of the model that our transformer computes in another way, each as "name: what it is"."""
        self.differences += parts

    def number(self, key: str, default: int | None = None, least: int = 1, most: int = MOST) -> int:
        """An integer. If it is null or absent: the given default, else the default of the family's class, else an error."""
        value = self.get(key)
        if value is None:
            assumed = DEFAULTS.get(self.family, {}).get(key) if key not in self.data else None
            if assumed is not None:
                self.notes.append(f"{key} is not given: {assumed}, the default of {self.family}, is used")
                return assumed
            if default is None:
                raise MeshwrightError("MW-HF-005", f"the {self.family} config lacks '{key}'", why="It has no default")
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.bad(key, value, f"a whole number from {least} to {most}")
        return value

    def _checked(self, key: str, default: Any, is_valid: Callable[[Any], bool], wanted: str) -> Any:
        """The value of a key, or its default if it is null or absent."""
        value = self.get(key)
        if value is not None and not is_valid(value):
            raise self.bad(key, value, wanted)
        return default if value is None else value

    def decimal(self, key: str, default: float) -> float:
        """A number from 0 up."""
        return float(
            self._checked(key, default, lambda v: is_number(v) and 0 <= v <= MOST, f"a number from 0 to {MOST}")
        )

    def flag(self, key: str, default: bool) -> bool:
        return bool(self._checked(key, default, lambda v: isinstance(v, bool), "true or false"))

    def word(self, key: str, default: str) -> str:
        return str(self._checked(key, default, lambda v: isinstance(v, str), "text"))

    def many(self, key: str, kind: type) -> list[Any] | None:
        def is_list(value: Any) -> bool:
            return isinstance(value, list) and all(isinstance(v, kind) and not isinstance(v, bool) for v in value)

        values: list[Any] | None = self._checked(
            key, None, is_list, f"a list of {'whole numbers' if kind is int else 'texts'}"
        )
        return values

    def decimals(self, key: str) -> tuple[float, ...]:
        """A list of numbers from 0 up; empty if it is null or absent."""

        def are_numbers(value: Any) -> bool:
            return isinstance(value, list) and bool(value) and all(is_number(v) and 0 <= v <= MOST for v in value)

        return tuple(map(float, self._checked(key, (), are_numbers, f"a list of numbers from 0 to {MOST}")))

    def bad(self, key: str, value: object, wanted: str) -> MeshwrightError:
        return MeshwrightError("MW-HF-006", f"{key} = {shown(value)} is not valid", valid=[wanted])

    def rate(self, kind: str) -> float | None:
        """The dropout rate of a kind, in any of the spellings that configs use; None if the config has none."""
        for key in DROPOUT[kind]:
            value = self.get(key)
            if is_number(value):
                if not 0 <= value < 1:
                    raise self.bad(key, value, "a number from 0 up to 1")
                return float(value)
        return RATES.get(self.family, {}).get(kind)

    @property
    def drops(self) -> bool:
        """Whether any dropout rate is above zero, so that masks are saved for backward."""
        return any(self.rate(kind) for kind in DROPOUT)

    def unread(self) -> list[str]:
        """Keys with a value that no function read."""
        ignored = (k for k, v in self.data.items() if k not in self.read_keys and v not in (None, False, 0, "", [], {}))
        return [f"unknown key, ignored: {k[:60]} = {shown(self.data[k])}" for k in ignored if not HARMLESS.search(k)]


def is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def shown(value: object) -> str:
    try:
        text = json.dumps(value, default=str)
    except (RecursionError, ValueError):
        text = kind_of(value)
    return text if len(text) <= 60 else text[:57] + "..."


def load(path: str | Path) -> Json:
    """The content of a config.json, or of that of a folder."""
    return parse(read_text(Path(path) / "config.json" if os.path.isdir(path) else path, MOST_BYTES).encode())


def parse(raw: bytes) -> Json:
    """JSON without NaN or infinities, an object at the top."""
    try:
        data = json.loads(raw.decode("utf-8-sig"), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        why = "It is nested too deeply" if isinstance(error, RecursionError) else str(error)[:200]
        raise MeshwrightError("MW-HF-003", "the config is not valid JSON", why=why) from None
    if not isinstance(data, dict):
        raise MeshwrightError("MW-HF-003", f"the config is {kind_of(data)}, not a JSON object")
    return data


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number of JSON")
