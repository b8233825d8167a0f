"""A series of numbers as one line of text."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

BLOCKS = "▁▂▃▄▅▆▇█"
WIDTH = 32


def sparkline(values: Sequence[float], width: int = WIDTH) -> str:
    """Blocks, each the mean of an equal run of values; × marks NaN and infinity."""
    if not values or width < 1:
        return ""
    edges = (
        [round(i * len(values) / width) for i in range(width + 1)] if len(values) > width else range(len(values) + 1)
    )
    means = [sum(values[a:b]) / (b - a) for a, b in zip(edges, list(edges)[1:], strict=False)]
    finite = [m for m in means if isfinite(m)] or [0.0]
    low, span = min(finite), max(finite) - min(finite)
    span = (
        span if span > 1e-9 * max(map(abs, finite)) else 1.0
    )  # the mean of equal numbers may differ in its last digit
    return "".join(BLOCKS[round((m - low) / span * (len(BLOCKS) - 1))] if isfinite(m) else "×" for m in means)
