"""The model of settings: a catalog entry by name, changed by the numbers that the settings state, or those numbers alone.

Where a number is missing, it takes a value that every degree divides, so that the rules about it cannot be broken; `Shape.complete` is then false
and the memory of such a model is not judged.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from meshwright.describe import catalog
from meshwright.describe.model import Model
from meshwright.errors import MeshwrightError
from meshwright.interop.keys import Facts, Table, read_facts
from meshwright.interop.stages import pattern_layers
from meshwright.interop.tables import KeyTable

# --- Names of models and of hardware, as people write them, in the catalog.
#
# `meta-llama/Meta-Llama-3.1-8B-Instruct`, `llama31_8b` and `llama3.1-8b` are one shape. A name is compared without its owner, without words
# for how it was trained, and without punctuation.

TRAINING = re.compile(
    r"^(meta|nvidia)[-_]|([-_]?(instruct|base|it|pt|hf|chat|thinking|bf16|fp8|mx|nvfp4|bnb|nf4|[48]bit|gptq|awq|int[48]|dequantized|prequantized|\d{4}|v0\.\d|4k|128k|"
    r"pretrain|sft|lora|peft|config|tp\d+|pp\d+|ep\d+|cp\d+))+(?=$|[-_])",
    re.IGNORECASE,
)
# Names of models that have the shape of a catalog entry.
ALIASES = {
    "llama3.3-70b": "llama3.1-70b", "llama3-405b": "llama3.1-405b", "qwen2-72b": "qwen2.5-72b", "qwen2-7b": "qwen2.5-7b",
    "qwen2-1.5b": "qwen2.5-1.5b", "qwen2-0.5b": "qwen2.5-0.5b", "qwq-32b": "qwen2.5-32b", "phi-4": "phi4-14b", "deepseek-v3-671b": "deepseek-v3",
    "deepseek-v3.1": "deepseek-v3", "deepseek-r1": "deepseek-v3", "nemotron4-340b": "nemotron-4-340b", "nemotron4-15b": "nemotron-4-15b",
    "kimi-k2.5": "kimi-k2", "nemotron-3-nano-30b-a3b": "nemotron-3-nano", "nemotron-3-super-120b-a12b": "nemotron-3-super",
    "nemotron-3-ultra-550b-a55b": "nemotron-3-ultra", "ai21-jamba-1.5-large": "jamba-1.5-large", "glm-4.6": "glm-4.5", "glm-4.7": "glm-4.5",
    "minimax-m2.5": "minimax-m2", "minimax-m2.7": "minimax-m2", "c4ai-command-r7b-12-2024": "command-r7b", "qwen3.6-35b-a3b": "qwen3.5-35b-a3b",
}  # fmt: skip
HARDWARE = (
    (r"gb300", "gb300-nvl72"), (r"gb200", "gb200-nvl72"), (r"b300", "dgx-b300"), (r"b200", "dgx-b200"), (r"h200", "dgx-h200"),
    (r"h800", "dgx-h800"), (r"h100", "dgx-h100"), (r"a100.{0,6}40", "azure-nd-a100-v4"), (r"a[18]00", "dgx-a100"), (r"v100", "dgx-v100"),
    (r"mi355", "mi355x-8"), (r"mi300", "mi300x-8"), (r"a10g", "aws-g5"), (r"a40(?!0)", "a40-pcie"),
)  # fmt: skip


def canonical(name: str) -> str:
    """A name without owner, training words and punctuation, in lower case."""
    last = name.strip().rstrip("/").rsplit("/", 1)[-1]
    return re.sub(r"[^a-z0-9]", "", TRAINING.sub("", last).lower())


@cache
def _index() -> dict[str, str]:
    entries = {canonical(name): name for name in catalog.names("models")}
    known = {canonical(alias): name for alias, name in ALIASES.items() if name in catalog.names("models")}
    return {**known, **entries}


def catalog_model(name: object) -> str:
    """The catalog's name of a model that people call `name`; "" if it has none."""
    return _index().get(canonical(str(name)), "") if name else ""


def catalog_cluster(hardware: object) -> str:
    """The catalog's cluster of a kind of GPU; "" if it has none."""
    text = str(hardware or "").lower()
    known = catalog.names("clusters")
    return next((name for pattern, name in HARDWARE if re.search(pattern, text) and name in known), "")


