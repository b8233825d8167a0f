"""Scaling laws: the loss of a language model of N parameters trained on D tokens, and the tokens that are compute-optimal for it.

    Kaplan        L(N) = (Nc/N)^αN          L(D) = (Dc/D)^αD            N without embeddings, trained to convergence
    Chinchilla    L(N, D) = E + A/N^α + B/D^β

At a budget of C = 6·N·D FLOPs the loss is least where one more FLOP on either side gains the same, α·A/N^α = β·B/D^β:

    D*(N) = (β·B / (α·A))^(1/β) · N^(α/β)           N*(C) = G·(C/6)^(β/(α+β)),  G = (α·A / (β·B))^(1/(α+β))

The constants as Hoffmann et al. print them give about 110 tokens per parameter at 70B, against the 20 of their two other methods and of
Chinchilla itself. Besiroglu et al. fitted the same data again and found that the optimizer had stopped early and that the printed exponents
are rounded too much; their constants give 18. They are the default here. The losses are in nats per token of those authors' data and
tokenizers: they compare sizes, they do not predict the loss on other data. All models were dense.
"""

from typing import NamedTuple

FLOPS_PER_PARAMETER = 6.0  # forward and backward of one token, without attention scores


class LossLaw(NamedTuple):
    """L(N, D) = E + A/N^α + B/D^β."""

    floor: float  # E
    size: float  # A
    size_power: float  # α
    data: float  # B
    data_power: float  # β
    source: str

    def loss(self, parameters: float, tokens: float) -> float:
        return self.floor + self.size / parameters**self.size_power + self.data / tokens**self.data_power

    def optimal_tokens(self, parameters: float) -> float:
        """D*(N): the tokens for which no other split of the same FLOPs has a smaller loss."""
        ratio = self.data_power * self.data / (self.size_power * self.size)
        return float(ratio ** (1 / self.data_power) * parameters ** (self.size_power / self.data_power))

    def optimal_parameters(self, flops: float) -> float:
        """N*(C)."""
        powers = self.size_power + self.data_power
        scale = (self.size_power * self.size / (self.data_power * self.data)) ** (1 / powers)
        return float(scale * (flops / FLOPS_PER_PARAMETER) ** (self.data_power / powers))


class PowerLaw(NamedTuple):
    """L(x) = (c/x)^power."""

    critical: float
    power: float
    source: str

    def loss(self, x: float) -> float:
        return float((self.critical / x) ** self.power)

    def factor(self, loss_ratio: float) -> float:
        """How many times larger x has to be for a loss of `loss_ratio` times the present one."""
        return float((1 / loss_ratio) ** (1 / self.power))


KAPLAN = "Kaplan et al. 2020, Scaling Laws for Neural Language Models (arXiv 2001.08361)"
CHINCHILLA = {
    "besiroglu": LossLaw(
        *(1.8172, 482.01, 0.3478, 2085.43, 0.3658),
        "Besiroglu et al. 2024, Chinchilla Scaling: A replication attempt (arXiv 2404.10102)",
    ),
    "hoffmann": LossLaw(
        *(1.69, 406.4, 0.34, 410.7, 0.28),
        "Hoffmann et al. 2022, Training Compute-Optimal Large Language Models (arXiv 2203.15556), approach 3",
    ),
}
DEFAULT = "besiroglu"
BY_SIZE = PowerLaw(8.8e13, 0.076, f"{KAPLAN}, parameters without embeddings")
BY_DATA = PowerLaw(5.4e13, 0.095, f"{KAPLAN}, tokens")
