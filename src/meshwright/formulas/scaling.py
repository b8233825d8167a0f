"""Scaling laws on one's own numbers: predicted loss, compute-optimal tokens, FLOPs of a training."""

from typing import NamedTuple

from meshwright.cost.scaling_laws import BY_DATA, BY_SIZE, CHINCHILLA, DEFAULT, FLOPS_PER_PARAMETER, LossLaw
from meshwright.formulas import arguments
from meshwright.formulas.arguments import Quantity


class ComputeOptimal(NamedTuple):
    """The model and the tokens with the smallest loss for a number of FLOPs."""

    parameters: float
    tokens: float
    loss: float
    flops: float
    source: str


def kaplan_loss(parameters: Quantity = 0, tokens: Quantity = 0) -> float:
    """L(N) = (8.8e13/N)^0.076 of a model with N parameters without embeddings, or L(D) = (5.4e13/D)^0.095 of D tokens: give one of them."""
    if bool(parameters) == bool(tokens):
        raise arguments.refused(
            "parameters", parameters, "Give either parameters or tokens: each law is for the other one unlimited"
        )
    if parameters:
        return BY_SIZE.loss(arguments.count("parameters", parameters))
    return BY_DATA.loss(arguments.count("tokens", tokens))


def kaplan_size_factor(loss_ratio: float) -> float:
    """How many times the parameters multiply the loss by `loss_ratio`: ratio^(−1/0.076); to halve the loss, 9,139."""
    return BY_SIZE.factor(arguments.share("loss_ratio", loss_ratio))


def chinchilla_loss(parameters: Quantity, tokens: Quantity, fit: str = DEFAULT) -> float:
    """L(N, D) = E + A/N^α + B/D^β, in nats per token. `fit`: besiroglu (2024, the default) or hoffmann (2022, as printed)."""
    return _law(fit).loss(arguments.count("parameters", parameters), arguments.count("tokens", tokens))


def optimal_tokens(parameters: Quantity, fit: str = DEFAULT) -> float:
    """The compute-optimal tokens of a model: D* = (β·B/(α·A))^(1/β) · N^(α/β)."""
    return _law(fit).optimal_tokens(arguments.count("parameters", parameters))


def compute_optimal(flops: Quantity, fit: str = DEFAULT) -> ComputeOptimal:
    """The model and the tokens with the smallest loss at C = 6·N·D FLOPs."""
    law, budget = _law(fit), arguments.count("flops", flops)
    n = law.optimal_parameters(budget)
    tokens = budget / (FLOPS_PER_PARAMETER * n)
    return ComputeOptimal(n, tokens, law.loss(n, tokens), budget, law.source)


def training_flops(parameters: Quantity, tokens: Quantity) -> float:
    """C = 6·N·D: forward and backward of all tokens, without attention scores."""
    return FLOPS_PER_PARAMETER * arguments.count("parameters", parameters) * arguments.count("tokens", tokens)


def _law(fit: str) -> LossLaw:
    return CHINCHILLA[arguments.one_of("fit", fit, CHINCHILLA)]