# GB of GPUs that no cluster of the catalog has.
OTHER_GPUS = ((r"[34]090|a10(?![0g])|l4(?!0)|a5000", 24), (r"5090", 32), (r"l40s?|a6000|rtx.?[68]000", 48), (r"h20(?!0)", 96),
              (r"t4|p100", 16))  # fmt: skip
OTHER_HARDWARE = rf"(gb10|spark|tpu|npu|ascend|gaudi|rtx.?\d{{4}}|mi250x?|{'|'.join(name for name, _ in OTHER_GPUS)})"
REPORTED = 0.988  # of the GB in a GPU's name, the GiB that the driver reports


def stated_memory(hardware: object) -> float | None:
    """GiB of a GPU that names its memory (`A100 64GB`), or that no cluster of the catalog has; None: the catalog's cluster decides."""
    text = str(hardware or "").lower()
    if stated := re.search(r"(\d{2,3}) ?gi?b(?![a-z])", text):
        return int(stated[1]) * REPORTED
    if catalog_cluster(text):
        return None
    return next((gb * REPORTED for name, gb in OTHER_GPUS if re.search(rf"(?<![a-z0-9]){name}(?![0-9])", text)), None)


def hardware_in(text: str) -> str:
    """The GPU that a path, a name or a comment speaks of, as a word by itself; "" if there is none."""
    for pattern in (*(pattern for pattern, _ in HARDWARE), OTHER_HARDWARE):
        if found := re.search(rf"(?<![a-z0-9]){pattern}(?![0-9])", text.lower()):
            return found[0]
    return ""


HYBRID = re.compile(
    r"nemotron.?h|nemotron.{0,3}3|nemotron.?nano|jamba|falcon.?h1|qwen3.?next|qwen3[._]?5|qwen3\.[68]|kimi.?linear|mamba|granite.?4|minimax.?m1|ling.?2\.5"
)
QWEN_HYBRID = re.compile(r"qwen3[._]?[5-9](?!\d)")
DIVISIBLE = 2**7 * 3 * 5 * 7  # a multiple of the usual degrees
MANY_LAYERS = 2**6 * 3 * 5
LEAST_VOCAB = 32_000  # tokens of Llama 2's and Mistral's tokenizers; others have more
# Names of a shape in torchtitan's model packages, in Hugging Face configs, and plain ones.
PLAIN = Table(KeyTable("plain"))


@dataclass
class ShapeKeys:
    """A model, which of its numbers were stated, and whether they suffice to compute memory and time."""

    model: Model
    stated: set[str] = field(default_factory=set)
    complete: bool = False
    partial: bool = False  # parts of the model are not counted: what is computed is less than the truth
    source: str = ""
    layers_stated: bool = False  # the number of layers is given, not known by the model's name only
    changed: bool = False  # the settings change numbers of the catalog's entry
    refused: MeshwrightError | None = None  # numbers that contradict each other, where all are stated
    numbers: Mapping[str, Any] = field(default_factory=dict)  # of a model that is refused

    @property
    def layers(self) -> int | None:
        return self.model.layers if "layers" in self.stated else None

    @property
    def missing(self) -> list[str]:
        """Numbers of the model that are not stated, although memory and time depend on them."""
        if self.complete:
            return []
        needed = ["layers", "hidden", "heads", "vocab"]
        if not {"ffn", "expert_ffn"} & self.stated:
            needed.append("ffn")
        if self.model.experts:
            needed += ["experts", "top_k"]
        return [name for name in needed if name not in self.stated]

    def with_least_vocab(self) -> "ShapeKeys":
        """The same with the smallest usual vocabulary where nothing else is missing: tokenizers state it, settings often do not. What is computed
        is then less than the truth."""
        if self.missing != ["vocab"] or self.partial:
            return self
        return replace(self, model=self.model.but(vocab=LEAST_VOCAB), complete=True, partial=True)

    @property
    def experts(self) -> bool | None:
        """Whether the model has experts; None: not known."""
        return bool(self.model.experts) if "experts" in self.stated else None


