"""The model of a published run: a catalog entry, or a shape built from the row's own numbers.

The name of the row is compared with the names of the catalog. A variant ("layers reduced", other experts) keeps the entry's architecture and
takes the row's numbers. A name that the catalog does not have becomes a transformer of the row's layers, hidden width, heads and FFN. What a row
leaves open (SwiGLU or GELU, tied embeddings, learned positions, FFN width, vocabulary) is chosen so that the shape has the published number of
parameters: the first choice, in the order of how usual they are, whose number of parameters rounds to the published one; if there is none, the
first within 2% of it. If there is none either, the row is refused.

One published run: its row, and the objects that it is converted to.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from typing import Any

from meshwright.describe import catalog
from meshwright.describe.config import Config, Configured
from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.describe.variants import ATTENTIONS
from meshwright.errors import MeshwrightError
from meshwright.units import format_count


@dataclass
class PublishedRun(Configured):
    """One published run: its measurements and its configuration, or why it has none."""

    row: dict[str, str]
    assumed: list[str] = field(default_factory=list)
    refused: str = ""
    config: Config = None  # type: ignore[assignment]  # only a refused row has none

    @property
    def plan(self) -> Plan:
        return self.config.plan

    @property
    def row_id(self) -> str:
        return self.row.get("row_id", "")

    @property
    def step_time(self) -> float | None:
        """The published step time, or the one that follows from tokens per second and device."""
        published = number(self.row.get("step_time_s", ""))
        rate = number(self.row.get("tokens_per_s_per_gpu", ""))
        if published is None and rate and not self.refused:
            return self.workload.tokens_per_step / (rate * self.cluster.world)
        return published

    @property
    def memory(self) -> float | None:
        return number(self.row.get("memory_gib", ""))


def number(text: str | None) -> float | None:
    """The first number in a cell, or None if the cell is blank."""
    match = re.search(r"\d+(?:\.\d+)?(?:[eE][+-]?\d+)?", text or "")
    return float(match[0]) if match else None


def integer(text: str | None, default: int = 0) -> int:
    """The first number in a cell as an integer, or `default` if the cell is blank."""
    value = number(text)
    return default if value is None else int(min(value, 2**40))


def refusal(what: str) -> MeshwrightError:
    """The error of a row that cannot be converted."""
    return MeshwrightError("MW-VAL-003", what)


MODEL_COLUMNS = (
    "file",
    "model",
    "params",
    "layers",
    "hidden",
    "ffn_hidden",
    "heads",
    "kv_heads",
    "vocab",
    "experts",
    "topk",
    "seq_len",
)
TOLERANCE = 0.02  # of the published number of parameters
EXACT = 0.001  # a published number is not more exact than this
ALIASES = (  # canonical name → catalog entry, where the two are written differently
    (r"opt175b", "gpt3-175b"),
    (r"llama3\|405b", "llama3.1-405b"),
    (r"nemotron3(\|5)?(nano|lightning)", "nemotron-3-nano"),
    (r"minimax(text)?01|minimaxtext", "minimax-text-01"),
    (r"jamba1\.5mini|jambamini", "jamba-1.5-mini"),
    (r"jamba1\.5large|jambalarge", "jamba-1.5-large"),
)
GATED = (
    r"llama|qwen|mixtral|deepseek|grok|gpt.?oss|mistral|gemma|olmo|phi.?[34]|\byi\b|glm|internlm|baichuan|smollm|granite|"
    r"minimax|kimi|dbrx|command.?r|falcon.?3"
)
ENCODER_DECODER = r"\b(m?t5|bart|whisper)\b"
HYBRID = r"hybrid|mamba|jamba|nemotron.?h"
VOCABULARIES = (50304, 32000, 128256, 151936)


def read_model(c: PublishedRun) -> Model:
    """The model of a row, with the assumptions added to the case."""
    r, name = c.row, c.row["model"].lower()
    published = {key: integer(r[key]) for key in ("layers", "hidden", "heads", "vocab") if integer(r[key])}
    count, rounding = _parameters(r["params"]), _rounding(r["params"])
    base = catalog_entry(name)
    if re.search(ENCODER_DECODER, name):
        raise refusal("a model of encoder and decoder cannot be described: its layers attend to two sequences")
    if base:
        shape: Model = catalog.load("models", base)
        if "reduced" in name and count is None:
            _require_reduced(c, name)
        if published.get("hidden", shape.hidden) == shape.hidden:
            model = _variant(c, shape, published)
            if count is None or abs(model.total / count - 1) <= TOLERANCE:
                if not published:
                    c.assumed.append(f"shape: catalog {base}")
                return model
            if not {"layers", "hidden"} <= set(published):
                raise _other_count(model, count)
    if not {"layers", "hidden"} <= set(published):
        raise refusal("the shape of the model is not published")
    if re.search(HYBRID, name) or (base and shape.pattern):
        raise refusal(f"the pattern of layer kinds of {r['model']} is not published")
    return _built(c, published, name, count, rounding)


def _require_reduced(c: PublishedRun, name: str) -> None:
    """Refuse a variant of a catalog model with fewer layers or experts whose number of them is not published."""
    words = [word for word in ("layers", "experts") if re.search(f"{word}[^)]*reduced|reduced[^)]*{word}", name)]
    for word in words or ["layers"]:
        if not integer(c.row[word]):
            raise refusal(f"the {word} of {c.row['model']} are not published")


def canonical(name: str) -> str:
    """A name without case, parentheses and separators; a separator between two numbers is a bar: "Llama-3 70B" is llama3|70b."""
    name = re.sub(r"\(.*?\)", " ", name.lower())
    name = re.sub(r"[^a-z0-9.]+", " ", name)
    return re.sub(r"(?<=\d) (?=\d)", "|", name.strip()).replace(" ", "")


@cache
def _catalog_names() -> dict[str, str]:
    """Canonical name → catalog entry, of the models that somebody published."""
    entries = [n for n in catalog.names("models") if catalog.load("models", n).published.source]
    return {canonical(n): n for n in entries}


@cache
def catalog_entry(name: str) -> str | None:
    """The catalog entry that a row's name contains (the longest), or that it begins (only one)."""
    text, names = canonical(name), _catalog_names()
    for pattern, entry in ALIASES:
        if re.search(pattern, text):
            return entry
    inside = [known for known in names if re.search(_whole(known), text)]
    if inside:
        return names[max(inside, key=len)]
    begun = [known for known in names if text and re.match(_whole(text), known)]
    return names[begun[0]] if len(begun) == 1 and re.search(r"\d", text) else None


