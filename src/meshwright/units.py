"""Quantities with units: bytes, rates, durations, FLOP rates, counts.

    parse_bytes("80GiB") == 85899345920.0      parse_rate("400Gb/s") == 50e9
    parse_seconds("1.5us") == 1.5e-6           parse_flops("989TFLOP/s") == 989e12

Case matters where it changes the meaning: `b` is a bit and `B` a byte, `GB` is 10⁹ and `GiB` 2³⁰ bytes. So 400 Gb/s is
50 GB/s, and 80 GiB is 85.9 GB. Everything inside Meshwright is in bytes, seconds, bytes/s and FLOP/s as floats; units
exist only where a person reads or writes.
"""

import math
import re
from typing import Any

from meshwright.errors import MeshwrightError, nearest, shown

Json = dict[str, Any]  # an object of JSON, or a table of TOML

DECIMAL = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50, "Ei": 2.0**60}
BYTES = (
    {p + "B": f for p, f in (DECIMAL | BINARY).items()}
    | {p + "b": f / 8 for p, f in DECIMAL.items()}
    | {p + "bit": f / 8 for p, f in (DECIMAL | BINARY).items()}
)
RATES = {u + s: f for u, f in BYTES.items() for s in ("/s", "ps")}
SECONDS = {
    "ps": 1e-12, "ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0,
    "min": 60.0, "h": 3600.0, "d": 86400.0, "days": 86400.0,
}  # fmt: skip
FLOPS = {p + u: f for p, f in DECIMAL.items() for u in ("FLOP/s", "FLOPS", "FLOPs/s", "FLOPs", "flops")}
COUNTS = {p: f for p, f in DECIMAL.items() if p not in ("P", "E")} | {"B": 1e9}

# A comma separates groups of three digits and nothing else: "1,5GB" may mean 1.5 or 15, and is refused.
_WHOLE = r"\d{1,3}(?:,\d{3})+|\d[\d_]*"
_NUMBER = re.compile(
    rf"\s*([+-]?(?:(?:{_WHOLE})(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{{1,4}})?)\s*([^\s\d,][^\s]*)?\s*", re.ASCII
)

_COMMA = re.compile(r"\s*\d+,\d+\s*[^\s\d.,]*\s*", re.ASCII)


def _parse(text: str | float, units: dict[str, float], what: str, examples: list[str]) -> float:
    if isinstance(text, bool) or not isinstance(text, int | float | str):
        raise MeshwrightError("MW-UNIT-001", f"{shown(text, 40)} is not {what}", valid=examples)
    if isinstance(text, int | float):
        try:
            value = float(text)
        except OverflowError:
            value = math.inf
    else:
        match = _NUMBER.fullmatch(text) if len(text) <= 64 else None
        if match is None:
            comma = _COMMA.fullmatch(text) if len(text) <= 64 else None
            raise MeshwrightError(
                "MW-UNIT-001",
                f"{shown(text, 40)} is not {what}",
                why="A comma separates groups of three digits; decimals follow a point"
                if comma
                else "A number and a unit are needed",
                valid=examples,
                fix=text.strip().replace(",", ".") if comma else "",
            )
        unit = match[2] or ""
        if unit not in units and not (unit == "" and float(match[1].replace(",", "").replace("_", "")) == 0):
            near = nearest(unit, [u for u in units if u])
            raise MeshwrightError(
                "MW-UNIT-002",
                f"{shown(unit)} in {shown(text, 40)} is not a unit of {what.split(' ', 1)[1]}",
                valid=[u for u in units if u],
                fix=f"{match[1]}{near}" if near else "",
            )
        value = float(match[1].replace(",", "").replace("_", "")) * units.get(unit, 1.0)
    if not math.isfinite(value) or value < 0:
        raise MeshwrightError(
            "MW-UNIT-003", f"{shown(text, 40)} is not {what}", why="It must be finite and not negative", valid=examples
        )
    return value


