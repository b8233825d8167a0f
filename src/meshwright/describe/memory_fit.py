"""How sure a plan is to fit: the chance that the measured peak memory stays below the memory of the device.

    chance = F(capacity / predicted),    F: the distribution of measured / predicted peaks

F comes from the published runs that report their memory, every source with the same weight (`QUANTILES`). Allocators fragment and libraries take
workspaces, so it is not symmetric: one of twenty runs needs half as much again as predicted, almost none needs 10% less. Every
command, the page and JSON say the same word:

    fits             nine of ten such runs stay below the capacity
    probably fits    5% of the memory is free, which `plan` demands of its winner: about six of ten
    may not fit      the prediction is below the capacity, but not by 5%
    does not fit     the prediction is above it
"""

from __future__ import annotations

import numpy as np

# Of measured / predicted. tests/calibrate/test_validate.py computes them from the published runs.
QUANTILES = {0.01: 0.85, 0.05: 0.93, 0.10: 0.95, 0.25: 1.00, 0.50: 1.02, 0.75: 1.08, 0.90: 1.22, 0.95: 1.50, 0.99: 1.66}
MEMORY_BAND = QUANTILES[0.05], QUANTILES[0.95]
USABLE_MEMORY = 0.95  # largest share of device memory that a safe plan uses
SURE = 0.90


def chance_to_fit(predicted: float, capacity: float) -> float:
    """Return the share of published runs whose measured peak would be within the capacity, from 1% to 99%."""
    if predicted <= 0:
        return 0.99
    return float(np.interp(capacity / predicted, list(QUANTILES.values()), list(QUANTILES)))


def fit_word(predicted: float, capacity: float) -> str:
    """Return "fits", "probably fits", "may not fit" or "does not fit"."""
    if predicted > capacity:
        return "does not fit"
    if chance_to_fit(predicted, capacity) >= SURE:
        return "fits"
    return "probably fits" if predicted <= USABLE_MEMORY * capacity else "may not fit"


def fit_words(predicted: float, capacity: float) -> str:
    """Return the word with its chance: "probably fits (62% chance)", "may not fit (40% chance that it does)", "does not fit (93% chance)"."""
    word, chance = fit_word(predicted, capacity), chance_to_fit(predicted, capacity)
    shown = {"may not fit": f"{chance:.0%} chance that it does", "does not fit": f"{1 - chance:.0%} chance"}
    return f"{word} ({shown.get(word, f'{chance:.0%} chance')})"