def shape_of(facts: Facts, name: str, shape: Mapping[str, Any] | None = None, trains_mtp: bool = False) -> ShapeKeys:
    """The model that a name, a table of its numbers and facts of the settings describe; settings win over the table, both over the name.

    `trains_mtp`: the framework trains the multi-token prediction of a model that has it, unless the settings switch it off."""
    given = {
        **({"mtp": 1} if trains_mtp and QWEN_HYBRID.search(name.lower()) else {}),
        **_table_facts(shape or {}),
        **{k: v for k, v in facts.items() if k.startswith("model.") or k in SHAPE_FACTS},
    }
    fields = {k.removeprefix("model."): v for k, v in given.items() if k.startswith("model.") and v is not None}
    if given.get("pattern"):
        fields["layers"] = pattern_layers(given["pattern"])
    if given.get("mtp"):
        fields["mtp_layers"] = given["mtp"]
    fields |= dropout_fields(facts)
    entry = _agreeing_entry(catalog_model(name), fields)
    hybrid = bool(given.get("pattern") or facts.get("state_space")) or (not entry and bool(HYBRID.search(name.lower())))
    if entry:
        return _of_catalog(entry, fields, facts)
    _llama_width(given, fields)
    _moe_layers(given, fields)
    stated = set(fields)
    if QWEN_HYBRID.search(name.lower()) and fields.get("hidden"):
        fields |= _gated_delta(fields)
    enough = {"layers", "hidden", "heads", "vocab"} <= stated and bool({"ffn", "expert_ffn"} & stated)
    if fields.get("layers") and "experts" not in fields and enough and fields.get("ffn"):
        stated.add("experts")
        fields["experts"] = 0
    if fields.get("experts") and not fields.get("top_k"):
        enough = False
    partial = bool(given.get("encoder_layers")) or hybrid
    if facts.get("ep", 1) > 1 and not fields.get("experts"):
        fields["experts"], enough = DIVISIBLE * facts["ep"], False
    try:
        model = Model(**_filled(fields), name=_short(name))
    except MeshwrightError as error:
        return ShapeKeys(
            Model(**_filled({"layers": fields.get("layers", 0)}), name=_short(name)),
            stated & {"layers"},
            source="settings",
            refused=error if enough else None,
            numbers=_filled(fields),
        )
    return ShapeKeys(model, stated, enough, partial, "settings", layers_stated="layers" in fields)


def _agreeing_entry(entry: str, fields: Facts) -> str:
    """The catalog's entry of the model's name, unless the numbers that are stated are those of another model."""
    if not entry:
        return ""
    model: Model = catalog.load("models", entry)
    same = {k: v for k, v in fields.items() if k in ("hidden", "heads", "experts", "top_k", "kv_rank") and v}
    return entry if all(getattr(model, k) == v for k, v in same.items()) else ""


# Numbers that tell models apart.
SIZES = {
    "hidden",
    "layers",
    "heads",
    "kv_heads",
    "ffn",
    "vocab",
    "experts",
    "top_k",
    "expert_ffn",
    "tied",
    "activation",
}


def same_shape(model: Model, other: Model, stated: set[str] = SIZES) -> bool:
    """Whether two models agree in their numbers, of those that are stated."""
    return all(getattr(model, name) == getattr(other, name) for name in SIZES & stated)


DROPOUTS = ("hidden_dropout", "attention_dropout")


def dropout_fields(facts: Facts) -> Facts:
    """The dropout of a model. PyTorch's operator and Megatron's fused one keep the mask of what is added, a byte an element; fused attention keeps
    a seed only."""
    hidden, attention = map(facts.get, DROPOUTS)
    fields: Facts = {} if hidden is None else {"dropout": hidden > 0, "dropout_rate": hidden}
    return fields if attention is None else fields | {"attention_dropout": attention}


SHAPE_FACTS = ("pattern", "ffn_multiple", "ffn_factor", "moe_layout", "mtp", "encoder_layers")


def _table_facts(shape: Mapping[str, Any]) -> Facts:
    return {k: v for k, v in read_facts(PLAIN, shape).facts.items() if v is not None}


