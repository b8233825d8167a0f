"""How a Hugging Face config routes tokens, read into `RouterOptions`; each family as its own class does it.

    mixtral, gpt_oss       softmax, top k, weights that sum to one
    qwen2_moe, qwen3_moe   softmax, top k; weights sum to one where norm_topk_prob is true
    deepseek_v2            softmax; topk_method "greedy", or group_limited_greedy: top k among the topk_group best of
                           n_group groups; weights scaled by routed_scaling_factor. Transformers' class ignores
                           norm_topk_prob, which no released model sets; so do we, with a note
    deepseek_v3, glm4_moe, nemotron_h  sigmoid and a balancing bias; groups ranked by the sum of their two best; normalised, then scaled

`router_aux_loss_coef` weighs E·Σ f_e P_e with f and P averaged over all layers with experts and f summing to k; ours is
added in each layer, with f summing to one: a coefficient c becomes c·k/layers. Those classes add the loss only where
`output_router_logits` is true. DeepSeek's `aux_loss_alpha` is per layer and normalised as ours is, per sequence if
`seq_aux` is true.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from meshwright.describe.hf.config import Config, shown

SCORES = ("softmax", "sigmoid")


class Defaults(NamedTuple):
    """Defaults of a configuration class for missing keys."""

    score: str
    methods: tuple[str, ...]
    groups: int = 1
    groups_kept: int = 1
    normalise: bool = True
    scale: float = 1.0


DEEPSEEK = {
    "deepseek_v2": Defaults("softmax", ("greedy", "group_limited_greedy"), normalise=False),
    "deepseek_v3": Defaults("sigmoid", ("noaux_tc",), groups=8, groups_kept=4, scale=2.5),
    "deepseek_v32": Defaults("sigmoid", ("noaux_tc",), groups=8, groups_kept=4, scale=2.5),
    "glm4_moe": Defaults("sigmoid", ("noaux_tc",)),
    "nemotron_h": Defaults("sigmoid", ("noaux_tc",)),
}


def _options(top_k: int, normalise: bool, **options: Any) -> dict[str, Any]:
    """Router options that differ from their defaults."""
    kept = options | ({} if normalise == (top_k > 1) else {"normalise": normalise})
    return {"router": kept} if kept else {}


def _coefficient(c: Config, top_k: int, layers: int) -> dict[str, float]:
    """The balancing loss of the classes that average it over layers."""
    coefficient = c.decimal("router_aux_loss_coef", 0.001)
    if not c.flag("output_router_logits", False):
        if "router_aux_loss_coef" in c.data and coefficient:
            c.notes.append(f"router_aux_loss_coef = {coefficient:g} is left out, as output_router_logits is not true")
        return {}
    return {"aux": coefficient * top_k / layers} if coefficient else {}


def softmax_router(c: Config, top_k: int, layers: int, normalise: bool) -> dict[str, Any]:
    """Mixtral's and Qwen's; `layers`: those with experts."""
    return _options(top_k, normalise, **_coefficient(c, top_k, layers))


def deepseek_router(c: Config, top_k: int) -> dict[str, Any]:
    """DeepSeek's and GLM-4.5's routing, from the keys of the config and the defaults of its class."""
    default = DEEPSEEK[c.family]
    method = c.word("topk_method", default.methods[0])
    if method not in default.methods:
        c.notes.append(f"topk_method {shown(method)} is read as {default.methods[0]}")
    groups, kept = c.number("n_group", default.groups), c.number("topk_group", default.groups_kept)
    grouped = {"groups": groups, "groups_kept": kept} if method != "greedy" and kept < groups else {}
    normalise, scale = c.flag("norm_topk_prob", default.normalise), c.decimal("routed_scaling_factor", default.scale)
    if normalise and c.family == "deepseek_v2":
        c.notes.append("norm_topk_prob is ignored, as by the class of deepseek_v2")
        normalise = False
    score = c.word("scoring_func", default.score)
    if score not in SCORES:
        c.notes.append(f"scoring_func {shown(score)} is read as {default.score}")
        score = default.score
    options: dict[str, Any] = {"scale": scale} if scale != 1.0 else {}
    options |= {"score": score} if score != default.score else {}
    if alpha := c.decimal("aux_loss_alpha", 0.0):
        options["aux"] = alpha
        if c.flag("seq_aux", True):
            options["aux_scope"] = "sequence"
    return _options(top_k, normalise, **options, **grouped)