def _whole(name: str) -> str:
    """The pattern of a name whose last number, if it ends with one, goes no further."""
    return re.escape(name) + (r"(?![\d.])" if name[-1:].isdigit() else "")


def _parameters(text: str) -> float | None:
    """A published number of parameters: "8.03e9", "8.03B", "671e9 total / 37e9 active"."""
    value = number(text.replace(",", ""))
    unit = re.search(r"\d\s*([kmbt])\b", text.lower())
    return None if not value else value * {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}[unit[1]] if unit else value


def _rounding(text: str) -> float:
    """Return how far a published number may be from the true one, relative to it: half a unit of its last digit, between `EXACT` and `TOLERANCE`.
    "6.2e9" is 0.8%: 6.25e9 parameters would have been published as "6.3e9"."""
    digits = re.search(r"[\d.,]+", text)
    figures = len(digits[0].replace(".", "").replace(",", "").lstrip("0")) if digits else 0
    value = float(digits[0].replace(",", "").replace(".", "")) if digits and figures else 0.0
    return min(max(0.5 / value, EXACT), TOLERANCE) if value else EXACT


@dataclass(frozen=True)
class Widths:
    """The FFN widths in a cell of a table: "18432 dense (3 layers) / 2048 per expert + 2048 shared; MoE every 2nd layer"."""

    plain: int = 0
    expert: int = 0
    dense: int = 0
    dense_layers: int = 0
    shared: int = 0  # a width, or a number of experts if it is small
    every: int = 0

    @classmethod
    def of(cls, text: str) -> Widths:
        def first(*patterns: str) -> int:
            matches = (re.search(pattern, text) for pattern in patterns)
            return next((int(m[1]) for m in matches if m), 0)

        return cls(
            integer(text),
            first(r"(\d+) per expert"),
            first(r"(\d+) dense", r"dense (\d+)"),
            first(r"dense \((\d+) layers"),
            first(r"\+ (\d+) shared"),
            first(r"every (\d+)(?:nd|rd|th)"),
        )


def _variant(c: PublishedRun, shape: Model, published: dict[str, int]) -> Model:
    """A catalog model with the numbers of the row."""
    r = c.row
    grouped = ATTENTIONS[shape.attention].reads("kv_heads")
    keep: dict[str, Any] = {k: v for k, v in published.items() if k != "heads" or grouped}
    if r["kv_heads"].isdigit() and grouped:
        keep["kv_heads"] = integer(r["kv_heads"])
    if "layers" in keep and shape.dense_layers:
        keep["dense_layers"] = min(shape.dense_layers, keep["layers"])
    widths = Widths.of(r["ffn_hidden"])
    if shape.experts:
        experts = integer(r["experts"]) or shape.experts
        keep |= {"experts": experts, "top_k": min(integer(r["topk"]) or shape.top_k, experts)}
        if experts % shape.router.groups:
            keep["router"] = shape.router.but(groups=1, groups_kept=0)
        if widths.expert or (widths.plain and not shape.has_part("ffn")):
            keep["expert_ffn"] = widths.expert or widths.plain
    elif widths.plain:
        keep["ffn"] = widths.plain
    return shape.but(name=r["model"], **keep)