def _of_catalog(entry: str, fields: Facts, facts: Facts) -> ShapeKeys:
    model: Model = catalog.load("models", entry)
    changeable = ("layers", "vocab_multiple", "mtp_layers", "dropout", "dropout_rate", "attention_dropout")
    changes = {k: v for k, v in fields.items() if k in changeable and getattr(model, k) != v}
    if "layers" in changes:
        changes["dense_layers"] = min(model.dense_layers, changes["layers"])
    return ShapeKeys(
        model.but(**changes) if changes else model,
        set(Model.model_fields),
        complete=True,
        source=f"catalog {entry}",
        layers_stated="layers" in fields,
        changed=bool(changes),
    )


def _llama_width(given: Facts, fields: Facts) -> None:
    """Llama's FFN width: two thirds of 4 × hidden, times a factor, up to a multiple."""
    if "ffn" in fields or not fields.get("hidden") or not (given.get("ffn_multiple") or given.get("ffn_factor")):
        return
    base = int(2 * 4 * fields["hidden"] / 3)
    width = int(given["ffn_factor"] * base) if given.get("ffn_factor") else base
    unit = int(given.get("ffn_multiple") or 1)
    fields["ffn"] = -(-width // unit) * unit


def _gated_delta(fields: Facts) -> Facts:
    """Qwen3.5 and its successors: three layers of gated delta rule for each of attention, and a shared expert, as in Qwen3-Next."""
    channel = "E" if fields.get("experts") else "-"
    heads = 32 if fields["hidden"] < 3072 else 64
    mixer = {"kind": "gated-delta", "heads": heads, "head_dim": 128, "groups": 16, "state": 128, "conv": 4, "chunk": 64}
    shared = {"shared_experts": 1, "shared_gate": True} if fields.get("experts") else {}
    return {
        **shared,
        "pattern": f"M{channel} M{channel} M{channel} *{channel}",
        "linear": mixer,
        "qk_norm": True,
        "output_gate": True,
    }


def _moe_layers(given: Facts, fields: Facts) -> None:
    """Megatron's `([0]*3+[1]*58)`: dense layers first; a number n: every n-th layer has experts."""
    layout = str(given.get("moe_layout") or "")
    if found := re.fullmatch(r"\(?\[0\]\*(\d+)\+\[1\]\*\d+\)?", layout):
        fields["dense_layers"] = int(found[1])
    elif layout.isdecimal() and int(layout) > 1:
        fields["moe_every"] = int(layout)


def _filled(fields: Facts) -> dict[str, Any]:
    """The fields of a model; what is missing takes a value that every degree divides."""
    out = {k: v for k, v in fields.items() if v is not None}
    out["layers"] = out.get("layers") or MANY_LAYERS
    out["heads"] = out.get("heads") or DIVISIBLE
    if out.get("kv_heads") and "heads" not in fields:
        out["heads"] = out["kv_heads"] * DIVISIBLE
    out["hidden"] = out.get("hidden") or out["heads"] * 8
    if out["hidden"] % out["heads"] and not out.get("head_dim"):
        out["head_dim"] = max(1, out["hidden"] // out["heads"])
    if out.get("kv_rank") and out.get("nope_dim"):
        out |= {"attention": "mla", "kv_heads": 0, "value_dim": out.get("value_dim") or out["nope_dim"]}
    else:
        for name in ("q_rank", "kv_rank", "nope_dim", "value_dim", "attention"):
            out.pop(name, None)
        out.pop("rope_dim", None)
    out["vocab"] = out.get("vocab") or DIVISIBLE * 8
    if out.get("experts"):
        out["top_k"] = out.get("top_k") or 1
        out["expert_ffn"] = out.get("expert_ffn") or out.get("ffn") or DIVISIBLE
        out["dense_layers"] = min(out.get("dense_layers") or 0, out["layers"])
        if out.get("shared_ffn") and not out.get("shared_experts"):
            out["shared_experts"] = 1
    else:
        for name in ("experts", "top_k", "expert_ffn", "shared_experts", "shared_ffn", "dense_layers", "moe_every"):
            out.pop(name, None)
    out["ffn"] = out.get("ffn") or (out.get("expert_ffn") if out.get("experts") else 4 * out["hidden"]) or DIVISIBLE
    if out.get("vocab_multiple", 1) is None:
        out.pop("vocab_multiple")
    return out


def _short(name: str) -> str:
    return re.sub(r"[^\w.+-]", "-", name.rstrip("/").rsplit("/", 1)[-1])[:60] or "custom"
