"""`meshwright show formats`: number formats; all figures are computed from the numbers of bits.

A float of e exponent and m mantissa bits with bias b = 2ᵉ⁻¹ − 1 has the largest value 2^(E−b)·(2 − 2⁻ᵐ), the smallest
normal one 2^(1−b), the smallest at all 2^(1−b−m), and a relative step of 2⁻ᵐ. E is the largest exponent field that
encodes numbers: 2ᵉ − 2 if the last one is reserved for infinity and NaN (IEEE), else 2ᵉ − 1. E4M3 reserves only its
last code for NaN; E2M1 reserves none.
"""

import math
from typing import Any, NamedTuple

from rich.text import Text

from meshwright.describe.result import values_of
from meshwright.units import Json
from meshwright.view.tables import filled, heading


class Format(NamedTuple):
    """Numbers of bits, and the meaning of the top exponent: ieee (infinity and NaN), nan (one code is NaN), all (numbers)."""

    name: str
    exponent: int
    mantissa: int
    top: str
    bits: int
    use: str

    @property
    def bias(self) -> int:
        return 2 ** (self.exponent - 1) - 1

    @property
    def largest(self) -> float:
        field = 2**self.exponent - (2 if self.top == "ieee" else 1)
        fraction = 2 - 2.0**-self.mantissa * (2 if self.top == "nan" else 1)
        return 2.0 ** (field - self.bias) * fraction

    @property
    def smallest_normal(self) -> float:
        return 2.0 ** (1 - self.bias)

    @property
    def smallest(self) -> float:
        return 2.0 ** (1 - self.bias - self.mantissa)

    @property
    def step(self) -> float:
        """Distance from 1 to the next number."""
        return 2.0**-self.mantissa

    @property
    def digits(self) -> float:
        return (self.mantissa + 1) * math.log10(2)


FORMATS = [
    Format(*row)
    for row in (
        ("fp64", 11, 52, "ieee", 64, "proofs and parity tests, where a tolerance would hide a bug"),
        ("fp32", 8, 23, "ieee", 32, "master weights, optimizer state, sums and the loss"),
        ("tf32", 8, 10, "ieee", 19, "inside tensor cores since A100: fp32 operands, fp32 sums; stored as 32 bits"),
        ("fp16", 5, 10, "ieee", 16, "older GPUs; its range is short, so the loss must be scaled"),
        ("bf16", 8, 7, "ieee", 16, "the usual training type: fp32's range, no loss scaling"),
        (
            "fp8 e4m3",
            4,
            3,
            "nan",
            8,
            "weights and activations, with a scale per tensor, row or tile; DeepSeek-V3: gradients too",
        ),
        ("fp8 e5m2", 5, 2, "ieee", 8, "gradients, where range matters more than precision"),
        ("fp4 e2m1", 2, 1, "all", 4, "Blackwell: blocks of 16 or 32 values share a scale (NVFP4, MXFP4)"),
    )
]
COLUMNS = (
    "format", ">bits", ">sign+exp+man", ">largest", ">least normal", ">least", ">step at 1", ">digits", "use",
)  # fmt: skip
NOTE = (
    "bf16 is fp32 with 16 mantissa bits cut off: same range, 2–3 digits. fp16 has a digit more but overflows at 65,504 and\n"
    "loses gradients below 6e-8. Formats of eight bits or fewer need scale factors that map the data to their range."
)
INT8_USE = "quantised inference, compressed gradients; equal steps, needs a scale"


def data(topic: str = "formats") -> list[Json]:
    floats: list[Json] = [
        {
            "name": f.name,
            "bits": f.bits,
            "sign": 1,
            **values_of(f, "exponent", "mantissa", "largest", "smallest_normal", "smallest"),
            "step_at_1": f.step,
            "decimal_digits": f.digits,
            "use": f.use,
        }
        for f in FORMATS
    ]
    return [*floats, {"name": "int8", "bits": 8, "largest": 127.0, "smallest": 1.0, "use": INT8_USE}]


def page(topic: str = "formats") -> list[Any]:
    """The table of formats."""
    rows: list[tuple[object, ...]] = []
    for f in FORMATS:
        range_of = map(number, (f.largest, f.smallest_normal, f.smallest))
        precision = f"2^-{f.mantissa}", f"{f.digits:.1f}"
        bits = f.bits, f"1+{f.exponent}+{f.mantissa}"
        rows.append((Text(f.name, "bold"), *bits, *range_of, *precision, Text(f.use, "dim")))
    rows.append((Text("int8", "bold"), 8, "1+7", "127", "", "1", "", "", Text(INT8_USE, "dim")))
    title = heading("Number formats", "range comes from exponent bits, precision from mantissa bits")
    return [title, filled(COLUMNS, rows), Text(NOTE, "dim")]


def number(x: float) -> str:
    """Return a whole number below a million in full, else three significant digits."""
    return f"{x:,.0f}" if 1 <= x < 1e6 and x == int(x) else f"{x:.3g}"
