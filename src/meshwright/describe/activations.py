"""The activation functions of the FFN: names, costs, and the torch function, which `models.parts` joins by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from meshwright.describe.variants import NameIn, Registry


@dataclass(frozen=True)
class Activation:
    """One activation function. A gated one multiplies a second projection of the input by the activation of the first."""

    name: str
    about: str
    gated: bool = False
    exponential: bool = True  # computes one exponential, error function or tanh for each element
    hf: str = ""  # its name in a Hugging Face config; empty: it has none
    function: Callable[..., Any] | None = None


ACTIVATIONS: Registry[Activation] = Registry(
    "activation",
    Activation("gelu", "x·Φ(x)", hf="gelu"),
    Activation("gelu-tanh", "the tanh approximation of GELU (GPT-2)", hf="gelu_new"),
    Activation("quick-gelu", "x·sigmoid(1.702·x)", hf="quick_gelu"),
    Activation("relu", "max(x, 0)", exponential=False, hf="relu"),
    Activation("relu2", "max(x, 0)²", exponential=False, hf="relu2"),
    Activation("swiglu", "gated by x·sigmoid(x)", gated=True, hf="silu"),
    Activation("geglu", "gated by GELU", gated=True, hf="gelu"),
    Activation("geglu-tanh", "gated by the tanh approximation of GELU", gated=True, hf="gelu_pytorch_tanh"),
)
ActivationName = Annotated[str, NameIn(ACTIVATIONS)]
