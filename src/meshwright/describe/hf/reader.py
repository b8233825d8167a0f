"""From a parsed config to a Model: find the family, read its fields, and note what was assumed or not understood.

Encoders, encoder-decoders and layers of unknown kinds are refused with what to do instead: a wrong count is worse than none.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from meshwright.describe.hf.config import Config, load
from meshwright.describe.hf.differences import not_run, numbers
from meshwright.describe.hf.families import ALIASES, FAMILIES
from meshwright.describe.hf.rope import rotary
from meshwright.describe.model import Model
from meshwright.errors import MeshwrightError

MOST_NOTES = 20
ENCODERS = {
    "bert", "roberta", "distilbert", "deberta-v2", "electra", "modernbert", "xlm-roberta", "vit", "clip", "siglip", "dinov2",
}  # fmt: skip
NOT_DESCRIBED = {
    "mamba", "falcon_mamba", "zamba", "zamba2", "falcon_h1", "granitemoehybrid", "recurrent_gemma", "rwkv", "lfm2",
    "t5", "mt5", "umt5", "bart", "mbart", "pegasus", "whisper",
}  # fmt: skip


def read(path: str | Path, name: str = "") -> Model:
    """The model that a `config.json`, or a folder that holds one, describes."""
    return interpret(load(path), name)


def interpret(data: dict[str, Any], name: str = "") -> Model:
    """A config already parsed. `Model.notes` says what was assumed, `Model.not_run` what `train` computes differently."""
    notes: list[str] = []
    family, data = _language_model(data, notes)
    config = Config(family, data, notes)
    fields = FAMILIES[family](config)
    fields |= rotary(config, fields) | numbers(config)
    differences = not_run(config)
    notes += config.unread()
    if fields.get("balance_bias"):
        notes.append("the routers' balancing biases are counted; Transformers has them as buffers, not parameters")
    if len(notes) > MOST_NOTES:
        notes = [*notes[:MOST_NOTES], f"and {len(notes) - MOST_NOTES} more"]
    fields |= {"notes": tuple(notes), "not_run": tuple(differences), "dropout": config.drops}
    return Model(**fields, name=name or _name(data, family))


def family_of(data: dict[str, Any]) -> str:
    """The family of a config already parsed: the key of `FAMILIES`."""
    return _language_model(data, [])[0]


def _language_model(data: dict[str, Any], notes: list[str]) -> tuple[str, dict[str, Any]]:
    """The family and the keys of the language model, which a multi-modal config has in a nested table or at its top level."""
    text = data.get("text_config")
    towers = [key for key in data if re.fullmatch(r"(vision|audio|image)\w*_config", key)]
    if isinstance(text, dict) or towers:
        notes.append("only the language model is counted; towers for images or sound are left out")
    if isinstance(text, dict):
        outer = {k: v for k, v in data.items() if k in ("tie_word_embeddings", "model_type")}
        data = {**outer, **text}
    data = {k: v for k, v in data.items() if k not in towers}
    return _family(data), data


def _family(data: dict[str, Any]) -> str:
    """By `model_type`, else by the class named in `architectures`."""
    kind = data.get("model_type")
    if isinstance(kind, str) and ALIASES.get(kind, kind) in FAMILIES:
        return ALIASES.get(kind, kind)
    classes = data.get("architectures")
    first = classes[0] if isinstance(classes, list) and classes and isinstance(classes[0], str) else ""
    if kind is None and first:
        stem = re.sub(r"(ForCausalLM|LMHeadModel|ForConditionalGeneration|Model)$", "", first[:100]).lower()
        for family in (*FAMILIES, *ALIASES):
            if family.replace("_", "") == stem:
                return ALIASES.get(family, family)
    if isinstance(kind, str) and (spelled := kind.lower().replace("-", "_")) in {*FAMILIES, *ALIASES}:
        raise MeshwrightError("MW-HF-004", f"model_type {kind} is not known", fix=f'"model_type": "{spelled}"')
    raise _cannot_be_described(str(kind or first or "(none)")[:60])


def _cannot_be_described(kind: str) -> MeshwrightError:
    """Build the error for a family that is not read: how to write the model. It never suggests another family: its counts would differ."""
    if kind in ENCODERS:
        return MeshwrightError(
            "MW-HF-008",
            f"model_type {kind} cannot be read",
            why="Only decoders are read from a config; an encoder of plain layers can be written as a [model] table",
            fix='a [model] table in a plan file, with hidden, layers, heads, ffn, vocab, activation = "gelu" and causal = false',
        )
    why = (
        "It has layers that a [model] table cannot describe: shared, parallel, with cross-attention, or with a mixer that is not known"
        if kind in NOT_DESCRIBED
        else "Its parameters would have to be counted as its class builds them, which is known of the families in docs/hugging-face.md"
    )
    plain = (
        ""
        if kind in NOT_DESCRIBED
        else "a [model] table in a plan file, with hidden, layers, heads, kv_heads, ffn, vocab and activation; or "
    )
    counts = 'a [model] table with kind = "counts", given_parameters, given_flops and given_activations (data parallelism only)'
    code = "MW-HF-008" if kind in NOT_DESCRIBED else "MW-HF-004"
    return MeshwrightError(code, f"model_type {kind} cannot be read", why=why, fix=plain + counts)


def _name(data: dict[str, Any], family: str) -> str:
    given = data.get("_name_or_path")
    last = given.rstrip("/").rsplit("/", 1)[-1] if isinstance(given, str) else ""
    return last if re.fullmatch(r"[\w.+-]{1,60}", last, re.ASCII) and last.strip(".") else family
