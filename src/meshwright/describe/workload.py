"""The training workload: batch, sequence length, precision, optimizer and token budget."""

from typing import Annotated, Literal

from pydantic import Field

from meshwright.describe.base import Count, Described, Length, Size
from meshwright.describe.packing import packed
from meshwright.describe.variants import OPTIMIZERS, OptimizerName

FP8 = ("fp8", "mxfp8")  # precisions whose operands have 8 bits
Precision = Literal["fp32", "tf32", "fp16", "bf16", "fp8", "mxfp8", "fp4", "fp64"]
Scaling = Literal["tensor", "row"]


class Workload(Described):
    """`batch` is the global batch in sequences (samples)."""

    batch: Size = 1024
    seq: Length = 4096
    precision: Precision = "bf16"
    scaling: Scaling = "tensor"
    """fp8: one scale per tensor, or one per row of each operand: an outlier harms its row only, and inputs are kept in 16 bits"""
    optimizer: OptimizerName = "adamw"
    ema: bool = False
    """keep a moving average of the weights; optimizer.ema is its decay"""
    clip: bool = True
    """clip by the global gradient norm"""
    tokens: Count = 0.0
    """token budget of the whole training; 0: not given"""
    imbalance: float = Field(default=1.0, ge=1)
    """tokens of the busiest expert rank over the mean"""
    loads: tuple[Annotated[float, Field(ge=0, allow_inf_nan=False)], ...] = ()
    """tokens that each expert gets, as measured, in any unit: the busiest rank of each plan follows from them in the place of imbalance"""

    lengths: tuple[Size, ...] = Field(default=(), max_length=10_000)
    """tokens of documents (a sample of them) that are packed into sequences with masks between them; empty: each sequence is one document"""

    @property
    def attended(self) -> float:
        """Tokens of a sequence of one document in which attention computes as much as in a packed one."""
        return packed(self.lengths, self.seq).attended

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.seq

    @property
    def state_copies(self) -> int:
        """Optimizer moments kept per parameter. Muon has one for the matrices of layers, and Adam's two for other parameters."""
        return OPTIMIZERS[self.optimizer].moments
