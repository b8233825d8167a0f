"""How a Hugging Face config routes, read into `RouterOptions`; each family as its own class does it.

    mixtral, gpt_oss   softmax, top k, weights that sum to one
    qwen2_moe, qwen3_moe   softmax, top k; sum to one where norm_topk_prob says so
    deepseek_v2        softmax; topk_method "greedy", or group_limited_greedy: of n_group groups the topk_group with the
                       highest score; weights scaled by routed_scaling_factor, or, where normalised, not
    deepseek_v3        sigmoid and a bias that balances; groups by the sum of their two highest; normalised, then scaled

`router_aux_loss_coef` weighs E·Σ f_e P_e with f and P averaged over all layers with experts and f summing to k; ours is
added in each layer, with f summing to one: a coefficient c is c·k/layers here. Those classes add it only where
`output_router_logits` is true. DeepSeek's `aux_loss_alpha` is per layer and normalised as ours is, though of each
sequence by itself where `seq_aux` says so.
"""

from __future__ import annotations

from typing import Any

from meshwright.describe.hf_config import Config, shown

SCORES = ("softmax", "sigmoid")


def _said(top_k: int, normalise: bool, **options: Any) -> dict[str, Any]:
    """A router, leaving out what is its default."""
    kept = options | ({} if normalise == (top_k > 1) else {"normalise": normalise})
    return {"router": kept} if kept else {}


def _coefficient(c: Config, top_k: int, layers: int) -> dict[str, float]:
    """The balancing loss of the classes that average it over layers."""
    if c.decimal("router_jitter_noise", 0.0):
        c.notes.append("router_jitter_noise is not run: the router sees its input as it is")
    coefficient = c.decimal("router_aux_loss_coef", 0.001)
    if not c.flag("output_router_logits", False):
        if "router_aux_loss_coef" in c.data and coefficient:
            c.notes.append(f"router_aux_loss_coef = {coefficient:g} is left out, as output_router_logits is not true")
        return {}
    return {"aux": coefficient * top_k / layers} if coefficient else {}


def softmax_router(c: Config, top_k: int, layers: int, normalise: bool) -> dict[str, Any]:
    """Mixtral's and Qwen's; `layers`: those with experts."""
    return _said(top_k, normalise, **_coefficient(c, top_k, layers))


def deepseek_router(c: Config, top_k: int) -> dict[str, Any]:
    third = c.family == "deepseek_v3"
    method = c.word("topk_method", "noaux_tc" if third else "greedy")
    known = ("noaux_tc",) if third else ("greedy", "group_limited_greedy")
    if method not in known:
        c.notes.append(f"topk_method {shown(method)} is taken as {known[0]}")
    groups, kept = c.number("n_group", 8 if third else 1), c.number("topk_group", 4 if third else 1)
    grouped = {"groups": groups, "groups_kept": kept} if method != "greedy" and kept < groups else {}
    normalise, scale = c.flag("norm_topk_prob", third), c.decimal("routed_scaling_factor", 2.5 if third else 1.0)
    if normalise and not third:
        scale = 1.0  # weights are normalised, or else scaled
    score = c.word("scoring_func", SCORES[third])
    if score not in SCORES:
        c.notes.append(f"scoring_func {shown(score)} is taken as {SCORES[third]}")
        score = SCORES[third]
    options: dict[str, Any] = {"scale": scale} if scale != 1.0 else {}
    options |= {"score": score} if score != SCORES[third] else {}
    if alpha := c.decimal("aux_loss_alpha", 0.0):
        options["aux"] = alpha
        if c.flag("seq_aux", True):
            c.notes.append("seq_aux: the balancing loss is of all tokens in flight here, not of each sequence")
    return _said(top_k, normalise, **options, **grouped)