def parse_bytes(text: str | float) -> float:
    """Bytes from "80GiB", "25 MB", "512B"; a bare number is bytes."""
    return _parse(text, {"": 1.0} | BYTES, "a size", ["512B", "25MB", "80GiB"])


def parse_rate(text: str | float) -> float:
    """Bytes per second from "400Gb/s", "900 GB/s"; a bare number is bytes/s."""
    return _parse(text, {"": 1.0} | RATES, "a rate", ["400Gb/s", "900GB/s", "3.35TB/s"])


def parse_seconds(text: str | float) -> float:
    """Seconds from "1.5us", "20ms", "3h"; a bare number is seconds."""
    return _parse(text, {"": 1.0} | SECONDS, "a duration", ["1.5us", "20ms", "3h"])


def parse_flops(text: str | float) -> float:
    """FLOP per second from "989TFLOP/s"; a bare number is FLOP/s."""
    return _parse(text, {"": 1.0} | FLOPS, "a FLOP rate", ["989TFLOP/s", "1.4PFLOP/s"])


def parse_count(text: str | float) -> float:
    """A count from "15T", "175B", "300M"; a bare number is itself."""
    return _parse(text, {"": 1.0} | COUNTS, "a count", ["15T", "175B", "300M"])


def _scaled(value: float, steps: list[tuple[float, str]], digits: int) -> str:
    if value == 0 or not math.isfinite(value):
        return f"{value:g} {steps[-1][1]}".strip()
    fits = (step for step in steps if abs(value) >= step[0] * (1 - 0.5 * 10 ** (-digits)))
    factor, unit = next(fits, steps[-1])
    scaled = value / factor
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(scaled))))
    text = f"{scaled:,.{decimals}f}"
    if "." in text:
        text = text.rstrip("0").rstrip(".")
    if text in ("0", "-0"):
        text = f"{scaled:.{digits}g}"
    return f"{text} {unit}".strip()


def format_bytes(value: float, digits: int = 3) -> str:
    """Binary units, as for memory: 80 GiB."""
    steps = [(BINARY[p], p + "B") for p in ("Ei", "Pi", "Ti", "Gi", "Mi", "Ki")]
    return _scaled(value, [*steps, (1.0, "B")], digits)


def format_decimal_bytes(value: float, digits: int = 3) -> str:
    """Decimal units, as for traffic: 5.47 GB."""
    steps = [(DECIMAL[p], p + "B") for p in ("E", "P", "T", "G", "M")]
    return _scaled(value, [*steps, (1e3, "kB"), (1.0, "B")], digits)


def format_rate(value: float, digits: int = 3) -> str:
    return format_decimal_bytes(value, digits) + "/s"


def format_seconds(value: float, digits: int = 3) -> str:
    if abs(value) >= 172800:
        return f"{value / 86400:,.1f} d"
    if abs(value) >= 7200:
        return f"{value / 3600:,.1f} h"
    return _scaled(value, [(1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns")], digits)


def format_flops(value: float, digits: int = 3) -> str:
    return _scaled(value, [(DECIMAL[p], p + "FLOP/s") for p in ("E", "P", "T", "G", "M")] + [(1.0, "FLOP/s")], digits)


def format_count(value: float, digits: int = 3) -> str:
    return _scaled(value, [(1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"), (1.0, "")], digits).replace(" ", "")


def counted(number: int, noun: str) -> str:
    """A number with its noun: 1 rank, 2 ranks, 2 micro-batches."""
    return f"{number:,} {noun}{('es' if noun.endswith('ch') else 's') * (number != 1)}"


def format_value(value: float, unit: str) -> str:
    """A value of a measurement or prediction with its unit: s, GiB, bytes, tokens/s, or another one."""
    match unit:
        case "s":
            return format_seconds(value)
        case "GiB":
            return format_bytes(value * 2**30)
        case "bytes":
            return format_decimal_bytes(value)
        case "tokens/s":
            return f"{format_count(value)} /s"
    return f"{value:.3g} {unit}"
