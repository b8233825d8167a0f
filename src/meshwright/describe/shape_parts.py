"""Parts of a model's shape with fields of their own: rotary positions, the router of experts, convolutions."""

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import Field

from meshwright.describe.base import Described, Size, Whole
from meshwright.errors import MeshwrightError

# --- Rotary position embedding: `[model.rope]` in a plan file.
#
# Pair i of a head of width D is rotated at position p by the angle p·f_i, with f_i = θ^(−2i/D) (θ is `rope_theta`). A model that was
# trained on L positions (`original_positions`) reads longer sequences when its frequencies are scaled, with s = `factor`:
#
#     linear      f_i / s
#     dynamic     θ · (s·n/L − (s − 1))^(D/(D−2)) instead of θ, for a sequence of n > L positions; here L is `max_positions`
#     llama3      f_i / s for wavelengths 2π/f_i above L / low_freq_factor, f_i for those below L / high_freq_factor, and between them
#                 a mix of both that is linear in the number of wavelengths in L
#     yarn        f_i / s for pairs that complete fewer than beta_slow rotations in L positions, f_i for those that complete more than
#                 beta_fast, and between them a mix of both that is linear in i
#     longrope    f_i / long_factor_i for sequences of more than L positions, f_i / short_factor_i for others
#
# yarn and longrope also multiply cosine and sine by a constant, so that attention scores grow by its square:
#
#     yarn        m(s, mscale) / m(s, mscale_all_dim) if both are given, else m(s, 1);  m(s, a) = 0.1·a·ln s + 1, and 1 for s ≤ 1
#     longrope    √(1 + ln s / ln L), and 1 for s ≤ 1
#
# Multi-head latent attention (DeepSeek) multiplies all scores, not only the rotated part, by m(s, mscale_all_dim)².

# Kinds that compare with the positions of the original training
NEED_ORIGINAL = ("dynamic", "llama3", "yarn", "longrope")


class RopeOptions(Described):
    kind: Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"] = "default"
    """how the frequencies are scaled for sequences longer than the original ones"""
    interleaved: bool = False
    """elements 2i and 2i+1 form a pair (DeepSeek), instead of i and i + D/2"""
    factor: float = Field(default=1.0, gt=0)
    """s: new over original number of positions"""
    original_positions: Whole = 0
    """L: positions before scaling; 0: max_positions"""
    low_freq_factor: float = Field(default=1.0, gt=0)
    """llama3: wavelengths above L / this are scaled"""
    high_freq_factor: float = Field(default=4.0, gt=0)
    """llama3: wavelengths below L / this are kept"""
    beta_fast: float = Field(default=32.0, gt=0)
    """yarn: pairs with more rotations than this are kept"""
    beta_slow: float = Field(default=1.0, gt=0)
    """yarn: pairs with fewer rotations than this are scaled"""
    truncate: bool = True
    """yarn: round the limits of the ramp to whole pairs"""
    attention_factor: float = Field(default=0.0, ge=0)
    """yarn, longrope: factor of cosine and sine; 0: from the formula"""
    mscale: float = Field(default=0.0, ge=0)
    """yarn: a of m(s, a) in the numerator of that formula"""
    mscale_all_dim: float = Field(default=0.0, ge=0)
    """yarn: a in its denominator; latent attention scales all scores by m(s, a)²"""
    short_factor: tuple[float, ...] = ()
    """longrope: divisor of each frequency up to L"""
    long_factor: tuple[float, ...] = ()
    """longrope: divisor of each frequency beyond L"""

    def check(self, width: int, max_positions: int) -> None:
        """Raise if the options do not fit heads of which `width` elements are rotated."""
        if self.kind in NEED_ORIGINAL and (self.original_positions or max_positions) < 2:
            what = f"rope.kind={self.kind} without the number of original positions"
            why = "It scales frequencies for sequences longer than the original ones"
            raise MeshwrightError("MW-MODEL-009", what, why=why, fix="--set model.rope.original_positions=8192")
        if self.kind == "dynamic" and width <= 2:
            what = f"rope.kind=dynamic with a rotated width of {width}"
            why = "Its exponent is width / (width − 2)"
            raise MeshwrightError("MW-MODEL-009", what, why=why, fix="--set model.rope.kind=linear")
        if self.kind == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            raise MeshwrightError(
                "MW-MODEL-009",
                f"rope.low_freq_factor={self.low_freq_factor:g} is not below rope.high_freq_factor={self.high_freq_factor:g}",
                why="Frequencies between the two are mixed",
                fix="--set model.rope.low_freq_factor=1 --set model.rope.high_freq_factor=4",
            )
        for field in ("short_factor", "long_factor") if self.kind == "longrope" else ():
            setting = getattr(self, field)
            if len(setting) != width // 2 or not all(0 < value < math.inf for value in setting):
                what = f"rope.{field} has {len(setting)} numbers"
                why = f"{width} elements of each head are rotated, so longrope needs {width // 2} numbers above 0"
                raise MeshwrightError("MW-MODEL-009", what, why=why, fix="--set model.rope.kind=default")

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


