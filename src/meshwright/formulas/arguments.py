"""The arguments of the formulas: numbers or texts with units, above zero."""

import math
import operator
from collections.abc import Callable, Iterable

from meshwright.errors import MeshwrightError, shown, unknown
from meshwright.units import parse_bytes, parse_count, parse_flops, parse_rate, parse_seconds

Quantity = float | int | str


def size(name: str, value: Quantity) -> float:
    """Bytes above zero."""
    return above_zero(name, parse_bytes(value))


def seconds(name: str, value: Quantity) -> float:
    """Seconds above zero."""
    return above_zero(name, parse_seconds(value))


def latency(name: str, value: Quantity) -> float:
    """Seconds, which may be zero: a link without latency."""
    return parse_seconds(value)


def rate(name: str, value: Quantity) -> float:
    """Bytes per second above zero."""
    return above_zero(name, parse_rate(value))


def flop_rate(name: str, value: Quantity) -> float:
    """FLOP/s above zero."""
    return above_zero(name, parse_flops(value))


def count(name: str, value: Quantity) -> float:
    """A number of parameters, tokens or FLOPs above zero."""
    return above_zero(name, parse_count(value))


def above_zero(name: str, value: float) -> float:
    if not (isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf):
        raise refused(name, value, "It must be a number above zero")
    return float(value)


def whole(name: str, value: object, least: int = 1, most: int = 2**40) -> int:
    """A whole number."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = int(value) if isinstance(value, float) and value.is_integer() else least - 1
    if isinstance(value, bool) or not least <= number <= most:
        raise refused(name, value, f"It must be a whole number from {least} to {most:,}")
    return number


def share(name: str, value: float) -> float:
    """A number above 0 and below 1."""
    if above_zero(name, value) >= 1:
        raise refused(name, value, "It must be above 0 and below 1")
    return float(value)


def one_of(name: str, value: str, choices: Iterable[str]) -> str:
    choices = list(choices)
    if value not in choices:
        raise unknown("MW-FORM-002", name, str(value), choices)
    return value


def refused(name: str, value: object, why: str) -> MeshwrightError:
    return MeshwrightError("MW-FORM-001", f"{name} = {shown(value, 40)} is not valid", why=why)


Parser = Callable[[str, Quantity], float]


def many(name: str, values: Iterable[Quantity], parse: Parser) -> list[float]:
    """A list of quantities."""
    return [parse(f"{name}[{k}]", value) for k, value in enumerate(values)]