def _built(c: PublishedRun, published: dict[str, int], name: str, count: float | None, rounding: float) -> Model:
    """A transformer of the row's numbers: of the choices that the row leaves open, the usual one, or one that meets the published count."""
    candidates: list[tuple[float, Model, list[str]]] = []
    for fields, assumed in _choices(c, published, name, count is not None):
        try:
            model = Model(**fields)
        except MeshwrightError:
            if count is None:
                raise
            continue
        error = abs(model.total / count - 1) if count else 0.0
        candidates.append((error, model, assumed))
        if error <= rounding:
            break
    if not candidates:
        raise refusal("no shape of the row's numbers is a transformer")
    near = [x for x in candidates if x[0] <= rounding] or [x for x in candidates if x[0] <= TOLERANCE]
    if not near:
        assert count is not None
        raise _other_count(min(candidates, key=lambda choice: choice[0])[1], count)
    _, model, assumed = near[0]
    c.assumed += assumed
    return model


def _other_count(model: Model, count: float) -> MeshwrightError:
    return refusal(
        f"the shape of the row has {format_count(model.total)} parameters, and {format_count(count)} are published"
    )


def _choices(
    c: PublishedRun, published: dict[str, int], name: str, counted: bool
) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """The fields of the shapes that fit the row, the usual one first, each with what it assumes; one only if the row has no parameter count.
    The vocabulary changes first: neither the name nor the source of a row says anything of it, as they do of the architecture."""
    r, hidden = c.row, published["hidden"]
    heads = published.get("heads") or max(1, hidden // 128)
    kv_heads = [integer(r["kv_heads"]) or heads]
    kv_heads = [k if heads % k == 0 else heads for k in kv_heads]
    if not integer(r["kv_heads"]) and heads % 8 == 0 and heads > 8:
        kv_heads.append(8)
    widths = Widths.of(r["ffn_hidden"])
    plain = [widths.plain] if widths.plain else [4 * hidden, 256 * -(-8 * hidden // (3 * 256))]
    vocabularies = [published["vocab"]] if "vocab" in published else list(VOCABULARIES)
    gated = bool(re.search(GATED, name))
    kinds = [gated, not gated] if counted else [gated]
    options = product(plain, kv_heads, kinds, (False, True), (False, True), vocabularies)
    for ffn, kv, is_gated, other_tie, other_positions, vocab in options:
        fields: dict[str, Any] = {
            "name": r["model"],
            "layers": published["layers"],
            "hidden": hidden,
            "heads": heads,
            "kv_heads": kv,
            "vocab": vocab,
            "ffn": ffn,
            "max_positions": integer(r["seq_len"], 2048),
            **_experts(r, widths, ffn),
            **_architecture(c, name, is_gated),
        }
        if other_tie:
            fields["tied"] = not fields.get("tied", False)
        if other_positions:
            fields["positions"] = "learned" if fields.get("positions", "rope") != "learned" else "rope"
        assumed = [] if "heads" in published else [f"heads: hidden / 128 = {heads}"]
        assumed += [] if "vocab" in published else [f"vocabulary: {vocab}"]
        assumed += [] if widths.plain else [f"FFN: {ffn}"]
        assumed += [] if is_gated == gated else [f"activation: {fields['activation']}, to meet the parameters"]
        yield fields, assumed
        if not counted:
            return


def _experts(r: dict[str, str], widths: Widths, ffn: int) -> dict[str, Any]:
    """Experts, and which layers have them."""
    experts = integer(r["experts"])
    if not experts:
        return {}
    width = widths.expert or ffn
    fields: dict[str, Any] = {"experts": experts, "top_k": integer(r["topk"], 2), "expert_ffn": width}
    fields["ffn"] = widths.dense or width
    if widths.shared:
        count, wide = (widths.shared, widths.shared * width) if widths.shared < 64 else (1, widths.shared)
        fields |= {"shared_experts": count, "shared_ffn": wide}
    if widths.dense_layers:
        fields["dense_layers"] = min(widths.dense_layers, integer(r["layers"]))
    if widths.every > 1:
        fields["moe_every"] = widths.every
    return fields


def _architecture(c: PublishedRun, name: str, gated: bool) -> dict[str, Any]:
    """Return what the name and the source of a run say about norms, positions, biases and the activation."""
    if gated:
        return {"activation": "swiglu"}
    if "nemotron" in name:
        return {"activation": "relu2", "norm": "layernorm", "vocab_multiple": 128}
    gpt: dict[str, Any] = {"activation": "gelu", "norm": "layernorm", "tied": True, "vocab_multiple": 128}
    if "mpt" in name:
        return gpt | {"positions": "alibi"}
    gpt |= {"qkv_bias": True, "out_bias": True, "ffn_bias": True, "positions": "learned", "dropout": True}
    return gpt | ({"positions": "alibi", "embedding_norm": True} if "bloom" in c.row["file"] else {})
