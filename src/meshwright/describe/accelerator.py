"""One device of a cluster: its rates and its memory, as published, and what of the rates it reaches."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from meshwright.describe.base import Bytes, Described, Flops, Rate, Seconds
from meshwright.errors import MeshwrightError, unknown

DTYPE_BYTES = {
    "fp64": 8.0, "fp32": 4.0, "tf32": 4.0, "fp16": 2.0, "bf16": 2.0, "fp8": 1.0, "mxfp8": 1.0, "int8": 1.0, "fp4": 0.5,
    "int4": 0.5,
}  # fmt: skip
LEAST_MEMORY = 1e6  # bytes of a device
PRIOR = "uncalibrated: never measured, so the median shares of the measured chips (H100, B200, MI355X)"
# Rate of the first flash attention in Triton over that of version 2, whose paper (Dao 2023, section 4.1) has 1/1.4 forward (1.3 to 1.5 times slower)
# and 1/2 backward, which has 2.5 times the operations.
TRITON_FLASH = 3.5 / (1.4 + 2.5 * 2)


class Efficiency(Described):
    """The share of its peak rates that a device sustains, from measured matrix products and copies (`calibrate`).

    The defaults are for a device that was never measured: the median of the measured devices. Its predictions have a wider band
    (`predict.prediction`).
    """

    gemm: float = Field(default=0.66, gt=0, le=1)
    """large matrix products, sustained"""
    gemm_fp8: float = Field(default=0.0, ge=0, le=1)
    """large fp8 products; 0: as `gemm`"""
    gemm_mxfp8: float = Field(default=0.0, ge=0, le=1)
    """large products of fp8 with a scale per block; 0: as `gemm`"""
    gemm_fp4: float = Field(default=0.0, ge=0, le=1)
    """large fp4 products; 0: as `gemm`"""
    grouped: float = Field(default=1.0, gt=0)
    """rate of the products of several experts in one kernel, over that of one large product"""
    gemm_traffic: float = Field(default=0.35, ge=0)
    """part of a product's smaller term, arithmetic or traffic, that is not hidden"""
    floor: Seconds = 2e-6
    """ramp of any kernel"""
    flash: float = Field(default=0.25, gt=0, le=1)
    """flash attention, forward and backward, head dim 128"""
    fused: float = Field(default=0.47, gt=0, le=1)
    """the vendor's fused attention"""
    scan: float = Field(default=0.5, gt=0, le=1)
    """the kernels of a chunked scan (Mamba-2), of the rates of flash attention and of copies; fitted to runs on H100"""
    sdpa: Literal["flash", "fused"] = "flash"
    """the kernel that torch's scaled_dot_product_attention takes. fused: flash attention 2 has no kernels for the device (Blackwell)"""
    memory: float = Field(default=0.77, gt=0, le=1)
    """elementwise kernels, of memory bandwidth"""
    tile: float = Field(default=128.0, ge=1)
    """a smaller dimension of a product costs as much; 1 on CPUs"""
    sequence_half: float = Field(default=700.0, ge=0)
    """sequence length at which flash attention reaches half of its peak rate"""
    update: float = Field(default=1.0, gt=0)
    """rate of the optimizer's updates, which work in place, over that of `memory`"""
    selection: Seconds = 0.0
    """time of one element from which a top-k selects, where it is not bound by memory (CPU)"""
    exponential: Seconds = 0.0
    """time of one exp, erf or tanh of an activation or a softmax, where it is not hidden (CPU)"""
    elementwise: dict[str, float] = Field(default_factory=dict)
    """seconds of a norm, activation, residual, rotation or loss over those of its bytes at `memory`; default 1"""
    doubt: float = Field(default=0.0, ge=0, le=1)
    """standard deviation of ln seconds of a step that shares add which were assumed"""
    measured_dtype: str = ""
    """dtype of the operations that `train` timed on this machine; empty: catalog, published runs or `bench`"""
    source: str = PRIOR

    def products(self, dtype: str) -> float:
        """The share of the peak rate of a dtype that large matrix products sustain."""
        narrow = {"fp8": self.gemm_fp8, "mxfp8": self.gemm_mxfp8, "fp4": self.gemm_fp4}
        return narrow.get(dtype, 0.0) or self.gemm

    def attention(self, kernel: str) -> float:
        """The share of the peak rate that an attention kernel (`Stack.attention`) sustains."""
        if (self.sdpa if kernel == "sdpa" else kernel) == "fused":
            return self.fused
        return self.flash * (TRITON_FLASH if kernel == "triton" else 1.0)

    @property
    def measured(self) -> bool:
        """Whether these shares were measured or fitted to published runs of the device."""
        return self.source != PRIOR


class Accelerator(Described):
    """One device: dense peak rates by dtype, memory, memory bandwidth."""

    name: str
    memory: Bytes
    memory_bandwidth: Rate
    peak: dict[str, Flops]
    """dense FLOP/s by dtype; never the sparse figure"""
    efficiency: Efficiency = Efficiency()
    power: float = Field(default=0.0, ge=0)
    """watts of the board at which its shares of peak hold; 0: unknown"""
    power_limit: float = Field(default=0.0, ge=0)
    """watts to which the board is limited (`nvidia-smi --power-limit`); 0: no limit below `power`"""
    host_bandwidth: Rate = 25e9
    """bytes/s between the device and its host's memory, per direction; the default is what PCIe 4 x16 reaches"""
    planning_only: bool = False
    """our trainer does not run on it"""
    source: str = ""
    checked: str = "unchecked"
    """what the figures were compared with, and when"""

    @field_validator("memory")
    @classmethod
    def _has_a_unit(cls, memory: float) -> float:
        """A bare number is bytes: `memory = 80` without its unit would be 80 bytes."""
        if memory < LEAST_MEMORY:
            what = f"{memory:g} bytes of memory"
            why = "A number without a unit is bytes, and no device has so little"
            raise MeshwrightError("MW-CONF-003", what, why=why, fix=f"{memory:g}GiB" if memory >= 1 else "80GiB")
        return memory

    def peak_for(self, dtype: str) -> float:
        """Peak FLOP/s of a dtype; a dtype that the device lacks runs at the rate of the next wider dtype."""
        wider = {
            "fp4": ["mxfp8", "fp8", "bf16"],
            "mxfp8": ["fp8", "bf16"],
            "fp8": ["bf16"],
            "bf16": ["fp16", "fp32"],
            "fp16": ["bf16", "fp32"],
            "tf32": ["fp32"],
            "int8": ["fp8", "bf16"],
        }
        for name in [dtype, *wider.get(dtype, []), "fp32"]:
            if name in self.peak:
                return self.peak[name]
        raise unknown("MW-CLUS-002", f"dtype of {self.name}", dtype, self.peak)

    @property
    def clock(self) -> float:
        """The clock of products and attention under the power limit, over that at full power.

            P ≈ C · V² · f and V ∝ f   →   f = (limit / power)^⅓

        Published sweeps of limits agree within 3% where the limit is 60% of the power or more: a V100 at 250 and 200 W is 1.13 and 1.05 times as
        fast as at 175 W (cube root 1.13, 1.05), an RTX 3090 at 330 W has 0.95 of its rate at 388 W (0.95)."""
        if not 0 < self.power_limit < self.power:
            return 1.0
        return float((self.power_limit / self.power) ** (1 / 3))

    @property
    def gamma(self) -> float:
        """Seconds to reduce one byte into another: two reads and a write of memory."""
        return 3.0 / self.memory_bandwidth
