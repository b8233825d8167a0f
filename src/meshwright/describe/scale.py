"""Scaling laws: model size, training tokens and compute budget, independent of any cluster.

Growth. Models grew from 65M parameters (Transformer, 2017) to a trillion (2023): 15,400×, or 13.9 doublings, one every five
months. The memory of an accelerator grew from 16 GB (V100, 2017) to 80 GB (H100, 2022): one doubling in 26 months. The gap
between the two curves is the reason for distributed training.

Loss as a function of size (Kaplan et al. 2020), if neither data nor compute is the limit:

    L(N) ∝ N^−0.076      a loss r times lower needs N larger by r^(1/0.076); half the loss needs 2^13.2 = 9,139×

Loss as a function of size and data (Hoffmann et al. 2022, "Chinchilla"), with C = 6·N·D FLOPs to train N parameters on D tokens:

    L(N, D) = E + A/N^α + B/D^β

For a budget C, the optimum follows from ∂L/∂N = 0 with D = C/6N. With G = (αA / βB)^(1/(α+β)):

    N* = G · (C/6)^(β/(α+β))        D* = (C/6)^(α/(α+β)) / G

Their rule of thumb is D ≈ 20·N. The constants printed in the paper (`PRINTED`: α = 0.34, β = 0.28) do not
give this ratio: at Chinchilla's budget they give 93 tokens per parameter, because they are rounded and their fit stopped too
early. A refit of the same data (`REFITTED`, Besiroglu et al. 2024) gives 18, close to the paper's two other methods.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from meshwright.errors import MeshwrightError, shown

SIZE_EXPONENT = 0.076  # Kaplan et al. 2020, equation 1.1
TOKENS_PER_PARAMETER = 20.0  # Hoffmann et al. 2022, table 3
FLOPS_PER_PARAMETER_TOKEN = 6.0  # 2 forward, 4 backward


@dataclass(frozen=True)
class Milestone:
    year: float
    model: str
    parameters: float
    source: str


GROWTH = (
    Milestone(2017, "Transformer", 65e6, "Vaswani et al. 2017, base model"),
    Milestone(2018, "BERT-Large", 340e6, "Devlin et al. 2018"),
    Milestone(2019, "GPT-2", 1.5e9, "Radford et al. 2019"),
    Milestone(2020, "GPT-3", 175e9, "Brown et al. 2020"),
    Milestone(2021, "MT-NLG", 530e9, "Smith et al. 2022; announced 2021"),
    Milestone(2022, "PaLM", 540e9, "Chowdhery et al. 2022"),
    Milestone(2023, "GPT-4 era", 1e12, "not published; the order of magnitude commonly assumed"),
)


def growth_factor(first: Milestone = GROWTH[0], last: Milestone = GROWTH[-1]) -> float:
    """Ratio of the parameter counts: 15,400 over the whole table."""
    return last.parameters / first.parameters


def doubling_months(first: Milestone = GROWTH[0], last: Milestone = GROWTH[-1]) -> float:
    """Months per doubling of model size, for constant growth between two models."""
    if last.year <= first.year or last.parameters <= first.parameters:
        raise MeshwrightError("MW-SCALE-001", f"{last.model} is not later and larger than {first.model}")
    return 12 * (last.year - first.year) / math.log2(growth_factor(first, last))


def size_factor_for_loss(ratio: float, exponent: float = SIZE_EXPONENT) -> float:
    """Factor by which a model must grow for its loss to fall to `ratio` of the current loss: 0.5 needs 9,139×."""
    _positive("ratio", ratio, most=1)
    _positive("exponent", exponent)
    try:
        return ratio ** (-1 / exponent)
    except OverflowError:
        return math.inf


def loss_ratio_for_size(factor: float, exponent: float = SIZE_EXPONENT) -> float:
    """Loss of a model `factor` times larger, as a share of the current loss."""
    return _positive("factor", factor) ** -_positive("exponent", exponent)


@dataclass(frozen=True)
class LossLaw:
    """L(N, D) = E + A/N^α + B/D^β, in nats per token."""

    name: str
    irreducible: float  # E
    size_scale: float  # A
    data_scale: float  # B
    size_exponent: float  # α
    data_exponent: float  # β
    source: str

    def loss(self, parameters: float, tokens: float) -> float:
        of_size = self.size_scale / _positive("parameters", parameters) ** self.size_exponent
        of_data = self.data_scale / _positive("tokens", tokens) ** self.data_exponent
        return self.irreducible + of_size + of_data

    def optimum(self, flops: float) -> tuple[float, float]:
        """Parameters and tokens that give the lowest loss for a budget of FLOPs."""
        product = _positive("flops", flops) / FLOPS_PER_PARAMETER_TOKEN
        a, b = self.size_exponent, self.data_exponent
        balance = (a * self.size_scale / (b * self.data_scale)) ** (1 / (a + b))
        parameters = balance * product ** (b / (a + b))
        return parameters, product / parameters

    def tokens_for_loss(self, parameters: float, loss: float) -> float:
        """Tokens that a model of this size needs to reach a loss; infinite if no number of tokens does."""
        left = loss - self.irreducible - self.size_scale / _positive("parameters", parameters) ** self.size_exponent
        return (self.data_scale / left) ** (1 / self.data_exponent) if left > 0 else math.inf


PRINTED = LossLaw("hoffmann", 1.69, 406.4, 410.7, 0.34, 0.28, "Hoffmann et al. 2022, equation 10")
REFITTED = LossLaw("besiroglu", 1.8172, 482.01, 2085.43, 0.3478, 0.3658, "Besiroglu et al. 2024, a refit")


def compute_optimal_tokens(parameters: float, ratio: float = TOKENS_PER_PARAMETER) -> float:
    """Tokens by the rule of thumb of 20 per parameter (1.4T for Chinchilla's 70B)."""
    return _positive("parameters", parameters) * _positive("ratio", ratio)


def training_flops(parameters: float, tokens: float) -> float:
    """C = 6·N·D, without the quadratic part of attention, which `Model.model_flops` counts."""
    return FLOPS_PER_PARAMETER_TOKEN * _positive("parameters", parameters) * _positive("tokens", tokens)


def compute_optimal(flops: float, ratio: float = TOKENS_PER_PARAMETER) -> tuple[float, float]:
    """Parameters and tokens for a compute budget by the rule of thumb: N = √(C / 6·20)."""
    parameters = math.sqrt(_positive("flops", flops) / (FLOPS_PER_PARAMETER_TOKEN * _positive("ratio", ratio)))
    return parameters, parameters * ratio


def _positive(name: str, value: float, most: float = math.inf) -> float:
    if isinstance(value, bool) or not math.isfinite(value) or not 0 < value <= most:
        wanted = "above 0" if most == math.inf else f"above 0, at most {most:g}"
        raise MeshwrightError("MW-SCALE-001", f"{name} = {shown(value)} is not valid", valid=[wanted])
    return value
