"""The dtype in which sums are computed, whatever the precision of a model."""

from __future__ import annotations

import torch


def at_least_single(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums are computed: float32, or wider."""
    return torch.promote_types(dtype, torch.float32)
