"""Rotary positions of a Hugging Face config, read into `rope_theta`, `rope_dim` and `[model.rope]`.

Newer files have a table `rope_parameters`; older ones have `rope_theta` at the top level and the scaling in `rope_scaling`, with the key
`type` instead of `rope_type`. A value in the table has priority over the same key at the top level, except
`original_max_position_embeddings`, where the top level has priority.
"""

from __future__ import annotations

from typing import Any

from meshwright.describe.hf.config import Config
from meshwright.describe.rope import NEED_ORIGINAL

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
OLD_KINDS = {"su": "longrope"}
# Defaults of the configuration classes, where they differ from those of a Model.
THETA = {
    "mixtral": 1e6,
    "minimax": 1e6,
    "gpt_oss": 1.5e5,
    "gemma3_text": 1e6,
    "olmo3": 5e5,
    "llama4_text": 5e5,
    "smollm3": 2e6,
    "cohere": 5e5,
    "minimax_m2": 5e6,
    "gemma3n_text": 1e6,
}
TABLE = {
    "gpt_oss": {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096},
}
PARTIAL = {
    "gpt_neox": 0.25,
    "glm4_moe": 0.5,
    "phi3": 1.0,
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "stablelm"), 0.25),
    **dict.fromkeys(("glm", "glm4", "phi"), 0.5),
    "minimax_m2": 1.0,
}  # families that can rotate a part of each head
INTERLEAVED = (
    "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm", "glm4", "cohere", "cohere2", "gptj", "codegen", "llama4_text",
)  # fmt: skip
# Base of windowed layers, which are not scaled: the default of the class, or 0 for the base of the other layers.
WINDOW_THETA = {"gemma3_text": 1e4, "olmo3": 0.0}
POSITIONS = {
    "llama": 2048, "mistral": 131072, "qwen2": 32768, "qwen3": 32768, "qwen3_moe": 32768, "mixtral": 131072,
    "deepseek_v2": 2048, "deepseek_v3": 4096, "deepseek_v32": 4096, "gpt_oss": 131072,
}  # fmt: skip


def rope_parameters(c: Config) -> dict[str, Any]:
    """The table of rotary settings, or what the family's class assumes without one."""
    for key in ("rope_scaling", "rope_parameters"):
        table = c.get(key)
        if isinstance(table, dict) and table:
            inner = table.get("full_attention")
            return inner if isinstance(inner, dict) else table
    return TABLE.get(c.family, {})


def rope_kind(c: Config) -> str:
    """The kind of scaling; a word that is not one of `KINDS` is not run."""
    table = rope_parameters(c)
    kind = table.get("rope_type") or table.get("type") or "default"
    return OLD_KINDS.get(str(kind), str(kind))


def window_parameters(c: Config) -> dict[str, Any]:
    """The table of rotary settings of windowed layers, in families that have one for each kind of layer."""
    table = c.get("rope_parameters")
    inner = table.get("sliding_attention") if isinstance(table, dict) else None
    return inner if isinstance(inner, dict) and c.family in WINDOW_THETA else {}


def window_rope_kind(c: Config) -> str:
    return str(window_parameters(c).get("rope_type") or "")


def window_base(c: Config, fields: dict[str, Any], out: dict[str, Any]) -> dict[str, float]:
    """The base of windowed layers, if they rotate in another way than the others."""
    if c.family not in WINDOW_THETA or not fields.get("window"):
        return {}
    main = out.get("rope_theta", 10_000.0)
    own = Config(c.family, window_parameters(c), c.notes).decimal("rope_theta", 0.0)
    base = own or c.decimal("rope_local_base_freq", WINDOW_THETA[c.family]) or main
    return {} if base == main and "rope" not in out else {"window_rope_theta": base}


def rotary(c: Config, fields: dict[str, Any]) -> dict[str, Any]:
    """The rotary settings of a model that has the other `fields`."""
    if fields.get("positions", "rope") != "rope":
        return {}
    table = Config(c.family, rope_parameters(c), c.notes)
    out: dict[str, Any] = {}
    theta = table.data.get("rope_theta") or c.data.get("rope_theta") or c.data.get("rotary_emb_base")
    theta = THETA.get(c.family) if theta is None else theta
    if isinstance(theta, int | float) and not isinstance(theta, bool) and 1 < theta < 1e15:
        out["rope_theta"] = float(theta)
    if c.family in PARTIAL:
        out |= _part_of_head(c, table, fields)
    kind = rope_kind(c)
    options = _scaling(c, table, kind, fields, out) if kind in KINDS and kind != "default" else {}
    if c.family in INTERLEAVED and c.flag("rope_interleave", True):
        options["interleaved"] = True
    out |= {"rope": options} if options else {}
    return out | window_base(c, fields, out)


def _part_of_head(c: Config, table: Config, fields: dict[str, Any]) -> dict[str, int]:
    share = c.decimal("partial_rotary_factor", c.decimal("rotary_pct", PARTIAL[c.family]))
    share = table.decimal("partial_rotary_factor", share)
    width = fields["head_dim"] or fields["hidden"] // fields["heads"]
    rotated = int(width * share)
    return {"rope_dim": rotated} if 0 < rotated < width else {}


def _scaling(c: Config, table: Config, kind: str, fields: dict[str, Any], out: dict[str, Any]) -> dict[str, Any]:
    """The options of a kind of scaling that differ from their defaults."""
    options: dict[str, Any] = {"kind": kind}
    positions = fields.get("max_positions", 0)
    if kind in NEED_ORIGINAL and not positions and c.family in POSITIONS:
        positions = out["max_positions"] = POSITIONS[c.family]
        c.notes.append(f"max_position_embeddings is not given: {positions}, the default of {c.family}, is used")
    original = table.number("original_max_position_embeddings", 0, least=0)
    original = c.number("original_max_position_embeddings", original, least=0)
    if kind != "dynamic" and original and original != positions:
        options["original_positions"] = original
    ratio = positions / original if original and kind in ("yarn", "longrope") else 1.0
    options["factor"] = table.decimal("factor", ratio)
    if kind == "llama3":
        options |= {
            key: table.decimal(key, 0.0) for key in ("low_freq_factor", "high_freq_factor") if key in table.data
        }
    if kind == "yarn":
        given = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")
        options |= {key: table.decimal(key, 0.0) for key in given if table.data.get(key)}
        options |= {} if table.flag("truncate", True) else {"truncate": False}
    if kind == "longrope":
        options |= {key: table.decimals(key) for key in ("short_factor", "long_factor")}
    if kind in ("yarn", "longrope") and table.data.get("attention_factor"):
        options["attention_factor"] = table.decimal("attention_factor", 0.0)
    return options