# --- How a mixture of experts routes tokens: `[model.router]` in a plan file.
#
#     score          softmax over the experts, or a sigmoid per expert (DeepSeek-V3)
#     choice         tokens choose k experts, or experts choose their tokens
#     groups         experts form groups, and a token chooses among the experts of the `groups_kept` best groups. Groups are
#                    ranked by their highest score (DeepSeek-V2), or, with a balancing bias, by the sum of their two highest (V3)
#     capacity       an expert takes at most c·T·k/E token copies and drops the others; 0: no limit
#     aux, z         weights α and β of the balancing loss and of the loss on the logits
#     balance_rate   γ: step of the bias that balances the experts without a loss
#
# Lowering needs two numbers: the share of the T·k token copies that is dispatched, and the load of the busiest expert over the mean.


class RouterOptions(Described):
    score: Literal["", "softmax", "sigmoid"] = ""
    """default: sigmoid where the model balances by a bias, else softmax"""
    choice: Literal["token", "expert"] = "token"
    groups: Size = 1
    """groups of experts; a token chooses experts from some of them"""
    groups_kept: Whole = 0
    """groups a token may choose from; 0: all"""
    capacity: float = Field(default=0.0, ge=0)
    """as a multiple of the mean load; 0: dropless"""
    normalise: bool | None = None
    """weights of a token sum to one; default: where k > 1 and tokens choose"""
    scale: float = Field(default=1.0, ge=0)
    """factor of the sum of the routed experts' outputs"""
    weigh_inputs: bool = False
    """weights multiply the input of an expert instead of its output (Llama 4)"""
    aux: float = Field(default=0.0, ge=0)
    """weight of the balancing loss (Switch, GShard)"""
    aux_scope: Literal["batch", "sequence"] = "batch"
    """the balancing loss is computed over all tokens in flight, or over each sequence"""
    z: float = Field(default=0.0, ge=0)
    """weight of the squared log-sum-exp of the logits (ST-MoE)"""
    balance_rate: float = Field(default=0.001, ge=0)
    """step of the balancing bias, if the model has one"""

    def check(self, experts: int, top_k: int) -> None:
        """Raise if a token cannot choose k experts within its groups."""
        groups_used = self.groups_kept or self.groups
        if experts % self.groups or groups_used > self.groups or top_k > groups_used * (experts // self.groups):
            raise MeshwrightError(
                "MW-MODEL-008",
                f"top {top_k} of {experts} experts in {groups_used} of {self.groups} groups",
                why="Groups have equal sizes, and the groups that are kept must hold at least top_k experts",
                fix="--set model.router.groups=1 --set model.router.groups_kept=0",
            )
        if self.groups > 1 and self.choice == "expert":
            what = f"{self.groups} groups of experts with choice=expert"
            why = "Groups limit what a token chooses"
            raise MeshwrightError("MW-MODEL-008", what, why=why, fix="--set model.router.choice=token")

    @property
    def compares(self) -> bool:
        """Whether experts compare all tokens in flight, so that their scores must be gathered."""
        return self.choice == "expert" or self.capacity > 0

    @property
    def counts_together(self) -> bool:
        """Whether the routing or the loss of a token depends on the other tokens of the micro-batch."""
        return self.compares or (self.aux > 0 and self.aux_scope == "batch")

    @property
    def travelling(self) -> float:
        """Largest share of the tokens' k copies that is dispatched to experts."""
        if self.choice == "expert":
            return self.capacity or 1.0
        return min(1.0, self.capacity) if self.capacity else 1.0

    def can_drop(self, experts: int, top_k: int) -> bool:
        """Whether the capacity can drop copies. An expert that all T tokens choose keeps c·T·k/E of them: all if c ≥ E/k."""
        return self.choice == "token" and 0 < self.capacity < experts / top_k

    def busiest(self, imbalance: Any, loads: Sequence[float] = (), ranks: Any = 1.0) -> Any:
        """Load of the busiest rank over the mean: `imbalance`, or that of measured `loads` of the experts over these numbers of ranks, each with as
        many experts in order (`imbalance` and `ranks` may be arrays over plans). A capacity limits the load of every expert."""
        if self.choice == "expert":
            return self.travelling
        if not sum(loads):
            return np.minimum(imbalance, self.capacity) if self.capacity else imbalance
        shares = self._kept(loads)
        divided = {
            n: shares.reshape(n, -1).mean(1).max() for n in {int(n) for n in np.ravel(ranks)} if len(loads) % n == 0
        }
        return np.array([divided.get(int(n), 1.0) for n in np.ravel(ranks)])

    def dropped(self, loads: Sequence[float]) -> float:
        """Share of the token copies that the capacity drops with these loads of the experts."""
        return float(1 - self._kept(loads).mean()) if sum(loads) and self.choice == "token" else 0.0

    def _kept(self, loads: Sequence[float]) -> np.ndarray:
        """Loads over their mean, as far as the capacity takes them."""
        shares = np.array(loads) / np.mean(loads)
        return np.minimum(shares, self.capacity) if self.capacity else shares


def skewed_loads(experts: int, ranks: int, imbalance: float) -> tuple[float, ...]:
    """Loads of experts over their mean, the largest first, of which nothing is known but those of the busiest of some ranks: the load falls as a
    power of an expert's place, k⁻ˢ, as the frequency of words does (Zipf). One rank has all experts: then it is the busiest expert's."""
    places, first = np.arange(1, experts + 1), max(1, experts // ranks) if ranks > 1 else 1
    low, high = 0.0, 64.0  # at 64 the first expert has all tokens
    for _ in range(50):
        power = (low + high) / 2
        loads = places**-power / np.mean(places**-power)
        low, high = (power, high) if loads[:first].mean() < imbalance else (low, power)
    return tuple(loads.tolist())


# --- Residual networks with bottleneck blocks: `[model.resnet]` (He et al. 2016; ResNet-50 is stages 3, 4, 6, 3).
#
#     stem     7×7 convolution, stride 2, and 3×3 pooling, stride 2
#     block    1×1 to p channels, 3×3, 1×1 to 4·p channels, each with batch norm; p doubles from stage to stage, and the first block of each
#              stage but the first halves the image in its 3×3 convolution (and has a 1×1 convolution on its shortcut)
#     head     mean over the image, and a product with a bias
#
# A sample is an image. Its cost is known by totals (`kind = "counts"`): 2·in·out·k²·s² FLOPs a convolution with an output of s × s, and for
# backward the inputs of every convolution, norm and pool.

EXPANSION = 4  # channels of a block's output over those inside of it
ELEMENT = 2  # bytes of a saved number, in 16 bits


class Convolution(NamedTuple):
    """A convolution and the batch norm after it."""

    name: str
    norm: str
    d_in: int
    d_out: int
    kernel: int
    stride: int
    size: int  # height and width of its output

    @property
    def flops(self) -> int:
        return 2 * self.d_in * self.d_out * self.kernel**2 * self.size**2


class ResNetOptions(Described):
    """The shape of a residual network."""

    stages: tuple[Size, ...] = ()
    """residual blocks of each stage; empty: not a residual network"""
    width: Size = 64
    """channels of the stem and inside the blocks of the first stage"""
    image: Size = 224
    """height and width of an image of three channels"""
    classes: Size = 1000

    def check(self, layers: int) -> None:
        """Raise if the model has another number of layers than blocks, or if the image is too small for the stages."""
        if layers != sum(self.stages):
            what = f"{layers} layers, and stages of {' + '.join(map(str, self.stages))} blocks"
            why = "Each block is a layer"
            raise MeshwrightError("MW-MODEL-010", what, why=why, fix=f"--set model.layers={sum(self.stages)}")
        least = 4 * 2 ** len(self.stages)
        if self.image < least:
            what = f"images of {self.image} × {self.image} for {len(self.stages)} stages"
            why = "The stem and every stage but the first halve an image, and batch norm needs more than one number of a channel"
            raise MeshwrightError("MW-MODEL-010", what, why=why, fix=f"--set model.resnet.image={least}")

    @cached_property
    def stem(self) -> Convolution:
        return Convolution("stem.conv", "stem.norm", 3, self.width, 7, 2, -(-self.image // 2))

    @cached_property
    def blocks(self) -> tuple[tuple[Convolution, ...], ...]:
        """The convolutions of each block; the fourth, where there is one, is that of the shortcut."""
        out: list[tuple[Convolution, ...]] = []
        channels, size = self.width, -(-self.stem.size // 2)
        for stage, count in enumerate(self.stages):
            inner = self.width * 2**stage
            for block in range(count):
                stride = 2 if stage and not block else 1
                small, wide = -(-size // stride), EXPANSION * inner
                at = f"layers.{len(out)}"
                convolutions = [
                    Convolution(f"{at}.conv1", f"{at}.norm1", channels, inner, 1, 1, size),
                    Convolution(f"{at}.conv2", f"{at}.norm2", inner, inner, 3, stride, small),
                    Convolution(f"{at}.conv3", f"{at}.norm3", inner, wide, 1, 1, small),
                ]
                if not block:
                    convolutions.append(Convolution(f"{at}.shortcut", f"{at}.norm4", channels, wide, 1, stride, small))
                out.append(tuple(convolutions))
                channels, size = wide, small
        return tuple(out)

    @property
    def features(self) -> int:
        """Channels that the head reads."""
        return EXPANSION * self.width * 2 ** (len(self.stages) - 1)

    @cached_property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """The shape of every parameter, in the order in which the network registers them."""
        out: dict[str, tuple[int, ...]] = {}
        for c in (self.stem, *(c for block in self.blocks for c in block)):
            out |= {f"{c.name}.weight": (c.d_out, c.d_in, c.kernel, c.kernel)}
            out |= {f"{c.norm}.weight": (c.d_out,), f"{c.norm}.bias": (c.d_out,)}
        return out | {"head.project.weight": (self.classes, self.features), "head.project.bias": (self.classes,)}

    @property
    def head_flops(self) -> int:
        return 2 * self.features * self.classes

    @property
    def block_flops(self) -> int:
        """Forward, of all blocks, for one image."""
        return sum(c.flops for block in self.blocks for c in block)

    def saved(self, block: tuple[Convolution, ...]) -> int:
        """Bytes that backward needs of a block for one image: its input, and the inputs of norms and later convolutions."""
        first, second = block[0], block[1]
        inner = first.d_out * first.size**2 + second.d_out * second.size**2
        norms = sum(c.d_out * c.size**2 for c in block)
        return ELEMENT * (first.d_in * first.size**2 + inner + norms)

    @property
    def saved_by_ends(self) -> int:
        """Bytes that backward needs of the stem, with its pooling, and of the head."""
        last = self.blocks[-1][2].size
        stem = self.stem.d_out * self.stem.size**2
        return ELEMENT * (3 * self.image**2 + 2 * stem + self.features * last**2 + self.features)
