"""Rotary position embedding: `[model.rope]` in a plan file.

Pair i of a head of width D is rotated at position p by the angle p·f_i, with f_i = θ^(−2i/D) (θ is `rope_theta`). A model that was
trained on L positions (`original_positions`) reads longer sequences when its frequencies are scaled, with s = `factor`:

    linear      f_i / s
    dynamic     θ · (s·n/L − (s − 1))^(D/(D−2)) instead of θ, for a sequence of n > L positions; here L is `max_positions`
    llama3      f_i / s for wavelengths 2π/f_i above L / low_freq_factor, f_i for those below L / high_freq_factor, and between them
                a mix of both that is linear in the number of wavelengths in L
    yarn        f_i / s for pairs that complete fewer than beta_slow rotations in L positions, f_i for those that complete more than
                beta_fast, and between them a mix of both that is linear in i
    longrope    f_i / long_factor_i for sequences of more than L positions, f_i / short_factor_i for others

yarn and longrope also multiply cosine and sine by a constant, so that attention scores grow by its square:

    yarn        m(s, mscale) / m(s, mscale_all_dim) if both are given, else m(s, 1);  m(s, a) = 0.1·a·ln s + 1, and 1 for s ≤ 1
    longrope    √(1 + ln s / ln L), and 1 for s ≤ 1

Multi-head latent attention (DeepSeek) multiplies all scores, not only the rotated part, by m(s, mscale_all_dim)².
"""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field

from meshwright.describe.base import Described, Whole
from meshwright.errors import MeshwrightError

NEED_ORIGINAL = (
    "dynamic",
    "llama3",
    "yarn",
    "longrope",
)  # kinds that compare with the positions of the original training


class RopeOptions(Described):
    kind: Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"] = Field(
        default="default", description="how the frequencies are scaled for sequences longer than the original ones"
    )
    interleaved: bool = Field(
        default=False, description="elements 2i and 2i+1 form a pair (DeepSeek), instead of i and i + D/2"
    )
    factor: float = Field(default=1.0, gt=0, description="s: new over original number of positions")
    original_positions: Whole = Field(default=0, description="L: positions before scaling; 0: max_positions")
    low_freq_factor: float = Field(default=1.0, gt=0, description="llama3: wavelengths above L / this are scaled")
    high_freq_factor: float = Field(default=4.0, gt=0, description="llama3: wavelengths below L / this are kept")
    beta_fast: float = Field(default=32.0, gt=0, description="yarn: pairs with more rotations than this are kept")
    beta_slow: float = Field(default=1.0, gt=0, description="yarn: pairs with fewer rotations than this are scaled")
    truncate: bool = Field(default=True, description="yarn: round the limits of the ramp to whole pairs")
    attention_factor: float = Field(
        default=0.0, ge=0, description="yarn, longrope: factor of cosine and sine; 0: from the formula"
    )
    mscale: float = Field(default=0.0, ge=0, description="yarn: a of m(s, a) in the numerator of that formula")
    mscale_all_dim: float = Field(
        default=0.0, ge=0, description="yarn: a in its denominator; latent attention scales all scores by m(s, a)²"
    )
    short_factor: tuple[float, ...] = Field(default=(), description="longrope: divisor of each frequency up to L")
    long_factor: tuple[float, ...] = Field(default=(), description="longrope: divisor of each frequency beyond L")

    def check(self, width: int, max_positions: int) -> None:
        """Raise if the options do not fit heads of which `width` elements are rotated."""
        if self.kind in NEED_ORIGINAL and (self.original_positions or max_positions) < 2:
            raise MeshwrightError(
                "MW-MODEL-009",
                f"rope.kind={self.kind} without the number of original positions",
                why="It scales frequencies for sequences longer than the original ones",
                fix="--set model.rope.original_positions=8192",
            )
        if self.kind == "dynamic" and width <= 2:
            raise MeshwrightError(
                "MW-MODEL-009",
                f"rope.kind=dynamic with a rotated width of {width}",
                why="Its exponent is width / (width − 2)",
                fix="--set model.rope.kind=linear",
            )
        if self.kind == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            raise MeshwrightError(
                "MW-MODEL-009",
                f"rope.low_freq_factor={self.low_freq_factor:g} is not below rope.high_freq_factor={self.high_freq_factor:g}",
                why="Frequencies between the two are mixed",
                fix="--set model.rope.low_freq_factor=1 --set model.rope.high_freq_factor=4",
            )
        for field in ("short_factor", "long_factor") if self.kind == "longrope" else ():
            given = getattr(self, field)
            if len(given) != width // 2 or not all(0 < value < math.inf for value in given):
                raise MeshwrightError(
                    "MW-MODEL-009",
                    f"rope.{field} has {len(given)} numbers",
                    why=f"{width} elements of each head are rotated, so longrope needs {width // 2} numbers above 0",
                    fix="--set model.rope.kind=default",
                )

    def rotation_factor(self, max_positions: int) -> float:
        """The factor of cosine and sine."""
        if self.kind not in ("yarn", "longrope"):
            return 1.0
        if self.attention_factor:
            return self.attention_factor
        if self.kind == "longrope":
            original = self.original_positions or max_positions
            return math.sqrt(1 + math.log(self.factor) / math.log(original)) if self.factor > 1 else 1.0
        if self.mscale and self.mscale_all_dim:
            return magnitude(self.factor, self.mscale) / magnitude(self.factor, self.mscale_all_dim)
        return magnitude(self.factor, 1.0)

    @property
    def latent_score_factor(self) -> float:
        """The factor of all scores of multi-head latent attention."""
        return magnitude(self.factor, self.mscale_all_dim) ** 2 if self.kind != "default" else 1.0


def magnitude(factor: float, scale: float) -> float:
    """m(s, a) of the module's docstring."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0
