"""Rotary position embedding: pairs of elements of queries and keys are rotated by angles that grow with the position.

A rotation by p_q·f of a query and by p_k·f of a key changes their product by the distance p_q − p_k only. `describe.shape_parts` has the
formulas by which the frequencies f are scaled for longer sequences; here they are computed, in float64.

Two layouts of pairs: element i with i + D/2, or 2i with 2i + 1 (`interleaved`). The second one returns its pairs in the order of the first:
queries and keys are permuted in the same way, so their products do not change.

Legend: B batch, S sequence, N heads, D rotated width of a head, I = D/2 pairs.
"""

import math

import torch
from torch import Tensor

from meshwright.describe.model import Model
from meshwright.describe.shape_parts import RopeOptions


def frequencies(model: Model, length: int, base: float = 0.0) -> Tensor:
    """f_i of each pair in float64, for sequences of `length` positions; with a `base`, its plain frequencies, not scaled."""
    rope, width, theta = (RopeOptions() if base else model.rope), model.rotated_width, base or model.rope_theta
    original = rope.original_positions or model.max_positions
    if rope.kind == "dynamic" and length > original:
        theta *= (rope.factor * length / original - (rope.factor - 1)) ** (width / (width - 2))
    plain_I = theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    match rope.kind:
        case "linear":
            return plain_I / rope.factor
        case "llama3":
            return mixed(plain_I, rope.factor, kept_by_wavelength(plain_I, rope, original))
        case "yarn":
            return mixed(plain_I, rope.factor, kept_by_rotations(rope, width, theta, original))
        case "longrope":
            factors = rope.long_factor if length > original else rope.short_factor
            return plain_I / torch.tensor(factors, dtype=torch.float64)
    return plain_I


def mixed(plain_I: Tensor, factor: float, kept_I: Tensor) -> Tensor:
    """Frequencies of which a share is kept as it is and the remaining share is divided by `factor`."""
    return kept_I * plain_I + (1 - kept_I) * plain_I / factor


def kept_by_wavelength(plain_I: Tensor, rope: RopeOptions, original: int) -> Tensor:
    """Llama 3: 0 for wavelengths above L / low, 1 for those below L / high, linear in L / wavelength between."""
    in_original_I = original * plain_I / (2 * math.pi)
    return ((in_original_I - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)


def kept_by_rotations(rope: RopeOptions, width: int, theta: float, original: int) -> Tensor:
    """YaRN: 1 up to the pair that completes beta_fast rotations in L positions, 0 from the pair that completes beta_slow on."""
    first, last = (
        width * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))
        for rotations in (rope.beta_fast, rope.beta_slow)
    )
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    last += 0.001 if first == last else 0.0  # a ramp of no width would divide by zero
    pairs_I = torch.arange(width // 2, dtype=torch.float64)
    return 1 - ((pairs_I - first) / (last - first)).clamp(0, 1)


def angles(model: Model, position_ids: Tensor, length: int, base: float = 0.0) -> tuple[Tensor, Tensor]:
    """Cosine and sine [S, D] of the angles at some positions of a sequence of `length`, in float64. `base`: see `frequencies`."""
    angle_SI = torch.outer(position_ids.to("cpu", torch.float64), frequencies(model, length, base))
    factor = 1.0 if base else model.rope.rotation_factor(model.max_positions)
    angle_SD = angle_SI.repeat(1, 2)
    return angle_SD.cos() * factor, angle_SD.sin() * factor


def rotate(x_BNSD: Tensor, cosine_SD: Tensor, sine_SD: Tensor, interleaved: bool) -> Tensor:
    """The elements of x, as many as the angles are wide, rotated pair by pair; further elements stay as they are."""
    width = cosine_SD.shape[-1]
    if width < x_BNSD.shape[-1]:
        turned, kept = x_BNSD.split((width, x_BNSD.shape[-1] - width), dim=-1)
        return torch.cat((rotate(turned, cosine_SD, sine_SD, interleaved), kept), dim=-1)
    if interleaved:
        x_BNSD = x_BNSD.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    first, second = x_BNSD.chunk(2, dim=-1)
    return x_BNSD * cosine_SD + torch.cat((-second, first), dim=-1) * sine_SD
