"""Low-rank adapters as frameworks state them, and `[adapter]` of a plan: one table of facts for both directions.

    adapters, adapter_alpha, adapter_dropout      rank, alpha and dropout
    adapter_targets, adapter_all                  words of PEFT or Megatron, patterns of names; all matrices of layers
    adapter_trains                                modules that train in full
    quantised, double_quantised                   bits of the frozen matrices: 4 are nf4, 8 are int8

Words that name nothing in our models (a vision tower's, a framework's own fused experts) are left out. If none is left, all matrices have adapters.
"""

from typing import Any

from meshwright.describe.adapter import ALL_LINEAR, DEFAULT, PACKINGS, WORDS, Adapter, matches
from meshwright.describe.model import Model
from meshwright.describe.module_names import module_of
from meshwright.errors import MeshwrightError
from meshwright.interop.keys import Facts

BASES = {4: "nf4", 8: "int8"}
EVERYTHING = ("all", ALL_LINEAR, "*")


def adapter_of(facts: Facts) -> Adapter:
    """The section [adapter] that settings state; values that cannot be are left out."""
    rank = facts.get("adapters")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank <= 0:
        return Adapter()
    targets = (ALL_LINEAR,) if facts.get("adapter_all") else words_of(facts.get("adapter_targets"))
    fields: dict[str, Any] = {
        "rank": rank,
        "targets": targets,
        "alpha": _number(facts.get("adapter_alpha")),
        "dropout": _number(facts.get("adapter_dropout")),
        "scaling": "root" if facts.get("adapter_root") else "rank",
        "trains": tuple(word for word in words_of(facts.get("adapter_trains")) if word in WORDS),
        "base": BASES.get(facts.get("quantised") or 0, "plain"),
    }
    if facts.get("adapter_shared_rank") and facts.get("model.top_k"):
        fields["expert_rank"] = max(1, rank // facts["model.top_k"])
    fields["double_quantised"] = bool(facts.get("double_quantised")) and fields["base"] != "plain"
    try:
        return Adapter(**fields)
    except MeshwrightError:
        return Adapter(rank=rank, targets=targets)


def with_adapter(model: Model, adapter: Adapter) -> Model:
    """The model with an adapter, without the words that name nothing in it; without any adapter if the model cannot have one."""
    if not adapter.on:
        return model
    modules = [module_of(model, linear) for block in model.blocks.values() for linear in block.linears]
    known = tuple(t for t in adapter.targets if t == ALL_LINEAR or any(matches([t], module) for module in modules))
    for changes in ({"targets": known}, {"targets": known, "expert_rank": 0}, {"targets": (ALL_LINEAR,)}):
        try:
            return model.but(adapter=adapter.but(**changes))
        except MeshwrightError:
            continue
    return model


def adapter_facts(model: Model) -> Facts:
    """The facts that a model's adapter states: the inverse of `adapter_of`."""
    a = model.adapter
    if not a.rank:
        return {}
    targets = list(a.targets or (word for word in DEFAULT if _names(model, word)))
    everything = ALL_LINEAR in targets
    return {
        "adapter_kind": "qlora" if a.base == "nf4" else "lora",
        "adapters": a.rank,
        "adapter_alpha": int(a.alpha) if a.alpha.is_integer() and a.alpha else a.alpha or a.rank,
        "adapter_dropout": a.dropout,
        "adapter_root": a.scaling == "root" or None,
        "adapter_all": everything or None,
        "adapter_targets": None if everything else targets,
        "adapter_trains": list(a.trains) or None,
        "quantised": PACKINGS[a.base].bits if a.base in BASES.values() else None,
        "double_quantised": a.double_quantised if a.base == "nf4" else a.double_quantised or None,
    }


def adapter_differences(model: Model, back: Adapter) -> dict[str, tuple[Any, Any]]:
    """Fields of [adapter] that settings which were read back do not have: ours and theirs."""
    ours = model.adapter
    if not (ours.on or back.on):
        return {}
    out: dict[str, tuple[Any, Any]] = {}
    if ranks(model, ours) != ranks(model, back):
        pair = (ours.rank, back.rank) if ours.rank != back.rank else (ours.targets or DEFAULT, back.targets or DEFAULT)
        out["adapter.rank" if ours.rank != back.rank else "adapter.targets"] = pair
    for name in ("dropout", "base", "double_quantised", "trains", "freezes", "expert_rank"):
        if getattr(ours, name) != getattr(back, name):
            out[f"adapter.{name}"] = getattr(ours, name), getattr(back, name)
    if ours.rank and back.rank and ours.scale(ours.rank) != back.scale(back.rank):
        out["adapter.alpha"] = ours.alpha or ours.rank, back.alpha or back.rank
    return out


def ranks(model: Model, adapter: Adapter) -> dict[str, int]:
    """The rank of each matrix that has an adapter."""
    linears = [linear for block in model.blocks.values() for linear in block.linears]
    found = {module_of(model, x): adapter.rank_of(module_of(model, x), x.style.startswith("experts")) for x in linears}
    return {module: rank for module, rank in found.items() if rank}


def words_of(value: Any) -> tuple[str, ...]:
    """Names as a framework writes them: a list, or a text with commas."""
    words = value.split(",") if isinstance(value, str) else value if isinstance(value, list | tuple) else []
    plain = tuple(str(word).strip() for word in words if str(word).strip())
    return (ALL_LINEAR,) if any(word in EVERYTHING for word in plain) else plain


def fused_words(targets: list[str] | None, model_words: dict[tuple[str, ...], str]) -> list[str] | None:
    """The targets in the words of a framework that joins matrices; None if a joined matrix would be adapted in part."""
    left, out = set(targets or ()), list[str]()
    for parts, word in model_words.items():
        if left >= set(parts):
            out.append(word)
            left -= set(parts)
        elif word in left:
            out.append(word)
            left.discard(word)
    return None if left else out


def _names(model: Model, word: str) -> bool:
    return any(matches([word], module_of(model, linear)) for block in model.blocks.values() for linear in block.linears)


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else 0.0
